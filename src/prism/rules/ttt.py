"""Test-time training (TTT): the memory is a network that learns, by gradient descent, to map keys to values.

    W_i = W_start - τ_i Σ_{j≤i} η_j ∇½‖f(k_j; W_start) - v_j‖²          f(x) = x + LN(z(x))           (Sun et al., 2024)

z is one linear layer (TTT-Linear) or two with a GELU between them (TTT-MLP). Gradients of a mini-batch of b tokens are
taken at the weights it started with; η_j = base_lr · σ(w·x_j + b) / K depends on the token that is written,
τ_i = max(0, 1/i + learned) on the position that is read. The LayerNorm is trained by the outer loop, the same for loss and
output. Rotary positions count within a mini-batch. b = 1 is online gradient descent and also has the form `serial`; without
LayerNorm, residual and bias it is DeltaNet with β = η.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.networks import Averaged, InnerUpdate, Network
from prism.rules.parts import Carry, Rotary, ShortConv, at_least_float32, split_heads, token_positions
from prism.rules.rule import (
    Objective,
    Paper,
    Rule,
    Span,
    check_integers,
    check_nonnegative,
    per_head,
    set_initial_weights,
)


class FastWeights(nn.Module):
    """W₀ and b₀, the weights with which a network memory starts every document: layers `sizes[0]` → … → `sizes[-1]` per head.

    They are parameters, trained by the outer loop. They count as gates (kept in float32, no weight decay), because they are
    a memory's state at its first token.

    Args:
        heads: number of networks.
        sizes: sizes of keys, hidden layers and values.
        bias: whether there are biases (they start at 0).
        norm: whether the output goes through a LayerNorm with a scale and a shift per head.
        hidden_std: standard deviation of W₀ in the layers before the last; 1/√(inputs) by default. The last layer starts
            near zero, so that the output of a memory comes from what was written to it.
    """

    def __init__(
        self, heads: int, sizes: list[int], *, bias: bool = False, norm: bool = False, hidden_std: float | None = None
    ) -> None:
        super().__init__()
        layers = list(pairwise(sizes))
        self.stds = [fan_in**-0.5 if hidden_std is None else hidden_std for fan_in, _ in layers[:-1]] + [0.02]
        self.weights = nn.ParameterList(torch.empty(heads, fan_in, out) for fan_in, out in layers)
        self.biases = nn.ParameterList(torch.empty(heads, out) for _, out in layers) if bias else None
        self.scale = nn.Parameter(torch.empty(heads, sizes[-1])) if norm else None
        self.shift = nn.Parameter(torch.empty(heads, sizes[-1])) if norm else None
        self.size = heads * sum(out * (fan_in + bias) for fan_in, out in layers)
        """Number of weights that the inner loop changes."""
        set_initial_weights(self)

    def initial_weights(self) -> dict[str, Tensor]:
        values = {f"weights.{i}": self.stds[i] * torch.randn(w.shape) for i, w in enumerate(self.weights)}
        values |= {f"biases.{i}": torch.zeros(b.shape) for i, b in enumerate(self.biases or ())}
        if self.scale is not None and self.shift is not None:
            values |= {"scale": torch.ones(self.scale.shape), "shift": torch.zeros(self.shift.shape)}
        return values

    def network(self, residual: bool = False, loss_scale: float = 0.5) -> Network:
        """The network as the engine takes it."""
        return Network(
            tuple(self.weights),
            None if self.biases is None else tuple(self.biases),
            None if self.scale is None or self.shift is None else (self.scale, self.shift),
            residual,
            loss_scale,
        )


class TttLinear(Rule):
    """TTT-Linear: a linear layer that learns at test time, in mini-batches.

    Defaults are the authors' Transformer backbone; `shared_qk` and `gate` together are their Mamba backbone.

    Args:
        key_dim: size of a head's queries, keys and values; width / heads by default.
        mini_batch: b, the number of tokens whose gradients are taken at the same weights.
        base_lr: learning rate of the inner loop; by default 1 for TTT-Linear and 0.1 for TTT-MLP (the authors raise it
            from 0.01).
        shared_qk: whether queries and keys share one projection, followed by a convolution each.
        conv_size: number of tokens that those convolutions see; only with `shared_qk`.
        gate: whether the output is multiplied by GELU(W x).
        inner_norm: whether f has its LayerNorm.
        residual: whether f adds its input.
        bias: whether the layers of z have biases.
    """

    name = "ttt_linear"
    paper = Paper("Learning to (Learn at Test Time)", "Sun et al. 2024", "https://arxiv.org/abs/2407.04620")
    objective = Objective("½‖LN(kW) + k - v‖²")
    forgetting = "none"
    transition = "nonlinear"
    forms: tuple[str, ...] = ("recurrent", "chunkwise")
    hidden: ClassVar[tuple[int, ...]] = ()
    """Sizes of the hidden layers, as multiples of key_dim."""
    default_lr: ClassVar[float] = 1.0
    shared_maps = ("gate", "out")
    query_first_maps = ("qkv",)

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        mini_batch: int = 16,
        base_lr: float | None = None,
        shared_qk: bool = False,
        conv_size: int = 4,
        gate: bool = False,
        inner_norm: bool = True,
        residual: bool = True,
        bias: bool = True,
    ) -> None:
        key_dim = per_head(width, heads, key_dim)
        check_integers(mini_batch=mini_batch)
        super().__init__(width, heads, key_dim, key_dim, write_rank=mini_batch if self.hidden else 1)
        if mini_batch == 1:
            self.forms = (*self.forms, "serial")
        self.mini_batch, self.residual = mini_batch, residual
        self.base_lr = self.default_lr if base_lr is None else base_lr
        check_nonnegative(base_lr=self.base_lr)
        inner = heads * key_dim
        self.projected = [inner] * (2 if shared_qk else 3)
        self.qkv = nn.Linear(width, sum(self.projected), bias=False)
        self.convs: nn.ModuleList | None = None
        if shared_qk:
            self.convs = nn.ModuleList(ShortConv(inner, conv_size, bias=True, activation=False) for _ in range(2))
        self.rotary = Rotary(key_dim, interleaved=True)
        self.rate = nn.Linear(width, heads)
        self.reader_scale = nn.Parameter(torch.empty(mini_batch))
        set_initial_weights(self)
        sizes = [key_dim * n for n in (1, *self.hidden, 1)]
        self.fast = FastWeights(heads, sizes, bias=bias, norm=inner_norm, hidden_std=0.02)
        self.state_size = self.fast.size
        self.norm = nn.LayerNorm(inner, eps=1e-6)
        self.gate = nn.Linear(width, inner, bias=False) if gate else None
        self.out = nn.Linear(inner, width, bias=False)

    def initial_weights(self) -> dict[str, Tensor]:
        return {
            "rate.weight": torch.empty(self.heads, self.width).normal_(std=0.02),
            "rate.bias": torch.zeros(self.heads),
            "reader_scale": torch.zeros(self.mini_batch),
        }

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[InnerUpdate, dict[str, Tensor], None]:
        positions, following = token_positions(x, carry, span)
        *qk, v = self.qkv(x).split(self.projected, -1)  # one tensor for q and k if they share a projection
        if self.convs is not None:
            mixed = [conv(qk[0], carry.get(f"conv{i}"), span) for i, conv in enumerate(self.convs)]
            qk = [z for z, _ in mixed]
            following |= {f"conv{i}": conv_state for i, (_, conv_state) in enumerate(mixed)}
        q, k = (self.rotary(split_heads(z, self.heads), positions % self.mini_batch) for z in qk)
        rate = at_least_float32(self.rate(x)).sigmoid() * (self.base_lr / self.key_dim)
        order = torch.arange(1, self.mini_batch + 1, device=x.device, dtype=self.reader_scale.dtype)
        update = InnerUpdate(
            q,
            k,
            split_heads(v, self.heads),
            rate,
            self.fast.network(self.residual),
            Averaged((1 / order + self.reader_scale).clamp(min=0)),
            self.mini_batch,
            span.reset,
            span.mask,
        )
        return update, following, None

    def output(self, o: Tensor, x: Tensor, extra: None) -> Tensor:
        y = self.norm(o.flatten(-2))
        return self.out(y if self.gate is None else y * F.gelu(self.gate(x), approximate="tanh"))


class TttMlp(TttLinear):
    """TTT-MLP: a two-layer network that learns at test time, in mini-batches.

    The hidden layer is four times as wide as a key.
    """

    name = "ttt_mlp"
    paper = Paper("Learning to (Learn at Test Time)", "Sun et al. 2024", "https://arxiv.org/abs/2407.04620")
    objective = Objective("½‖LN(MLP(k)) + k - v‖²")
    hidden = (4,)
    default_lr = 0.1
