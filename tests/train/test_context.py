"""Processes that share sequences train the model that one process trains."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prism.language.corpus import prepare
from prism.language.model import build_model
from prism.language.settings import Settings
from prism.language.task import LanguageTask, train_lm
from prism.models import PrismConfig, PrismForCausalLM
from prism.recommend.task import RecTask
from prism.train.distributed import World, joined
from prism.train.settings import ParallelSettings
from tests.children import final_tensors, finish, kill_when, reached, same_tensors, start_children
from tests.train.runs import losses, small, start
from tests.train.test_parallel import assert_close

MODEL = {"layers": "prism+rwkv7", "hidden_size": 16, "num_heads": 2, "head_dim": 8, "num_hidden_layers": 2}
RUN = {"model": MODEL, "steps": 8, "data": {"context": 18}, "checkpoint": {"every": 3}, "batch": {"micro": 2}}
"""Parts of unequal lengths where four processes share a sequence, and two micro-batches where two do."""
Run = Callable[[str, int, dict[str, Any]], Settings]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Finished runs by name; each is made once."""
    made: dict[str, Settings] = {}

    def run(name: str, processes: int, parallel: dict[str, Any]) -> Settings:
        if name not in made:
            made[name] = small(tmp_path_factory.mktemp(name), **RUN, parallel=parallel)
            assert finish(start(made[name], build_model, processes)) == [0] * processes
        return made[name]

    return run


SHARED = {
    "two": (2, {"mode": "fsdp", "context": 2}),
    "two-by-two": (4, {"mode": "fsdp", "context": 2}),
    "four": (4, {"mode": "ddp", "context": 4}),
}


@pytest.mark.parametrize("name", SHARED)
def test_processes_that_share_sequences_equal_one(runs: Run, name: str) -> None:
    one, shared = runs("one", 1, {}), runs(name, *SHARED[name])
    assert_close(shared.out, one.out, 1e-5)
    assert losses(one.out)[0][1] != losses(one.out)[-2][1], "nothing was learned, so nothing was compared"
    a, b = (load_file(settings.out / "model" / "model.safetensors") for settings in (one, shared))
    assert a.keys() == b.keys() and len(a) > 5
    for tensor in a:
        torch.testing.assert_close(a[tensor], b[tensor], atol=1e-5, rtol=1e-5)
    prompt = torch.tensor([list(b"12 bottles, ")])
    texts = [
        AutoModelForCausalLM.from_pretrained(settings.out / "model").generate(
            prompt, max_new_tokens=12, do_sample=False
        )
        for settings in (one, shared)
    ]
    assert torch.equal(*texts)


def test_killed_and_resumed_is_bit_identical(runs: Run, tmp_path: Path) -> None:
    processes, parallel = SHARED["two"]
    calm, hunted = runs("two", processes, parallel), small(tmp_path, **RUN, parallel=parallel)
    kill_when(start(hunted, build_model, processes, slow="steps"), reached(hunted.out, 5))
    assert finish(start(hunted, build_model, processes)) == [0] * processes
    assert losses(hunted.out) == losses(calm.out)
    assert same_tensors(final_tensors(hunted.out), final_tensors(calm.out))


def test_a_group_that_shares_sequences_has_the_same_ones() -> None:
    group: Any = SimpleNamespace(size=2)
    numbers = [World(torch.device("cpu"), rank, 4, "fsdp", group).numbers(np.arange(6)).tolist() for rank in range(4)]
    assert numbers == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    with pytest.raises(ValueError, match=r"batch.sequences is 5, which 2 groups of 2 processes cannot share equally"):
        World(torch.device("cpu"), 0, 4, "fsdp", group).share(5)
    with pytest.raises(ValueError, match=r"batch.sequences is 5, which 4 processes cannot share equally"):
        World(torch.device("cpu"), 0, 4, "fsdp").share(5)


@pytest.mark.parametrize(
    ("changes", "size", "sentence"),
    [
        ({"model": {"layers": "prism+softmax"}}, 2, "rule 'softmax' cannot share a sequence between processes"),
        ({}, 8, "rule 'prism' needs parts of at least 3 tokens where processes share a sequence, got 2"),
        ({"model": {"layers": "linear"}}, 32, "rule 'linear' needs parts of at least 1 tokens .* got 0"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path: Path, changes: dict, size: int, sentence: str) -> None:
    settings = small(tmp_path, **changes)
    corpus = prepare(settings.data.recipe(), settings.data.cache, False, lambda _: None)
    task = LanguageTask(settings, corpus, None, build_model)
    with pytest.raises(ValueError, match=sentence):
        task.share_sequences(SimpleNamespace(size=size))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"parallel.context is {size}, but prism train rec cannot share a history"):
        RecTask.share_sequences(None, SimpleNamespace(size=size))  # type: ignore[arg-type]


def test_labels_are_refused_where_the_next_one_is_in_another_process() -> None:
    model = PrismForCausalLM(PrismConfig(vocab_size=16, hidden_size=8, num_heads=1, layers="linear"))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="labels cannot be used with context"):
        model(tokens, labels=tokens, context=SimpleNamespace())


def test_groups_must_divide_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with (
        pytest.raises(ValueError, match=r"parallel.context is 3, which does not divide the 4 processes"),
        joined(ParallelSettings(context=3), "cpu"),
    ):
        pass


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (ParallelSettings(mode="ddp"), "--parallel.mode auto"),
        (ParallelSettings(mode="fsdp"), "--parallel.mode auto"),
        (ParallelSettings(context=2), "--parallel.context 1"),
    ],
)
def test_without_torchrun_one_process_is_a_way_on(
    settings: ParallelSettings, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was started with several processes is resumed with these settings."""
    monkeypatch.delenv("RANK", raising=False)
    sentence = f"start the run with torchrun, .*, or run it on one process with {flag}$"
    with pytest.raises(ValueError, match=sentence), joined(settings, "cpu"):
        pass


def data_bytes() -> int:
    """Memory that this process may write to, which RLIMIT_DATA limits."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) << 10


def train_within(settings: Settings, limit: int | None, notes: Path) -> None:
    """Train with at most `limit` bytes more than now. Writes the bytes that were needed, or the error, to `notes`."""
    before, most, ended = data_bytes(), 0, threading.Event()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.002):
            most = max(most, data_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    note = notes / os.environ.get("RANK", "0")
    try:
        train_lm(settings)
        note.write_text(str(most - before))
    except RuntimeError as error:
        note.write_text(str(error))
        raise
    finally:
        ended.set()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
def test_two_processes_train_a_sequence_that_is_too_long_for_one(tmp_path: Path) -> None:
    corpus, tokens = tmp_path / "corpus", 1 << 16
    corpus.mkdir()
    (corpus / "long.txt").write_text("all work and no play makes jack a dull boy. " * (tokens // 20))
    data = {"sources": [str(corpus)], "context": tokens, "separate_documents": False}
    model = {**MODEL, "layers": "prism", "hidden_size": 32, "head_dim": 32, "num_heads": 1}
    changes = {"model": model, "data": data, "steps": 1, "batch": {"sequences": 1}, "validation": {"sequences": 1}}

    def run(name: str, processes: int, limit: int | None) -> tuple[list[int | None], list[str], Settings]:
        settings, notes = small(tmp_path / name, **changes, parallel={"context": processes}), tmp_path / f"{name}-notes"
        notes.mkdir()
        codes = finish(start_children(train_within, settings, limit, notes, processes=processes))
        return codes, [path.read_text() for path in sorted(notes.iterdir())], settings

    codes, (needed,), free = run("free", 1, None)
    assert codes == [0]
    limit = int(needed) * 3 // 4
    codes, (error,), _ = run("limited", 1, limit)
    assert codes == [1] and "can't allocate memory" in error
    codes, used, shared = run("shared", 2, limit)
    assert codes == [0, 0] and all(int(number) < limit for number in used)
    assert_close(shared.out, free.out, 1e-5)
