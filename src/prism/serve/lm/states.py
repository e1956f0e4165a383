"""States as resources: texts that clients keep in memory, fork, save to files and load again.

A state is a `Text`: the model's memory after its whole segments and the few tokens after them. For models whose memories have
a fixed size all states have the same size, however long the text is. Forks share a memory until one of them is continued.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from prism.files import read_state, reason, sync, write_state
from prism.language.generate import LanguageModel
from prism.models import PrismCache
from prism.models.loading import fingerprint, mismatch
from prism.serve.errors import ApiError
from prism.serve.lm.text import Text

FORMAT = "prism serve state 1"
NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
"""Names of states: also names of files, so no separators, and no dot at the start."""


@dataclass(frozen=True)
class KeptState:
    """A text that a client keeps.

    Args:
        created: seconds since 1970.
        parent: id of the state that this one came from.
    """

    id: str
    name: str | None
    text: Text
    created: int
    parent: str | None


class States:
    """All states of a service, in memory and in a folder. All methods may be called from any thread.

    Args:
        most: most states in memory, and most files in the folder.
        limit: most bytes of states in memory. Memories that forks share are counted for each.
        folder: where states are saved; None: nowhere.
    """

    def __init__(self, lm: LanguageModel, most: int, limit: int, folder: Path | None = None) -> None:
        self.lm, self.most, self.limit, self.folder = lm, most, limit, folder
        self._kept: dict[str, KeptState] = {}
        self._lock = threading.Lock()
        self._about = {"model": lm.name, **fingerprint(lm.model)}
        reader = lm.reader()
        reader.read_all(torch.tensor([lm.tokenizer.end]))
        self.memory = reader.nbytes
        """Size of the memory of one text; of one token, if it grows."""
        self._layout = _described(reader.cache)
        self._segment = reader.segment

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return sum(self.size(state.text) for state in self.all())

    def size(self, text: Text) -> int:
        """What a text takes: its memory, and the tokens of one segment. The same for every text, unless memories grow."""
        memory = self.memory if self.lm.model.config.constant_state or text.cache is None else text.cache.nbytes
        return memory + 8 * self._segment

    def all(self) -> list[KeptState]:
        with self._lock:
            return list(self._kept.values())

    def get(self, id: str, param: str = "id") -> KeptState:
        state = self._kept.get(id)
        if state is None:
            raise ApiError(404, f"there is no state {id!r}: GET /v1/states lists all", param, "state_not_found")
        return state

    def check_room(self, text: Text | None = None) -> None:
        """Refuse a further state if there is no room for it."""
        if len(self._kept) >= self.most:
            raise ApiError(
                400, f"there are {self.most} states, the most that are kept (--max-states): delete some", None, "full"
            )
        if self.nbytes + self.size(text or Text()) > self.limit:
            raise ApiError(
                400,
                f"states take {self.limit:,} bytes, the most that are kept (--state-memory): delete some",
                None,
                "full",
            )

    def add(self, text: Text, name: str | None = None, parent: str | None = None) -> KeptState:
        """Keep a text as a new state."""
        state = KeptState(f"state-{secrets.token_hex(12)}", name, text, int(time.time()), parent)
        with self._lock:
            self._kept[state.id] = state
        return state

    def change(self, id: str, before: Text, after: Text) -> KeptState:
        """Replace a state's text, unless another request has changed it meanwhile."""
        with self._lock:
            state = self._kept.get(id)
            if state is None or state.text is not before:
                raise ApiError(
                    409, f"state {id!r} was changed or deleted by another request meanwhile", "id", "conflict"
                )
            self._kept[id] = replace(state, text=after)
            return self._kept[id]

    def delete(self, id: str) -> None:
        with self._lock:
            found = self._kept.pop(id, None)
        if found is None:
            self.get(id)

    # Files

    def saved(self) -> list[str]:
        """Names of the states in the folder."""
        if self.folder is None or not self.folder.is_dir():
            return []
        names = (path.stem for path in self.folder.glob("*.safetensors"))
        return sorted(name for name in names if re.match(NAME, name))

    def _path(self, name: str) -> Path:
        if not re.match(NAME, name):  # the schema checks it too: a name becomes a path
            raise ApiError(400, f"{name!r} is not a name: up to 64 letters, digits, '.', '_' and '-'", "name")
        if self.folder is None:
            raise ApiError(
                400, "states cannot be saved or loaded: start the service with --store FOLDER", None, "no_store"
            )
        return self.folder / f"{name}.safetensors"

    def save(self, id: str, name: str, overwrite: bool = False) -> None:
        """Write a state to the folder; a file is either complete or absent."""
        state, path = self.get(id), self._path(name)
        with self._lock:  # two requests must not write one file
            if path.exists() and not overwrite:
                raise ApiError(400, f"there is a saved state {name!r}: choose another name, or send overwrite", "name")
            if not path.exists() and len(self.saved()) >= self.most:
                raise ApiError(
                    400, f"there are {self.most} saved states, the most that are kept (--max-states)", "name"
                )
            text = state.text
            cache = {} if text.cache is None else text.cache.tensors()
            tensors = {f"state.{key}": value for key, value in cache.items()}
            tensors["tail"] = torch.tensor(text.tail, dtype=torch.int64)
            facts = {"start": str(text.start), "key": text.key.hex(), "documents": str(int(text.documents))}
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_state(path, FORMAT, tensors, {**self._about, **facts})
            except OSError as error:
                raise ApiError(503, f"state {name!r} cannot be saved: {reason(error)}", "name", "store") from error

    def load(self, name: str) -> KeptState:
        """A new state from a file of the folder."""
        path = self._path(name)
        if not path.is_file():
            raise ApiError(404, f"there is no saved state {name!r}", "name", "state_not_found")
        try:
            tensors, about = read_state(path, FORMAT)
            text = self._text(tensors, about)
        except (ValueError, KeyError, OSError) as error:
            raise ApiError(400, f"the saved state {name!r} cannot be loaded: {error}", "name") from error
        self.check_room(text)
        return self.add(text, name)

    def _text(self, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> Text:
        if mismatch(about, self._about):
            raise ValueError(f"it was made by another model ({about.get('model')}), not by {self.lm.name}")
        states = {key[6:]: x.to(self.lm.device) for key, x in tensors.items() if key.startswith("state.")}
        cache = PrismCache.load(states) if states else None
        if cache is not None and _described(cache) != self._layout:
            raise ValueError("its tensors do not fit the model")
        tail = tuple(tensors["tail"].tolist())
        if not all(0 <= token < self.lm.tokenizer.size for token in tail):
            raise ValueError("its tokens are not those of the tokenizer")
        return Text(cache, int(about["start"]), tail, bytes.fromhex(about["key"]), about["documents"] == "1")

    def delete_saved(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink()
        except FileNotFoundError:
            raise ApiError(404, f"there is no saved state {name!r}", "name", "state_not_found") from None
        sync(path.parent)


def _described(cache: PrismCache) -> list[dict[str, tuple[object, ...]]]:
    """Of every layer and tensor: dtype and sizes; caches of attention without their length."""
    return [
        {
            name: (x.dtype, x.ndim, *(x.shape[2:] if x.ndim == 4 and _attention(state) else x.shape))
            for name, x in state.items()
        }
        for state in (layer.tensors() for layer in cache.states)
    ]


def _attention(state: dict[str, torch.Tensor]) -> bool:
    return "memory.length" in state
