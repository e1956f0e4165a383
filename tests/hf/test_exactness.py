"""Every served family computes the same with and without `accelerate`: logits, loss, gradients, caches, padding, packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import prism
from tests.hf.models import CLASSES, tiny, tokens, torch_functions

PACKED = [name for name in CLASSES if name != "xlstm"]  # it takes no documents


@pytest.fixture(autouse=True)
def _originals_afterwards() -> Any:
    yield
    prism.restore()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def accelerated(name: str, **changes: Any) -> Any:
    model = tiny(name, **changes)
    prism.accelerate(model, quiet=True)
    return model


def gradients(model: Any, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.train()
    out = model(x, labels=x, use_cache=False)
    out.loss.backward()
    return (
        out.logits.detach(),
        out.loss.detach(),
        {k: p.grad for k, p in model.named_parameters() if p.grad is not None},
    )


@pytest.mark.parametrize("name", CLASSES)
def test_logits_loss_and_gradients_agree(name: str) -> None:
    x = tokens()
    with torch_functions(name):
        logits, loss, wanted = gradients(tiny(name), x)
    ours, our_loss, found = gradients(accelerated(name), x)
    assert difference(ours, logits) < 1e-4 and difference(our_loss, loss) < 1e-5
    assert found.keys() == wanted.keys()
    scale = max(float(g.norm()) for g in wanted.values())
    assert {
        k: difference(found[k], g)
        for k, g in wanted.items()
        if g.norm() > 1e-5 * scale and difference(found[k], g) > 1e-4
    } == {}


@pytest.mark.parametrize("name", CLASSES)
def test_generated_tokens_agree_with_and_without_cache(name: str) -> None:
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    x = tokens(length=9)
    with torch_functions(name):
        wanted = tiny(name).generate(x, **options)
    model = accelerated(name)
    found = model.generate(x, **options)
    assert torch.equal(found.sequences, wanted.sequences)
    logits = torch.stack(found.logits, 1)
    assert difference(logits, torch.stack(wanted.logits, 1)) < 1e-4
    if name in ("nemotron_h", "zamba2"):  # transformers limits their step size over prompts, not over cached tokens
        return
    with torch.no_grad():
        assert difference(logits, model(found.sequences[:, :-1], use_cache=False).logits[:, 8:]) < 1e-4


@pytest.mark.parametrize("name", CLASSES)
def test_left_padding_changes_nothing(name: str) -> None:
    if name == "xlstm":
        pytest.skip("xlstm has no attention mask")
    x, mask = tokens(1, 9), torch.ones(2, 12, dtype=torch.long)
    mask[0, :3] = 0
    both = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), x], 1), tokens(1, 12)])
    model = accelerated(name)
    with torch_functions(name):
        wanted = tiny(name).generate(both, attention_mask=mask, max_new_tokens=6, do_sample=False)
    found = model.generate(both, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(found, wanted)
    if name == "minimax":  # its padding is not exact in transformers either
        return
    alone = model.generate(x, max_new_tokens=6, do_sample=False)
    assert torch.equal(found[0, 12:], alone[0, 9:])


def packing(lengths: list[int]) -> dict[str, dict[str, Tensor]]:
    """The ways to say which documents a row holds."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None].int()
    return {
        "position_ids": {"position_ids": positions},
        "cu_seqlens": {"position_ids": positions, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets},
        "seq_idx": {"position_ids": positions, "seq_idx": numbers},
    }


@pytest.mark.parametrize("how", ["position_ids", "cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_do_not_see_each_other(name: str, how: str) -> None:
    lengths = [5, 1, 8]
    # Granite's attention layers are not given the positions: its memory layers are tested alone.
    changes = {"layer_types": ["mamba", "mamba"]} if name == "granitemoehybrid" else {}
    x, model = tokens(1, 14), accelerated(name, **changes)
    with torch.no_grad():
        found = model(x, use_cache=False, **packing(lengths)[how]).logits
        wanted = torch.cat([model(part, use_cache=False).logits for part in x.split(lengths, 1)], 1)
    assert difference(found, wanted) < 1e-4


WRONG_DOCUMENTS = {
    "short seq_idx": (
        {"seq_idx": torch.zeros(1, 12, dtype=torch.int)},
        r"seq_idx must have a number .* \[1, 19\], got",
    ),
    "list": ({"seq_idx": [0] * 19}, "seq_idx must have a number for each token, .*got list"),
    "short": ({"cu_seq_lens_q": [0, 7]}, r"cu_seq_lens_q must rise from 0 .*tokens, 19, got \[0, 7\]"),
    "falling": ({"cu_seq_lens_q": [0, 12, 7, 19]}, r"cu_seq_lens_q must rise .* 19, got \[0, 12, 7, 19\]"),
    "long": ({"cu_seq_lens_q": [0, 7, 25]}, r"cu_seq_lens_q must rise from 0 .*tokens, 19, got \[0, 7, 25\]"),
    "not 0": ({"cu_seq_lens_q": [2, 7, 19]}, r"cu_seq_lens_q must rise from 0"),
    "floats": ({"cu_seq_lens_q": [0.0, 19.0]}, "cu_seq_lens_q must be an integer tensor of n . 1 offsets"),
}


@pytest.mark.parametrize("case", WRONG_DOCUMENTS)
@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "minimax"])
def test_documents_that_do_not_cover_the_tokens_are_refused(name: str, case: str) -> None:
    given, message = WRONG_DOCUMENTS[case]
    given = {key: torch.tensor(value) if key == "cu_seq_lens_q" else value for key, value in given.items()}
    model = accelerated(name)
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 19), use_cache=False, **given)


def test_positions_that_do_not_cover_the_tokens_are_refused() -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with pytest.raises(ValueError, match=r"position_ids must have a number for each token, \[1, 19\]"):
        accelerated("mamba2")(tokens(1, 19), use_cache=False, position_ids=positions)


def test_offsets_count_the_tokens_of_all_rows() -> None:
    x, model = tokens(2, 7), accelerated("mamba2")
    with torch.no_grad():
        found = model(x, use_cache=False, cu_seq_lens_q=torch.tensor([0, 3, 7, 14])).logits
        wanted = model(x, use_cache=False, seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2] * 7])).logits
    assert difference(found, wanted) == 0


def test_generation_passes_the_documents_of_the_prompt_with_every_token() -> None:
    x, model = tokens(1, 9), accelerated("bamba")
    numbers = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    found = model.generate(x, seq_idx=numbers, max_new_tokens=4, do_sample=False)
    assert found.shape == (1, 13)


def test_documents_compile_without_a_graph_break() -> None:
    x, model = tokens(1, 14), accelerated("mamba2")
    offsets = torch.tensor([0, 5, 14])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        wanted = model(x, use_cache=False, cu_seq_lens_q=offsets).logits
        found = compiled(x, use_cache=False, cu_seq_lens_q=offsets).logits
    assert difference(found, wanted) < 1e-4
    torch.compiler.reset()


def test_the_original_leaks_between_documents_given_by_positions() -> None:
    """If this fails, transformers has mended it: docs/howto/accelerate.md says that it leaks."""
    x, model = tokens(1, 14), tiny("qwen3_next")
    with torch_functions("qwen3_next"), torch.no_grad():
        found = model(x, use_cache=False, **packing([5, 9])["position_ids"]).logits[:, 5:]
        wanted = model(x[:, 5:], use_cache=False).logits
    assert difference(found, wanted) > 1e-2


@pytest.mark.parametrize("name", CLASSES)
def test_bfloat16_errs_at_most_twice_what_the_original_does(name: str) -> None:
    x = tokens()
    with torch_functions(name), torch.no_grad():
        exact = tiny(name)(x).logits
        theirs = difference(tiny(name).bfloat16()(x).logits, exact)
    model = accelerated(name).bfloat16()
    with torch.no_grad():
        assert difference(model(x).logits, exact) <= 2 * theirs


def in_two_parts(model: Any, x: Tensor, cache: str) -> Tensor:
    with torch.no_grad():
        first = model(x[:, :10], use_cache=True)
        kept = {cache: getattr(first, cache)} if hasattr(first, cache) else {}
        return torch.cat([first.logits, model(x[:, 10:], use_cache=True, **kept).logits], 1)


@pytest.mark.parametrize("name", CLASSES)
def test_a_prompt_in_two_parts_agrees(name: str) -> None:
    x, cache = tokens(), "cache_params" if name in ("mamba2", "xlstm") else "past_key_values"
    with torch_functions(name):
        wanted = in_two_parts(tiny(name), x, cache)
    model = accelerated(name)
    found = in_two_parts(model, x, cache)
    assert difference(found, wanted) < 1e-4
    # In transformers itself Bamba, MiniMax and RecurrentGemma do not continue a prompt exactly.
    if name not in ("bamba", "minimax", "recurrent_gemma"):
        with torch.no_grad():
            assert difference(found, model(x).logits) < 1e-4


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    x = tokens()
    _, _, wanted = gradients(accelerated(name), x)
    model = accelerated(name)
    model.gradient_checkpointing_enable()
    _, _, found = gradients(model, x)
    assert max(difference(found[key], g) for key, g in wanted.items() if g.norm() > 0) < 1e-4
