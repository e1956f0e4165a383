"""How well a model predicts what was held out."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.data.prepare import Corpus
from prism.data.score import Score
from prism.data.windows import Batch, Windows
from prism.train.distributed import World


def total_nats(model: nn.Module, batch: Batch) -> Tensor:
    """Summed over all tokens of the batch, in float32; in training with the balance loss of mixtures of memories."""
    out = model(input_ids=batch.inputs, reset=batch.reset, use_cache=False)
    nats = F.cross_entropy(out.logits.float().flatten(0, 1), batch.targets.flatten(), reduction="sum")
    balance = getattr(out, "balance_loss", None)
    if model.training and balance is not None:
        nats = nats + batch.targets.numel() * balance
    return nats


class Validation:
    """Windows spread evenly over what was held out; several processes share them."""

    def __init__(self, corpus: Corpus, context: int, end: int | None, sequences: int) -> None:
        stream = corpus.stream("validation")
        self.windows = Windows(stream, min(context, len(stream) - 1), end)
        self.bytes_per_token = stream.split.text_bytes / stream.split.tokens
        count = min(sequences or len(self.windows), len(self.windows))
        self.chosen = np.arange(count) * len(self.windows) // count

    @torch.no_grad()
    def score(self, model: nn.Module, world: World, at_once: int) -> Score:
        """Every process makes the same number of passes, the last perhaps with samples that count for nothing."""
        mine = self.chosen[world.rank :: world.size]
        rounds = -(-len(self.chosen) // (world.size * at_once))
        nats, tokens = 0.0, 0
        training = model.training
        model.eval()
        for i in range(rounds):
            windows = mine[i * at_once : (i + 1) * at_once]
            batch = self.windows.windows(windows if len(windows) else self.chosen[:1]).to(world.device)
            total = total_nats(model, batch)
            if len(windows):
                nats, tokens = nats + float(total), tokens + batch.targets.numel()
        model.train(training)
        nats, count = world.sum(nats, tokens)
        return Score(nats / count, self.bytes_per_token)
