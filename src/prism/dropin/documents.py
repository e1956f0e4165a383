"""Find where packed documents start, from any of the ways in which callers say so.

| argument | meaning |
|---|---|
| `seq_idx` `[B, T]` | each token's document number |
| `cu_seqlens`, `cu_seq_lens_q` `[n + 1]` | offsets of n documents in the flattened batch, 0 and B·T included |

`position_ids` that start again become a `seq_idx` before the first layer (families.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
