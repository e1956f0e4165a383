"""Replayed steps when the model changes in between: weights, modules, hooks, adapters; and interrupted steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from prism.models import PrismForCausalLM
from tests.models.recorded import pair, step_of, steps
from tests.models.stacks import model, tokens

pytestmark = pytest.mark.usefixtures("captured_at_once")


def replaced_weight(lm: PrismForCausalLM) -> None:
    lm.lm_head.weight = nn.Parameter(lm.lm_head.weight.data * 1.5)


def loaded_weights(lm: PrismForCausalLM) -> None:
    lm.load_state_dict({name: z * 1.1 for name, z in lm.state_dict().items()}, assign=True)


def replaced_module(lm: PrismForCausalLM) -> None:
    lm.model.norm = nn.RMSNorm(16, eps=0.3, dtype=torch.float64)


def moved_weight(lm: PrismForCausalLM) -> None:
    lm.model.norm.weight.data = lm.model.norm.weight.data * 0.5


def shortened_weight(lm: PrismForCausalLM) -> None:
    lm.lm_head.weight.data = lm.lm_head.weight.data[:10]


def replaced_forward(lm: PrismForCausalLM) -> None:
    norm = lm.model.norm
    norm.forward = lambda x: 2 * nn.RMSNorm.forward(norm, x)


class Louder(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def another_class(lm: PrismForCausalLM) -> None:
    lm.model.norm.__class__ = Louder


def dropout_in_training(lm: PrismForCausalLM) -> None:
    torch.manual_seed(0)
    lm.model.layers[0].dropout = nn.Dropout(1.0).train()


def weight_in_place(lm: PrismForCausalLM) -> None:
    lm.lm_head.weight.data.mul_(1.5)


CHANGES = [replaced_weight, loaded_weights, replaced_module, moved_weight, shortened_weight, replaced_forward]
CHANGES += [another_class, dropout_in_training, weight_in_place]


@pytest.mark.parametrize("change", CHANGES)
def test_the_model_may_change(change: Callable[[PrismForCausalLM], None]) -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    plain, replayed = pair(lm, ids[:, :5])
    assert torch.equal(steps(lm, replayed, ids[:, 5:8]), before := steps(lm, plain, ids[:, 5:8]))
    step = step_of(replayed)
    change(lm)
    after = steps(lm, plain, ids[:, 5:8])
    assert not torch.equal(after, before)
    assert torch.equal(steps(lm, replayed, ids[:, 5:8]), after)
    assert (step_of(replayed) is step) == (change is weight_in_place), "captured again only where needed"


def test_memories_of_a_captured_step_are_updated_in_place() -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    _, replayed = pair(lm, ids[:, :5])
    steps(lm, replayed, ids[:, 5:8])
    with torch.no_grad():
        written = step_of(replayed)._step()[-1]
    assert [new.memory is own.memory for new, own in zip(written, replayed.states, strict=True)] == [True, True]


def test_an_added_layer_is_noticed() -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    _, replayed = pair(lm, ids[:, :5])
    steps(lm, replayed, ids[:, 5:8])
    lm.model.layers.append(lm.model.layers[0])
    with pytest.raises(ValueError, match="past_key_values has 2 layers, the model 3"):
        steps(lm, replayed, ids[:, 5:8])


class Adapted(nn.Module):
    """A map with a correction that a flag switches, as peft's layers have it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.more = base, nn.Linear(base.in_features, base.out_features, dtype=torch.float64)
        self._disable_adapters = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) if self._disable_adapters else self.base_layer(x) + self.more(x)


def test_adapters_are_switched_between_steps() -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    adapted = lm.model.layers[0].mlp.up = Adapted(lm.model.layers[0].mlp.up)
    plain, replayed = pair(lm, ids[:, :5])
    answers = []
    for disabled in (False, True):
        adapted._disable_adapters = disabled
        answers.append(steps(lm, plain, ids[:, 5:8]))
        assert torch.equal(steps(lm, replayed, ids[:, 5:8]), answers[-1])
    assert not torch.equal(*answers)


def test_hooks_run_at_every_step() -> None:
    lm, ids = model("prism*2"), tokens(1, 20)
    _, replayed = pair(lm, ids[:, :5])
    steps(lm, replayed, ids[:, 5:8])
    seen: list[int] = []
    handle = lm.model.norm.register_forward_hook(lambda *_: seen.append(1))
    steps(lm, replayed, ids[:, 8:12])
    assert len(seen) == 4
    handle.remove()
    steps(lm, replayed, ids[:, 12:16])
    assert len(seen) == 4 and step_of(replayed) is not None


def test_hooks_on_all_modules_run_too() -> None:
    lm, ids, seen = model("prism*2"), tokens(1, 20), []
    _, replayed = pair(lm, ids[:, :5])
    steps(lm, replayed, ids[:, 5:8])
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        steps(lm, replayed, ids[:, 8:10])
    finally:
        handle.remove()
    assert len(seen) > 10
