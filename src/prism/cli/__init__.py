"""The command line: thin. Each command is a typed function in a module of its own, imported only when it is chosen."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple, NoReturn

from prism.extras import missing
from prism.files import reason
from prism.messages import INTERRUPTED, did_you_mean, say


class Command(NamedTuple):
    target: str
    """`module:function`; the function's arguments become flags through tyro."""
    summary: str
    own_arguments: bool = False
    """The function takes the list of arguments and parses it itself."""
    extra: str = "lm"
    """The extra that installs what the command needs."""


COMMANDS = {
    "train lm": Command("prism.cli.train:train", "train a language model, or go on training one", True),
    "train rec": Command(
        "prism.cli.train_rec:train", "train a recommender on a log of events, or go on training one", True, "rec"
    ),
    "generate": Command("prism.cli.generate:generate", "write text with a model, and go on later where it stopped"),
    "evaluate lm": Command("prism.cli.evaluate:evaluate_lm", "perplexity on files, and lm-eval tasks from local data"),
    "evaluate rec": Command(
        "prism.cli.evaluate_rec:evaluate_rec",
        "where held-out events land in a recommender's ranking of all items",
        extra="rec",
    ),
    "recommend": Command(
        "prism.cli.recommend:recommend", "the next items for users, for sequences or for saved states", extra="rec"
    ),
    "export": Command("prism.cli.export:export", "write a run's newest checkpoint as a transformers model"),
    "rules": Command("prism.cli.rules:rules", "the table of all rules: what they forget, write and cost", extra="cli"),
    "demo": Command("prism.cli.demo:demo", "train three small models here and now, and write a report about them"),
    "probe mqar": Command(
        "prism.cli.probe:mqar", "train small models on associative recall and draw what they remember"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `prism …`; returns the exit code."""
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output (`| head`) has enough; exiting must not try to write the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # as rich does where it meets the closed pipe first


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        from prism import __version__

        print(__version__)
        return 0
    name, rest = _choose(words)
    module, function = COMMANDS[name].target.split(":")
    try:
        with _interrupts_wait():
            import tyro

            run = getattr(import_module(module), function)
        if COMMANDS[name].own_arguments:
            return run(rest) or 0
        return tyro.cli(run, prog=f"prism {name}", args=rest) or 0
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("PRISM_DEBUG") == "1":
            raise
        told = missing(error, COMMANDS[name].extra) or _unwritable(error) or error
        say(f"prism {name}: {told}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _unwritable(error: BaseException) -> str | None:
    """A sentence, if a file could not be written because the disk is full or the file system read-only."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return None
    return f"{error.filename or 'a file'} cannot be written: {reason(error)}"


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """While libraries are imported: in their hands an interrupt may become another error, or the end of the process."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _choose(words: list[str]) -> tuple[str, list[str]]:
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, words[length:]
    group = [name for name in COMMANDS if name.split()[0] == words[0]]
    if group:
        wanted = "" if len(words) < 2 or words[1] in ("-h", "--help") else f" unknown command {words[1]!r};"
        if not wanted and len(words) > 1:
            print(_overview(group))
            raise SystemExit(0)
        _fail(f"prism {words[0]}:{wanted} choose from {', '.join(name.split()[1] for name in group)}")
    asked = " ".join(words[:2])
    hints = (did_you_mean(name, COMMANDS, "`prism {}`".format) for name in (asked, words[0]))
    hint = next(filter(None, hints), "")
    _fail(f"prism: unknown command {words[0]!r}{hint}; `prism --help` lists them all")


def _fail(sentence: str) -> NoReturn:
    say(sentence)
    raise SystemExit(2)


def _overview(names: Sequence[str] = ()) -> str:
    lines = ["usage: prism COMMAND [options]        (each command has its own --help)", ""]
    lines += [f"  {name:<14} {command.summary}" for name, command in COMMANDS.items() if not names or name in names]
    return "\n".join(lines)
