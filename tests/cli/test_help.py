"""Help in groups: an overview on one screen, one screen for each group, and every setting in exactly one of them."""

from __future__ import annotations

import re

import pytest

from prism.cli import COMMANDS as KNOWN
from prism.cli import help as groups
from prism.cli import main
from prism.language.adapt_settings import AdaptSettings
from prism.language.settings import Settings
from prism.language.tune_settings import DpoSettings, SftSettings
from prism.recommend.settings import RecSettings

COMMANDS = {
    "train lm": Settings(),
    "train rec": RecSettings(),
    "train sft": SftSettings(),
    "train dpo": DpoSettings(),
    "adapt": AdaptSettings(),
}
SCREEN = 45
Captured = pytest.CaptureFixture[str]


def shown(capsys: Captured, command: str, *topic: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help", *topic])
    assert stop.value.code in (0, None)
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_no_command_is_missing() -> None:
    assert set(COMMANDS) == {name for name, command in KNOWN.items() if command.own_arguments}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_overview_names_every_setting_on_one_screen(command: str, capsys: Captured) -> None:
    text = shown(capsys, command)
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 80
    words = set(re.findall(r"[\w-]+", text.replace("--", " ").replace(".", " ")))
    for group, paths in groups.groups_of(COMMANDS[command]).items():
        assert f"  {group} " in text and {path[-1].replace("_", "-") for path in paths} <= words
    assert f"prism {command} --help GROUP" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_a_group_shows_its_settings_and_no_others(command: str, capsys: Captured) -> None:
    known = groups.groups_of(COMMANDS[command]).items()
    flags = {group: {groups.flag_of(path) for path in paths} for group, paths in known}
    everything = shown(capsys, command, groups.ALL)
    for group, mine in flags.items():
        text = shown(capsys, command, group)
        assert len(text.splitlines()) <= SCREEN and max(map(len, text.splitlines())) <= 80
        found = set(re.findall(r"^. (--[\w.-]+)", text, re.MULTILINE))
        assert found == mine
        assert all(flag in everything for flag in mine)


def test_defaults_are_those_of_the_preset(capsys: Captured) -> None:
    assert "(default: 384)" in shown(capsys, "train lm --preset 30m", "model")


def test_an_unknown_group_is_one_sentence(capsys: Captured) -> None:
    assert main(["train", "lm", "--help", "nodel"]) == 2
    error = capsys.readouterr().err
    assert "no help on 'nodel' (did you mean 'model'?)" in error and len(error.splitlines()) == 1
