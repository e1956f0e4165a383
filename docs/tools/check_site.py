"""Fail if the built site loads anything from another host, or shows an equation as source text.

python docs/tools/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# What a browser fetches by itself: scripts, styles, images, frames, fonts. Links that a reader clicks are not among them.
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|audio|video|embed)\b[^>]*?\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?=[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon|modulepreload|dns-prefetch))"
    r"[^>]*?\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)",
    re.IGNORECASE,
)
_STYLE = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


def outside(site: Path) -> list[str]:
    """`page: address` for everything that a page or a style sheet loads from another host."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix not in (".html", ".css"):
            continue
        text = path.read_text(encoding="utf-8")
        addresses = [a or b for a, b in _LOADED.findall(text)] if path.suffix == ".html" else []
        addresses += _STYLE.findall(text)
        found += [f"{path.relative_to(site)}: {address}" for address in addresses]
    return found


def unrendered(site: Path) -> list[str]:
    """Pages that still hold an equation as LaTeX."""
    pages = sorted(site.rglob("*.html"))
    return [str(page.relative_to(site)) for page in pages if 'class="arithmatex"' in page.read_text(encoding="utf-8")]


def main(site: Path) -> None:
    if not (site / "index.html").is_file():
        sys.exit(f"{site} holds no index.html: build the site first (make docs)")
    problems = [f"loaded from another host: {line}" for line in outside(site)]
    problems += [f"equation not rendered: {page}" for page in unrendered(site)]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{site}: nothing is loaded from another host")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site"))
