"""Where documents start in a sequence of tokens: the one definition that training, evaluation and generation share.

The end token opens the document that follows it. Memories are reset AT the end token and nowhere else, so that

- the end token is predicted from the document it ends, like any other token of that document;
- the first token of a document is predicted from the end token alone, in training and in use;
- no later token sees anything of an earlier document.

A sequence that begins without an end token continues a document (a window of a stream) or has no opening token (a prompt).
"""

from __future__ import annotations

from torch import Tensor


def document_starts(tokens: Tensor, end: int) -> Tensor:
    """Where documents start in tokens `[B, T]`: bool `[B, T]`, True at every end token."""
    return tokens == end


def starts_of_positions(position_ids: Tensor) -> Tensor:
    """The same for transformers' packed batches, whose positions `[B, T]` count from 0 in every document."""
    return position_ids == 0


def needed_starts(starts: Tensor, fresh: bool) -> Tensor | None:
    """`starts` `[B, T]`, or None if they change nothing, which lets models take faster paths.

    Reads the values: call it on the CPU, where a batch is made. On a GPU it waits for the device.

    Args:
        fresh: no state precedes the first token, so a start there changes nothing.
    """
    return starts if bool(starts[:, 1 if fresh else 0 :].any()) else None
