"""What Titans and ATLAS share: an MLP M without biases as memory, its gates, and what is around it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.networks import InnerUpdate, Momentum
from prism.rules.fast_weights import FastWeights
from prism.rules.initial import set_initial_weights
from prism.rules.norms import HeadNorm
from prism.rules.parts import Carry, ShortConv, at_least_float32, l2_normalize, split_heads
from prism.rules.rule import Rule, check_amount, check_whole
from prism.rules.span import Span


class NeuralMemory(Rule):
    """Subclasses say what goes into M (`features`) and how it learns (`learner`).

    Args:
        features: number of inputs of M for a key.
        depth: number of layers of M.
        expand: size of the hidden layers, as a multiple of value_dim.
        mini_batch: b, the number of tokens whose gradients are taken at the same weights.
        momentum: whether gradients are accumulated with momentum.
        base_lr: the largest step of the inner loop; 1 / mini_batch by default.
        conv_size: number of tokens that the convolution before SiLU and L2 norm sees; 1 means no convolution.
        gate: whether the answer is multiplied by SiLU(W x).
    """

    transition = "nonlinear"
    forgetting = "per head, of all weights"
    forms = ("recurrent", "chunkwise")
    shared_maps = ("gate", "out")
    query_first_maps = ("qkv",)

    def __init__(
        self,
        width: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        features: int,
        *,
        depth: int,
        expand: int,
        mini_batch: int,
        momentum: bool,
        base_lr: float | None,
        conv_size: int,
        gate: bool,
    ) -> None:
        super().__init__(width, heads, key_dim, value_dim, write_rank=mini_batch)
        check_whole(depth=depth, expand=expand, mini_batch=mini_batch)
        self.mini_batch = mini_batch
        self.base_lr = 1 / mini_batch if base_lr is None else base_lr
        check_amount(base_lr=self.base_lr)
        self.largest_rate = self.base_lr
        keys, values = heads * key_dim, heads * value_dim
        self.sizes = [keys, keys, values]
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False)
        self.conv = ShortConv(sum(self.sizes), conv_size)
        self.rate = nn.Linear(width, heads)
        self.decay = nn.Linear(width, heads)
        self.momentum = nn.Linear(width, heads) if momentum else None
        self.fast = FastWeights(heads, [features, *[expand * value_dim] * (depth - 1), value_dim])
        self.state_size = (2 if momentum else 1) * self.fast.size
        self.norm = HeadNorm(value_dim)
        self.gate = nn.Linear(width, values, bias=False) if gate else None
        self.out = nn.Linear(values, width, bias=False)
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        return {"decay.bias": torch.full((self.heads,), math.log(0.99 / 0.01))}  # 1 - α starts at .99

    def features(self, x: Tensor) -> Tensor:
        """φ, `[B, T, H, K]` → `[B, T, H, features]`."""
        return x

    def learner(self, x: Tensor) -> tuple[Tensor, Momentum]:
        """How much each example weighs, `[B, T, H]`, and what becomes of its gradient."""
        log_decay = F.logsigmoid(at_least_float32(self.decay(x)))
        log_momentum = None if self.momentum is None else F.logsigmoid(at_least_float32(self.momentum(x)))
        return self.largest_rate * at_least_float32(self.rate(x)).sigmoid(), Momentum(log_decay, log_momentum)

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[InnerUpdate, dict[str, Tensor], None]:
        mixed, window = self.conv(self.qkv(x), carry.get("conv"), span)
        q, k, v = (split_heads(z, self.heads) for z in mixed.split(self.sizes, -1))
        q, k = (self.features(l2_normalize(z)) for z in (q, k))
        rate, learner = self.learner(x)
        network = self.fast.network(loss_scale=1.0)
        update = InnerUpdate(q, k, v, rate, network, learner, self.mini_batch, span.reset, span.mask)
        return update, {"conv": window}, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        return self.out(self.norm(o, None if self.gate is None else F.silu(self.gate(x))))
