"""Find where packed documents start, from any of the ways in which callers say so.

| argument | meaning |
|---|---|
| `seq_idx` `[B, T]` | each token's document number |
| `cu_seqlens`, `cu_seq_lens_q` `[n + 1]` | offsets of n documents in the flattened batch, 0 and B·T included |

`position_ids` that start again become a `seq_idx` before the first layer (`packed_by_positions`), where all of them are
checked: layers may see the tokens of a conv state in front of the new ones, and cannot tell.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prism.engine.inputs import check_offsets, check_offsets_tensor, describe, values_may_be_read

DOCUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q")
"""Arguments of a model that say which documents its rows hold."""
_CACHES = ("past_key_values", "cache_params")
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
    """Wrap a backbone's `forward`: check documents; position_ids that start again become numbers for the memory layers.

    transformers finds packed documents in `position_ids` for its attention layers, under the same conditions (no mask, no
    cache), and lets the state of the other layers run through.
    """
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def with_documents(self: Any, *positional: Any, **named: Any) -> Any:
        named |= self.__dict__.pop(_PASSED, {})
        given = dict(zip(names, positional, strict=False)) | named
        numbers = _numbers(given)
        _check(given, numbers)
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


def _check(given: Mapping[str, Any], positions: Tensor | None) -> None:
    """Raise an error unless the documents of a call cover its tokens. No value is read from a GPU or in compiled code.

    Args:
        given: the arguments of the call.
        positions: document numbers by its position_ids, if it is packed by them.
    """
    x = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if not isinstance(x, Tensor) or x.ndim < 2:
        return  # transformers says what is wrong with it
    batch, tokens = x.shape[:2]
    if tokens == 1 and any(given.get(name) is not None for name in _CACHES):
        return  # `generate` passes the prompt's documents again with every new token, which continues the last one
    for name, numbers in (("seq_idx", given.get("seq_idx")), ("position_ids", positions)):
        fitting = ((batch, tokens), (1, tokens), (tokens,))
        if numbers is not None and not (isinstance(numbers, Tensor) and tuple(numbers.shape) in fitting):
            raise ValueError(f"{name} must have a number for each token, [{batch}, {tokens}], got {describe(numbers)}")
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        offsets = given.get(name)
        if offsets is not None:
            check_offsets_tensor(offsets, name)
            if values_may_be_read(offsets):
                check_offsets(offsets, batch * tokens, name)


def _numbers(given: Mapping[str, Any]) -> Tensor | None:
    """Document numbers `[B, T]` from a call's position_ids; None if it packs nothing, or says itself what it packs."""
    from transformers.masking_utils import find_packed_sequence_indices

    if any(given.get(name) is not None for name in ("attention_mask", *_CACHES, *DOCUMENTS[1:])):
        return None
    positions = given.get("position_ids")
    if positions is not None and positions.ndim == 3:  # text positions above those of images
        positions = positions[0] if positions.shape[0] == 4 else None
    return None if positions is None or positions.shape[-1] < 2 else find_packed_sequence_indices(positions)
