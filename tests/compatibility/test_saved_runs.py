"""Runs, models and states that version 0.1.0 wrote still open, and give the same numbers.

`saved/` was written once by these commands and is never regenerated: a new format gets a folder next to it.

    prism train lm --out lm --steps 12 --model.layers prism+softmax --model.hidden-size 8 --data.sources corpus …
    prism generate lm --prompt "12 bottles" --save-state state.safetensors …
    prism train rec --out rec --steps 12 --model.hidden-size 8 …
    prism recommend rec --sequence series001-01 series001-02 series002-03 --save-states user.safetensors …
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from prism import Recommender
from prism.cli import main
from prism.language.settings import BLANK_RUN, command_line
from prism.models import PrismForCausalLM
from prism.rules.options import RULE_DEFAULTS
from prism.train.run import stored_settings

SAVED = Path(__file__).parent / "saved"
EXPECTED = json.loads((SAVED / "expected.json").read_text())


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the saved files, as the working directory."""
    shutil.copytree(SAVED, tmp_path / "saved")
    monkeypatch.chdir(tmp_path / "saved")
    monkeypatch.setenv("PRISM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "saved"


def last_step(run: Path) -> int:
    lines = (run / "log.jsonl").read_text().splitlines()
    return max(json.loads(line)["step"] for line in lines)


def test_a_saved_language_model_gives_the_same_logits(saved: Path) -> None:
    model = PrismForCausalLM.from_pretrained(saved / "lm" / "model").eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(1, 21)[None]).logits[0, -1, :32]
    torch.testing.assert_close(logits, torch.tensor(EXPECTED["last_logits"]), atol=2e-6, rtol=1e-5)


def test_a_saved_text_state_continues(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "lm", "--state", "state.safetensors", "--max-new-tokens", "4", "--temperature", "0"]
    assert main([*words, "--device", "cpu", "--prompt", " b"]) == 0
    assert "4 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["lm", "rec"])
def test_a_saved_run_resumes(saved: Path, run: str) -> None:
    report = ["--no-report"] if run == "rec" else []
    assert main(["train", run, "--out", run, "--steps", "14", *report]) == 0
    assert last_step(saved / run) == 14
    assert (saved / run / "checkpoints" / "step-00000014").is_dir()


def gates(folder: Path) -> tuple[int, list[str]]:
    """The number of a model's defaults, and the output gates of its PRISM layers."""
    model = PrismForCausalLM.from_pretrained(folder)
    rules = [layer.mixer.rule for layer in model.model.layers]
    return model.config.rule_defaults, [rule.gate_by for rule in rules if rule.name == "prism"]


def test_a_run_goes_on_with_the_gate_that_it_has(saved: Path) -> None:
    """However it is resumed: by its folder alone, or by the command that started it. PRISM's gate was SiLU then."""
    stored = stored_settings(Path("lm"), "lm", BLANK_RUN)
    assert stored is not None and stored.model.rule_defaults == 0
    words = shlex.split(command_line(stored))[1:]  # without `prism`
    at = words.index("--model.rule-defaults")
    as_started = [*words[:at], *words[at + 2 :]]  # version 0.1.0 had no such flag
    assert as_started[:4] == ["train", "lm", "--preset", "tiny"]
    for steps, command in (("14", ["train", "lm", "--out", "lm"]), ("16", as_started)):
        assert main([*command, "--steps", steps]) == 0
        assert last_step(saved / "lm") == int(steps) and gates(saved / "lm" / "model") == (0, ["silu"])
    assert main(["export", "lm", "--out", "again"]) == 0
    assert gates(saved / "again") == (0, ["silu"])


def test_a_run_cannot_change_its_gate(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, now in (("1", "1"), ("0", "None")):
        run = f"run-{number}"
        shutil.copytree(saved / "lm", saved / run)
        if number == "0":  # a new run, with today's defaults
            shutil.rmtree(saved / run)
            words = shlex.split(command_line(stored_settings(Path("lm"), "lm", BLANK_RUN)))[1:]
            at = words.index("--model.rule-defaults")
            words[words.index("--out") + 1] = run
            assert main([*words[:at], *words[at + 2 :]]) == 0
            assert gates(saved / run / "model") == (RULE_DEFAULTS, ["silu"])  # of bytes
        assert main(["train", "lm", "--out", run, "--steps", "14", "--model.rule-defaults", number]) == 2
        assert f"now it is {now}" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["rec/model", "rec"])
def test_a_saved_recommender_ranks_the_same_items(saved: Path, folder: str) -> None:
    recommender = Recommender.load(saved / folder, device="cpu")
    found = recommender.recommend(sequences=[["series001-01", "series001-02", "series002-03"]], k=5)
    assert list(found.items[0]) == EXPECTED["recommended"]
    torch.testing.assert_close(
        torch.as_tensor(found.scores[0]).cpu(), torch.tensor(EXPECTED["scores"]), atol=1e-5, rtol=1e-5
    )


def test_a_saved_user_state_continues(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "recommend",
        "rec",
        "--states",
        "user.safetensors",
        "--k",
        "5",
        "--json",
        "--device",
        "cpu",
        "--no-filter-seen",
    ]
    assert main([*words, "--exclude", "series001-01", "series001-02", "series002-03"]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == EXPECTED["recommended"]
