"""Generate text with a saved language model, token by token; save the state to a file and resume from it later.

Design choices
- A session has always read what it has written, and holds the logits of the next token. Stopping and resuming takes the
  same steps as not stopping, so it gives the same text, bit for bit.
- Each session has its own random generator, on the CPU for any model device. Its state is saved with the session; each
  token takes one draw. Greedy decoding (temperature 0) draws nothing.
- The end token ends the writing and is not read. The text stays open: after more of it is read, writing can continue.
- Text of any length is read in constant memory: one segment at a time, and only the state is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prism.documents import document_starts, needed_starts
from prism.files import read_json, read_state, write_state
from prism.language.tokenizer import TextStream, Tokenizer, load_tokenizer
from prism.models import PrismCache, PrismForCausalLM
from prism.models.language import PrismOutput
from prism.models.loading import by_columns, fingerprint, fingerprint_mismatch, open_weights

FORMAT = "prism generation state 1"
SEGMENT = 2048
"""Tokens per forward pass."""
CPU_SEGMENT = 256
"""The same for a text that is read on a CPU: longer passes are no faster there, and others would wait for them."""


class Reader:
    """A model and its state after the tokens read so far.

    Memories are reset between documents: the end token opens a new one (see `prism.documents`).

    Args:
        end: the end token.
        cache: the state to continue from.
        last: the last token that `cache` has read; it is part of saved states.

    Attributes:
        documents: whether the end token opens a document. False for chats, in which it ends a message (see chat.py).
    """

    documents = True

    def __init__(
        self, model: PrismForCausalLM, end: int, cache: PrismCache | None = None, last: int | None = None
    ) -> None:
        self.model, self.end, self.last = model, end, last
        self.cache = PrismCache() if cache is None else cache

    @torch.no_grad()
    def forward(self, tokens: Tensor, **options: Any) -> PrismOutput:
        """Read tokens `[T]` in one forward pass; `options` are further arguments of the model."""
        starts = document_starts(tokens[None], self.end) if self.documents else None
        reset = None if starts is None else needed_starts(starts, fresh=not self.cache.is_initialized)
        out: PrismOutput = self.model(
            tokens[None].to(self.model.device),
            past_key_values=self.cache,
            reset=None if reset is None else reset.to(self.model.device),
            use_cache=True,
            **options,
        )
        self.last = int(tokens[-1])
        return out

    @property
    def nbytes(self) -> int:
        """Size of the state."""
        return self.cache.nbytes

    def read(self, tokens: Tensor, keep: int = 0) -> Tensor:
        """Read tokens `[T]` in one forward pass; returns next-token logits `[T, V]` (with `keep`, of the last), float32."""
        logits = self.forward(tokens, logits_to_keep=keep).logits
        assert logits is not None  # without labels they are always there
        return logits[0].float()

    @property
    def segment(self) -> int:
        """Tokens per forward pass of `read_all`."""
        return CPU_SEGMENT if self.model.device.type == "cpu" else SEGMENT

    def read_all(self, tokens: Tensor) -> Tensor:
        """Read tokens `[T]` in segments; returns the logits `[V]` of the next token."""
        for part in tokens.split(self.segment):
            logits = self.read(part, keep=1)
        return logits[-1]

    def read_next(self, token: int) -> Tensor:
        """Read one token; returns the logits `[V]` of the next one."""
        if token == self.end or not self.cache.states:
            return self.read_all(torch.tensor([token]))
        ids = torch.tensor([[token]], device=self.model.device)
        with torch.inference_mode():
            logits: Any = self.model(ids, past_key_values=self.cache, use_cache=True).logits
        self.last = token
        return logits[0, -1].float()


class OtherReader(Reader):
    """A model of transformers and its cache. It reads one prompt, whole, and then token by token; documents are not reset."""

    def __init__(self, model: Any, end: int) -> None:
        self.model, self.end, self.last = model, end, None
        self.cache: Any = None

    @torch.no_grad()
    def forward(self, tokens: Tensor, **options: Any) -> Any:
        ids = tokens[None].to(self.model.device)
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, **options)
        self.cache, self.last = out.past_key_values, int(tokens[-1])
        return out

    def read_all(self, tokens: Tensor) -> Tensor:
        return self.read(tokens, keep=1)[-1]

    def read_next(self, token: int) -> Tensor:
        return self.read_all(torch.tensor([token]))

    @property
    def nbytes(self) -> int:
        parts = [part for layer in self.cache.layers for part in vars(layer).values()]
        held = [x for part in parts for x in (part.values() if isinstance(part, dict) else [part])]
        return sum(x.nbytes for x in held if isinstance(x, Tensor))


@dataclass(frozen=True)
class LanguageModel:
    """A saved language model and its tokenizer."""

    model: Any
    """A `PrismForCausalLM`, or with an adapter perhaps a model of transformers."""
    tokenizer: Tokenizer
    name: str

    @property
    def own(self) -> bool:
        """Whether it is a model of this library."""
        return isinstance(self.model, PrismForCausalLM)

    def reader(self, state_dtype: torch.dtype = torch.float32) -> Reader:
        """The model with an empty state."""
        if not self.own:
            return OtherReader(self.model, self.tokenizer.end)
        return Reader(self.model, self.tokenizer.end, PrismCache(state_dtype))

    @property
    def device(self) -> torch.device:
        where: torch.device = self.model.device
        return where


def open_model(folder: Path, device: str = "auto") -> LanguageModel:
    """Open a model folder that `save_pretrained` or `prism train lm` wrote, to read and write texts with it."""
    model = open_weights(PrismForCausalLM, folder, device)
    by_columns(model)
    return with_tokenizer(model, folder)


def with_tokenizer(model: Any, folder: Path) -> LanguageModel:
    """A model with the tokenizer in its folder."""
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    tokenizer = load_tokenizer(folder / "tokenizer.json", _end_token(folder))
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.size > rows:
        raise ValueError(f"the tokenizer in {folder} has {tokenizer.size} tokens, but the model only {rows}")
    full = folder.resolve()
    return LanguageModel(model, tokenizer, full.parent.name if full.name == "model" else full.name)


def _end_token(folder: Path) -> str | None:
    """The end token in the folder's tokenizer configuration, or None."""
    path = folder / "tokenizer_config.json"
    name = read_json(path).get("eos_token") if path.is_file() else None
    return name.get("content") if isinstance(name, dict) else name


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The filters are those of transformers, in the order of its `generate`."""

    temperature: float = 0.8
    """Divides the logits; 0 is greedy: the most likely token."""
    top_k: int | None = None
    """Sample from the k most likely tokens."""
    top_p: float | None = None
    """Sample from the most likely tokens that have this probability in total."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise ValueError("top_k and top_p need a temperature above 0: at 0 the most likely token is always taken")

    def choose(self, logits: Tensor, random: torch.Generator) -> int:
        """Choose a token by its logits `[V]`."""
        if self.temperature == 0:
            return int(logits.argmax())
        return int(torch.multinomial(self.weights(logits[None]), 1, generator=random))

    def weights(self, logits: Tensor) -> Tensor:
        """The probability of every token by its logits `[B, V]`: `[B, V]` on the CPU. Only at a temperature above 0."""
        weights: Tensor = self._filters(None, logits.cpu()).softmax(-1)
        return weights

    @cached_property
    def _filters(self) -> Any:
        from transformers.generation import logits_process as filters

        chosen = filters.LogitsProcessorList([filters.TemperatureLogitsWarper(float(self.temperature))])
        if self.top_k is not None:
            chosen.append(filters.TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            chosen.append(filters.TopPLogitsWarper(self.top_p))
        return chosen


class Session:
    """A text that is read and written by a model.

    Args:
        seed: of the random generator.
        state_dtype: dtype in which memories are kept between tokens (see `PrismCache`).
    """

    def __init__(self, lm: LanguageModel, seed: int = 0, state_dtype: torch.dtype = torch.float32) -> None:
        self.lm = lm
        self.reader = lm.reader(state_dtype)
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {seed}")
        self.random = torch.Generator().manual_seed(seed)
        self.text = TextStream(lm.tokenizer)
        self.logits: Tensor | None = None
        """Logits of the next token, `[V]`; None before anything was read."""
        self.ended = False
        """The model has written its end token."""

    @property
    def nbytes(self) -> int:
        """Size of the state; constant if all rules of the model have a state of fixed size."""
        return self.reader.nbytes

    def read(self, text: str) -> int:
        """Read more text; returns its number of tokens."""
        tokens = torch.tensor(self.lm.tokenizer.encode([text])[0].astype("int64"))
        if len(tokens):
            self.text = TextStream(self.lm.tokenizer)  # an incomplete character stays incomplete
            self.logits = self.reader.read_all(tokens)
            self.ended = False
        return len(tokens)

    def read_start(self) -> None:
        """If nothing was read yet, read an end token, after which a new document starts."""
        if self.logits is None:
            self.logits = self.reader.read_all(torch.tensor([self.lm.tokenizer.end]))

    def choose(self, sampling: Sampling) -> int | None:
        """The next token; None if the text has ended."""
        if self.ended or self.logits is None:
            return None
        # The embedding may have more rows than the tokenizer has tokens.
        token = sampling.choose(self.logits[: self.lm.tokenizer.size], self.random)
        self.ended = token == self.lm.tokenizer.end
        return None if self.ended else token

    def write(self, tokens: int, sampling: Sampling) -> Iterator[str]:
        """Write up to this many tokens; yields for each the text that it completes, which may be empty."""
        self.read_start()
        for _ in range(tokens):
            token = self.choose(sampling)
            if token is None:
                return
            self.logits = self.reader.read_next(token)
            yield self.text.push(token)

    def save(self, path: Path) -> None:
        """Save everything that resuming depends on, atomically."""
        tensors = {f"state.{name}": value for name, value in self.reader.cache.tensors().items()}
        if self.logits is None or self.reader.last is None:
            raise ValueError("there is no state to save: nothing has been read or written")
        tensors |= {
            "logits": self.logits,
            "ended": torch.tensor(self.ended),
            "last": torch.tensor(self.reader.last),
            "recent": torch.tensor(self.text.recent, dtype=torch.int64),
            "random": self.random.get_state(),
        }
        write_state(path, FORMAT, tensors, {"model": self.lm.name, **fingerprint(self.lm.model)})

    @classmethod
    def load(
        cls, path: Path, lm: LanguageModel, seed: int | None = None, state_dtype: torch.dtype | None = None
    ) -> Session:
        """Resume from a saved session, with its random state or a new `seed`, and its dtype of memories or a new one."""
        tensors, about = read_state(path, FORMAT)
        if what := fingerprint_mismatch(about, lm.model):
            raise ValueError(
                f"the state in {path} was made by a model with {what} ({about['model']}), not by {lm.name}"
            )
        session = cls(lm, 0 if seed is None else seed)
        states = {name[6:]: x.to(lm.device) for name, x in tensors.items() if name.startswith("state.")}
        cache = PrismCache.load(states)
        if state_dtype is not None:
            cache.state_dtype = state_dtype
            cache.update(cache.states, 0)
        session.reader = Reader(lm.model, lm.tokenizer.end, cache, int(tensors["last"]))
        session.logits, session.ended = tensors["logits"].to(lm.device), bool(tensors["ended"])
        session.text = TextStream(lm.tokenizer, tensors["recent"].tolist())
        if seed is None:
            session.random.set_state(tensors["random"])
        return session
