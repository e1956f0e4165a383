"""The `prism` command: finds the subcommand, imports its module only then, runs it, and reports errors in one line."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, NoReturn

from prism.files import reason
from prism.messages import INTERRUPTED, did_you_mean, missing_extra, say


class Command(NamedTuple):
    target: str
    """`module:function`. tyro turns the function's arguments into flags."""
    summary: str
    own_arguments: bool = False
    """The function receives the list of arguments and parses it itself."""
    extra: str = "lm"
    """The extra that installs the libraries the command needs."""


COMMANDS = {
    "train lm": Command("prism.cli.train:train", "train or resume a language model", True),
    "train rec": Command("prism.cli.train_rec:train", "train or resume a recommender on user events", True, "rec"),
    "train sft": Command("prism.cli.tune:sft", "fine-tune a language model on chats", True, "adapters"),
    "train dpo": Command("prism.cli.tune:dpo", "train a language model on preferred answers", True, "adapters"),
    "adapt": Command("prism.cli.adapt:adapt", "fine-tune a model with a PRISM adapter", True, "adapters"),
    "generate": Command("prism.cli.generate:generate", "continue a text with a language model"),
    "evaluate lm": Command("prism.cli.evaluate:evaluate_lm", "measure perplexity on files and run lm-eval tasks"),
    "evaluate rec": Command(
        "prism.cli.evaluate_rec:evaluate_rec", "measure how well a recommender ranks held-out events", extra="rec"
    ),
    "recommend": Command(
        "prism.cli.recommend:recommend", "recommend items to users, or after item sequences", extra="rec"
    ),
    "serve rec": Command("prism.cli.serve:serve_rec", "serve a recommender over HTTP, with a page", extra="serve"),
    "serve lm": Command(
        "prism.cli.serve_lm:serve_lm", "serve a language model over OpenAI's API, with a page", extra="serve"
    ),
    "export": Command("prism.cli.export:export", "write a run's checkpoint as a model folder"),
    "convert": Command("prism.cli.convert:convert", "turn a Gated DeltaNet of another library into ours, or back"),
    "rules": Command("prism.cli.rules:rules", "list all rules, or show the options of one", extra="cli"),
    "demo": Command("prism.cli.demo:demo", "train three small models and write a report"),
    "probe mqar": Command("prism.cli.probe_mqar:mqar", "compare rules on associative recall"),
    "probe": Command("prism.cli.probe:probe", "compare rules on another synthetic task"),
    "compare": Command("prism.cli.compare:compare", "compare rules under one budget, as a TOML file says"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `prism …`; returns the exit code."""
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader (`| head`) has closed the pipe: do not flush the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # the same code as rich, which may meet the closed pipe first


def _run(words: list[str]) -> int:
    imports, words = _imports(words)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        if find_spec("tyro") is None:  # only the core is installed: none of the commands runs
            say(f"\nprism {missing_extra(ModuleNotFoundError(name='tyro'), 'lm')}")
            return 0 if words else 2
        return 0
    if words[0] == "--version":
        from prism import __version__

        print(__version__)
        return 0
    name, rest = _choose(words)
    module, function = COMMANDS[name].target.split(":")
    try:
        with _interrupts_wait():
            from prism.cli.flags import run_command

            run = getattr(import_module(module), function)
            if imports:
                from prism.rules.outside import import_modules

                import_modules(imports)
        if COMMANDS[name].own_arguments:
            return run(rest) or 0
        return run_command(run, name, rest)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("PRISM_DEBUG") == "1":
            raise
        say(f"prism {name}: {missing_extra(error, COMMANDS[name].extra) or _unwritable(error) or error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _unwritable(error: BaseException) -> str | None:
    """The message for a full disk or a read-only file system; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return None
    return f"{error.filename or 'a file'} cannot be written: {reason(error)}"


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C while libraries are imported: inside an import it can become another error or kill the process."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received:
        raise KeyboardInterrupt


def _imports(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The modules of every `--import MODULE`, and the other words."""
    modules, others, rest = list[str](), list[str](), iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag != "--import":
            others.append(word)
            continue
        module = value if equals else next(rest, "")
        if not module or module.startswith("-"):
            _fail("prism: --import needs the name of a module that registers rules, such as --import own_rule")
        modules.append(module)
    return modules, others


def _choose(words: list[str]) -> tuple[str, list[str]]:
    """The command that the words name, and the words after it. Prints help or an error and exits if there is none."""
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
    _fail(f"prism: unknown command {words[0]!r}{hint}; `prism --help` lists all commands")


def _fail(message: str) -> NoReturn:
    say(message)
    raise SystemExit(2)


def _overview(names: Sequence[str] = ()) -> str:
    """The help text that lists commands: all, or those given."""
    lines = ["usage: prism COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:<14}{command.summary}" for name, command in COMMANDS.items() if not names or name in names]
    lines += ["", "`prism COMMAND --help` lists the options of a command."]
    return "\n".join([*lines, "`--import MODULE`, with any command, adds the rules that a module registers."])
