"""transformers' `generate` with the model's own cache: greedy, sampling, beams, left padding, resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from prism.models import PrismCache, PrismForCausalLM
from tests.helpers import assert_close
from tests.models.stacks import HYBRIDS, STACKS, label, left_padded, model, tokens

NEW = 12


def generate(lm: PrismForCausalLM, ids: Tensor, **settings: Any) -> Any:
    """Greedy by default, and always NEW tokens."""
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, **settings}
    return lm.generate(ids, pad_token_id=0, eos_token_id=None, **settings)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_greedy_with_and_without_cache(layers: Any) -> None:
    lm, ids = model(layers), tokens(2, 11)
    report = {"return_dict_in_generate": True, "output_logits": True}
    cached, uncached = generate(lm, ids, **report), generate(lm, ids, use_cache=False, **report)
    assert torch.equal(cached.sequences, uncached.sequences)
    assert_close("logits", torch.stack(cached.logits), torch.stack(uncached.logits), 1e-9)
    assert len(cached.sequences[:, 11:].unique()) > 2, "a model that always says the same proves nothing"
    assert isinstance(cached.past_key_values, PrismCache)


@pytest.mark.parametrize("layers", HYBRIDS)
def test_32_prompts_of_random_lengths_in_one_batch_equal_the_prompts_alone(layers: str) -> None:
    lm = model(layers)
    lengths = torch.randint(1, 60, (32,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [tokens(1, count, seed)[0] for seed, count in enumerate(lengths)]
    ids, mask = left_padded(prompts)
    report = {"return_dict_in_generate": True, "output_logits": True}
    together = generate(lm, ids, attention_mask=mask, **report)
    for row, prompt in enumerate(prompts):
        alone = generate(lm, prompt[None], **report)
        assert torch.equal(together.sequences[row, ids.shape[1] :], alone.sequences[0, len(prompt) :])
        assert_close(f"prompt {row}", torch.stack(together.logits)[:, row], torch.stack(alone.logits)[:, 0], 1e-9)


@pytest.mark.parametrize("layers", HYBRIDS)
def test_beam_search_with_and_without_cache(layers: str) -> None:
    lm = model(layers)
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 4, seed=2)[0]])
    settings = {"attention_mask": mask, "num_beams": 4, "num_return_sequences": 2}
    beams = generate(lm, ids, **settings)
    assert torch.equal(beams, generate(lm, ids, use_cache=False, **settings))
    assert not torch.equal(beams[::2], generate(lm, ids, attention_mask=mask)), "beams must have changed places"


def test_sampling_is_the_same_with_and_without_cache() -> None:
    lm, ids = model("prism+softmax"), tokens(3, 7)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        drawn.append(generate(lm, ids, do_sample=True, temperature=1.5, top_k=20, use_cache=use_cache))
    assert torch.equal(*drawn)
    torch.manual_seed(6)
    assert not torch.equal(drawn[0], generate(lm, ids, do_sample=True, temperature=1.5, top_k=20))


@pytest.mark.parametrize("layers", HYBRIDS)
def test_going_on_from_a_cache(layers: str) -> None:
    lm = model(layers)
    ids, mask = left_padded([tokens(1, 9)[0], tokens(1, 4, seed=2)[0]])
    whole = generate(lm, ids, attention_mask=mask, max_new_tokens=2 * NEW)
    first = generate(lm, ids, attention_mask=mask, return_dict_in_generate=True)
    seen = first.sequences
    mask = torch.cat([mask, torch.ones(2, NEW, dtype=mask.dtype)], 1)
    rest = generate(lm, seen, attention_mask=mask, past_key_values=first.past_key_values)
    assert torch.equal(rest, whole)


def test_going_on_with_a_new_turn() -> None:
    """The user says something more: all tokens are passed, those in the cache are not read again."""
    lm = model("prism*2+softmax")
    first = generate(lm, tokens(1, 10), return_dict_in_generate=True)
    turn = torch.cat([first.sequences, tokens(1, 6, seed=4)], 1)
    assert torch.equal(generate(lm, turn, past_key_values=first.past_key_values), generate(lm, turn))


def test_an_empty_prompt_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        ValueError, match=r"^input_ids must have at least 1 token, got \[1, 0\]: start an empty text with"
    ):
        generate(model("prism"), torch.zeros(1, 0, dtype=torch.int64))


def test_a_prompt_that_the_cache_has_already_seen_is_named() -> None:
    lm, ids = model("prism"), tokens(1, 6)
    cache = lm(ids).past_key_values
    with pytest.raises(ValueError, match="the cache has seen 6 tokens, input_ids has 6"):
        generate(lm, ids, past_key_values=cache)
    new = tokens(1, 3, seed=2)
    both = torch.cat([ids, new], 1)
    rest = generate(lm, new, past_key_values=cache, attention_mask=torch.ones_like(both))
    assert torch.equal(rest[:, 3:], generate(lm, both)[:, 9:])


def test_long_prompts_can_be_read_in_pieces() -> None:
    lm, ids = model("prism+softmax"), tokens(2, 50)
    assert torch.equal(generate(lm, ids, prefill_chunk_size=16), generate(lm, ids))


def test_prompts_as_embeddings() -> None:
    lm, ids = model("prism+softmax"), tokens(2, 9)
    embedded = lm.generate(
        inputs_embeds=lm.get_input_embeddings()(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    assert torch.equal(embedded, generate(lm, ids)[:, 9:])


def test_caches_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="cache_implementation 'static' is for growing caches"):
        generate(model("prism"), tokens(1, 4), cache_implementation="static")
