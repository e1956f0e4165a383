"""`prism adapt`: what is trained, saved, resumed and exported, and the same adapter in `prism generate` and in peft."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import prism.hf.adapters  # noqa: F401  (registers the type of the adapter)
from prism.cli import main
from prism.language.adapt import AdaptTask, adapt
from prism.language.adapt_settings import AdaptSettings
from prism.language.adapted import digest, open_adaptable, with_adapter
from prism.language.tokenizer import ByteTokenizer
from prism.overrides import override
from tests.children import final_tensors, same_tensors
from tests.hf.adapters.bases import FUNCTIONS, without_fla
from tests.hf.adapters.bases import base as small_base
from tests.tiny_lm import save_lm, save_tokenizer
from tests.train.runs import losses, write_corpus

Captured = pytest.CaptureFixture[str]
KINDS = ("own", "qwen3_next")


def save_base(folder: Path, kind: str) -> Path:
    """A small model with the tokenizer of bytes, of this library or of transformers."""
    if kind == "own":
        return save_lm(folder, "gated_delta*2")
    small_base(kind, vocab_size=257).save_pretrained(folder)
    save_tokenizer(folder, ByteTokenizer())
    return folder


def small(root: Path, kind: str = "own", **changes: Any) -> AdaptSettings:
    """Settings of a run that takes a second."""
    if not (root / "corpus").exists():
        write_corpus(root / "corpus")
        save_base(root / "base", kind)
    given = {
        "out": str(root / "run"),
        "steps": 16,
        "device": "cpu",
        "base": str(root / "base"),
        "adapter": {"rank": 4},
        "data": {"sources": [str(root / "corpus")], "cache": str(root / "cache"), "context": 24},
        "batch": {"sequences": 4},
        "optimizer": {"lr": 0.06},
        "schedule": {"warmup": 2},
        "validation": {"every": 8, "sequences": 6},
        "checkpoint": {"every": 6},
        "log": {"every": 1},
    }
    return override(override(AdaptSettings(), given, "base"), changes, "changes")


@pytest.fixture(scope="module", autouse=True)
def _torch_alone() -> Iterator[None]:
    """transformers computes with torch, also if flash-linear-attention is installed, which needs a GPU."""
    module = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    before = {name: getattr(module, name) for name in FUNCTIONS}
    without_fla("qwen3_next")
    yield
    for name, function in before.items():
        setattr(module, name, function)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a finished run on each kind of base."""
    found = {}
    for kind in KINDS:
        found[kind] = tmp_path_factory.mktemp(kind)
        settings = small(found[kind], kind)
        before = {path.name: path.read_bytes() for path in settings.base.folder.iterdir()}
        adapt(settings, report=lambda step, loss: None)
        assert {path.name: path.read_bytes() for path in settings.base.folder.iterdir()} == before
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_only_the_adapter_is_saved(roots: dict[str, Path], kind: str, tmp_path: Path) -> None:
    run = roots[kind] / "run"
    base = adapt(
        small(roots[kind], kind, out=str(tmp_path / "run"), steps=1, optimizer={"lr": 0.0}), lambda step, loss: None
    )
    scores = [base.score.nats, *(nats for *_, nats in losses(run) if nats is not None)]
    assert len(scores) == 3 and scores[2] < scores[0] - 0.1, scores
    assert {path.name for path in (run / "model").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
        "README.md",
    }
    saved = load_file(run / "model" / "adapter_model.safetensors")
    assert saved and all(".prism_branches.writes." in name for name in saved)
    count = sum(p.numel() for p in saved.values())
    stored = final_tensors(run)
    sizes = {
        kind: sum(x[0].numel() for name, x in stored.items() if f"/{kind}." in name) for kind in ("model", "optimizer")
    }
    assert sizes["model"] == count < sizes["optimizer"] < 3 * count
    size = (run / "model" / "adapter_model.safetensors").stat().st_size
    assert size < 4 * count + 8000 < (roots[kind] / "base" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_is_unchanged_bitwise(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[AdaptTask] = []
    build = AdaptTask.build
    monkeypatch.setattr(AdaptTask, "build", lambda task: tasks.append(task) or build(task))
    adapt(small(tmp_path, kind, steps=3), report=lambda step, loss: None)
    trained = {
        name.replace(".base_layer", ""): p for name, p in tasks[0].model.named_parameters() if not p.requires_grad
    }
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert all(torch.equal(p, trained.pop(name)) for name, p in before.named_parameters()) and not trained
    assert all(p.grad is None for p in tasks[0].model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_is_what_peft_would_save(roots: dict[str, Path], kind: str, tmp_path: Path) -> None:
    folder = roots[kind] / "run" / "model"
    base = AutoModelForCausalLM.from_pretrained(roots[kind] / "base")
    PeftModel.from_pretrained(base, folder).save_pretrained(tmp_path)
    ours, theirs = (load_file(place / "adapter_model.safetensors") for place in (folder, tmp_path))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    configs = [json.loads((place / "adapter_config.json").read_text()) for place in (folder, tmp_path)]
    assert {**configs[0], "auto_mapping": None} == {**configs[1], "auto_mapping": None}


class Killed(BaseException):
    """Ends a run as a kill does: nothing is written any more. (Real kills: tests/train/test_kill.py.)"""


def test_killed_and_resumed_is_bit_identical(roots: dict[str, Path], tmp_path: Path) -> None:
    hunted, calm = replace(small(roots["own"]), out=tmp_path / "run"), roots["own"] / "run"

    def kill(step: int, loss: float) -> None:
        if step == 9:  # after the checkpoint of step 6
            raise Killed

    with pytest.raises(Killed):
        adapt(hunted, kill)
    assert not (hunted.out / "model").exists() and losses(hunted.out)[-1][0] == 9
    torch.manual_seed(123)
    steps: list[int] = []
    adapt(hunted, lambda step, loss: steps.append(step))
    assert steps == list(range(7, 17))
    assert losses(hunted.out) == losses(calm)
    assert same_tensors(final_tensors(hunted.out), final_tensors(calm))


@pytest.mark.parametrize("changes", [{"recompute": "cheap"}, {"base": {"gradient_checkpointing": True}}])
def test_saving_memory_changes_no_number(roots: dict[str, Path], tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = replace(small(roots["own"], **changes), out=tmp_path / "run", steps=3)
    adapt(settings, report=lambda step, loss: None)
    ours = [loss for _, loss, *_ in losses(tmp_path / "run")[:2]]
    torch.testing.assert_close(ours, [loss for _, loss, *_ in losses(roots["own"] / "run")[:2]])


@pytest.mark.parametrize("kind", KINDS)
def test_generate_writes_what_peft_writes(roots: dict[str, Path], kind: str, capsys: Captured) -> None:
    base, run = roots[kind] / "base", roots[kind] / "run"
    options = ["generate", str(base), "--prompt", "12 bottles", "--max-new-tokens", "12", "--temperature", "0"]
    assert main([*options, "--adapter", str(run)]) == 0
    written = capsys.readouterr().out
    assert main([*options, "--adapter", str(run / "model")]) == 0
    assert capsys.readouterr().out == written
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "model").eval()
    ids = torch.tensor([list(b"12 bottles")])
    text = {}
    for name in ("adapted", "base"):
        call = model if name == "adapted" else model.get_base_model()
        with model.disable_adapter() if name == "base" else torch.no_grad():
            found = call.generate(input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=256, pad_token_id=256)
        kept = [token for token in found[0, ids.shape[1] :].tolist() if token < 256]
        text[name] = bytes(kept).decode(errors="replace")
    assert text["adapted"] == written.removesuffix("\n")
    assert text["base"] != text["adapted"]


def test_a_state_belongs_to_its_adapter(roots: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    base, state = roots["own"] / "base", tmp_path / "state.safetensors"
    adapter = ["--adapter", str(roots["own"] / "run"), "--temperature", "0"]

    def generate(*more: str) -> str:
        assert main(["generate", str(base), *more]) == 0
        return capsys.readouterr().out

    whole = generate("--prompt", "7", "--max-new-tokens", "20", *adapter)
    part = generate("--prompt", "7", "--max-new-tokens", "9", "--save-state", str(state), *adapter)
    assert part + generate("--state", str(state), "--max-new-tokens", "11", *adapter) == whole
    assert main(["generate", str(base), "--state", str(state)]) == 2
    assert "was made by a model with other weights" in capsys.readouterr().err


def test_a_run_is_resumed_and_exported_by_its_folder(tmp_path: Path, capsys: Captured) -> None:
    settings = small(tmp_path, steps=2)
    command = [
        "adapt",
        str(settings.base.folder),
        "--data",
        str(tmp_path / "corpus"),
        "--data.cache",
        str(tmp_path / "c"),
    ]
    command += ["--out", str(settings.out), "--device", "cpu", "--data.context", "24", "--batch.sequences", "2"]
    assert main([*command, "--steps", "2", "--adapter.rank", "3", "--adapter.layers", "1"]) == 0
    assert "trained 2 steps at" in capsys.readouterr().out
    assert main(["adapt", "--out", str(settings.out), "--steps", "3"]) == 0
    assert "the adapter is in" in capsys.readouterr().out
    assert main(["export", str(settings.out), "--out", str(tmp_path / "copy")]) == 0
    saved = load_file(tmp_path / "copy" / "adapter_model.safetensors")
    assert all("layers.1." in name for name in saved)
    shutil.rmtree(settings.out / "model")
    lm = with_adapter(open_adaptable(settings.base.folder, "cpu"), settings.out)  # of the newest checkpoint
    mine = {name: p for name, p in lm.model.named_parameters() if "prism_branches" in name}
    assert sorted(p.sum().item() for p in mine.values()) == sorted(p.sum().item() for p in saved.values())


def test_a_run_folder_is_a_base(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    data = ["--data.sources", str(tmp_path / "corpus"), "--data.cache", str(tmp_path / "cache"), "--device", "cpu"]
    shape = [
        "--model.layers",
        "gated_delta",
        "--model.hidden-size",
        "16",
        "--model.head-dim",
        "8",
        "--data.context",
        "16",
    ]
    run = str(tmp_path / "lm")
    assert main(["train", "lm", *data, *shape, "--model.num-hidden-layers", "1", "--steps", "1", "--out", run]) == 0
    more = ["--steps", "1", "--adapter.rank", "2", "--data.context", "16", "--out", str(tmp_path / "run")]
    assert main(["adapt", run, *data, *more]) == 0
    saved = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / "lm" / "model")


def test_bad_input_is_one_sentence(roots: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    base, corpus = str(roots["own"] / "base"), str(roots["own"] / "corpus")
    softmax = str(save_lm(tmp_path / "softmax", "softmax*2"))
    untokenized = str(shutil.copytree(base, tmp_path / "untokenized", ignore=shutil.ignore_patterns("tokenizer*")))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text('{"model_type": "qwen3_next"}')
    unknown = Path(shutil.copytree(base, tmp_path / "unknown"))
    (unknown / "config.json").write_text('{"model_type": "abacus"}')
    options = ["--data.cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run"), "--device", "cpu"]
    text = ["--data", corpus]
    cases: dict[str, list[str]] = {
        "the model to adapt is missing: give its folder": text,
        "the text to train on is missing": [base],
        "there is no file or folder": [base, "--data", str(tmp_path / "nowhere")],
        "there is no model folder": [str(tmp_path / "nowhere"), *text],
        "has no layer that a PRISM adapter can extend": [softmax, *text],
        "has no tokenizer.json": [untokenized, *text],
        "has no safetensors file": [str(pickled), *text],
        "abacus": [str(unknown), *text],
        "holds an adapter, not a model": [str(roots["own"] / "run"), *text],
        "rank must be from 1 to": [base, *text, "--adapter.rank", "99"],
        "adapter.steps must be at least 2, got 1": [base, *text, "--adapter.steps", "1"],
        "layers must be among the Gated DeltaNet layers 0, 1, got 7": [base, *text, "--adapter.layers", "7"],
        "adapter.layers must be numbers of layers": [base, *text, "--adapter.layers", "-1"],
        "trains with --parallel none or ddp": [base, *text, "--parallel", "fsdp"],
        "has no presets": [base, *text, "--preset", "tiny"],
        "unknown setting --data.tokenizer": [base, *text, "--data.tokenizer", "bytes"],
    }
    capsys.readouterr()  # of saving models
    for sentence, arguments in cases.items():
        assert main(["adapt", *arguments, *options]) == 2, sentence
        lines = capsys.readouterr().err.splitlines()
        said = "\n".join(line for line in lines if not line.startswith("tokenizing "))
        assert sentence in said and "\n" not in said, f"expected {sentence!r}, got: {said}"
    assert not (tmp_path / "run").exists()


def test_a_learning_rate_for_frozen_weights_is_refused(roots: dict[str, Path], tmp_path: Path) -> None:
    settings = small(roots["own"], out=str(tmp_path / "run"), steps=1, optimizer={"groups": ["*embed_tokens*=lr:0.5"]})
    with pytest.raises(ValueError, match="which no parameter takes"):
        adapt(settings, lambda step, loss: None)


def test_a_wrong_adapter_is_one_sentence(roots: dict[str, Path], tmp_path: Path, capsys: Captured) -> None:
    base, adapter = str(roots["own"] / "base"), roots["own"] / "run" / "model"
    other = str(save_lm(tmp_path / "other", "gated_delta*2", seed=1))
    longer = str(save_lm(tmp_path / "longer", "gated_delta*3"))
    made_in_python = shutil.copytree(adapter, tmp_path / "python", ignore=shutil.ignore_patterns("manifest.json"))
    (made_in_python / "adapter_model.safetensors").write_bytes(_without_digest(adapter / "adapter_model.safetensors"))
    pickled = shutil.copytree(adapter, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    cases = {
        "there is no adapter folder": [base, "nowhere"],
        "is no adapter: it has no adapter_config.json": [base, base],
        "is no adapter: it has no adapter_model.safetensors": [base, str(pickled)],
        "was trained on another model than other": [other, str(adapter)],
        "this adapter was made for another base": [longer, str(made_in_python)],
    }
    capsys.readouterr()
    for sentence, (model, folder) in cases.items():
        assert main(["generate", model, "--prompt", "x", "--device", "cpu", "--adapter", folder]) == 2, sentence
        said = capsys.readouterr().err.strip()
        assert sentence in said and "\n" not in said, f"expected {sentence!r}, got: {said}"
    assert main(["generate", other, "--prompt", "x", "--adapter", str(made_in_python), "--max-new-tokens", "1"]) == 0
    foreign = ["--adapter", str(roots["qwen3_next"] / "run"), "--save-state", str(tmp_path / "s.safetensors")]
    assert main(["generate", str(roots["qwen3_next"] / "base"), "--prompt", "x", *foreign]) == 2
    assert "need a model of this library" in capsys.readouterr().err


def test_a_missing_peft_is_one_sentence(
    roots: dict[str, Path], tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [module for module in sys.modules if (module + ".").startswith("prism.hf.adapters.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "peft", None)
    base, run = str(roots["own"] / "base"), str(roots["own"] / "run")
    train = ["adapt", base, "--data", run, "--out", str(tmp_path / "run")]
    for arguments in (train, ["generate", base, "--prompt", "x", "--adapter", run]):
        assert main(arguments) == 2
        said = capsys.readouterr().err.strip()
        assert 'needs peft, from the extra adapters: pip install ".[adapters]"' in said and "\n" not in said
    assert not (tmp_path / "run").exists()


def _without_digest(path: Path) -> bytes:
    from safetensors.torch import save

    return save(load_file(path), {"format": "pt"})


def test_the_digest_tells_weights_apart(roots: dict[str, Path]) -> None:
    lm = open_adaptable(roots["own"] / "base", "cpu")
    before = digest(lm.model)
    with safe_open(roots["own"] / "run" / "model" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata()["base_sha256"] == before
    assert digest(lm.model.to(torch.bfloat16)) != before
    with torch.no_grad():
        next(lm.model.parameters()).add_(1)
    assert digest(lm.model.float()) != before
