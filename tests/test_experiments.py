"""Experiments compute what they say: the simulation is the engine's memory, counts are current, fits find linear maps."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import prism
from prism.engine import Update

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))


def experiment(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", ROOT / "experiments" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_simulated_errors_are_those_of_the_engine() -> None:
    """A memory with an error in every write, minus the same memory without."""
    forgetting, tokens = experiment("forgetting"), 40
    for i, case in enumerate(forgetting.CASES):
        k, beta, c, errors = forgetting.inputs(case, tokens, seed=1)
        decay = torch.full((1, tokens, 1), case.decay, dtype=torch.float64).log()
        true = torch.randn(tokens, forgetting.VALUE_DIM, dtype=torch.float64)

        def state(wrong: torch.Tensor, k: Any = k, c: Any = c, beta: Any = beta, decay: Any = decay) -> torch.Tensor:
            keys, writes = torch.stack([c, c], 1), torch.stack([true, wrong], 1)  # noqa: B023
            update = Update(
                k[None, :, None],
                keys[None, :, None],
                writes[None, :, None],
                decay,
                k[None, :, None],
                beta[None, :, None],
            )
            return prism.memory(update, form="recurrent")[1][0, 0]

        expected = (state(errors) - state(torch.zeros_like(errors))).norm()
        found = forgetting.simulate(forgetting.CASES, tokens, 2, [tokens])[i, 1, 0]
        assert found == pytest.approx(expected.item(), rel=1e-9)


def test_growth_is_the_exponent_of_the_length() -> None:
    forgetting = experiment("forgetting")
    at = [2**n for n in range(8)]
    norms = torch.tensor([[float(t) ** power for t in at] for power in (0.0, 0.5, 1.0)], dtype=torch.float64)
    torch.testing.assert_close(forgetting.growth(norms, at), torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))
    norms[0, -1] = float("inf")
    assert forgetting.growth(norms, at)[0] == float("inf")


def test_stored_counts_of_parameters_are_those_of_the_models() -> None:
    parameters = experiment("parameters")
    rows = json.loads((ROOT / "experiments" / "results" / "parameters.json").read_text(encoding="utf-8"))["results"]
    assert [row for row in rows if row["size"] == "30m"] == parameters.measure("30m"), (
        "run `python experiments/parameters.py`, then `python docs/tools/claims.py`"
    )


def test_the_rank_of_a_write_is_counted() -> None:
    write_rank = experiment("write_rank")
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    own = prism.Mixer("prism", 32, 2, steps=3).double()
    shared = prism.Mixer("prism", 32, 2, steps=3, shared_key=True).double()
    rank, effective = write_rank.ranks(own.rule, x)
    assert (rank == 3).all() and (effective > 1).all() and (effective <= 3).all()
    rank, effective = write_rank.ranks(shared.rule, x)
    assert (rank == 1).all() and torch.allclose(effective, torch.ones_like(effective))


def test_explained_variance_of_a_window() -> None:
    """A target that is linear in the last two inputs is explained by a window of two, not of one."""
    anchor_error = experiment("anchor_error")
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4, 200, 3, generator=random, dtype=torch.float64)
    maps = torch.randn(2, 3, 5, generator=random, dtype=torch.float64)
    target = x @ maps[0] + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1] @ maps[1]
    flat = anchor_error.flat

    def share(width: int) -> float:
        windows = anchor_error.window(x, width)
        found: float = anchor_error.fit((flat(windows[:2]), flat(windows[2:])), (flat(target[:2]), flat(target[2:])))
        return found

    assert share(2) > 0.999
    assert 0.1 < share(1) < 0.9
    rows = flat(target[:2])
    assert anchor_error.explained(rows, rows.mean(0).expand_as(rows)).item() == pytest.approx(0)


def test_an_answer_is_read_before_the_write() -> None:
    """The first token's answer is zero, and later ones are S_{t-1}ᵀk₁."""
    anchor_error = experiment("anchor_error")
    torch.manual_seed(0)
    config = prism.models.PrismConfig(hidden_size=16, num_heads=2, num_hidden_layers=1)
    model = prism.models.PrismForCausalLM(config).eval()
    (found,) = anchor_error.answers(model, torch.randint(256, (2, 6)))
    assert found["answer"][:, 0].abs().max() == 0
    rule = next(m for name, m in model.named_modules() if name.endswith(".mixer")).rule
    update, _, _ = rule.update(found["x"], {}, prism.nn.mixer.Span())
    before = prism.memory(update, form="recurrent")[1] * 0
    for t in range(6):
        torch.testing.assert_close(
            found["answer"][:, t], torch.einsum("bhkv,bhk->bhv", before, update.k[:, t, :, 0]), atol=1e-6, rtol=1e-5
        )
        first = rule.update(found["x"][:, : t + 1], {}, prism.nn.mixer.Span())[0]
        before = prism.memory(first, form="recurrent")[1]


def test_collected_lines_are_small_and_name_no_folder(tmp_path: Path) -> None:
    collect = experiment("collect")
    source, target = tmp_path / "results.jsonl", tmp_path / "kept" / "novels.jsonl"
    about = {"machine": {"cpu": "x"}, "prism": "1", "command": "prism compare /home/me/novels.toml --out /tmp/x/runs"}
    done = {"status": "done", "result": {"scores": {"nats": 3.0}, "curve": [[1, 2]]}, **about}
    lines: list[dict[str, Any]] = [
        {"key": "a", "status": "started"},
        {"key": "a", "settings": {"data": "/home/me/tokens"}, **done},
        {"key": "b", "status": "failed", "error": "bad", "details": "/home/me/x.py", **about},
        {"key": "c", "status": "started"},
    ]
    source.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    assert collect.collect(source, target) == 3
    first, second, third = map(json.loads, target.read_text(encoding="utf-8").splitlines())
    assert first["settings"] == {"data": "tokens"} and first["result"] == {"scores": {"nats": 3.0}}
    assert second["status"] == "failed" and "details" not in second
    assert third["status"] == "stopped" and third["command"] == "prism compare novels.toml --out runs"
    source.write_text(json.dumps({"key": "c", **done}) + "\n", encoding="utf-8")
    assert collect.collect(source, target) == 3
    assert "/home" not in target.read_text(encoding="utf-8")
    assert json.loads(target.read_text(encoding="utf-8").splitlines()[2])["status"] == "done"
    source.write_text(
        json.dumps({"key": "c", "status": "stopped", "error": "killed", **about}) + "\n", encoding="utf-8"
    )
    collect.collect(source, target)  # another machine had started it too
    assert json.loads(target.read_text(encoding="utf-8").splitlines()[2])["status"] == "done"


def test_final_runs_at_a_rate_that_is_no_longer_chosen_are_superseded(tmp_path: Path) -> None:
    collect = experiment("collect")
    source, target = tmp_path / "results.jsonl", tmp_path / "kept.jsonl"
    common = {"status": "done", "phase": "final", "task": "t", "state_size": 8, "result": {"scores": {"": 1.0}}}
    lines = [
        {"key": "a", "rule": "x", "learning_rate": 1e-3, "time": "2026-01-02", **common},
        {"key": "b", "rule": "x", "learning_rate": 3e-3, "time": "2026-01-01", **common},
        {"key": "c", "rule": "y", "learning_rate": 3e-3, "time": "2026-01-01", **common},
        {"key": "d", "rule": "x", "learning_rate": 3e-3, "time": "2026-01-03", **common, "phase": "search"},
    ]
    source.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    collect.collect(source, target)
    found = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert [line["phase"] for line in found] == ["final", "superseded", "final", "search"]
