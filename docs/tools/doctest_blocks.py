"""A griffe extension: doctests in docstrings (`>>> …`) are shown as Python code, not as quotations."""

from __future__ import annotations

from typing import Any

import griffe


class DoctestBlocks(griffe.Extension):
    """Puts every paragraph that starts with `>>>` into a code block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = fence_doctests(obj.docstring.value)


def fence_doctests(text: str) -> str:
    """The docstring with fences around its doctests."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        f"```pycon\n{paragraph.strip()}\n```" if paragraph.lstrip().startswith(">>>") else paragraph
        for paragraph in paragraphs
    )
