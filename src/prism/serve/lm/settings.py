"""What a language-model service allows and keeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LmSettings:
    """Limits and choices of `prism serve lm`."""

    store: Path | None = None
    """Folder for states that clients save. None: states can be used, but not saved."""
    rows: int = 32
    """Most texts that are written at the same time; further ones wait."""
    queue: int = 256
    """Most requests that wait; further ones are refused with 429."""
    max_prompt: int = 65536
    """Most tokens that one request may bring."""
    max_tokens: int = 4096
    """Most tokens that one text may be asked for."""
    max_states: int = 1000
    """Most states in memory, and most in the folder; further ones are refused."""
    state_bytes: int = 2**30
    """Most bytes of states in memory; further ones are refused."""
    prefix_bytes: int = 2**28
    """Most bytes kept of texts that were read, for texts that start in the same way. 0 keeps none."""
    chat_template: Path | None = None
    """File with a chat template in jinja2. None: the tokenizer's."""
    exact: bool | None = None
    """Whether a text is the same whatever else is computed with it: there are then always `rows` rows, used or not, and the
    service ends at its start if that is not enough on this machine. None: on a GPU, where it costs nothing, if it can be."""
    device: str = "auto"

    def check(self) -> None:
        """Raise ValueError for values that cannot be served with."""
        for name, least in {"rows": 1, "queue": 1, "max_prompt": 1, "max_tokens": 1, "max_states": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("state_bytes", "prefix_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.store is not None and self.store.exists() and not self.store.is_dir():
            raise ValueError(f"store must be a folder, but {self.store} is a file")
