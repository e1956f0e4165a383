"""Whether a library is installed, and new enough, without importing it."""

from __future__ import annotations

import re
from importlib import metadata


def at_least(oldest: tuple[int, int], *distributions: str) -> bool:
    """The first of these names that is installed decides."""
    for distribution in distributions:
        try:
            version = re.match(r"(\d+)\.(\d+)", metadata.version(distribution))
        except metadata.PackageNotFoundError:
            continue
        return version is not None and tuple(map(int, version.groups())) >= oldest
    return False
