"""Tokens on disk, and the batches read from them.

    tokens/
      manifest.json            dtype, vocabulary, shards with their SHA-256, the two splits
      tokenizer.json
      train-00000.bin …        little-endian integers, one end token after every document

Shards are memory-mapped. A split is a range of one stream of shards, so a tail can be held out without copying.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from prism.documents import document_starts, needed_starts
from prism.engine.sequence_parallel import Context
from prism.files import read_json, sha256, write_json
from prism.models.cross_entropy import IGNORED
from prism.train.order import sequence_of

FORMAT = 1
MANIFEST = "manifest.json"
SHARD_TOKENS = 1 << 27


@dataclass(frozen=True)
class Shard:
    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """Tokens `start` to `stop` of a stream, with their number of documents and of UTF-8 bytes of text."""

    stream: str
    start: int
    stop: int
    documents: int
    text_bytes: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Manifest:
    dtype: str
    vocab_size: int
    end: int
    end_token: str
    tokenizer_sha256: str
    streams: dict[str, list[Shard]]
    splits: dict[str, Split]

    @property
    def digest(self) -> str:
        """One hash of all tokens and splits; a resumed run must find the same."""
        parts = [f"{name} {shard.tokens} {shard.sha256}" for name in self.streams for shard in self.streams[name]]
        parts += [f"{name} {split}" for name, split in sorted(self.splits.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        write_json(folder / MANIFEST, {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        path = folder / MANIFEST
        fields = read_json(path)
        if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is not a token manifest of format {FORMAT}")
        streams = {name: [Shard(**shard) for shard in shards] for name, shards in fields.pop("streams").items()}
        splits = {name: Split(**split) for name, split in fields.pop("splits").items()}
        return cls(streams=streams, splits=splits, **fields)


class StreamWriter:
    """Append tokens to `name-00000.bin`, `name-00001.bin` and so on, and hash them on the way."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.shards: list[Shard] = []
        self.tokens = 0
        self._file: BinaryIO | None = None

    def append(self, tokens: np.ndarray) -> None:
        while len(tokens):
            if self._file is None:
                self._path = self.folder / f"{self.name}-{len(self.shards):05d}.bin"
                self._file, self._digest, self._filled = self._path.open("wb"), hashlib.sha256(), 0
            now = tokens[: self.shard_tokens - self._filled]
            data = now.astype(self.dtype).tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._filled += len(now)
            self.tokens += len(now)
            tokens = tokens[len(now) :]
            if self._filled == self.shard_tokens:
                self.close()

    def close(self) -> list[Shard]:
        if self._file is not None:
            self._file.close()
            self.shards.append(Shard(self._path.name, self._filled, self._digest.hexdigest()))
            self._file = None
        return self.shards


class Stream:
    """A split as one long array of token ids, read from memory-mapped shards."""

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        self.split = manifest.splits[split]
        shards = manifest.streams[self.split.stream]
        dtype = np.dtype(manifest.dtype)
        self._ends = np.cumsum([shard.tokens for shard in shards])
        self._maps = [np.memmap(folder / shard.file, dtype, "r", shape=(shard.tokens,)) for shard in shards]

    def __len__(self) -> int:
        return self.split.tokens

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids start … stop-1, int64."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"tokens {start} to {stop} are outside a split of {len(self)}")
        begin, end = start + self.split.start, stop + self.split.start
        parts = []
        shard = int(np.searchsorted(self._ends, begin, "right"))
        while begin < end:
            first = int(self._ends[shard]) - len(self._maps[shard])
            take = min(end, int(self._ends[shard]))
            parts.append(self._maps[shard][begin - first : take - first])
            begin, shard = take, shard + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def check_tokens(folder: Path, manifest: Manifest, contents: bool) -> None:
    """Raise ValueError for a shard that is missing or has the wrong size or, with `contents`, the wrong SHA-256."""
    width = np.dtype(manifest.dtype).itemsize
    for shard in (shard for shards in manifest.streams.values() for shard in shards):
        path = folder / shard.file
        if not path.is_file():
            raise ValueError(f"the token shard {path} is missing: remove {folder} to prepare the tokens again")
        size = path.stat().st_size
        if size != shard.tokens * width or (contents and sha256(path) != shard.sha256):
            raise ValueError(f"the token shard {path} is damaged: remove {folder} to prepare the tokens again")


def smallest_dtype(vocab_size: int) -> np.dtype:
    """The smallest token dtype for a vocabulary: uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@contextmanager
def writing(*writers: StreamWriter) -> Iterator[None]:
    """Close the writers' files, also on errors."""
    try:
        yield
    finally:
        for writer in writers:
            writer.close()


@dataclass(frozen=True)
class Batch:
    """Samples of one step.

    inputs and targets (the next tokens) are int64 `[B, T]`; reset is bool `[B, T]`, True where a document starts, or None.
    context: the processes that share the samples, of which this batch holds one part; None: they are whole.
    some: whether only some targets are predicted; the others are `IGNORED`.
    """

    inputs: Tensor
    targets: Tensor
    reset: Tensor | None
    context: Context | None = None
    some: bool = False

    @property
    def predicted(self) -> Tensor | int:
        """Number of targets that are predicted."""
        return (self.targets != IGNORED).sum() if self.some else self.targets.numel()

    def part(self, context: Context) -> Batch:
        """This process's part of the samples' tokens. Targets were shifted before, so each part has the one after it."""
        mine = context.part(self.inputs.shape[1])
        return replace(self._map(lambda x: x[:, mine].contiguous()), context=context)

    def tensors(self) -> dict[str, Tensor]:
        held = {"inputs": self.inputs, "targets": self.targets, "reset": self.reset}
        return {name: value for name, value in held.items() if value is not None}

    def __getitem__(self, rows: slice) -> Batch:
        return self._map(lambda x: x[rows])

    def to(self, device: torch.device) -> Batch:
        """Copy to a device. A reset without effect is dropped first, on the CPU, where reading it needs no synchronisation."""
        fresh = self.context is None or self.context.first
        needed = None if self.reset is None else needed_starts(self.reset, fresh)
        pin = device.type == "cuda"  # from pageable memory, CUDA lets the host wait for the work queued before the copy
        return replace(self, reset=needed)._map(lambda x: (x.pin_memory() if pin else x).to(device, non_blocking=True))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        reset = None if self.reset is None else function(self.reset)
        return replace(self, inputs=function(self.inputs), targets=function(self.targets), reset=reset)


class Sequences:
    """A stream cut into sequences of `context` tokens, each with the token after it.

    Args:
        end: the end token. With it, batches mark where documents start (see `prism.documents`).
    """

    def __init__(self, stream: Stream, context: int, end: int | None = None) -> None:
        if context < 1:
            raise ValueError(f"context must be at least 1 token, got {context}")
        if len(stream) < context + 1:
            raise ValueError(
                f"the data has {len(stream)} tokens, too few for a context of {context} and the token after it"
            )
        self.stream, self.context, self.end = stream, context, end

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.context

    def samples(self, samples: np.ndarray, seed: int) -> Batch:
        """Samples i, j, … of the infinite training order (see `prism.train.order`)."""
        return self.batch(sequence_of(samples, len(self), seed))

    def batch(self, numbers: np.ndarray) -> Batch:
        """The sequences with these numbers, in this order."""
        starts = np.asarray(numbers) * self.context
        tokens = torch.from_numpy(np.stack([self.stream.read(s, s + self.context + 1) for s in starts.tolist()]))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        reset = None if self.end is None else document_starts(inputs, self.end)
        return Batch(inputs, targets, reset)
