"""One decode step as ONNX and as an exported program: the same logits as torch over 50 steps, at another batch size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from prism.cli import main
from prism.models import PrismConfig, PrismForCausalLM
from prism.models.decode_step import DecodeStep
from prism.models.onnx_step import check_onnx, write_onnx
from tests.tiny_lm import save_lm

REQUIRED = ("prism", "gated_delta", "mamba2", "rwkv7")


def language_model(layers: str) -> PrismForCausalLM:
    config = PrismConfig(vocab_size=40, hidden_size=32, num_heads=2, layers=layers, intermediate_size=48)
    model = PrismForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def onnxruntime_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, T, vocab_size]` by the file's own description: another program knows nothing else."""
    from onnxruntime import InferenceSession

    about = json.loads((folder / "step.json").read_text())
    session = InferenceSession(str(folder / about["model"]))
    sizes = {"batch": len(ids)}
    states = {
        state["input"]: torch.zeros(
            [sizes.get(n, n) for n in state["shape"]], dtype=getattr(torch, state["dtype"])
        ).numpy()
        for state in about["states"]
    }
    outputs, found = [about["output"]["name"], *(state["output"] for state in about["states"])], []
    for column in ids.T:
        logits, *new = session.run(outputs, {about["input"]["name"]: column.numpy(), **states})
        states = dict(zip(states, new, strict=True))
        found.append(torch.from_numpy(logits))
    return torch.stack(found, 1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of all rules that must be exportable, and beside it what the command writes: an export takes seconds."""
    root = tmp_path_factory.mktemp("written")
    save_lm(root / "model", "+".join(REQUIRED))
    assert main(["export", str(root / "model"), "--format", "onnx", "--out", str(root / "out")]) == 0
    return root


def test_onnx_logits_equal_those_of_a_whole_sequence(written: Path) -> None:
    model = PrismForCausalLM.from_pretrained(written / "model").eval()
    ids = torch.randint(model.config.vocab_size, (3, 50))
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
    torch.testing.assert_close(onnxruntime_logits(written / "out", ids), wanted, rtol=1e-4, atol=1e-4)


def test_the_folder_is_complete(written: Path) -> None:
    files = {"model.onnx", "step.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (written / "out").iterdir()} == files
    about = json.loads((written / "out" / "step.json").read_text())
    assert about["layers"] == list(REQUIRED) and about["tokenizer"] == "tokenizer.json"


def test_a_difference_is_refused(written: Path) -> None:
    """The check is done with the file that was written, not with the model in memory."""
    model = PrismForCausalLM.from_pretrained(written / "model")
    assert check_onnx(written / "out", DecodeStep(model)) < 1e-5
    with torch.no_grad():
        model.lm_head.weight[3] += 0.1
    with pytest.raises(ValueError, match="onnxruntime's logits differ from torch's by"):
        check_onnx(written / "out", DecodeStep(model))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*REQUIRED, "delta_product", "mlstm", "rg_lru", "mamba3", "gsa", "kda"])
def test_one_rule_alone(rule: str, tmp_path: Path) -> None:
    step = write_onnx(language_model(rule), tmp_path)
    assert check_onnx(tmp_path, step, steps=50) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["s4d", "mom"])
def test_operations_that_onnx_lacks_are_one_sentence(rule: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"torch cannot write a step of this model \({rule}\) as ONNX: ") as raised:
        write_onnx(language_model(rule), tmp_path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


def test_states_that_do_not_start_as_zeros_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(titans\) do not start as zeros, so its step cannot be exported"):
        DecodeStep(language_model("titans"))


def test_a_step_is_a_program_of_torch_export() -> None:
    step = DecodeStep(language_model("gated_delta"))
    batch = {0: torch.export.Dim("batch")}
    shapes: Any = (batch, tuple(batch for _ in step.states))
    program = torch.export.export(step, (torch.zeros(13, dtype=torch.int64), *step.empty(13)), dynamic_shapes=shapes)
    ids, states = torch.randint(40, (5,)), [torch.randn_like(state) for state in step.empty(5)]
    for found, wanted in zip(program.module()(ids, *states), step(ids, *states), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_cache_that_grows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_lm(tmp_path / "model", "prism+softmax")
    assert main(["export", str(tmp_path / "model"), "--format", "onnx", "--out", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "layer 1 (softmax) cannot be exported as a step: its cache grows with the context" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_a_missing_library_is_named_with_its_extra(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    save_lm(tmp_path / "model", "linear")
    assert main(["export", str(tmp_path / "model"), "--format", "onnx", "--out", str(tmp_path / "out")]) == 2
    assert f"needs {missing}, from the extra onnx: pip install" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
