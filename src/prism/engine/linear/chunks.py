"""The chunk form for one decay per head (or none), forward and backward: the fast path on the CPU.

Autograd through the block equations would keep every C×C matrix of the sequence. Here the backward is written by hand: it
keeps the incoming state of each chunk and, with an erase, T⁻¹, F and Y_1, about four numbers per channel and token, and
computes the rest again. Segments of a sequence run one after the other, as long as their temporaries stay in a cache. In a
segment everything is computed for all chunks at once, except the states.

With an erase
    Symbols are those of block.py. Join the erase with the writes, and the two kinds of rows, Z = [Q; B]. Where the erase runs
    along the first key, b = β k_1, it shares that key's columns, otherwise it has separate ones:

        X = [K_1; …; K_L],  Y = [W_1 - R; W_2; …; W_L]      or      X = [A; K_1; …; K_L],  Y = [-R; W_1; …; W_L]
        N = (Q Xᵀ) ⊙ Γ,  M = (B Xᵀ) ⊙ Γ,  T = I + M_1        R = (B ⊙ e^G) S + M Y
        O = (Q ⊙ e^G) S + N Y                                S' = e^{G_C} S + (X ⊙ e^{G_C - G})ᵀ Y

    (M_1: the first C columns.) With Y° the writes without the erase and M° the columns of M after the first C, solved for R:

        Y_1 = T⁻¹(Y°_1 - M° Y°) - F S,                        F = T⁻¹(B ⊙ e^G)

    Backward, from dO and dS'. Because Y has R in its first part, the erase needs no separate terms:

        dY = Nᵀ dO + (X ⊙ e^{G_C - G}) dS'                   dU = -T⁻ᵀ dY_1       dS = e^{G_C} dS' + (Q ⊙ e^G)ᵀ dO - Fᵀ dY_1
        dN = dO Yᵀ,  dM = dU Yᵀ                              dW_1 = -dU if the columns are shared, otherwise dW = dY + M°ᵀ dU
        dZ = ([dN; dM] ⊙ Γ) X + e^G ⊙ ([dO; dU] Sᵀ)          dX = ([dN; dM] ⊙ Γ)ᵀ Z + e^{G_C - G} ⊙ (Y dS'ᵀ)

Without
    X = K and Y = W, and G heads of queries and keys serve H = G·r heads of values. Only Γ, e^G and Y differ between the heads
    of a group. So Q Xᵀ is made once for a group, and the products with states are made for all its heads at once, their values
    side by side in `[n, C, r·V]`, n = N·B·G:

        O = e^G ⊙ (Q S) + ((Q Xᵀ) ⊙ Γ) Y                     S' = e^{G_C} S + Xᵀ (e^{G_C - G} ⊙ Y)
        dY = (QXᵀ ⊙ Γ)ᵀ dO + e^{G_C - G} ⊙ (X dS')           dS = e^{G_C} dS' + Qᵀ (e^G ⊙ dO)
        dA = Σ_heads dO Yᵀ ⊙ Γ,   dQ = dA X + (e^G ⊙ dO) Sᵀ,   dX = dAᵀ Q + (e^{G_C - G} ⊙ Y) dS'ᵀ

In both, G receives from every weight exp(G_i - G_j) +(dΓ Γ)_ij at i and the same with a minus at j.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prism.engine.linear.decay import Documents, HeadDecay

CACHED, CACHED_WITHOUT_ERASE = 2**18, 2**19
"""Numbers of a segment's values; without an erase there are fewer temporaries. Measured: twice as many outgrow the cache, half
as many cost more calls."""
BLOCK = 16
"""Rows of a triangular system that LAPACK solves. Up to this size MKL solves on the calling thread. From 32 on it starts all
threads for every single matrix, and each start waits for the slowest: milliseconds where another process holds a core."""
SMALL_SUM = 8.0
"""Of the absolute values in a row of an inverse that hardly amplifies rounding."""


class Kind(NamedTuple):
    """Settings that do not depend on the data."""

    chunk: int
    segment: int
    """At most this many rows at once (`segment_rows`)."""
    look_before: bool
    """The erase reads the undecayed state."""
    read_before: bool
    """Queries read S_{t-1}."""

    def within(self, rows: int) -> Kind:
        """For a sequence of so many rows, which may be shorter than a chunk."""
        return self._replace(chunk=min(self.chunk, rows))


class Fields(NamedTuple):
    """The tensors of a sequence of R rows, as in `Steps`. An erase has a and b, or β: then it runs along the first key."""

    q: Tensor  # [B, R, G, K]; G = H with an erase
    k: Tensor  # [B, R, G, L, K]
    w: Tensor  # [B, R, H, L, V]
    log_decay: Tensor | None  # [B, R, H]
    erase_write: Tensor | None  # a, [B, R, H, K]
    erase_key: Tensor | None  # b, [B, R, H, K]
    erase_strength: Tensor | None  # β, [B, R, H]
    reset: Tensor | None = None  # [B, R]

    @property
    def erases(self) -> bool:
        return self.erase_write is not None or self.erase_strength is not None

    def at(self, now: slice) -> Fields:
        """Some of the rows."""
        return Fields(*(None if z is None else z[:, now] for z in self))  # type: ignore[arg-type]


class Kept(NamedTuple):
    """What a segment keeps for the backward: its incoming states `[n, K, r·V]`; with an erase T⁻¹, F and Y_1."""

    incoming: Tensor
    inverse: Tensor | None = None  # [m, C, C]
    F: Tensor | None = None  # [m, C, K]
    first: Tensor | None = None  # [m, C, V]


def forward(x: Fields, S: Tensor, kind: Kind, keep: bool) -> tuple[Tensor, Tensor, list[Kept]]:
    """The outputs `[B, R, H, V]`, the memory after the last row `[B, H, K, V]`, and with `keep` what `backward` needs."""
    B, rows, H, _, V = x.w.shape
    o = x.w.new_empty(B, rows, H, V)
    kept = []
    run, kind = _erase_rows if x.erases else _shared_rows, kind.within(rows)
    S = _side_by_side(S, x.q.shape[2])
    for now in _segments(x, kind):
        chunks, S, found = run(x.at(now), S, kind)
        from_chunks(chunks, o[:, now])
        if keep:
            kept.append(found)
    return o, _heads_apart(S, B, V), kept


def backward(x: Fields, kept: Sequence[Kept], d_o: Tensor, dS: Tensor, kind: Kind) -> tuple[Fields, Tensor]:
    """The gradients of the fields and of the incoming memory."""
    B, rows, _, V = d_o.shape
    d = Fields(*(None if z is None else torch.empty_like(z) for z in x[:-1]))  # type: ignore[arg-type]
    run, kind = _erase_rows_back if x.erases else _shared_rows_back, kind.within(rows)
    dS = _side_by_side(dS, x.q.shape[2])
    for now, found in reversed(list(zip(_segments(x, kind), kept, strict=True))):
        dS = run(x.at(now), found, d_o[:, now], dS, kind, d.at(now))
    return d, _heads_apart(dS, B, V)


def segment_rows(x: Fields, kind: Kind) -> int:
    """Rows that are computed at once, whole chunks: so many that the temporaries of all rows and heads fit in a cache."""
    B, _, H, _, V = x.w.shape
    return fitting_rows(B * H * max(V, x.q.shape[-1]), kind, x.erases)


def fitting_rows(width: int, kind: Kind, erases: bool = True) -> int:
    """As `segment_rows`, for rows of `width` numbers."""
    numbers = CACHED if erases else CACHED_WITHOUT_ERASE
    return max(1, min(kind.segment, numbers // width) // kind.chunk) * kind.chunk


def _segments(x: Fields, kind: Kind) -> Iterator[slice]:
    rows, size = x.q.shape[1], segment_rows(x, kind)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def to_chunks(rows: Tensor, chunks: Tensor) -> None:
    """Copy `[B, R, H, (L,) …]` into chunks `[m, C, …]` (`[m, L·C, …]`), m = N·B·H, with zeros past the end.

    A zero row is an identity, so the last chunk may be partial.
    """
    view = _as_rows(chunks, rows)
    for part, source in _pairs(view, rows):
        part.copy_(source)
    rest = rows.shape[1] % view.shape[2]
    if rest:
        view[:, -1, rest:] = 0


def from_chunks(chunks: Tensor, rows: Tensor) -> None:
    """The inverse of `to_chunks`."""
    for part, target in _pairs(_as_rows(chunks, rows), rows):
        target.copy_(part)


def _as_rows(chunks: Tensor, rows: Tensor) -> Tensor:
    """`[m, (L·)C, …]` seen as `[B, N, C, H, (L,) …]`, the order of `rows` `[B, R, H, (L,) …]`."""
    B, _, H, *rest = rows.shape
    if rows.ndim == 5:
        return chunks.view(-1, B, H, rest[0], chunks.shape[1] // rest[0], rest[1]).permute(1, 0, 4, 2, 3, 5)
    return chunks.view(-1, B, H, *chunks.shape[1:]).permute(1, 0, 3, 2, *range(4, rows.ndim + 1))


def _pairs(view: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The whole chunks and their rows, then those of a partial last chunk."""
    C = view.shape[2]
    whole, rest = divmod(rows.shape[1], C)
    if whole:
        yield view[:, :whole], rows[:, : whole * C].unflatten(1, (whole, C))
    if rest:
        yield view[:, whole, :rest], rows[:, whole * C :]


def decays(like: Tensor, g: Tensor | None, reset: Tensor | None, C: int, *before: bool) -> tuple[Tensor, ...]:
    """Γ `[m, Z, C, 1, C]`, e^G `[m, Z, C, 1]`, e^{G_C - G} `[m, 1, C, 1]` and e^{G_C} `[m, 1, 1]` of rows in chunks.

    Args:
        like: `[B, R, H, …]`, of the dtype.
        g: the log-decays `[B, R, H]`.
        reset: `[B, R]`.
        C: rows of a chunk.
        before: for each of Z kinds of rows, whether they read S_{t-1}.
    """
    B, rows, H = like.shape[:3]
    log_decay, documents = like.new_zeros(-(-rows // C) * B * H, C), None
    if g is not None:
        to_chunks(g, log_decay)
    if reset is not None:
        begins = torch.empty_like(log_decay, dtype=torch.bool)
        to_chunks(reset.unsqueeze(2).expand(-1, -1, H), begins)
        documents = Documents(begins)
    decay, one = HeadDecay(log_decay, documents), like.new_ones(())
    gamma = _stacked([decay.weights(strict=b, before=b) for b in before])
    start = _stacked([decay.from_start(one, b) for b in before])
    return gamma.unsqueeze(3), start, decay.to_end(one), decay.carry().unsqueeze(-1)


def _stacked(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(1) if len(parts) == 1 else torch.stack(parts, 1)


class EraseSegment(NamedTuple):
    """A segment with an erase, in m = N·B·H chunks, the first chunk of every row and head first.

    The 2C rows are the queries above the erase keys. The J·C columns are the erase writes (if they are separate) above the
    L write keys. Γ is stored once if queries and erase keys share it, up to the diagonal.
    """

    z: Tensor  # [m, 2C, K]
    x: Tensor  # [m, J·C, K]
    strength: Tensor | None  # β, [m, C, 1], where the erase key is β k_1
    gamma: Tensor  # [m, 2 or 1, C, 1, C]
    start: Tensor  # [m, 2 or 1, C, 1]
    end: Tensor  # [m, 1, C, 1]
    carry: Tensor  # [m, 1, 1]

    @property
    def chunk(self) -> int:
        return self.gamma.shape[-1]

    def scaled(self, rows: Tensor, weight: Tensor) -> Tensor:
        """`[m, J·C, K]` times one weight per token, `[m, J or 1, C, 1]`."""
        return (rows.unflatten(1, (-1, self.chunk)) * weight).flatten(1, 2)

    def grid(self, pairs: Tensor) -> Tensor:
        """`[m, 2C, J·C]` → `[m, 2, C, J, C]`."""
        return pairs.unflatten(2, (-1, self.chunk)).unflatten(1, (-1, self.chunk))

    def decayed(self, pairs: Tensor) -> Tensor:
        """`[m, 2C, J·C]` ⊙ Γ, in place."""
        grid = self.grid(pairs)
        grid.mul_(self.gamma)
        grid[:, 1].diagonal(dim1=1, dim2=3).zero_()  # the erase does not see the token's own write
        return pairs

    def gram(self) -> Tensor:
        """[N; M] = (Z Xᵀ) ⊙ Γ, `[m, 2C, J·C]`."""
        return self.decayed(self.z @ self.x.mT)


def _erase_rows(x: Fields, S: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Kept]:
    """A segment's outputs `[m, C, V]`, the memory after it, and what its backward needs."""
    o, S, kept, _ = erase_forward(_erase_segment(x, kind), _writes(x, kind), S)
    return o, S, kept


def _erase_segment(x: Fields, kind: Kind) -> EraseSegment:
    (B, rows, H, K), C = x.q.shape, kind.chunk
    m, extra = -(-rows // C) * B * H, _erase_columns(x, kind)
    z, columns = x.q.new_empty(m, 2 * C, K), x.q.new_empty(m, extra + x.k.shape[3] * C, K)
    to_chunks(x.q, z[:, :C])
    to_chunks(x.k, columns[:, extra:])
    strength = None
    if x.erase_write is not None and x.erase_key is not None:
        to_chunks(x.erase_key, z[:, C:])
        to_chunks(x.erase_write, columns[:, :C])
    elif x.erase_strength is not None:
        strength = x.q.new_empty(m, C)
        to_chunks(x.erase_strength, strength)
        strength = strength.unsqueeze(-1)
        torch.mul(columns[:, :C], strength, out=z[:, C:])
    before = [kind.read_before] if kind.read_before == kind.look_before else [kind.read_before, kind.look_before]
    return EraseSegment(z, columns, strength, *decays(x.w, x.log_decay, x.reset, C, *before))


def _erase_columns(x: Fields, kind: Kind) -> int:
    """How many columns belong to the erase alone."""
    return 0 if x.erase_write is None else kind.chunk


def _writes(x: Fields, kind: Kind) -> Tensor:
    """Y° `[m, J·C, V]`: the writes, under zeros where the erase has separate columns."""
    (B, rows, H, L, V), C, extra = x.w.shape, kind.chunk, _erase_columns(x, kind)
    y = x.w.new_empty(-(-rows // C) * B * H, extra + L * C, V)
    y[:, :extra] = 0
    to_chunks(x.w, y[:, extra:])
    return y


def erase_forward(s: EraseSegment, y: Tensor, S: Tensor) -> tuple[Tensor, Tensor, Kept, Tensor]:
    """The outputs of a segment `[m, C, V]`, the memory after it `[B·H, K, V]`, what `erase_backward` needs, and [N; M].

    y is Y°, `[m, J·C, V]`; it is overwritten.
    """
    C = s.chunk
    z_start, x_end = s.scaled(s.z, s.start), s.scaled(s.x, s.end)
    MN = s.gram()
    T = _inverse(s, MN)
    F = T @ z_start[:, C:]
    if y.shape[1] == C:
        y = T @ y
    else:
        y[:, :C] = T @ (y[:, :C] - MN[:, C:, C:] @ y[:, C:])
    incoming, S = _chain(S, s.carry, x_end, y, F)
    o = z_start[:, :C] @ incoming
    return o.baddbmm_(MN[:, :C], y), S, Kept(incoming, T, F, y[:, :C].contiguous()), MN


def _inverse(s: EraseSegment, MN: Tensor) -> Tensor:
    """T⁻¹ `[m, C, C]`.

    Where every step contracts, I - β k kᵀ with 0 ≤ β|k|² ≤ 1 up to rounding, its entries are at most 1. Otherwise, for example
    where reflections (β near 2) meet nearly equal keys, a row can have many large ones, which amplify the rounding of M, so
    that both are made in float64.
    """
    C, on_cpu = s.chunk, s.z.device.type == "cpu"  # elsewhere reading a value would wait for the device
    contracts = False
    if s.strength is not None and on_cpu:
        low, high = torch.linalg.vecdot(s.z[:, C:], s.x[:, :C]).aminmax()
        contracts = bool(low >= 0) and bool(high <= 1 + 1e-5)
    if contracts or on_cpu:
        found = unit_lower_inverse(MN[:, C:, :C])
        if contracts or bool(found.abs().sum(-1).amax() <= SMALL_SUM):
            return found
    exact = (s.z[:, C:].double() @ s.x[:, :C].double().mT).mul_(s.gamma[:, -1, :, 0])
    return unit_lower_inverse(exact).to(s.z.dtype)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + L)⁻¹ for L `[m, C, C]`, of which only the part below the diagonal is read.

    Forward substitution, never repeated squaring: with correlated keys (I - L)(I + L²)(I + L⁴)… is wrong by orders of magnitude
    in float32. LAPACK substitutes inside 16×16 diagonal blocks; then neighbouring blocks are joined for all matrices at once,
    [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [-C⁻¹ B A⁻¹, C⁻¹]].
    """
    C = lower.shape[-1]
    size = max(BLOCK, 1 << (C - 1).bit_length())
    if size != C:  # zeros below an identity change nothing
        lower = torch.nn.functional.pad(lower, (0, size - C, 0, size - C))
    inverse = torch.zeros_like(lower, memory_format=torch.contiguous_format)
    blocks, identity = _diagonal_blocks(lower, BLOCK), torch.eye(BLOCK, dtype=lower.dtype, device=lower.device)
    solved = torch.linalg.solve_triangular(blocks, identity.expand_as(blocks), upper=False, unitriangular=True)
    _diagonal_blocks(inverse, BLOCK).copy_(solved)
    h = BLOCK
    while h < size:
        pairs, corners = _diagonal_blocks(inverse, 2 * h), _diagonal_blocks(lower, 2 * h)[..., h:, :h]
        upper, under = pairs[..., :h, :h], pairs[..., h:, h:]
        pairs[..., h:, :h] = -(under @ (corners @ upper))
        h *= 2
    return inverse[:, :C, :C] if size != C else inverse


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """`[m, C, C]` → a view of its diagonal blocks `[m, C/size, size, size]`."""
    tiles = matrix.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [m, block row, size, block column, size]
    return tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1)


class EraseGradients(NamedTuple):
    """Of a segment's tensors, in chunks, and of its incoming memory."""

    z: Tensor  # [m, 2C, K]
    x: Tensor  # [m, J·C, K]
    y: Tensor  # [m, J·C, V]
    decay: Tensor | None  # [m, C]
    strength: Tensor | None  # [m, C]
    incoming: Tensor  # [B·H, K, V]


def _erase_rows_back(x: Fields, kept: Kept, d_o: Tensor, dS: Tensor, kind: Kind, d: Fields) -> Tensor:
    """Fill in the gradients d of a segment's rows; returns that of its incoming memory."""
    s, C, writes = _erase_segment(x, kind), kind.chunk, x.w.shape[3] * kind.chunk
    assert kept.first is not None
    if s.x.shape[1] == C:
        y = kept.first
    else:
        y = _writes(x, kind)
        y[:, :C] = kept.first
    d_rows = s.z.new_empty(*s.z.shape[:2], d_o.shape[-1])
    to_chunks(d_o, d_rows[:, :C])
    found = erase_backward(s, s.gram(), kept, y, d_rows, dS, None if d.log_decay is None else kind)
    for chunks, rows in (
        (found.z[:, :C], d.q),
        (found.x[:, -writes:], d.k),
        (found.y[:, -writes:], d.w),
        (found.decay, d.log_decay),
        (found.x[:, :C], d.erase_write),
        (found.z[:, C:], d.erase_key),
        (found.strength, d.erase_strength),
    ):
        if chunks is not None and rows is not None:
            from_chunks(chunks, rows)
    return found.incoming


def erase_backward(
    s: EraseSegment, MN: Tensor, kept: Kept, y: Tensor, d_rows: Tensor, dS: Tensor, decay: Kind | None
) -> EraseGradients:
    """The gradients of a segment.

    Args:
        s: the segment.
        MN: [N; M].
        kept: of `erase_forward`.
        y: Y, `[m, J·C, V]`.
        d_rows: `[m, 2C, V]`, dO in the first C rows; the rest is overwritten.
        dS: the gradient of the memory after the segment, `[B·H, K, V]`.
        decay: the kind if the gradient of the log-decay is wanted.
    """
    incoming, T, F, _ = kept
    assert T is not None and F is not None
    C = s.chunk
    q_start, x_end, d_o = s.z[:, :C] * s.start[:, 0], s.scaled(s.x, s.end), d_rows[:, :C]
    d_y = MN[:, :C].mT @ d_o
    outgoing, dS = _chain_back(dS, s.carry, q_start, d_o, F, x_end, d_y)
    d_first = T.mT @ d_y[:, :C]
    d_u = torch.neg(d_first, out=d_rows[:, C:])
    if y.shape[1] == C:
        d_y = d_first
    else:
        d_y[:, :C] = d_first
        d_y[:, C:].baddbmm_(MN[:, C:, C:].mT, d_u)

    d_MN = d_rows @ y.mT
    d_z, d_x = d_rows @ incoming.mT, y @ outgoing.mT
    d_z.unflatten(1, (-1, C)).mul_(s.start)
    d_x.unflatten(1, (-1, C)).mul_(s.end)
    d_decay = d_strength = None
    if decay is not None:
        from_state, pairs = (s.z * d_z).sum(-1), s.grid(MN * d_MN)
        d_decay = _decay_gradient(
            [
                (pairs[:, 0], from_state[:, :C], decay.read_before),
                (pairs[:, 1], from_state[:, C:], decay.look_before),
            ],
            (s.x * d_x).sum(-1).unflatten(1, (-1, C)).sum(1),
            s.carry.flatten() * torch.linalg.vecdot(outgoing.flatten(1), incoming.flatten(1)),
        )
    s.decayed(d_MN)
    d_z.baddbmm_(d_MN, s.x)
    d_x.baddbmm_(d_MN.mT, s.z)
    if s.strength is not None:  # b = β k_1
        d_strength = (d_z[:, C:] * s.x[:, :C]).sum(-1)
        d_x[:, :C].addcmul_(s.strength, d_z[:, C:])
    return EraseGradients(d_z, d_x, d_y, d_decay, d_strength, dS)


class SharedSegment(NamedTuple):
    """A segment without an erase, in n = N·B·G chunks of queries and keys that r heads share."""

    q: Tensor  # [n, C, K]
    x: Tensor  # [n, L·C, K]
    y: Tensor  # [n, r, L, C, V]
    gamma: Tensor  # [n, r, C, 1, C]
    start: Tensor  # [n, r, C, 1]
    end: Tensor  # [n, r, 1, C, 1]
    carry: Tensor  # [n, 1, r, 1]

    def attention(self) -> Tensor:
        """(Q Xᵀ) ⊙ Γ, `[n, r, C, L·C]`."""
        product = (self.q @ self.x.mT).unflatten(2, (-1, self.gamma.shape[-1]))
        return (product.unsqueeze(1) * self.gamma).flatten(3)

    def wide(self, y: Tensor, weight: Tensor) -> Tensor:
        """`[n, r, L, C, V]` ⊙ weight as `[n, L·C, r·V]`: the heads of a group side by side."""
        n, r, L, C, V = y.shape
        wide = y.new_empty(n, L, C, r, V)
        torch.mul(y, weight, out=wide.permute(0, 3, 1, 2, 4))
        return wide.view(n, L * C, r * V)

    def wide_carry(self) -> Tensor:
        """`[n, 1, r·V]`."""
        return self.carry.expand(-1, -1, -1, self.y.shape[-1]).flatten(2)

    def heads(self, wide: Tensor) -> Tensor:
        """`[n, L·C, r·V]` → a view `[n, r, L, C, V]`."""
        return wide.unflatten(2, (-1, self.y.shape[-1])).unflatten(1, (-1, self.y.shape[3])).permute(0, 3, 1, 2, 4)

    def sums(self, wide: Tensor) -> Tensor:
        """Σ_v of `[n, L·C, r·V]`, `[m, L, C]`."""
        sums = wide.unflatten(2, (-1, self.y.shape[-1])).sum(-1)
        return sums.unflatten(1, (-1, self.y.shape[3])).movedim(3, 1).flatten(0, 1)


def _shared_segment(x: Fields, kind: Kind) -> SharedSegment:
    (B, rows, G, K), (H, L, V), C = x.q.shape, x.w.shape[2:], kind.chunk
    n, r = -(-rows // C) * B * G, H // G
    q, keys, y = x.q.new_empty(n, C, K), x.q.new_empty(n, L * C, K), x.w.new_empty(n * r, L * C, V)
    to_chunks(x.q, q)
    to_chunks(x.k, keys)
    to_chunks(x.w, y)
    gamma, start, end, carry = decays(x.w, x.log_decay, x.reset, C, kind.read_before)
    return SharedSegment(
        q,
        keys,
        y.view(n, r, L, C, V),
        gamma.view(n, r, C, 1, C),
        start.view(n, r, C, 1),
        end.view(n, r, 1, C, 1),
        carry.view(n, 1, r, 1),
    )


def _shared_rows(x: Fields, S: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Kept]:
    """A segment's outputs `[m, C, V]`, the memory after it, and what its backward needs."""
    s = _shared_segment(x, kind)
    incoming, S = _chain(S, s.wide_carry(), s.x, s.wide(s.y, s.end))
    o = torch.bmm(s.attention().flatten(0, 1), s.y.flatten(2, 3).flatten(0, 1)).view_as(s.y[:, :, 0])
    o.addcmul_(s.heads(s.q @ incoming)[:, :, 0], s.start)
    return o.flatten(0, 1), S, Kept(incoming)


def _shared_rows_back(x: Fields, kept: Kept, d_o: Tensor, dS: Tensor, kind: Kind, d: Fields) -> Tensor:
    """Fill in the gradients d of a segment's rows; returns that of its incoming memory."""
    s, incoming = _shared_segment(x, kind), kept.incoming
    d_out = torch.empty_like(s.y[:, :, 0])  # [n, r, C, V]
    to_chunks(d_o, d_out.flatten(0, 1))
    d_start, y_end = s.wide(d_out.unsqueeze(2), s.start.unsqueeze(2)), s.wide(s.y, s.end)
    outgoing, dS = _chain_back(dS, s.wide_carry(), s.q, d_start)

    N, y = s.attention(), s.y.flatten(2, 3).flatten(0, 1)
    d_y = torch.bmm(N.flatten(0, 1).mT, d_out.flatten(0, 1)).view_as(s.y)
    from_end = s.x @ outgoing  # [n, L·C, r·V]
    d_y.addcmul_(s.heads(from_end), s.end)
    from_chunks(d_y.flatten(2, 3).flatten(0, 1), d.w)

    d_N = torch.bmm(d_out.flatten(0, 1), y.mT).view_as(N).unflatten(-1, (-1, s.gamma.shape[-1]))
    if d.log_decay is not None:
        from_state = d_start.mul(s.q @ incoming)
        into_state = from_end.mul_(y_end)
        d_carry = (outgoing * incoming).unflatten(2, (-1, s.y.shape[-1])).sum((1, 3))
        d_decay = _decay_gradient(
            [(N.view_as(d_N).mul_(d_N).flatten(0, 1), s.sums(from_state)[:, 0], kind.read_before)],
            s.sums(into_state).sum(1),
            s.carry.flatten() * d_carry.flatten(),
        )
        from_chunks(d_decay, d.log_decay)
    d_A = d_N.mul_(s.gamma).sum(1).flatten(2)  # [n, C, L·C]
    from_chunks((d_A @ s.x).baddbmm_(d_start, incoming.mT), d.q)
    from_chunks((d_A.mT @ s.q).baddbmm_(y_end, outgoing.mT), d.k)
    return dS


def _chain(S: Tensor, carry: Tensor, x_end: Tensor, y: Tensor, F: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The state each chunk starts from `[n, K, r·V]`, and the one after the last `[B·G, K, r·V]`: the only serial part.

    Args:
        S: the state before the first chunk.
        carry: e^{G_C}, `[n, 1, 1 or r·V]`.
        x_end, y: `[n, J·C, K]`, `[n, J·C, r·V]`, one of them times e^{G_C - G}.
        F: `[n, C, K]`; F S is subtracted from the first C rows of y, in place. None without an erase.
    """
    width = len(S)
    states = y.new_empty(len(y) + width, *S.shape[1:])
    states[:width] = S
    each = states.split(width)
    if F is None:  # no write depends on a state: all at once
        torch.bmm(x_end.mT, y, out=states[width:])
        for now, following, c in zip(each, each[1:], carry.split(width), strict=False):
            following.addcmul_(c, now)
    else:
        parts = (z.split(width) for z in (carry, x_end.mT, y, F, y[:, : F.shape[1]]))
        for now, following, c, x, writes, f, first in zip(each, each[1:], *parts, strict=False):
            first.baddbmm_(f, now, alpha=-1)
            torch.mul(now, c, out=following).baddbmm_(x, writes)
    return states[:-width], states[-width:].clone()


def _chain_back(
    dS: Tensor,
    carry: Tensor,
    q_start: Tensor,
    d_o: Tensor,
    F: Tensor | None = None,
    x_end: Tensor | None = None,
    d_y: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of each chunk's outgoing state `[n, K, r·V]`, and of the first incoming one `[B·G, K, r·V]`.

    Args:
        dS: the gradient of the state after the last chunk.
        carry, F, x_end: as for `_chain`.
        q_start, d_o: `[n, C, K]`, `[n, C, r·V]`, one of them times e^G.
        d_y: with an erase the gradient of Y from the outputs, `[n, J·C, V]`; that from the states is added, in place.
    """
    width = len(dS)
    gradients = dS.new_empty(len(d_o) + width, *dS.shape[1:])
    gradients[-width:] = dS
    torch.bmm(q_start.mT, d_o, out=gradients[:-width])
    each = gradients.split(width)
    if F is None or x_end is None or d_y is None:
        for now, following, c in reversed(list(zip(each, each[1:], carry.split(width), strict=False))):
            now.addcmul_(c, following)
    else:
        parts = (z.split(width) for z in (carry, F.mT, x_end, d_y, d_y[:, : F.shape[1]]))
        for now, following, c, f, x, writes, first in reversed(list(zip(each, each[1:], *parts, strict=False))):
            writes.baddbmm_(x, following)
            now.addcmul_(c, following).baddbmm_(f, first, alpha=-1)
    return gradients[width:], gradients[:width]


def _side_by_side(S: Tensor, G: int) -> Tensor:
    """`[B, H, K, V]` → `[B·G, K, r·V]`: the memories of a group side by side."""
    return S.unflatten(1, (G, -1)).movedim(2, 3).flatten(0, 1).flatten(2)


def _heads_apart(S: Tensor, B: int, V: int) -> Tensor:
    """The inverse of `_side_by_side`."""
    return S.unflatten(2, (-1, V)).movedim(2, 1).unflatten(0, (B, -1)).flatten(1, 2).contiguous()


def _decay_gradient(rows: list[tuple[Tensor, Tensor, bool]], into_state: Tensor, carried: Tensor) -> Tensor:
    """dg `[m, C]`: dG_i, plus as a row and minus as a column, summed over the tokens at and after each one.

    Args:
        rows: for each kind of rows dΓ ⊙ Γ `[m, C, J, C]`, the part of their gradient that came through the incoming state
            `[m, C]`, and whether they read S_{t-1}.
        into_state: the columns' part that came through the outgoing state, `[m, C]`.
        carried: the gradient of log e^{G_C} from the incoming state itself, `[m]`.
    """
    into_state[:, -1] = 0  # exp(0), as on the diagonal
    d_G = -into_state.double()
    d_G[:, -1] += into_state.sum(-1) + carried
    for pairs, from_state, before in rows:
        if not before:
            # A weight on the diagonal is exp(0). It is left out: its two halves would cancel only up to rounding, which is
            # larger than the gradient of a strong decay.
            pairs.diagonal(dim1=1, dim2=3).zero_()
        d_G -= pairs.sum((1, 2))
        at_rows = pairs.sum((2, 3)) + from_state
        if before:  # G_{i-1}; the first row's is the constant 0
            d_G[:, :-1] += at_rows[:, 1:]
        else:
            d_G += at_rows
    return d_G.flip(-1).cumsum(-1).flip(-1)
