"""A training step gives the same weights whatever makes it fast: the sliced loss, recomputation, kernels, graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import using
from prism.language import task as language
from prism.language.corpus import prepare
from prism.language.model import build_model
from prism.language.task import LanguageTask, train_lm
from prism.language.tokens import Batch
from prism.nn.block import Block
from prism.train.distributed import World, spread
from prism.train.graph import check_graph
from prism.train.step import Step, Stepper
from tests.train.runs import small


def trained(
    root: Path,
    device: str = "cpu",
    layers: str = "prism",
    dtype: torch.dtype = torch.float64,
    steps_made: int = 50,
    **changes: Any,
) -> dict[str, Tensor]:
    """The losses and weights after some steps on small documents, in micro-batches.

    In float64, because in float32 Adam turns the last bit of a tiny gradient into a whole step.
    """
    count = len(layers.split("+"))
    # With drawn weights: those that start equal have gradients that nearly cancel, whose rounding Adam makes large.
    layers = "+".join(f"{rule}(start=drawn)" if rule == "prism" else rule for rule in layers.split("+"))
    model = {"layers": layers, "num_hidden_layers": count, "hidden_size": 16, "num_heads": 1, "head_dim": 16}
    settings = small(root, **{"device": device, "model": model, "batch": {"sequences": 2, "micro": 1}, **changes})
    task = LanguageTask(settings, prepare(settings.data.recipe(), settings.data.cache), None, build_model)
    world = World(torch.device(device))
    stepper = Stepper(task, world, spread(task.build, task.initialize, world).to(dtype).train())
    stepper.prepare()
    losses = []
    for number in range(1, steps_made + 1):
        numbers = torch.arange(2 * (number - 1), 2 * number).numpy()
        step = Step(number, task.samples(numbers, world.device), task.weight(numbers), 0.0)
        losses.append(stepper.compute(step, 1.0, stopping=False, update=True)[0].clone())
    weights = {name: p.detach() for name, p in stepper.model.named_parameters()}
    return {"losses": torch.stack(losses), **weights}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], losses: float, weights: float) -> None:
    """Equal up to these differences."""
    assert (wanted["losses"][0] - wanted["losses"][-1]) > 0.1, "it must have learned something"
    for name, value in wanted.items():
        tolerance = losses if name == "losses" else weights
        torch.testing.assert_close(got[name], value, rtol=0.0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def plain_loss(model: nn.Module, batch: Batch, z_loss: float) -> Tensor:
    logits = model(batch.inputs, reset=batch.reset, use_cache=False).logits
    nats = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    return nats + z_loss * logits.logsumexp(-1).square().sum()


def test_fifty_steps_equal_the_plain_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = trained(tmp_path, recompute="cheap", z_loss=1e-3)
    unlike = trained(tmp_path, recompute="none", z_loss=1e-3)
    assert all(torch.equal(fast[name], unlike[name]) for name in fast), "recomputation changes no bit"
    monkeypatch.setattr(language, "loss_sum", plain_loss)
    assert_same(fast, trained(tmp_path, recompute="none", z_loss=1e-3), 1e-9, 1e-9)


def test_recomputation_is_chosen_by_device(tmp_path: Path) -> None:
    chosen = {}
    for how in ("auto", "none", "cheap"):
        settings = small(tmp_path, recompute=how)
        task = LanguageTask(settings, prepare(settings.data.recipe(), settings.data.cache), None, build_model)
        model = task.build()
        Stepper(task, World(torch.device("cpu")), model).prepare()
        chosen[how] = {m.recompute for m in model.modules() if isinstance(m, Block)}
    assert chosen == {"auto": {False}, "none": {False}, "cheap": {True}}


@pytest.mark.parametrize(
    ("device", "processes", "dropout", "message"),
    [
        ("cpu", 1, 0.0, "graph needs a GPU"),
        ("cuda", 2, 0.0, "graph works in one process, not in 2"),
        ("cuda", 1, 0.1, "random numbers of dropout"),
    ],
)
def test_a_graph_that_cannot_be_is_refused(device: str, processes: int, dropout: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_graph(nn.Sequential(nn.Dropout(dropout)), torch.device(device), processes)


def test_a_graph_on_a_cpu_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    settings = small(tmp_path, graph=True, device="cpu")
    with pytest.raises(ValueError, match="graph needs a GPU, but the device is cpu: omit --graph"):
        train_lm(settings)
    assert not settings.out.exists()


class ReplayedOnCpu:
    """Stands in for a captured pass: a capture computes nothing, a replay reads the captured samples, and every replay of
    any graph overwrites what the others have returned, because graphs share their memory."""

    returned: ClassVar[list[Tensor]] = []
    seen: ClassVar[set[bool]] = set()
    pool = None

    def __init__(
        self, differentiate: Any, samples: Batch, tensors: dict[str, Tensor], weight: float, pool: Any
    ) -> None:
        self.differentiate, self.samples, self.tensors = differentiate, samples, tensors
        self.weight = torch.full((), float(weight))

    def replay(self, tensors: dict[str, Tensor], weight: float) -> Tensor:
        for loss in self.returned:
            loss.fill_(torch.nan)
        self.weight.fill_(float(weight))
        for name, held in self.tensors.items():
            held.copy_(tensors[name])
        self.seen.add("reset" in tensors)
        self.returned.append(self.differentiate(self.samples, self.weight).clone())
        return self.returned[-1]


def test_graphs_of_batches_with_and_without_document_starts_learn_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured, replayed, accumulated and set to zero, without a GPU: two graphs alternate, also inside a step."""
    plain = trained(tmp_path)
    monkeypatch.setattr("prism.train.graph._Graph", ReplayedOnCpu)
    graphed = trained(tmp_path, graph=True)
    assert ReplayedOnCpu.seen == {False, True}
    assert_same(graphed, plain, 1e-6, 1e-6)  # the weight of a batch is a float32 in a graph


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["prism+gated_delta", "mamba2+softmax"])
def test_on_a_gpu_graphs_and_kernels_equal_the_plain_path(layers: str, tmp_path: Path) -> None:
    """Losses are close. In float32 Adam may turn the last bit of a tiny gradient into a whole step of a weight."""
    given: dict[str, Any] = {"device": "cuda", "layers": layers, "precision": "fp32", "dtype": torch.float32}
    given |= {"optimizer": {"lr": 1e-3}, "steps_made": 20}
    with using(backend="torch"):
        plain = trained(tmp_path, recompute="none", **given)
    kernels = trained(tmp_path, recompute="none", **given)
    assert_same(kernels, plain, 5e-3, 2e-2)
    lean = trained(tmp_path, **given)
    assert_same(lean, kernels, 5e-3, 2e-2)
    assert_same(trained(tmp_path, graph=True, **given), lean, 5e-3, 2e-2)
