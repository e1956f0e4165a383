"""A model in training: losses, packed documents, checkpointed gradients, and logits only where they are needed."""

from __future__ import annotations

import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Trainer, TrainingArguments
from transformers.utils.generic import find_labels

from prism.models import PrismForCausalLM
from prism.nn import Block
from tests.helpers import assert_close
from tests.models.stacks import HYBRIDS, STACKS, label, model, tokens


def gradients(lm: PrismForCausalLM, ids: Tensor, **arguments: Any) -> dict[str, Tensor]:
    lm.train().zero_grad()
    lm(ids, labels=ids, **arguments).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_checkpointing_gives_the_same_gradients(layers: Any) -> None:
    lm, ids = model(layers), tokens(2, 20)
    plain = gradients(lm, ids)
    lm.gradient_checkpointing_enable()
    calls = []
    for layer in lm.model.layers:
        layer.mixer.register_forward_hook(lambda *_: calls.append(1))
    checkpointed = gradients(lm, ids)
    assert len(calls) == 2 * len(lm.model.layers), "every layer must have been computed a second time"
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0 or name.endswith("rule.bound"), name  # HGRN's bounds of other layers
        assert_close(name, checkpointed[name], gradient, 1e-9)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_packed_documents_do_not_see_each_other(layers: Any) -> None:
    lm = model(layers)
    lengths = [(13, 1, 20, 6), (5, 30, 3, 2)]
    ids = tokens(2, 40)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    packed = lm(ids, position_ids=positions).logits
    assert_close("by reset", lm(ids, reset=positions == 0).logits, packed, 0.0)
    for row, counts in enumerate(lengths):
        alone = [lm(document[None]).logits[0] for document in ids[row].split(counts)]
        assert_close(f"row {row}", packed[row], torch.cat(alone), 1e-9)
    assert (packed - lm(ids).logits)[:, 20:].abs().max() > 1e-3, "without the positions they must see each other"


def test_documents_may_start_with_padding() -> None:
    lm, ids = model("prism*2+softmax"), tokens(2, 9)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1, 0, 1, 2]])
    packed = lm(ids, attention_mask=mask, position_ids=positions).logits
    for row, cuts in enumerate(([0, 3, 9], [0, 4, 6, 9])):
        for start, end in pairwise(cuts):
            real = mask[row, start:end].bool()
            alone = lm(ids[row, start:end][real][None]).logits[0]
            assert_close(f"row {row} from {start}", packed[row, start:end][real], alone, 1e-9)
    # Padding that is numbered by zeros, inside a document of which positions count the real tokens.
    inside = torch.tensor([[0, 1, 2, 0, 0, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 0, 5, 6]])
    found = lm(ids, attention_mask=mask, position_ids=inside).logits[mask.bool()]
    assert_close("inside", found, lm(ids, attention_mask=mask).logits[mask.bool()], 1e-9)


def test_packed_documents_continue_through_a_cache() -> None:
    lm, ids = model("prism*2+softmax"), tokens(1, 30)
    positions = torch.cat([torch.arange(12), torch.arange(8), torch.arange(10)])[None]
    whole = lm(ids, position_ids=positions).logits
    for cut in (10, 12, 20):
        cache = lm(ids[:, :cut], position_ids=positions[:, :cut]).past_key_values
        rest = lm(ids[:, cut:], position_ids=positions[:, cut:], past_key_values=cache).logits
        assert_close(f"cut at {cut}", rest, whole[:, cut:], 1e-9)


@pytest.mark.parametrize("layers", HYBRIDS)
def test_padding_takes_no_part_in_the_gradients(layers: str) -> None:
    lm, ids = model(layers), tokens(1, 15)
    padded = F.pad(ids, (4, 3), value=7)
    mask = F.pad(torch.ones_like(ids), (4, 3))
    labels = padded.masked_fill(mask.cumsum(1) < 2, -100).masked_fill(
        mask == 0, -100
    )  # nothing predicts the first token
    lm.zero_grad()
    lm(padded, attention_mask=mask, labels=labels).loss.backward()
    got = {name: parameter.grad.clone() for name, parameter in lm.named_parameters()}
    for name, gradient in gradients(lm, ids).items():
        assert_close(name, got[name], gradient, 1e-6)  # transformers takes the loss in float32


def test_the_loss_is_that_of_the_next_token() -> None:
    lm, ids = model("prism+softmax"), tokens(2, 9)
    out = lm(ids, labels=ids)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(out.loss - expected) < 1e-6


def test_in_training_with_labels_logits_are_computed_only_if_asked_for() -> None:
    lm, ids = model("prism+softmax"), tokens(2, 9)
    whole = lm(ids, labels=ids)
    assert whole.logits is not None and lm(ids, labels=ids, skip_logits=True).logits is None
    lm.train()
    assert lm(ids).logits is not None
    out = lm(ids, labels=ids)
    assert out.logits is None
    assert_close("loss", out.loss, whole.loss, 1e-12)
    assert_close("logits", lm(ids, labels=ids, skip_logits=False).logits, whole.logits, 1e-12)
    assert [tuple(z.shape) for z in lm(ids, labels=ids, return_dict=False)] == [()]
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    assert_close("shifted", lm(ids, shift_labels=shifted).loss, whole.loss, 1e-12)
    assert_close("by a number of tokens", lm(ids, labels=ids, num_items_in_batch=4).loss, whole.loss * 16 / 4, 1e-12)


def test_a_loss_of_ones_own_and_a_replaced_head_get_logits() -> None:
    lm, ids = model("prism"), tokens(2, 9)
    expected = lm(ids, labels=ids).loss
    lm.loss_function = lambda logits, labels, **_: logits.square().mean()
    assert_close("own loss", lm(ids, labels=ids).loss, lm(ids).logits.square().mean(), 1e-12)
    del lm._loss_function
    lm.lm_head.register_forward_hook(lambda module, inputs, out: 2 * out)
    doubled = lm(ids, labels=ids).loss
    lm.lm_head = torch.nn.Sequential(lm.lm_head)
    assert abs(doubled - lm(ids, labels=ids).loss) < 1e-6 and abs(doubled - expected) > 1e-3


def test_logits_are_computed_where_they_are_asked_for() -> None:
    lm, ids = model("prism+softmax"), tokens(2, 9)
    whole = lm(ids).logits
    assert torch.equal(lm(ids, logits_to_keep=0).logits, whole)
    assert_close("last three", lm(ids, logits_to_keep=3).logits, whole[:, -3:], 1e-12)
    chosen = torch.tensor([0, 4])
    assert_close("chosen", lm(ids, logits_to_keep=chosen).logits, whole[:, chosen], 1e-12)


def evaluated(lm: Any, folder: Path) -> dict[str, float]:
    """What transformers' Trainer finds on two texts, and that it can choose the best model by it."""
    data = [{"input_ids": row, "labels": row} for row in tokens(2, 9)]
    settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "load_best_model_at_end": True}
    settings |= {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 1, "learning_rate": 0.0}
    trainer = Trainer(lm, TrainingArguments(str(folder), **settings), train_dataset=data, eval_dataset=data)
    trainer.train()
    return trainer.evaluate()


def test_trainer_of_transformers_finds_the_loss(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert find_labels(PrismForCausalLM) == ["labels"]
    lm, ids = model("prism", torch.float32), tokens(2, 9)
    expected = lm(ids, labels=ids).loss.item()
    assert abs(evaluated(lm, tmp_path / "whole")["eval_loss"] - expected) < 1e-5
    adapted = get_peft_model(lm, LoraConfig(r=2))
    assert abs(evaluated(adapted, tmp_path / "adapter")["eval_loss"] - expected) < 1e-5


def test_hidden_states_and_tuples() -> None:
    lm, ids = model("prism*2"), tokens(2, 9)
    out = lm(ids, output_hidden_states=True)
    assert [tuple(x.shape) for x in out.hidden_states] == [(2, 9, 16)] * 3
    assert torch.equal(lm.lm_head(out.hidden_states[-1]), out.logits)
    assert torch.equal(lm(ids, return_dict=False)[0], out.logits)


@torch.no_grad()
@pytest.mark.parametrize("kept", [False, True])
def test_hidden_states_stay_alive_only_if_asked_for(kept: bool) -> None:
    """Counts, as each layer begins, how many earlier layers' outputs are still held by anyone."""
    lm, ids = model("prism*6"), tokens(2, 9)
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    for layer in lm.model.layers:
        layer.register_forward_pre_hook(lambda *_: alive.append(sum(x() is not None for x in outputs)))
        layer.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output[0])))
    out = lm(ids, output_hidden_states=kept)
    assert alive == (list(range(6)) if kept else [0, 1, 1, 1, 1, 1]), "a layer needs the output before it, no other"
    assert (out.hidden_states is not None) is kept


def test_training_keeps_no_cache_unless_asked() -> None:
    lm, ids = model("prism"), tokens(1, 5)
    assert lm(ids).past_key_values is not None
    assert lm.train()(ids).past_key_values is None
    assert lm(ids, use_cache=True).past_key_values.get_seq_length() == 5


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "pass either input_ids or inputs_embeds"),
        ({"input_ids": tokens(2, 5), "inputs_embeds": torch.zeros(2, 5, 16)}, "pass either input_ids or inputs_embeds"),
        (
            {"input_ids": tokens(2, 5), "attention_mask": torch.ones(2, 4)},
            r"attention_mask must be \[B, T\] = \[2, 5\]",
        ),
        ({"input_ids": tokens(2, 5), "attention_mask": torch.ones(2, 1, 5, 5)}, r"attention_mask must be \[B, T\]"),
        ({"input_ids": tokens(2, 5), "position_ids": torch.zeros(2, 4)}, r"must be \[B, T\] = \[2, 5\], got \[2, 4\]"),
        ({"input_ids": tokens(2, 5), "reset": torch.zeros(2, 6)}, r"must be \[B, T\] = \[2, 5\], got \[2, 6\]"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        model("prism")(**arguments)


@pytest.mark.parametrize("layers", ["prism*2+softmax", "mamba2*2"])
def test_deferred_sums_change_nothing(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's residual sum is computed by the next layer: losses and gradients are those of sums computed at once."""
    lm, ids, deferred = model(layers).train(), tokens(2, 20), []
    layer = type(lm.model.layers[0])
    forward = layer.forward

    def watched(block: Block, *given: Any, defer: bool = False, **more: Any) -> Any:
        deferred.append(defer)
        return forward(block, *given, defer=defer, **more)

    def results() -> list[Tensor]:
        deferred.clear()
        loss = lm(ids, labels=ids).loss
        return [loss, *torch.autograd.grad(loss, list(lm.parameters()))]

    monkeypatch.setattr(layer, "forward", watched)
    found = results()
    assert deferred == [True] * (len(lm.model.layers) - 1) + [False]
    lm.model.layers[0].register_forward_hook(lambda module, given, output: None)
    expected = results()
    assert not any(deferred)  # a hook sees one tensor
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(lm(ids, output_hidden_states=True).hidden_states) == len(lm.model.layers) + 1
