"""What must hold for an adapter on every base: it starts as the base, and after training all ways to compute it agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model

from prism.hf.adapters import PrismAdapterConfig
from prism.models import PrismConfig, PrismForCausalLM
from tests.hf.adapters.bases import FAMILIES, adapted, base, close, logits, perturb, tokens

PARTS = (5, 9, 11)
CUTS = (9, 10, 11, 12, 13)
EACH = tuple(range(1, 14))


@pytest.mark.parametrize("family", FAMILIES)
def test_starts_bit_for_bit_as_the_base(family: str) -> None:
    ids, plain, model = tokens(), base(family), adapted(family, steps=3)
    assert torch.equal(logits(model, ids), logits(plain, ids))
    assert torch.equal(logits(model, ids, PARTS), logits(plain, ids, PARTS))
    assert close(logits(model, ids, CUTS), logits(plain, ids, CUTS))  # a plain layer has a way of its own for one token


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_is_uncached_and_chunks_are_tokens(family: str) -> None:
    ids, model = tokens(), perturb(adapted(family))
    whole = logits(model, ids)
    assert not close(whole, logits(base(family), ids), 1e-2)  # the adapter does something
    assert close(logits(model, ids, CUTS), whole)
    assert close(logits(model, ids, EACH), whole)
    assert close(logits(model, ids, (5, 9)), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_nothing(family: str) -> None:
    ids, model = tokens(1, 9), perturb(adapted(family))
    padded = torch.cat([tokens(1, 4, seed=5), ids], 1)  # not the padding token, whose vector may be zero
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    assert close(logits(model, padded, attention_mask=mask)[:, 4:], logits(model, ids))
    options = {"max_new_tokens": 6, "do_sample": False}
    alone = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(model.generate(input_ids=padded, attention_mask=mask, **options)[:, 4:], alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_on_a_fresh_base_is_identical(family: str, tmp_path: Path) -> None:
    ids, model = tokens(), perturb(adapted(family, keys="orthogonal", layers=[2]))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(family), tmp_path).eval()
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 20_000


@pytest.mark.parametrize("family", FAMILIES)
def test_disabled_it_is_the_base_bit_for_bit(family: str) -> None:
    ids, plain, model = tokens(), base(family), perturb(adapted(family))
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), logits(plain, ids))
        assert torch.equal(logits(model, ids, PARTS), logits(plain, ids, PARTS))
        assert close(logits(model, ids, CUTS), logits(plain, ids, CUTS))
    assert not torch.equal(logits(model, ids), logits(plain, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_training_moves_the_adapter_alone(family: str) -> None:
    ids, model = tokens(4), adapted(family).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=3e-2)
    losses = []
    for _ in range(6):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is None for name, p in model.named_parameters() if "prism_branches" not in name)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "prism_branches" in name}


@pytest.mark.parametrize("family", ["gated_delta", "qwen3_next"])
def test_checkpointing_has_the_same_gradients(family: str) -> None:
    ids, gradients = tokens(), []
    for checkpointing in (False, True):
        model = perturb(adapted(family)).train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(close(b, a) for a, b in zip(*gradients, strict=True))
    assert all(bool(g.any()) for g in gradients[0])


@pytest.mark.parametrize("family", ["gated_delta", "qwen3_next", "olmo_hybrid"])
def test_in_bfloat16_it_starts_as_the_base_too(family: str) -> None:
    ids, plain = tokens(), base(family).bfloat16()
    model = get_peft_model(base(family).bfloat16(), PrismAdapterConfig(rank=4)).eval()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert torch.equal(logits(model, ids), logits(plain, ids))
    assert torch.equal(logits(model, ids, CUTS), logits(plain, ids, CUTS))
    perturb(model)
    assert close(logits(model, ids, CUTS), logits(model, ids), 0.05)


@pytest.mark.parametrize("family", ["gated_delta", "qwen3_next"])
def test_under_autocast_it_starts_as_the_base_and_learns(family: str) -> None:
    ids, plain, model = tokens(), base(family), adapted(family)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(model, ids), logits(plain, ids))
        assert torch.equal(logits(model, ids, PARTS), logits(plain, ids, PARTS))
        assert close(logits(model, ids, CUTS), logits(plain, ids, CUTS))
        perturb(model).train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert close(logits(model, ids, CUTS), logits(model, ids), 0.05)


def test_few_weights_are_trained() -> None:
    config = PrismConfig(32000, 768, num_heads=6, layers="gated_delta", num_hidden_layers=12)
    with torch.device("meta"):
        model = get_peft_model(PrismForCausalLM(config), PrismAdapterConfig(steps=2, rank=16))
    trained, total = model.get_nb_trainable_parameters()
    assert 120e6 < total < 140e6
    assert trained < 0.01 * total
