"""Several processes train the model that one process trains."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prism.language.model import build_model
from tests.children import final_tensors, finish, reached, same_tensors, wait_until
from tests.train.runs import losses, small, start
from tests.train.standin import build_plain, build_poisoned

REAL = {"model": {"layers": "prism+softmax", "hidden_size": 32, "num_heads": 2, "head_dim": 16, "num_hidden_layers": 2}}


def assert_close(run: Path, reference: Path, tolerance: float) -> None:
    got, wanted = losses(run), losses(reference)
    assert [step for step, *_ in got] == [step for step, *_ in wanted]
    for (step, loss, _, nats), (_, other_loss, _, other_nats) in zip(got, wanted, strict=True):
        a, b = (nats, other_nats) if loss is None else (loss, other_loss)
        assert abs(a - b) <= tolerance, f"step {step}: {a} against {b}"


@pytest.mark.parametrize(
    ("build", "changes"),
    [(build_plain, {}), (build_plain, {"optimizer": {"name": "muon"}, "batch": {"micro": 1}}), (build_model, REAL)],
    ids=["standin", "muon-accumulating", "prism"],
)
def test_fsdp_on_two_processes_equals_one(tmp_path: Path, build: object, changes: dict) -> None:
    one = small(tmp_path / "one", **changes)
    two = small(tmp_path / "two", parallel="fsdp", **changes)
    assert finish([*start(one, build), *start(two, build, processes=2)]) == [0, 0, 0]
    assert_close(two.out, one.out, 1e-5)
    assert losses(one.out)[0][1] != losses(one.out)[-2][1], "nothing was learned, so nothing was compared"
    # Born sharded on the meta device, exported whole: the same model as the one that was never cut.
    a, b = (load_file(settings.out / "model" / "model.safetensors") for settings in (one, two))
    assert a.keys() == b.keys() and len(a) > 5
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=1e-4)
    shards = list((two.out / "checkpoints" / "step-00000024" / "tensors").iterdir())
    assert len(shards) == 2 and len(final_tensors(two.out)) > 0


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, parallel: str) -> None:
    constant = {"schedule": {"name": "constant", "warmup": 4}}
    one = small(tmp_path / "one", **constant)
    half = small(tmp_path / "changing", parallel=parallel, steps=12, **constant)
    rest = small(tmp_path / "changing", **constant)
    reference = start(one)
    assert finish(start(half, processes=2)) == [0, 0]
    assert finish([*start(rest), *reference]) == [0, 0]
    got = [
        record for record in losses(rest.out) if record[0] != 12 or record[1] is not None
    ]  # 12 was a last step: validated
    wanted = losses(one.out)
    assert [record[0] for record in got] == [record[0] for record in wanted]
    for (step, loss, *_), (_, other, *_) in zip(got, wanted, strict=True):
        assert (loss is None) == (other is None) and abs((loss or 0) - (other or 0)) < 1e-5, f"step {step}"


@pytest.mark.parametrize(("parallel", "optimizer"), [("fsdp", "adamw"), ("fsdp", "muon"), ("ddp", "adamw")])
def test_all_processes_skip_what_one_cannot_compute(tmp_path: Path, parallel: str, optimizer: str) -> None:
    """On the host and, as on a GPU, on the device: the same log, weights and optimizer states, bit by bit."""
    changes = {"parallel": parallel, "optimizer": {"name": optimizer}, "steps": 8}
    host, device = small(tmp_path / "host", **changes), small(tmp_path / "device", **changes)
    assert finish(start(host, build_poisoned, processes=2)) == [0, 0]
    assert finish(start(device, build_poisoned, processes=2, on_device=True)) == [0, 0]
    assert losses(host.out) == losses(device.out)
    assert [step for step, loss, norm, nats in losses(host.out) if loss is norm is nats is None] == [3, 4]
    assert same_tensors(final_tensors(host.out), final_tensors(device.out))


def test_a_signal_to_one_process_stops_all_and_a_refusal_by_one_is_a_refusal_by_all(tmp_path: Path) -> None:
    settings = small(tmp_path, parallel="fsdp", checkpoint={"every": 0})
    children = start(settings, processes=2, slow="steps")
    wait_until(reached(settings.out, 3), children)
    os.kill(children[1].pid, signal.SIGTERM)
    assert finish(children) == [0, 0]
    (saved,) = (settings.out / "checkpoints").iterdir()
    assert 3 <= int(saved.name[5:]) < 24
    # The first process finds that the run has another seed; the second hears of it instead of waiting for ever.
    assert finish(start(replace(settings, seed=1), processes=2)) == [1, 1]
