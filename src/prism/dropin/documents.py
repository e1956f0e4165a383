"""Find where packed documents start, from any of the ways in which callers say so.

| argument | meaning |
|---|---|
| `seq_idx` `[B, T]` | each token's document number |
| `cu_seqlens`, `cu_seq_lens_q` `[n + 1]` | offsets of n documents in the flattened batch, 0 and B·T included |

`position_ids` that start again become a `seq_idx` before the first layer (`packed_by_positions`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DOCUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q")
"""Arguments of a model that say which documents its rows hold."""
_PASSED = "_prism_documents"


def document_numbers(
    batch: int,
    tokens: int,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor | None:
    """Each token's document number `[B, T]`; None if the caller gave no documents.

    `tokens` may be more than the documents cover: the first columns then hold earlier tokens (a conv state), which count to
    the first document.
    """
    offsets = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    if seq_idx is not None:
        numbers = seq_idx.expand(batch, -1)
    elif offsets is not None:
        numbers = _from_offsets(offsets, batch, tokens)
    else:
        return None
    missing = tokens - numbers.shape[1]
    return torch.cat([numbers[:, :1].expand(-1, missing), numbers], 1) if missing > 0 else numbers


def document_starts(numbers: Tensor | None) -> Tensor | None:
    """`[B, T]` bool: a document starts here. The first token continues what came before, if anything did."""
    if numbers is None:
        return None
    return F.pad(numbers[:, 1:] != numbers[:, :-1], (1, 0))


def _from_offsets(offsets: Tensor, batch: int, tokens: int) -> Tensor:
    # A batch of one may have leading tokens of a conv state in front; the last offset says how many are new.
    new = tokens if batch > 1 or torch.compiler.is_compiling() else int(offsets[-1])
    where = torch.arange(batch * new, device=offsets.device)
    return torch.searchsorted(offsets[1:-1].contiguous(), where, right=True).view(batch, new)


def packed_by_positions(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backbone's `forward`: position_ids that start again become document numbers for the memory layers.

    transformers finds packed documents in `position_ids` for its attention layers, under the same conditions (no mask, no
    cache), and lets the state of the other layers run through.
    """
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def with_documents(self: Any, *positional: Any, **named: Any) -> Any:
        named |= self.__dict__.pop(_PASSED, {})
        numbers = _numbers(dict(zip(names, positional, strict=False)) | named)
        if numbers is not None:
            named["seq_idx"] = numbers
        return forward(self, *positional, **named)

    return with_documents


def passing_documents(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `forward` that does not pass packed documents on to its backbone."""

    @functools.wraps(forward)
    def with_documents(self: Any, *positional: Any, **named: Any) -> Any:
        given = {name: named[name] for name in DOCUMENTS if named.get(name) is not None}
        if given:
            self.backbone.__dict__[_PASSED] = given
        return forward(self, *positional, **named)

    return with_documents


def _numbers(given: Mapping[str, Any]) -> Tensor | None:
    """Document numbers `[B, T]` from a call's position_ids; None if it packs nothing, or says itself what it packs."""
    from transformers.masking_utils import find_packed_sequence_indices

    if any(
        given.get(name) is not None for name in ("attention_mask", "past_key_values", "cache_params", *DOCUMENTS[1:])
    ):
        return None
    positions = given.get("position_ids")
    if positions is not None and positions.ndim == 3:  # text positions above those of images
        positions = positions[0] if positions.shape[0] == 4 else None
    return None if positions is None or positions.shape[-1] < 2 else find_packed_sequence_indices(positions)
