"""Hooks of the documentation site: equations become MathML, and `help` comments become the output of `prism … --help`.

Both happen when the site is built, so that a page needs no script and no network to be read.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import re
from typing import Any

from latex2mathml.converter import convert

_EQUATION = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
_HELP = re.compile(r"^<!-- help: (.+?) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- help: train lm -->` by what `prism train lm --help` prints."""
    return _HELP.sub(lambda match: f"```text\n{command_help(match[1])}\n```", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Replace the equations that pymdownx.arithmatex marked by MathML."""
    return _EQUATION.sub(lambda match: mathml(match[2], block=match[1] == "div"), content)


def mathml(marked: str, block: bool) -> str:
    r"""The MathML of `\( … \)` or `\[ … \]`."""
    latex = html.unescape(marked).strip()[2:-2].strip()
    return convert(latex, display="block" if block else "inline")


def command_help(command: str) -> str:
    """What `prism COMMAND --help` prints, 88 columns wide; all settings of a command that shows them in groups."""
    os.environ.update(COLUMNS="88", NO_COLOR="1", TERM="dumb")
    from prism.cli import COMMANDS, main

    topic = ["all"] if COMMANDS[command].own_arguments else []
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*command.split(), "--help", *topic])
    if not (text := out.getvalue().strip()):
        raise ValueError(f"`prism {command} --help` printed nothing: is that a command?")
    return text
