"""A run learns, skips steps that are not finite, obeys signals, and refuses to mix runs."""

from __future__ import annotations

import errno
import io
import math
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from prism.cli.export import export
from prism.files import remove_folder
from prism.language.export import write_model
from prism.language.task import train_lm
from prism.train import loop
from prism.train.checkpoint import NotFiniteError
from prism.train.export import resolve_model_folder
from prism.train.run import read_log
from prism.train.signals import StopRequest
from tests.children import checkpoint_tensors, final_tensors, finish, reached, same_tensors, signal_when
from tests.train.runs import losses, small, start
from tests.train.standin import Poisoned, build_plain, build_with_dropout


def test_a_run_learns_and_leaves_what_it_promises(tmp_path: Path) -> None:
    outcome = train_lm(small(tmp_path, steps=60), build_plain)
    curve = [loss for _, loss, *_ in losses(outcome.run) if loss is not None]
    assert len(curve) == 60 and curve[-1] < curve[0] - 1.5
    assert outcome.score is not None and outcome.score.nats < curve[0] - 1.5
    assert outcome.score.perplexity == pytest.approx(math.exp(outcome.score.nats))
    per_token = outcome.score.bytes_per_token
    assert 0.9 < per_token < 1.0, "bytes, and one end for every document"
    assert outcome.score.bits_per_byte == pytest.approx(outcome.score.nats / math.log(2) / per_token)
    assert {path.name for path in outcome.run.iterdir()} == {
        ".lock",
        "config.json",
        "tokenizer.json",
        "log.jsonl",
        "checkpoints",
        "model",
    }
    assert "bits per byte" in (outcome.model / "README.md").read_text()


def test_how_the_batch_is_cut_does_not_matter(tmp_path: Path) -> None:
    whole = train_lm(small(tmp_path / "a"), build_plain).run
    parts = train_lm(small(tmp_path / "b", batch={"micro": 3}), build_plain).run  # 3 + 1
    for (step, *values), (_, *others) in zip(losses(whole), losses(parts), strict=True):
        for a, b in zip(values, others, strict=True):
            assert (a is None) == (b is None) and abs((a or 0) - (b or 0)) < 1e-4, f"step {step}"


def test_the_last_document_does_not_leak_into_the_next(tmp_path: Path) -> None:
    apart = train_lm(small(tmp_path / "a"), build_plain).run
    joined = train_lm(small(tmp_path / "b", data={"separate_documents": False}), build_plain).run
    assert losses(apart)[0][1] != losses(joined)[0][1]


@pytest.mark.slow
def test_compiled_layers_learn_the_same(tmp_path: Path) -> None:
    plain = train_lm(small(tmp_path / "a"), build_plain).run
    compiled = train_lm(small(tmp_path / "b", compile=True), build_plain).run
    for (step, loss, *_), (_, other, *_) in zip(losses(plain), losses(compiled), strict=True):
        assert (loss is None) == (other is None) and abs((loss or 0) - (other or 0)) < 1e-4, f"step {step}"
    a, b = (load_file(run / "model" / "model.safetensors") for run in (plain, compiled))
    assert a.keys() == b.keys()


@pytest.fixture(params=["host", "device"])
def decided_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a run in this process decides to skip a step: "device" is what a GPU does, one step ahead of the host."""
    monkeypatch.setattr(loop, "decides_on_device", lambda _: request.param == "device")
    return request.param


@pytest.mark.parametrize("kind", ["loss", "gradient", "engine"])
def test_steps_that_are_not_finite_are_skipped_and_counted(tmp_path: Path, kind: str, decided_on: str) -> None:
    result = train_lm(small(tmp_path), lambda *_: Poisoned(kind, length=2))
    assert (result.step, result.skipped) == (24, 2)
    records = [record for record in read_log(result.run / "log.jsonl") if "skipped" in record]
    assert [record["skipped"] for record in records] == [0] * 9 + [1] + [2] * 14
    assert all(
        (record["gradient_norm"] is None) == (record["step"] in (10, 11)) for record in records if kind != "engine"
    )
    saved = [value for shards in final_tensors(result.run).values() for value in shards]
    assert all(bool(torch.isfinite(value).all()) for value in saved if value.is_floating_point())


@pytest.mark.parametrize("max_skips", [2, 3], ids=["before a checkpoint", "at a checkpoint"])
@pytest.mark.parametrize("kind", ["loss", "gradient", "engine"])
def test_too_many_in_a_row_stop_the_run_with_the_samples_saved(
    tmp_path: Path, kind: str, max_skips: int, decided_on: str
) -> None:
    settings, last = small(tmp_path, max_skips=max_skips), 9 + max_skips
    message = rf"not finite {max_skips} times in a row, up to step {last}: .* the last checkpoint is step-00000006"
    with pytest.raises(NotFiniteError, match=message):
        train_lm(settings, lambda *_: Poisoned(kind, length=100))
    samples = load_file(settings.out / f"not-finite-step-{last:08d}-process-0.safetensors")
    assert samples["inputs"].shape == samples["targets"].shape == samples["reset"].shape == (4, 16)
    assert [record["step"] for record in read_log(settings.out / "log.jsonl")][-1] == last - 1
    names = [path.name for path in (settings.out / "checkpoints").iterdir()]
    assert names == ["step-00000006"], "no checkpoint after the trouble began"
    assert train_lm(settings, build_plain).step == 24, "the run resumes once the cause is gone"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(("kind", "first", "length"), [("loss", 1, 2), ("gradient", 11, 3), ("engine", 17, 1)])
def test_the_device_decides_as_the_host_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, first: int, length: int, optimizer: str
) -> None:
    """Same weights, optimizer states, counts, random states and log, at every checkpoint (11 to 13 surround one)."""
    runs, reports = [], ([], [])
    for on_device, reported in zip((False, True), reports, strict=True):
        monkeypatch.setattr(loop, "decides_on_device", lambda _, on_device=on_device: on_device)
        settings = small(tmp_path / str(on_device), optimizer={"name": optimizer}, checkpoint={"keep": 9})
        build = lambda *_: Poisoned(kind, length, first, dropout=0.2)  # noqa: E731
        result = train_lm(settings, build, lambda *values, reported=reported: reported.append(values))
        assert result.skipped == length
        runs.append(result.run)
    np.testing.assert_equal(*reports)
    logs = [read_log(run / "log.jsonl") for run in runs]
    for record in (record for log in logs for record in log):
        record.pop("tokens_per_second", None)
    assert logs[0] == logs[1] and len(logs[0]) > 24
    checkpoints = [sorted((run / "checkpoints").iterdir()) for run in runs]
    assert len(checkpoints[0]) == 4
    for one, other in zip(*checkpoints, strict=True):
        assert (one / "state.json").read_bytes() == (other / "state.json").read_bytes()
        assert same_tensors(checkpoint_tensors(one), checkpoint_tensors(other)), one.name


@pytest.mark.parametrize(
    ("number", "on_device"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGHUP, False), (signal.SIGTERM, True)],
)
def test_a_signal_saves_and_ends_cleanly_and_the_run_resumes(tmp_path: Path, number: int, on_device: bool) -> None:
    settings = small(tmp_path / "stopped", checkpoint={"every": 0})
    children = start(settings, build_with_dropout, slow="steps", on_device=on_device)
    signal_when(children, reached(settings.out, 3), number)
    assert finish(children) == [0]
    (saved,) = (settings.out / "checkpoints").iterdir()
    assert 3 <= int(saved.name[5:]) < 24 and not (settings.out / "model").exists()
    calm = small(tmp_path / "calm", checkpoint={"every": 0})
    assert finish([*start(settings, build_with_dropout), *start(calm, build_with_dropout)]) == [0, 0]
    assert losses(settings.out) == losses(calm.out)
    assert same_tensors(final_tensors(settings.out), final_tensors(calm.out))


def test_the_second_signal_of_a_closed_terminal_does_not_stop_at_once() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with StopRequest() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        assert stop.name == "SIGHUP"
    assert signal.getsignal(signal.SIGHUP) == before


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "the terminal is gone")])
def test_a_run_that_nobody_watches_any_more_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    train_lm(small(tmp_path, steps=1), build_plain)  # says that it prepares tokens

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    monkeypatch.setattr(sys, "stderr", Closed())
    assert train_lm(small(tmp_path, steps=3), build_plain).step == 3


def test_a_finished_run_is_not_trained_again_but_can_be_prolonged(tmp_path: Path) -> None:
    train_lm(small(tmp_path), build_plain)
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    assert train_lm(small(tmp_path), build_plain).step == 24
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log
    assert train_lm(small(tmp_path, steps=30), build_plain).step == 30
    config = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ValueError, match="is at step 30, but steps is 24"):
        train_lm(small(tmp_path), build_plain)
    assert (tmp_path / "run" / "config.json").read_bytes() == config, "a refused command changes nothing"


def test_a_resumed_run_keeps_its_parameter_groups(tmp_path: Path) -> None:
    groups = {"groups": ["*.up.*=lr:0.1,wd:0"]}
    changes = {"optimizer": groups, "schedule": {"name": "constant", "warmup": 0}}
    whole = train_lm(small(tmp_path / "a", steps=8, **changes), build_with_dropout)
    train_lm(small(tmp_path / "b", steps=4, **changes), build_with_dropout)
    resumed = train_lm(small(tmp_path / "b", steps=8, **changes), build_with_dropout)
    assert same_tensors(final_tensors(whole.run), final_tensors(resumed.run))
    other = train_lm(small(tmp_path / "c", steps=8, **{**changes, "optimizer": {}}), build_with_dropout)
    assert losses(other.run)[-1] != losses(whole.run)[-1]


def test_an_unknown_rule_is_refused_before_any_data_is_read(tmp_path: Path) -> None:
    settings = small(tmp_path, model={"layers": "foo"}, data={"sources": [str(tmp_path / "nowhere")]})
    with pytest.raises(ValueError, match="unknown rule 'foo'"):
        train_lm(settings)


def test_other_data_is_refused_with_short_hashes(tmp_path: Path) -> None:
    train_lm(small(tmp_path, steps=2), build_plain)
    (tmp_path / "other.txt").write_text("another text, long enough to be cut into windows\n" * 40)
    with pytest.raises(ValueError, match=r"was started with different tokens \(\w{12}…; now \w{12}…\)"):
        train_lm(small(tmp_path, steps=2, data={"sources": [str(tmp_path / "other.txt")]}), build_plain)


def test_export_of_a_run_with_patience_is_its_best_step(tmp_path: Path) -> None:
    best = {"every": 2, "sequences": 6, "patience": 2}
    outcome = train_lm(small(tmp_path, steps=40, optimizer={"lr": 3.0}, validation=best, checkpoint={"every": 2}))
    assert outcome.best_step is not None and outcome.best_step < outcome.step, "it must have become worse"
    trained = (outcome.run / "model" / "model.safetensors").read_bytes()
    export(outcome.run)
    assert (outcome.run / "model" / "model.safetensors").read_bytes() == trained
    remove_folder(outcome.run / "model")
    with resolve_model_folder(outcome.run, write_model) as folder:
        assert (folder / "model.safetensors").read_bytes() == trained


def test_runs_are_not_mixed_or_overwritten(tmp_path: Path) -> None:
    settings = small(tmp_path, steps=2)
    train_lm(settings, build_plain)
    before = {path: path.read_bytes() for path in settings.out.rglob("*") if path.is_file()}
    refusals = {
        "seed 0, now it is 1": {"seed": 1},
        "data.context 16, now it is 8": {"data": {"context": 8}},
        "model.hidden_size 16, now it is 32": {"model": {"hidden_size": 32}},
        "not empty and --no-resume was given": {"resume": False},
        "tokens ": {"data": {"split": "tail"}},
    }
    for sentence, change in refusals.items():
        with pytest.raises(ValueError, match=sentence):
            train_lm(small(tmp_path, **{"steps": 3, **change}), build_plain)
    with FileLock(settings.out / ".lock"), pytest.raises(ValueError, match="another process is training in"):
        train_lm(replace(settings, steps=3), build_plain)
    with pytest.raises(ValueError, match="not empty and holds no run"):
        train_lm(replace(settings, out=tmp_path / "corpus"), build_plain)
    with pytest.raises(ValueError, match="is a file"):
        train_lm(replace(settings, out=tmp_path / "corpus" / "songs.jsonl"), build_plain)
    assert {path: path.read_bytes() for path in settings.out.rglob("*") if path.is_file()} == before


def test_given_weights_are_where_a_run_starts(tmp_path: Path) -> None:
    first = train_lm(small(tmp_path / "a"), build_plain)
    nats = first.score.nats
    model = {"weights": str(first.model)}
    second = train_lm(small(tmp_path / "b", steps=1, optimizer={"lr": 0.0}, model=model), build_plain)
    assert second.score.nats == pytest.approx(nats, abs=1e-6)
    with pytest.raises(
        ValueError, match=r"embed.weight of shape \[320, 16\], the model expects \[512, 16\]: .* vocabulary"
    ):
        train_lm(small(tmp_path / "c", model={**model, "vocab_size": 512}), build_plain)
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"model\.weights has no embed\.weight"):
        train_lm(small(tmp_path / "c", model={"weights": str(tmp_path / "other.safetensors")}), build_plain)
    assert not (tmp_path / "c" / "run").exists()


def test_a_micro_batch_larger_than_the_batch_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_lm(small(tmp_path, steps=1, batch={"micro": 5}), build_plain)
    assert "batch.micro is 5, but a process has 4 sequences a step: all are computed at once" in capsys.readouterr().err
