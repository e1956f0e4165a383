"""Define the operations of a layer around its memory in torch, and choose between them and a kernel.

Before the memory:

    short_conv      y_t = silu(c + Σ_i weight[W-1-i] x_{t-i}), per channel
    delta_columns   q = K^-½ · unit(q̃),   k_1 = unit(k̃),   w_1 = β v;   PRISM's later writes   k_l = unit(k̃_l),   w_l
    conv_columns    short_conv, then delta_columns
    solved_writes   w_l = γ_l β_l δ_l, PRISM's solver, which reduces a residual r_1 = v - u in L steps:

        gelu     δ_l = GELU(p_l ⊙ r_l),   r_{l+1} = r_l - δ_l
        closed   δ_l = P_l ⊙ r_l,         r_{l+1} = r_l - δ_l,   P = σ(p)     =>   δ_l = P_l ⊙ Π_{j<l}(1 - P_j) ⊙ r

Around the mixer:

    residual_norm   s = x + delta,   y = RMSNorm(s) in autocast's dtype
    residual_sum    x + delta
    swiglu          down(silu(gate x) ⊙ up x)
    gated_norm      RMSNorm(o) ⊙ silu(g), per head
    gated_output    out(RMSNorm(o) ⊙ silu(g)), or ⊙ σ(g), per head
    products        x W₁ᵀ, x W₂ᵀ …, a short convolution of x, and x: the gradient of x is summed inside the products of the
                    backward pass
    widened         y's columns in parts, some of them mapped: the gradients are computed in their places in y's
    token_losses    -log softmax(logits)[target] of each row, and its gradient

Rules call these functions and import no kernel. On a GPU one kernel computes each of the first group, with the same results up
to rounding. In training on a GPU an autograd function (layer_ops_cuda.py) takes the place of one of the second, if every module
in it is an ordinary one without hooks. With `recomputing` (engine/recompute.py) the norms' results are not kept either, and the
definitions keep as little. Compiled code, dispatch modes and function transforms take the definitions of the second group.
Kernels are imported when they first run, so that `import prism` does not import Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine import compat
from prism.engine.compat import have_tangents
from prism.engine.kernels import available
from prism.engine.memory import resolve
from prism.engine.recompute import cheap, replaceable

UNIT_EPS = 1e-6
SOLVERS = ("gelu", "closed")
WIDEST_ROW, WIDEST_HEAD = 8192, 4096
"""Widths up to which the kernels serve a norm over a row of a layer's input, and over a head."""


class Corrections(NamedTuple):
    """PRISM's N = L - 1 writes after a token's first one: an argument of `delta_columns`."""

    keys: Tensor | None  # [B, T, H, N, K]; None: the first key for all
    expected: Tensor | None  # [B, T, H, V], subtracted from v to get the residual; None: the residual is v
    gains: Tensor | None  # [B, T, H, N, V]
    beta: Tensor  # [B, T, H, N]
    scale: Tensor  # [N, H, V]
    solver: str
    nonlinearity: bool


class Columns(NamedTuple):
    """The queries, keys and values of a delta rule's memory. The n sub-steps of a token are n rows of k and w."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T·n, H, L, K]
    w: Tensor  # [B, T·n, H, L, V]


def use_kernel(x: Tensor) -> bool:
    """Whether the kernels around the memory can serve a tensor and are allowed to: `using(backend="torch")` turns them off."""
    if not x.is_cuda or x.dtype == torch.float64 or resolve()[1] == "torch":
        return False
    available.warn_if_unavailable(x)
    return available.PROBLEM is None and not available.outdated(x) and not have_tangents(x)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    window: Tensor | None = None,
    documents: Tensor | None = None,
    activation: bool = True,
) -> Tensor:
    """Causal depthwise convolution over the last W tokens, then SiLU if `activation`.

    Args:
        x: `[B, T, D]`.
        weight: `[W, D]`, the current token's tap last.
        bias: `[D]`.
        window: the conv state: the W - 1 tokens before x, `[B, W - 1, D]`; None: zeros.
        documents: each token's document number `[B, T]`. Taps do not reach into an earlier document.
        activation: apply SiLU to the result `[B, T, D]`.
    """
    size, T = weight.shape[0], x.shape[1]
    if use_kernel(x):
        from prism.engine.kernels.ops import short_conv as kernel

        numbers = None if documents is None else documents.int()
        if window is not None and window.requires_grad and torch.is_grad_enabled():
            # The kernel has no gradient for the conv state: here its tokens come before the others.
            seen, numbers = history(x, window, size - 1), None if numbers is None else F.pad(numbers, (size - 1, 0))
            return kernel.short_conv(seen, weight, bias, None, numbers, activation)[:, size - 1 :]
        before = None if window is None else window.to(x.dtype)
        return kernel.short_conv(x, weight, bias, before, numbers, activation)
    seen = history(x, window, size - 1)
    # Under autocast x is bfloat16 and the weight float32. Their product must not turn the whole layer into float32.
    weight = weight.to(x.dtype)
    y = x * weight[-1]
    for back in range(1, size):
        past = seen[:, size - 1 - back : size - 1 - back + T]
        if documents is not None:
            age = F.pad(documents, (back, 0))[:, :T]
            past = torch.where((age == documents).unsqueeze(-1), past, 0.0)
        y = y + past * weight[-1 - back]
    if bias is not None:
        y = y + bias.to(x.dtype)
    return F.silu(y) if activation else y


def history(x: Tensor, window: Tensor | None, size: int) -> Tensor:
    """`[B, size + T, …]`: the tokens before x (zeros at the start of a sequence), then x."""
    if window is None:
        window = x.new_zeros(x.shape[0], size, *x.shape[2:])
    return torch.cat([window.to(x.dtype), x], 1)


def delta_columns(
    mixed: Tensor, beta: Tensor, key_dim: int, substeps: int = 1, corrections: Corrections | None = None
) -> Columns:
    """Compute the columns that a delta rule's memory reads from its projections.

    Args:
        mixed: q̃, k̃ and v, `[B, T, H·K + n·H·K + n·H·V]`.
        beta: β `[B, T·n, H]`.
        key_dim: K.
        substeps: n.
        corrections: PRISM's later writes; None: no later writes.
    """
    if substeps == 1 and use_kernel(mixed):
        return _columns_by_kernel(mixed, beta, key_dim, corrections)
    heads = beta.shape[-1]
    keys = heads * key_dim
    q, k, v = mixed.split([keys, substeps * keys, mixed.shape[-1] - (1 + substeps) * keys], -1)

    def rows(z: Tensor) -> Tensor:  # [B, T, n·H·D] -> [B, T·n, H, D]
        return z.unflatten(-1, (substeps, heads, -1)).flatten(1, 2)

    q = l2_normalize(q.unflatten(-1, (heads, -1))) * key_dim**-0.5
    k, v = l2_normalize(rows(k)).unsqueeze(3), rows(v)
    w = (beta.unsqueeze(-1) * v).unsqueeze(3)
    if corrections is None:
        return Columns(q, k, w)
    c = corrections
    later = k.expand(-1, -1, -1, c.beta.shape[-1], -1) if c.keys is None else l2_normalize(c.keys)
    writes = solved_writes(v, c.expected, c.gains, c.beta, c.scale, c.solver, c.nonlinearity)
    return Columns(q, torch.cat([k, later], 3), torch.cat([w, writes], 3))


def _columns_by_kernel(mixed: Tensor, beta: Tensor, key_dim: int, c: Corrections | None) -> Columns:
    from prism.engine.kernels.ops import columns as kernel

    later, options = _for_kernel(c, key_dim)
    return Columns(*kernel.columns(mixed, beta, *later, *options))


def _for_kernel(c: Corrections | None, key_dim: int) -> tuple[tuple[Tensor | None, ...], tuple[float, ...]]:
    """The later writes and the options of a kernel."""
    scaled = key_dim, key_dim**-0.5, UNIT_EPS
    if c is None:
        return (None,) * 5, (*scaled, False, False)
    return (c.keys, c.expected, c.gains, c.beta, c.scale), (*scaled, c.solver == "gelu", c.nonlinearity)


def one_operator_serves(
    projected: Tensor, window: Tensor | None, conv_size: int, key_dim: int, value_dim: int, writes: int
) -> bool:
    """Whether one operator computes `conv_columns` and saves nothing but its inputs."""
    if not 2 <= conv_size <= 4 or writes > 4 or {key_dim, value_dim} - {16, 32, 64, 128, 256}:
        return False
    wanted = (
        window is not None and window.requires_grad and torch.is_grad_enabled()
    )  # it has no gradient for the conv state
    return not wanted and use_kernel(projected)


def conv_columns(
    projected: Tensor,
    weight: Tensor,
    window: Tensor | None,
    documents: Tensor | None,
    beta: Tensor,
    key_dim: int,
    corrections: Corrections | None = None,
) -> Columns:
    """`short_conv` with SiLU and without a bias, then `delta_columns`, in one operator where `one_operator_serves`."""
    value_dim = projected.shape[-1] // beta.shape[-1] - 2 * key_dim
    c, writes = corrections, 1 if corrections is None else 1 + corrections.beta.shape[-1]
    if not one_operator_serves(projected, window, weight.shape[0], key_dim, value_dim, writes):
        return delta_columns(short_conv(projected, weight, None, window, documents), beta, key_dim, 1, c)
    from prism.engine.kernels.ops.conv_columns import conv_columns as kernel

    before = None if window is None else window.to(projected.dtype)
    numbers = None if documents is None else documents.int()
    later, options = _for_kernel(c, key_dim)
    return Columns(*kernel(projected, weight, before, numbers, beta, *later, *options))


def l2_normalize(x: Tensor, eps: float = UNIT_EPS, scale: float = 1.0) -> Tensor:
    """`scale` x / sqrt(Σx² + eps) over the last dimension, computed in float32 for half precision."""
    width, half = x.shape[-1], x.dtype in (torch.bfloat16, torch.float16)
    # Torch has one kernel for x / sqrt(mean x² + eps). Its weight √1/K is accurate enough in half precision if K is 2^n.
    if x.is_cuda and half and width & (width - 1) == 0:
        with torch.autocast("cuda", enabled=False):  # autocast would save a float32 copy of x
            return F.rms_norm(x, (width,), x.new_full((width,), scale * width**-0.5), eps / width)
    y = x.float() if half else x
    length = torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)
    return (y * (length if scale == 1.0 else scale * length)).to(x.dtype)


def solved_writes(
    v: Tensor,
    u: Tensor | None,
    p: Tensor | None,
    beta: Tensor,
    scale: Tensor | None,
    solver: str,
    nonlinearity: bool = True,
) -> Tensor:
    """Solve for PRISM's writes w_l = γ_l ⊙ β_l δ_l, `[…, H, L, V]`, of the residual v - u.

    Args:
        v, u: `[…, H, V]`; u None: the residual is v.
        p: the gains `[…, H, L, V]`; None: no gains.
        beta: β `[…, H, L]`.
        scale: γ `[L, H, V]`; None: 1.
        solver: `"gelu"` or `"closed"`.
        nonlinearity: False omits the GELU, or the sigmoid of the closed form.
    """
    if use_kernel(v):
        from prism.engine.kernels.ops import solver as kernel

        return kernel.solve(v, u, p, beta, scale, solver == "gelu", nonlinearity)
    r = v if u is None else v - u
    w = beta.unsqueeze(-1) * solve(r, p, beta.shape[-1], solver, nonlinearity)
    return w if scale is None else scale.movedim(0, 1).to(w.dtype) * w


def solve(r: Tensor, p: Tensor | None, steps: int, solver: str, nonlinearity: bool = True) -> Tensor:
    """The solver's corrections in torch: r `[…, V]`, p `[…, L, V]` (None: no gains) → δ `[…, L, V]`."""
    gains: tuple[Tensor | float, ...]
    if solver == "gelu":
        gains = (1.0,) * steps if p is None else p.unbind(-2)
    else:
        gains = (0.5,) * steps if p is None else (p.sigmoid() if nonlinearity else p).unbind(-2)
    corrections = []
    for gain in gains:
        delta = F.gelu(gain * r) if solver == "gelu" and nonlinearity else gain * r
        corrections.append(delta)
        r = r - delta
    return torch.stack(corrections, -2)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x in autocast's dtype if autocast is on: one cast here instead of one for every linear map that reads x."""
    return x.to(_autocast_dtype(x))


def residual_norm(x: Tensor, delta: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """x + delta `[…, D]` (x without delta), and its norm for the maps that read it, in autocast's dtype."""
    if _serves(x) and _plain_norm(norm, x.shape[-1], WIDEST_ROW):
        from prism.engine import layer_ops_cuda as cuda

        s, y = cuda.ResidualNorm.apply(x, delta, norm.weight, norm.eps, _autocast_dtype(x))
        return s, replaceable(y, partial(cuda.normed, norm=norm, dtype=y.dtype), s)
    s = x if delta is None else x + delta
    return s, replaceable(to_autocast_dtype(norm(s)), lambda z: to_autocast_dtype(norm(z)), s)


def residual_sum(x: Tensor, delta: Tensor) -> Tensor:
    """x + delta `[…, D]`. For a sum of two dtypes torch takes twice as long as memory allows."""
    if x.dtype == torch.float32 != delta.dtype and x.shape == delta.shape and x.shape[-1] <= WIDEST_ROW and _serves(x):
        from prism.engine import layer_ops_cuda as cuda

        s: Tensor = cuda.ResidualSum.apply(x, delta)
        return s
    return x + delta


def swiglu(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
    """`[…, D]` → `[…, D]`: down(silu(gate x) ⊙ up x)."""
    if _serves(x) and x.dtype == _autocast_dtype(x) and all(map(plain_linear, (gate, up, down))):
        from prism.engine import layer_ops_cuda as cuda

        y: Tensor = cuda.SwiGLU.apply(x, gate.weight, up.weight, down.weight)
        return y
    (h,), _ = cheap(lambda g, u: ((F.silu(g) * u,), None), gate(x), up(x))
    return down(h)


def gated_norm_serves(o: Tensor, g: Tensor, weight: Tensor) -> bool:
    """Whether `gated_norm` computes these rows: on a GPU, with and without gradients."""
    plain = type(weight) in (Tensor, nn.Parameter) and o.shape == g.shape and o.shape[-1] <= WIDEST_HEAD
    if not plain or torch.compiler.is_compiling() or o.numel() == 0 or not use_kernel(o):
        return False
    return not compat.in_dispatch_mode() and not compat.transforms_active(o)


def gated_norm(o: Tensor, g: Tensor, weight: Tensor, eps: float) -> Tensor:
    """o, g `[…, V]`, weight `[V]` → RMSNorm(o) ⊙ silu(g) in o's dtype, where `gated_norm_serves`."""
    from prism.engine import layer_ops_cuda as cuda

    y: Tensor = cuda.GatedNorm.apply(o, g, weight, eps)
    return y


def gated_output(
    o: Tensor, g: Tensor, norm: Callable[[Tensor, Tensor], Tensor], inner: nn.Module, out: nn.Module, by: str = "silu"
) -> Tensor:
    """The output map of a gated norm: o `[…, H, V]`, g `[…, H·V]` → out(norm(o, silu(g))), or with σ(g).

    Args:
        norm: the gated norm itself; `inner` is the RMSNorm over a head's values that it applies.
        by: `"silu"` or `"sigmoid"`.
    """
    by_sigmoid = by == "sigmoid"
    fits = o.dtype == g.dtype == _autocast_dtype(g) and o.shape[-2] * o.shape[-1] == g.shape[-1]
    if _serves(o) and fits and plain_linear(out) and _plain_norm(inner, o.shape[-1], WIDEST_HEAD):
        from prism.engine import layer_ops_cuda as cuda

        y: Tensor = cuda.GatedOutput.apply(o, g, inner.weight, inner.eps, out.weight, by_sigmoid)
        return y
    (y,), _ = cheap(lambda o, g: ((norm(o, g.sigmoid() if by_sigmoid else F.silu(g)),), None), o, g)
    return out(y)


def products_serve(x: Tensor) -> bool:
    """Whether `products` of x sums its gradient inside the products."""
    return _serves(x) and x.dtype == _autocast_dtype(x)


class Convolution(NamedTuple):
    """A short convolution with SiLU and without a bias, as in `short_conv`. Its conv state gets no gradient."""

    taps: Tensor  # [W, D]
    window: Tensor | None
    documents: Tensor | None  # int32


def products(
    x: Tensor, *weights: Tensor, conv: Convolution | None = None
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """x `[…, D]` and weights `[N_i, D]` → x W_iᵀ `[…, N_i]` for each weight, x itself for everything else that reads it, and
    its convolution `[B, T, D]`.

    The gradients of x by each of these, and by all readers of the x that is returned, are otherwise summed by autograd, which
    reads and writes all of them once more.
    """
    if products_serve(x):
        from prism.engine import layer_ops_cuda as cuda

        *found, same, convolved = cuda.Products.apply(x, *(conv or (None, None, None)), *weights)
        return found, same, convolved
    convolved = None if conv is None else short_conv(x, conv.taps, None, conv.window, conv.documents)
    return [F.linear(x, w) for w in weights], x, convolved


def widened(y: Tensor, sizes: list[int], weights: list[Tensor | None]) -> list[Tensor]:
    """y `[…, N]` in parts of these sizes, which leave out the last columns if they sum up to less than N; part i with a weight
    `[M_i, size_i]` is mapped by it, `[…, M_i]`: the second halves of low-rank maps."""
    if products_serve(y):
        from prism.engine import layer_ops_cuda as cuda

        return list(cuda.Widened.apply(y, sizes, *weights))
    parts = y.split([*sizes, y.shape[-1] - sum(sizes)], -1)
    return [part if w is None else F.linear(part, w) for part, w in zip(parts, weights, strict=False)]


def plain_linear(m: nn.Module) -> bool:
    """Whether m computes x Wᵀ with an ordinary tensor W: quantised and sharded weights are of other classes."""
    plain = type(m) is nn.Linear and m.bias is None and type(m.weight) in (Tensor, nn.Parameter)
    return plain and compat.is_unmodified(m)


def _plain_norm(m: nn.Module, width: int, widest: int) -> bool:
    """Whether m is an RMSNorm with an epsilon over rows of this width."""
    plain = type(m) is nn.RMSNorm and m.eps is not None and tuple(m.normalized_shape) == (width,) and width <= widest
    if not plain or not compat.is_unmodified(m):
        return False
    return m.weight is not None and type(m.weight) in (Tensor, nn.Parameter)


def _serves(x: Tensor) -> bool:
    """Whether the functions below may compute on x: in training on a GPU, where nothing else watches or transforms it."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or x.numel() == 0 or not use_kernel(x):
        return False
    return not compat.in_dispatch_mode() and not compat.transforms_active(x)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype on x's device if autocast is on, otherwise x's own. The meta device has no autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if not x.is_meta and torch.is_autocast_enabled(device) else x.dtype


def token_losses(
    logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float = 0.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Each row's cross-entropy `[M]` plus z_loss · lse², and with `dtype` the gradient of their sum by the logits `[M, V]`.

    The logits, in float32 or float64, are overwritten. Rows whose target is `ignore_index` have loss and gradient 0.
    """
    if use_kernel(logits):
        from prism.engine.kernels.ops import cross_entropy as kernel

        return kernel.token_losses(logits, targets, ignore_index, z_loss, dtype)
    counted = targets != ignore_index
    columns = torch.where(counted, targets, 0).unsqueeze(1)
    at_target = logits.gather(1, columns)
    highest = logits.amax(1, keepdim=True)
    shares = logits.sub_(highest).exp_()
    norm = shares.sum(1, keepdim=True)
    lse = norm.log() + highest
    losses = torch.where(counted, (lse - at_target + z_loss * lse.square()).squeeze(1), 0.0)
    if dtype is None:
        return losses, None
    shares = shares.mul_(torch.where(counted.unsqueeze(1), (1 + 2 * z_loss * lse) / norm, 0.0))
    return losses, shares.scatter_add_(1, columns, -counted.unsqueeze(1).to(logits.dtype)).to(dtype)
