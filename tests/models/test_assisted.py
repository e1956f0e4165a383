"""transformers' assisted generation: candidates from a smaller model or from the prompt, checked in one pass.

Candidates that the model would not have chosen are cropped from the caches of both models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from prism.models import PrismCache, PrismForCausalLM, language
from prism.models.rollback import DEPTH
from tests.helpers import assert_close
from tests.models.recorded import step_of
from tests.models.stacks import HYBRIDS, VOCABULARY, left_padded, model, tokens

NEW = 24


def generate(lm: Any, ids: Tensor, **settings: Any) -> Any:
    """Greedy by default, and always NEW tokens."""
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, **settings}
    return lm.generate(ids, pad_token_id=0, eos_token_id=None, **settings)


def similar(lm: PrismForCausalLM, layers: Any, noise: float = 0.15) -> PrismForCausalLM:
    """A model that often, but not always, says the same."""
    twin, random = model(layers, torch.float32), torch.Generator().manual_seed(1)
    twin.load_state_dict(lm.state_dict())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=random)
    twin.generation_config.assistant_confidence_threshold = 0.0  # also writes what it is not sure of
    return twin


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.5, **sizes)).eval()


def passes(lm: Any) -> list[int]:
    """The number of tokens of every forward pass from now on."""
    counted: list[int] = []
    lm.model.norm.register_forward_pre_hook(lambda _, args: counted.append(args[0].shape[1]))
    return counted


@pytest.mark.parametrize("prompt", [1, 70])
@pytest.mark.parametrize("layers", [*HYBRIDS, "prism"])
def test_greedy_text_is_the_same_with_an_assistant(layers: str, prompt: int) -> None:
    lm, ids = model(layers, torch.float32), tokens(1, prompt)
    count = {"max_new_tokens": 2 * DEPTH}
    plain = generate(lm, ids, **count)
    helper, other = similar(lm, layers), model("linear", torch.float32, seed=3)
    for assistant in (helper, other, lm):
        assert torch.equal(generate(lm, ids, assistant_model=assistant, **count), plain)


def test_candidates_are_accepted_and_rejected() -> None:
    """So that the other tests prove something. Each pass reads many candidates, and all prompts once."""
    lm = model("prism*2", torch.float32)
    helper, ids = similar(lm, "prism*2"), tokens(1, 200)
    ours, theirs = passes(lm), passes(helper)
    generate(lm, ids, assistant_model=helper)
    calls = len(ours)
    assert calls < NEW, "some candidates must have been accepted"
    assert sum(ours) > 200 + NEW, "some candidates must have been rejected"
    assert sum(count >= 100 for count in ours) == sum(count >= 100 for count in theirs) == 1, "a prompt is read once"


def test_an_assistant_may_write_more_and_more() -> None:
    lm, ids = model("prism", torch.float32), tokens(1, 5)
    helper = similar(lm, "prism", noise=0.01)
    helper.generation_config.num_assistant_tokens = 12
    helper.generation_config.num_assistant_tokens_schedule = "heuristic"
    plain = generate(lm, ids, max_new_tokens=120)
    assert torch.equal(generate(lm, ids, max_new_tokens=120, assistant_model=helper), plain)


def test_our_models_assist_others_and_are_assisted_by_them() -> None:
    lm, other, ids = model("prism+softmax", torch.float32), llama(), tokens(1, 9)
    assert torch.equal(generate(lm, ids, assistant_model=other), generate(lm, ids))
    assert torch.equal(generate(other, ids, assistant_model=lm), generate(other, ids))


@pytest.mark.parametrize("layers", HYBRIDS)
def test_candidates_from_the_prompt(layers: str) -> None:
    lm = model(layers, torch.float32)
    first = generate(lm, tokens(1, 9))
    ids = torch.cat([first, first[:, 4:20]], 1)
    counted = passes(lm)
    plain = generate(lm, ids)
    counted.clear()
    assert torch.equal(generate(lm, ids, prompt_lookup_num_tokens=15), plain)
    assert max(counted[1:]) > 1, "there must have been candidates"


@pytest.mark.parametrize("how", ["assistant_model", "prompt_lookup_num_tokens"])
def test_sampling(how: str) -> None:
    """Without chance (top_k 1) the greedy text; with it, every token is drawn by the logits of the text before it."""
    lm, ids = model("prism+softmax", torch.float32), tokens(1, 6).repeat(1, 2)
    settings = {"do_sample": True, how: similar(lm, "prism+softmax") if how == "assistant_model" else 4}
    assert torch.equal(generate(lm, ids, top_k=1, **settings), generate(lm, ids))
    torch.manual_seed(7)
    drawn = generate(lm, ids, temperature=2.0, output_logits=True, return_dict_in_generate=True, **settings)
    assert not torch.equal(drawn.sequences, generate(lm, ids))
    with torch.no_grad():
        whole = lm(drawn.sequences[:, :-1]).logits[:, -NEW:]
    assert_close("logits", torch.stack(drawn.logits, 1), whole, 1e-4)


def test_an_assisted_text_is_continued() -> None:
    """With the returned cache, and with one that was passed."""
    lm, ids = model("prism*2+softmax", torch.float32), tokens(1, 9)
    helper = similar(lm, "prism*2+softmax")
    plain = generate(lm, ids, max_new_tokens=2 * NEW)
    cache = PrismCache()
    first = generate(lm, ids, assistant_model=helper, return_dict_in_generate=True, past_key_values=cache)
    assert first.past_key_values is cache and cache.get_seq_length() == 9 + NEW - 1
    counted = passes(lm)
    rest = generate(lm, first.sequences, past_key_values=cache, assistant_model=helper)
    assert torch.equal(rest, plain)
    assert max(counted) < 9 + NEW, "what the cache has read is not read again"


def test_prompts_with_padding() -> None:
    lm = model("prism+softmax", torch.float32)
    ids, mask = left_padded([tokens(1, 5)[0], tokens(1, 9)[0]])
    settings = {"attention_mask": mask[:1]}
    with_help = generate(lm, ids[:1], assistant_model=similar(lm, "prism+softmax"), **settings)
    assert torch.equal(with_help, generate(lm, ids[:1], **settings))


def test_replayed_steps_assist_too(captured_at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids = model("prism*2", torch.float32), tokens(1, 9)
    plain = generate(lm, ids)
    made: list[PrismCache] = []

    class Noted(PrismCache):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(language, "PrismCache", Noted)
    assert torch.equal(generate(lm, ids, assistant_model=similar(lm, "prism*2")), plain)
    assert len(made) == 2 and any(step_of(cache) is not None for cache in made)
    twice = torch.cat([ids, plain[:, 9:30], ids], 1)
    assert torch.equal(generate(lm, twice, prompt_lookup_num_tokens=6), generate(lm, twice))


def test_only_assisted_generation_records() -> None:
    lm, ids = model("prism", torch.float32), tokens(1, 9)
    cache = PrismCache()
    generate(lm, ids, past_key_values=cache)
    assert cache.rollback is None
    cache = PrismCache()
    generate(lm, ids, past_key_values=cache, assistant_model=lm)
    assert cache.rollback is not None and cache.rollback.depth == DEPTH


@pytest.mark.gpu
def test_assisted_generation_on_a_gpu() -> None:
    lm, ids = model("prism*2").to("cuda"), tokens(1, 20).to("cuda")
    helper = similar(lm, "prism*2").to("cuda", torch.float64)
    plain = generate(lm, ids)
    assert torch.equal(generate(lm, ids, assistant_model=helper), plain)
    twice = torch.cat([ids, plain[:, 20:], ids], 1)
    assert torch.equal(generate(lm, twice, prompt_lookup_num_tokens=6), generate(lm, twice))
