"""A pool of states in memory: every tensor of the model's state with one row for each of many users.

Reading and writing the states of a batch of users is one gather and one scatter for each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prism.recommend import UserStates


class StatePool:
    """Rows for `capacity` users.

    Args:
        blank: the state of one user before the first event; it says what a state is made of.
    """

    def __init__(self, blank: UserStates, capacity: int) -> None:
        self.model = blank.model
        # Memory that is never written to is never taken from the system.
        self._tensors = {
            name: torch.empty((capacity, *x.shape[1:]), dtype=x.dtype, device=x.device)
            for name, x in blank.tensors().items()
        }
        self._blank = {name: x[0] for name, x in blank.tensors().items()}
        self._widths = {name: x[0].nbytes for name, x in blank.tensors().items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of one user's state, whatever the number of events."""
        return sum(self._widths.values())

    def read(self, rows: Sequence[int]) -> UserStates:
        """The states in these rows, copied."""
        picked = torch.as_tensor(rows, dtype=torch.int64, device=self._device)
        return UserStates.unflatten({name: x.index_select(0, picked) for name, x in self._tensors.items()}, self.model)

    def write(self, rows: Sequence[int], states: UserStates) -> None:
        """Put states into these rows."""
        picked = torch.as_tensor(rows, dtype=torch.int64, device=self._device)
        for name, x in states.tensors().items():
            self._tensors[name].index_copy_(0, picked, x)

    def clear(self, row: int) -> None:
        """Put the state before the first event into a row."""
        for name, x in self._blank.items():
            self._tensors[name][row] = x

    def hidden(self, rows: Sequence[int]) -> Tensor:
        """`[n, D]`, from which items are scored."""
        return self._tensors["hidden"][torch.as_tensor(rows, dtype=torch.int64, device=self._device)]

    def events(self, rows: Sequence[int]) -> Tensor:
        """int64 `[n]`, number of events that the states have read."""
        return self._tensors["events"][torch.as_tensor(rows, dtype=torch.int64, device=self._device)]

    def pack(self, rows: Sequence[int]) -> list[bytes]:
        """The states in these rows as bytes: the tensors' rows one after another."""
        picked = torch.as_tensor(rows, dtype=torch.int64, device=self._device)
        columns = [
            x.index_select(0, picked).cpu().reshape(len(rows), -1).view(torch.uint8).numpy()
            for x in self._tensors.values()
        ]
        return [row.tobytes() for row in np.concatenate(columns, axis=1)]

    def unpack(self, rows: Sequence[int], contents: Sequence[bytes]) -> None:
        """Put states that `pack` returned into these rows."""
        table = np.frombuffer(b"".join(contents), dtype=np.uint8).reshape(len(rows), self.row_bytes)
        picked = torch.as_tensor(rows, dtype=torch.int64, device=self._device)
        start = 0
        for name, x in self._tensors.items():
            column = table[:, start : start + self._widths[name]].copy()
            start += self._widths[name]
            values = torch.from_numpy(column).view(x.dtype).reshape(len(rows), *x.shape[1:])
            x.index_copy_(0, picked, values.to(x.device))

    @property
    def _device(self) -> torch.device:
        return self._tensors["hidden"].device
