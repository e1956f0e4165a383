"""Find where documents start in a sequence of tokens: one definition for training, evaluation and generation.

The end token opens the document that follows it. Memories are reset AT the end token and nowhere else, so that

- the end token is predicted from the document it ends, like any other token of that document;
- the first token of a document is predicted from the end token alone, in training and in use;
- no later token sees anything of an earlier document.

A sequence that starts without an end token continues a document (a sample of a stream) or has no opening token (a prompt).
"""

from __future__ import annotations

from torch import Tensor


def document_starts(tokens: Tensor, end: int) -> Tensor:
    """Where documents start in tokens `[B, T]`: bool `[B, T]`, True at every end token."""
    return tokens == end


def starts_of_positions(position_ids: Tensor) -> Tensor:
    """Where documents start in transformers' packed batches, whose positions `[B, T]` count from 0 in every document."""
    return position_ids == 0


def needed_starts(starts: Tensor, fresh: bool) -> Tensor | None:
    """`starts` `[B, T]`, or None if they have no effect, which lets models take faster paths.

    Reads the values: call it on the CPU, where a batch is made. On a GPU it synchronises with the device.

    Args:
        fresh: whether no state precedes the first token, so that a start there has no effect.
    """
    return starts if bool(starts[:, 1 if fresh else 0 :].any()) else None
