"""`prism train rec`: from a file to a model and a report, a sentence for what cannot be, and no import without need."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from prism.cli import main
from prism.cli.train_rec import parse
from prism.files import write_json
from prism.overrides import override, to_plain, train_command
from prism.recommend.config import PrismRecConfig, hstu, sasrec
from prism.recommend.events import prepare_dataset
from prism.recommend.settings import PRESETS, RecSettings, preset
from tests.recommend.test_recommender import recommender

TINY = "--steps 6 --model.hidden-size 16 --model.num-hidden-layers 1 --data.length 10 --batch.sequences 8 --device cpu"
SMALL_LOG = "--data.synthetic.users 60 --data.synthetic.items 120 --data.synthetic.events 1500"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    places = ["--data.cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run")]
    return ["train", "rec", *TINY.split(), *places]


def write_csv(path: Path) -> Path:
    chance = random.Random(0)
    lines = [f"u{u},{chance.choice('abcdefghij')},{1000 * u + t}" for u in range(30) for t in range(8)]
    path.write_text("\n".join(["user,item,time", *reversed(lines), lines[0]]))
    return path


def test_a_file_becomes_a_model_and_a_report(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = ["--data.source", str(write_csv(tmp_path / "events.csv"))]
    assert main([*command, *source]) == 0
    shown, messages = capsys.readouterr()
    assert "241 events of 30 users with 10 items\n1 events repeat an earlier one and are kept\n" in messages
    assert "210 events were earlier than the one above them: the events were sorted by time" in messages
    assert "trained 6 steps" in shown and "NDCG@10" in shown and "at most 10" in shown
    run = tmp_path / "run"
    assert {path.name for path in (run / "report").iterdir()} == {"results.json", "report.html"}
    assert "--data.source" in (run / "model" / "README.md").read_text()
    assert main(["train", "rec", "--out", str(run), "--no-report"]) == 0, "a run folder remembers its settings"
    assert main(["export", str(run), "--out", str(tmp_path / "again")]) == 0
    names = {path.name for path in (run / "model").iterdir()}
    assert {path.name for path in (tmp_path / "again").iterdir()} == names
    assert main(["evaluate", "rec", str(run), "--split", "validation"]) == 0


def test_models_are_served_and_prepared_events_trained_on_without_polars_tyro_or_tokens(tmp_path: Path) -> None:
    """As on a machine that has torch and transformers and little else."""
    recommender().save(tmp_path / "saved")
    recipe = override(RecSettings(), {"data": {"synthetic": {"users": 60, "items": 120, "events": 1500}}}, "test")
    dataset = prepare_dataset(recipe.data.recipe(), tmp_path / "cache")
    values = {
        "out": str(tmp_path / "run"),
        "steps": 2,
        "device": "cpu",
        "model": {"hidden_size": 16, "num_hidden_layers": 1},
        "data": {"source": str(dataset.folder), "length": 10},
    }
    code = f"""
import sys
for name in ("polars", "pandas", "tyro", "datasets"):
    sys.modules[name] = None
from prism.recommend import Recommender
print(Recommender.load({str(tmp_path / "saved")!r}, device="cpu").recommend(["eve"], k=1).items)
from prism.overrides import override
from prism.recommend.task import train_rec
from prism.recommend.settings import RecSettings
print(train_rec(override(RecSettings(), {values!r}, "test")).step)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{recommender().recommend(['eve'], k=1).items}\n2\n", done.stderr


def test_bad_input_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("user,item\n")
    once = tmp_path / "once.csv"
    once.write_text("user,item\n" + "\n".join(f"u{i},i{i}" for i in range(9)))
    source = write_csv(tmp_path / "events.csv")
    (tmp_path / "text").mkdir()
    write_json(tmp_path / "text" / "config.json", {"task": "lm", "settings": {}, "identity": {}})
    cases = {
        "there is no file or folder nowhere.csv": "--data.source nowhere.csv",
        "no user has 2 or more events": f"--data.source {once}",
        "colour": f"--data.source {source} --data.user colour",
        "unknown preset 'sasrek' (did you mean 'sasrec'?)": "--preset sasrek",
        "unknown setting --data.lenght (did you mean --data.length?)": "--data.lenght 3",
        "holds a run of `prism train lm`": f"--out {tmp_path / 'text'}",
        "epochs must be at least 0": "--epochs -1",
        "validation.metric must be one of": f"{SMALL_LOG} --validation.metric recall",
    }
    for sentence, words in cases.items():
        assert main([*command, *shlex.split(words)]) == 2, sentence
        said = capsys.readouterr().err.splitlines()  # facts about the events may come before it
        assert said[-1].startswith("prism train rec: ") and sentence in said[-1], f"expected {sentence!r}, got: {said}"
        assert not [line for line in said if "Traceback" in line]
    assert main([*command, "--data.source", str(empty)]) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [None, *PRESETS])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epochs": 7.0, "report": False, "loss": {"name": "gbce", "count": 9, "own": True}},
        {"model": {"layers": "prism*2+softmax", "options": ["prism.steps=3"]}, "data": {"time": None, "source": "a b"}},
        {"data": {"features": ["brand", "kind"], "synthetic": {"users": 9}}, "validation": {"patience": 0}},
    ],
)
def test_the_command_in_a_card_gives_the_same_settings(
    name: str | None, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = override(override(preset(name), {"preset": name}, "test"), changes, "test")
    words = shlex.split(train_command("rec", settings, preset(name)))
    assert words[:3] == ["prism", "train", "rec"]
    assert override(parse(words[3:]), {"preset": name}, "test") == settings
    assert override(RecSettings(), json.loads(json.dumps(to_plain(settings))), "file") == settings


@pytest.mark.parametrize(("name", "config"), [("sasrec", sasrec(9)), ("hstu", hstu(9))])
def test_a_preset_is_the_published_model(name: str, config: PrismRecConfig) -> None:
    chosen = {key: value for key, value in asdict(preset(name).model).items() if value is not None}
    same = {key: getattr(config, key) for key in chosen if hasattr(config, key)}
    assert same.keys() >= {"layers", "num_hidden_layers", "num_heads", "hidden_size", "dropout", "embedding_scale"}
    assert {key: chosen[key] for key in same} == same


def test_every_setting_has_a_flag_and_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help", "all"])
    shown = capsys.readouterr().out

    def flags(settings: Any, prefix: str = "--") -> list[str]:
        found = []
        for field in fields(settings):
            value, flag = getattr(settings, field.name), prefix + field.name.replace("_", "-")
            found += flags(value, flag + ".") if is_dataclass(value) else [flag]
        return found

    for flag in flags(RecSettings()):
        assert flag in shown
    for phrase in ("Epochs between validations", "as in SASRec", "Apply the logQ correction"):
        assert phrase in " ".join(shown.replace("│", " ").split())
