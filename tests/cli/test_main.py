"""The command line reports errors in one sentence, and `prism rules` lists every rule."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prism import cli, rules
from prism.cli import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code in (0, None)
    printed = capsys.readouterr().out
    assert "--" in printed and "{None}" not in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_an_interrupt_while_libraries_are_imported_waits_for_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may turn it into an error of their own."""
    finished = []

    def slowly(module: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        finished.append(module)

    monkeypatch.setattr(cli, "import_module", slowly)
    monkeypatch.setattr(cli, "COMMANDS", {"rules": cli.Command("prism.cli.rules:__doc__", "")})
    assert main(["rules"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n" and finished == ["prism.cli.rules"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(os.name != "posix", reason="signals are inherited on POSIX systems")
def test_tests_of_interrupts_pass_where_signals_are_ignored() -> None:
    """As in the background of a script, or under nohup."""
    this = f"{__file__}::{test_an_interrupt_while_libraries_are_imported_waits_for_them.__name__}"
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    words = [sys.executable, "-c", ignoring, sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", this]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout


def test_rules_table_names_every_rule(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    assert main(["rules", "--width", "64", "--heads", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in rules.names())
    assert f"{rules.get('gated_delta').build(64, 2).state_size:,}" in printed


def test_a_width_that_one_rule_cannot_have_names_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "--width", "7", "--heads", "3"]) == 2
    assert "width 7 with 3 heads does not fit every rule: mlstm: " in capsys.readouterr().err


def test_names_are_whole_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["rules"]) == 0
    printed = capsys.readouterr().out
    table = printed.partition("forms:")[0]
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert len(table.splitlines()) <= 2 + 2 * len(rules.names())
    words = {word for name in rules.names() for word in f"{_texts(name)} {_HEADINGS}".split()}
    assert {word for word in table.split() if len(word) > 3 and word.isalpha()} <= words


_HEADINGS = "Rules width with heads rule objective forgetting forms state size"


def _texts(name: str) -> str:
    kind = rules.get(name)
    return f"{name} {kind.objective.text} {kind.forgetting}".replace(",", " ")


@pytest.mark.parametrize("name", rules.names())
def test_one_rule_is_shown_with_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", name]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{name}: ") and rules.get(name).objective.text in printed
    flat = " ".join(printed.split())
    for option in rules.describe(name):
        assert f" {option.name}: {option.type} = {option.default!r} {option.meaning}" in flat


def test_one_unknown_rule_and_a_page_of_one_rule_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["rules", "prsim"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'prism'" in error and error.startswith("prism rules: unknown rule 'prsim'")
    assert main(["rules", "prism", "--output", str(tmp_path / "page.md")]) == 2
    assert "leave out the name 'prism'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["probe", "mqar", "--output", "FILE"],
        ["compare", "nowhere.toml", "--out", "FILE"],
        ["demo", "--output", "FILE"],
        ["evaluate", "rec", "nowhere", "--output", "FILE"],
        ["evaluate", "lm", "nowhere", "FILE", "--output", "FOLDER"],
        ["rules", "--output", "FOLDER"],
        ["probe", "mqar", "--output", "FILE/below"],
    ],
    ids=" ".join,
)
def test_a_wrong_output_is_told_before_the_work(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("text")
    places = {"FILE": tmp_path / "file", "FOLDER": tmp_path, "FILE/below": tmp_path / "file" / "below"}
    assert main([str(places.get(word, word)) for word in words]) == 2
    assert " is a f" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "text" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["train", "lm", "--data.sources", "nowhere", "--out", "PLACE"],
        ["train", "rec", "--data.source", "nowhere", "--out", "PLACE"],
        ["generate", "nowhere", "--prompt", "x", "--save-state", "PLACE.safetensors"],
        ["recommend", "nowhere", "--sequence", "a", "--save-states", "PLACE.safetensors"],
        ["export", "nowhere", "--out", "PLACE"],
        ["evaluate", "lm", "nowhere", "nowhere.txt", "--output", "PLACE"],
        ["evaluate", "rec", "nowhere", "--output", "PLACE"],
        ["probe", "mqar", "--output", "PLACE"],
        ["probe", "mqar2", "--output", "PLACE"],
        ["compare", "nowhere.toml", "--out", "PLACE"],
        ["demo", "--output", "PLACE"],
        ["rules", "--output", "PLACE"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_place_that_cannot_be_written_is_told_before_the_work(
    words: list[str], number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same words in every command. (The owner of the tests may write anywhere: the system's answer is made up.)"""

    def refused(dir: Path) -> None:
        assert dir == tmp_path
        raise OSError(number, os.strerror(number), str(dir))

    monkeypatch.setattr("prism.files.tempfile.TemporaryFile", refused)
    place = tmp_path / "place"
    assert main([word.replace("PLACE", str(place)) for word in words]) == 2
    said = capsys.readouterr().err
    why = "No space left on device" if number == errno.ENOSPC else "permission denied"
    assert str(place) in said and f" cannot be written: {why}; choose another path for " in said
    assert len(said.splitlines()) == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "extra"), [("train lm", "lm"), ("train rec", "rec"), ("generate", "lm")])
def test_a_missing_library_is_told_with_its_extra(
    command: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> None:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers.utils")

    monkeypatch.setattr("prism.cli.import_module", without)
    assert main([*command.split(), "x"]) == 2
    assert f"needs transformers, from the extra {extra}: pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rulez"], "rules"),
        (["probe"], "parity"),
        (["train", "nothing"], "lm, rec"),
    ],
)
def test_unknown_commands_are_answered_with_known_ones(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["rules"], ["--help"], ["train", "--help"]])
def test_a_reader_who_has_enough_hears_no_complaint(command: list[str]) -> None:
    """`prism rules | head -1`."""
    with subprocess.Popen(
        [sys.executable, "-m", "prism", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1
