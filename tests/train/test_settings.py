"""Preset < stored run < TOML file < flags; unknown settings are refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from prism.cli.train import parse
from prism.files import write_json
from prism.language.settings import PRESETS, Settings, preset
from prism.overrides import override, to_plain
from prism.train.settings import ParallelSettings


def test_flags_beat_toml_beats_preset(tmp_path: Path) -> None:
    toml = tmp_path / "my.toml"
    toml.write_text(
        'preset = "130m"\nsteps = 5\n[model]\nlayers = "gated_delta"\nhidden_size = 96\n[optimizer]\nlr = 1\n'
    )
    settings = parse(["--config", str(toml), "--steps", "7", "--model.hidden-size", "64", "--data.sources", "a", "b"])
    assert (settings.steps, settings.model.hidden_size) == (7, 64)
    assert (settings.model.layers, settings.optimizer.lr) == ("gated_delta", 1.0)
    assert settings.model.num_hidden_layers == preset("130m").model.num_hidden_layers == 12
    assert settings.data.sources == ("a", "b")
    assert parse(["--preset", "30m", "--config", str(toml)]).model.num_hidden_layers == 10, (
        "a flag beats the file here too"
    )


def test_a_run_folder_remembers_its_settings(tmp_path: Path) -> None:
    before = parse(
        ["--preset", "30m", "--out", str(tmp_path), "--model.layers", "prism*3+softmax", "--batch.micro", "None"]
    )
    write_json(
        tmp_path / "config.json",
        {"task": "lm", "started_in": str(tmp_path), "settings": to_plain(before), "identity": {}},
    )
    assert parse(["--out", str(tmp_path)]) == before
    assert parse(["--out", str(tmp_path), "--steps", "3"]) == dataclasses.replace(before, steps=3)
    assert parse(["--out", str(tmp_path), "--preset", "tiny"]).model.layers == "prism", "a preset that is named counts"


def test_the_bare_name_of_a_section_sets_its_short_field(tmp_path: Path) -> None:
    """As `parallel` was spelt when it was no section: in flags, TOML files and stored runs."""
    for words in (["--parallel", "ddp"], ["--parallel=ddp"], ["--parallel.mode", "ddp"]):
        assert parse([*words, "--parallel.context", "2"]).parallel == ParallelSettings("ddp", 2)
    toml = tmp_path / "my.toml"
    toml.write_text('parallel = "none"\n')
    assert parse(["--config", str(toml)]).parallel == ParallelSettings("none")
    toml.write_text('[parallel]\nmode = "fsdp"\ncontext = 4\n')
    assert parse(["--config", str(toml), "--parallel", "auto"]).parallel == ParallelSettings("auto", 4)
    write_json(
        tmp_path / "config.json",
        {"task": "lm", "started_in": str(tmp_path), "settings": {"parallel": "ddp"}, "identity": {}},
    )
    assert parse(["--out", str(tmp_path)]).parallel == ParallelSettings("ddp", 1)
    with pytest.raises(ValueError, match=r"^here: batch is a section of settings, got 3$"):
        override(Settings(), {"batch": 3}, "here")
    with pytest.raises(ValueError, match=r"^here: parallel.mode must be one of auto, none, ddp, fsdp, got 'dpp'$"):
        override(Settings(), {"parallel": "dpp"}, "here")
    with pytest.raises(ValueError, match=r"^parallel.context must be at least 1, got 0$"):
        parse(["--parallel.context", "0"])


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_head_sizes_of_the_kernels_and_survive_a_file(name: str) -> None:
    settings = preset(name)
    assert settings.preset == name
    assert settings.model.head_dim in (64, 128)
    assert settings.model.num_heads * settings.model.head_dim == settings.model.hidden_size
    assert override(Settings(), json.loads(json.dumps(to_plain(settings))), "file") == settings


@pytest.mark.parametrize(
    ("arguments", "toml", "sentence"),
    [
        (
            ["--preset", "131m"],
            "",
            r"^unknown preset '131m' \(did you mean '130m'\?\): choose from tiny, 30m, 130m, 340m, 1.3b$",
        ),
        (
            ["--model.hiden-size", "3"],
            "",
            r"^unknown setting --model.hiden-size \(did you mean --model.hidden-size\?\); --help",
        ),
        (
            ["--config", "{toml}"],
            "[model]\nlayer = 3",
            r"my.toml has a setting model.layer that does not exist \(did you mean model.l",
        ),
        (["--config", "{toml}"], "steps = 'x'", r"my.toml: steps must be an integer, got 'x'$"),
        (["--config", "{toml}"], "model = 3", r"my.toml: model is a section of settings, got 3$"),
        (["--config", "{toml}"], "[optimizer]\nname = 'sgd'", r"optimizer.name must be one of adamw, muon, got 'sgd'$"),
        (["--config", "{toml}"], "[optimizer]\nbetas = [0.9]", r"optimizer.betas must be a list of 2, got \[0.9\]$"),
        (["--config", "{toml}"], "[data]\nsources = 'a'", r"data.sources must be a list, got 'a'$"),
        (["--config", "{toml}"], "resume = 1", r"resume must be true or false, got 1$"),
        (["--config", "{toml}"], "steps =", r"my.toml is not a TOML file: "),
        (["--config", "nowhere.toml"], "", r"^there is no settings file nowhere.toml$"),
        (["--steps", "0"], "", r"^steps must be at least 1, got 0$"),
        (["--batch.micro", "0"], "", r"^batch.micro must be at least 1, got 0$"),
        (["--data.context", "0"], "", r"^data.context must be at least 1, got 0$"),
        (["--data.validation", "0"], "", r"^data.validation must be above 0 and at most 0.5, got 0.0$"),
        (["--schedule.final", "2"], "", r"^schedule.final is a fraction: it must be between 0 and 1, got 2.0$"),
        (["--config", "{toml}"], "preset = 3", r"my.toml: preset must be a string, got 3$"),
        (["--optimizer.lr", "-1"], "", r"^optimizer.lr must be at least 0, got -1.0$"),
        (["--optimizer.weight-decay", "nan"], "", r"^optimizer.weight_decay must be at least 0, got nan$"),
        (
            ["--optimizer.betas", "0.9", "1"],
            "",
            r"^optimizer.betas and optimizer.momentum must be at least 0 and below 1, got \(0.9, 1.0\) and 0.95$",
        ),
        *(
            (
                ["--optimizer.groups", text],
                "",
                rf"^optimizer.groups has '{re.escape(text)}': write pattern=lr:factor,wd:value",
            )
            for text in ("*.writes.*", "=lr:1", "*=lr", "*=rate:2", "*=lr:-1", "*=lr:1,lr:2", "*=wd:inf", "*=")
        ),
        (["--optimizer.clip", "0"], "", r"^optimizer.clip must be above 0 \(None: no clipping\), got 0.0$"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(
    tmp_path: Path, arguments: list[str], toml: str, sentence: str
) -> None:
    path = tmp_path / "my.toml"
    path.write_text(toml)
    with pytest.raises((ValueError, OSError), match=sentence) as caught:
        parse([argument.format(toml=path) for argument in arguments] + ["--out", str(tmp_path / "run")])
    assert "\n" not in str(caught.value)


def test_every_setting_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help", "all"])
    shown = capsys.readouterr().out

    def flags(settings: Any, prefix: str = "--") -> list[str]:
        found = []
        for field in dataclasses.fields(settings):
            value, flag = getattr(settings, field.name), prefix + field.name.replace("_", "-")
            found += flags(value, flag + ".") if dataclasses.is_dataclass(value) else [flag]
        return found

    for flag in flags(Settings()):
        assert flag in shown
    for phrase in ("Width of the model", "Muon for the matrices", "non-finite loss", "standard library"):
        assert phrase in " ".join(shown.replace("│", " ").split())
