"""Mixture of memories: a router sends every token to a few of several memories, all of one inner rule.

    o_t = Σ_{m routed} g_{t,m} (S^m_t)ᵀq_t  (+ (S^shared_t)ᵀq_t)   g = top-k of softmax(W_r x), renormalised  (Du et al., 2025)

A memory is left unchanged by a token that is not sent to it: it is neither written nor decayed, and its convolution sees
the neighbours that were sent to it, not those in the text. Memories share everything for queries and outputs (q, output
norm, gate and projection, the convolution, the constants of the decay). Each has its own maps for what it writes and
forgets; a map that serves both purposes (Mamba-1's) is each memory's own. Where a rule's output is more than a read of the
memory (Mamba's skip, mLSTM's divisor, RWKV's bonus), whole outputs are mixed instead of reads. Values from the layer below
(RWKV-7's first value) are not passed to the inner rule.

The memories are extra rows of the batch: row b·M + m holds the tokens of sequence b that were sent to memory m, in order,
followed by padding. So every rule, form and backend works in a mixture unchanged.

The load-balance loss (`balance` · M Σ_m fraction_m · probability_m) is added to `shared["balance_loss"]`, in the dict that is
passed from layer to layer. The language model returns it as `balance_loss` and, in training, includes it in its loss.

In this file: the inner rule's maps for M memories, routing of tokens, and the rule `Mom`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prism.engine.inputs import without_autocast
from prism.engine.memories.folded import Folded, fold, unfold
from prism.rules.parts import BlockLinear, Carry, at_least_float32
from prism.rules.rule import Objective, Paper, Rule, Span, check_integers, check_nonnegative, depth, rule_named


class MemoryMaps(nn.Module):
    """A linear map for each of M memories: `[B·M, T, width]` → `[B·M, T, out]`, row b·M + m by map m.

    Args:
        maps: one `nn.Linear` or `BlockLinear` per memory. A plain map is treated as a single block.
        first: a map that all memories share; its outputs come before the others.
    """

    def __init__(self, maps: Sequence[nn.Module], first: nn.Linear | None = None) -> None:
        super().__init__()
        self.maps = nn.ModuleList(maps)
        self.first = first
        self.blocks = maps[0].blocks if isinstance(maps[0], BlockLinear) else 1

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.stack([one.weight for one in self.maps]).unflatten(1, (self.blocks, -1))  # type: ignore[misc]  # a ModuleList has no element type
        rows = x.unflatten(-1, (self.blocks, -1)).unflatten(0, (-1, len(weight)))
        y = torch.einsum("bmtni,mnoi->bmtno", rows, weight).flatten(-2)
        if self.maps[0].bias is not None:
            y = y + torch.stack([one.bias for one in self.maps]).unsqueeze(1)  # type: ignore[misc]  # a ModuleList has no element type
        y = y.flatten(0, 1)
        return y if self.first is None else torch.cat([self.first(x), y], -1)


def replicate_write_projections(rules: list[Rule]) -> Rule:
    """Merge M copies of a rule into the first one, for batches of B·M rows.

    Each of its maps that write or forget becomes a `MemoryMaps` of the M copies. The maps in `shared_maps` stay single.
    """
    rule = rules[0]
    names = [name for name, part in rule.named_modules() if isinstance(part, (nn.Linear, BlockLinear))]
    shared = _shared_maps(rule, names)
    for name in names:
        if name.split(".")[0] in shared:
            continue
        maps = [one.get_submodule(name) for one in rules]
        place, _, leaf = name.rpartition(".")
        own = _split_query(maps[0], rule.query_size, len(maps)) if name in rule.query_first_maps else MemoryMaps(maps)
        setattr(rule.get_submodule(place), leaf, own)
    return rule


def _shared_maps(rule: Rule, maps: list[str]) -> tuple[str, ...]:
    """The maps that the rule declares as shared. Raises a ValueError if it declares none, or one that it does not have."""
    if rule.shared_maps is None and maps:
        raise ValueError(
            f"rule {rule.name!r} cannot be mixed: it has the linear maps {', '.join(maps)} and does not say which of them the "
            "memories share; set shared_maps on its class to those for queries and outputs, such as ('query', 'out')"
        )
    shared = rule.shared_maps or ()
    unknown = [name for name in (*shared, *rule.query_first_maps) if not hasattr(rule, name)]
    if unknown:
        raise ValueError(
            f"shared_maps and query_first_maps of rule {rule.name!r} name {unknown[0]!r}, which it does not have"
        )
    return shared


def _split_query(whole: nn.Module, query_size: int, memories: int) -> MemoryMaps:
    """Split a joint map to q and more: one shared map to q, and one map per memory to the rest."""
    assert isinstance(whole, nn.Linear)
    rest = whole.out_features - query_size
    first, *own = (nn.Linear(whole.in_features, n, bias=False) for n in (query_size, *[rest] * memories))
    return MemoryMaps(own, first)


class Routing(NamedTuple):
    """Which tokens were sent to which memory, for `output`."""

    weights: Tensor  # [B, M, T], zero where a token was not sent
    order: Tensor  # [B, M, T], the index of the token in each position
    x: Tensor  # [B·M, T, width]
    extra: Any  # the inner rule's


def gather_tokens(x: Tensor, order: Tensor) -> Tensor:
    """Reorder the tokens of each memory, `[B, M, T, D]`: position i of memory m gets token order[b, m, i]."""
    return x.gather(2, order.unsqueeze(-1).expand_as(x))


def memory_resets(order: Tensor, mask: Tensor, stale: Tensor | None, span: Span) -> tuple[Tensor | None, Tensor]:
    """Where documents start in each memory `[B, M, T]`, and which memories `[B, M]` still hold an earlier document.

    A document may send its first token, or all of them, to other memories. A memory is then reset when it is next written.
    """
    if span.reset is None and stale is None:
        return None, torch.zeros(order.shape[:2], dtype=torch.bool, device=order.device)
    document = torch.zeros_like(order[:, 0]) if span.documents is None else span.documents
    documents = document.unsqueeze(1).expand_as(order).gather(-1, order)
    before = torch.zeros_like(documents[..., :1]) if stale is None else -stale.long().unsqueeze(-1)
    documents = torch.cat([before, documents], -1)
    last = documents.gather(-1, mask.sum(-1, keepdim=True)).squeeze(-1)
    current = span.last(torch.cat([torch.zeros_like(document[:, :1]), document], 1), 1)
    return (documents[..., 1:] != documents[..., :-1]) & mask, last != current


def imbalance(scores: Tensor, chosen: Tensor, mask: Tensor | None) -> Tensor:
    """M Σ_m (fraction of tokens sent to m) · (mean probability of m), over real tokens; top_k if perfectly balanced."""
    real = torch.ones_like(scores[..., :1]) if mask is None else mask.unsqueeze(-1).to(scores.dtype)
    count = real.sum().clamp(min=1)
    fraction, probability = ((z * real).sum((0, 1)) / count for z in (chosen.to(scores.dtype), scores))
    return scores.shape[-1] * (fraction * probability).sum()


class Mom(Rule):
    """Mixture of memories: a router sends each token to a few memories of another rule.

    Defaults as published: four memories and a shared one, two of the four for each token, around Gated DeltaNet.

    Args:
        inner: the rule of every memory; any whose state has a constant size.
        memories: number of memories that the router chooses from.
        top_k: number of memories for each token. With 1 the weight is always 1, and only the balance loss trains the router.
        shared: whether there is one more memory, which receives every token.
        balance: weight of the load-balance loss.
        inner_options: options of the inner rule.
    """

    name = "mom"
    paper = Paper("Mixture-of-Memories", "Du et al. 2025", "https://arxiv.org/abs/2502.13685")
    objective = Objective("the inner rule's")
    forgetting = "the inner rule's, none if not routed"
    transition = "the inner rule's, per memory"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        inner: str = "gated_delta",
        memories: int = 4,
        top_k: int = 2,
        shared: bool = True,
        balance: float = 0.01,
        inner_options: dict[str, Any] | None = None,
        layer_index: int = 0,
        layer_count: int = 1,
    ) -> None:
        check_integers(memories=memories)
        check_nonnegative(balance=balance)
        depth(layer_index, layer_count)  # checks them
        if not isinstance(top_k, int) or not 1 <= top_k <= memories:
            raise ValueError(f"top_k must be one of 1 … memories = {memories}, got {top_k!r}")
        kind = rule_named(inner)
        if kind is Mom or not kind.constant_state:
            raise ValueError(f"inner must be a rule whose state has a constant size, other than mom: got {inner!r}")
        position = {"layer_index": layer_index, "layer_count": layer_count}
        accepted = kind.option_names()
        options = {**{n: v for n, v in position.items() if n in accepted}, **(inner_options or {})}
        super().__init__(width, heads, 1, 1)
        count = memories + shared
        self.inner = replicate_write_projections([kind.build(width, heads, **options) for _ in range(count)])
        self.router = nn.Linear(width, memories, bias=False)
        self.top_k, self.shared, self.balance, self.count = top_k, shared, balance, count
        self.key_dim, self.value_dim, self.forms = self.inner.key_dim, self.inner.value_dim, self.inner.forms
        self.state_size = count * self.inner.state_size
        self.write_rank = (top_k + shared) * self.inner.write_rank

    @classmethod
    def with_sizes(cls, sizes: Mapping[str, int], options: Mapping[str, Any]) -> dict[str, Any]:
        """As in `Rule`; sizes are those of the inner rule."""
        inner = rule_named(options.get("inner", cls.option_parameters()["inner"].default))
        return {**options, "inner_options": inner.with_sizes(sizes, options.get("inner_options") or {})}

    def route(self, x: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        """Weights `[B, T, M]`, and bool `[B, T, M]`, which memories a token is sent to; the shared memory comes last."""
        # In float32 even in half-precision models: rounding must not decide near-ties.
        logits = without_autocast(F.linear, at_least_float32(x), at_least_float32(self.router.weight))
        scores = logits.softmax(-1)
        best = scores.topk(self.top_k, -1)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, True)
        weights = torch.where(chosen, scores, 0.0) / best.values.sum(-1, keepdim=True)
        if span.shared is not None:
            loss = self.balance * imbalance(scores, chosen, span.mask)
            span.shared["balance_loss"] = span.shared["balance_loss"] + loss if "balance_loss" in span.shared else loss
        if self.shared:
            always = torch.ones_like(scores[..., :1])
            weights, chosen = torch.cat([weights, always], -1), torch.cat([chosen, always.bool()], -1)
        return weights, chosen if span.mask is None else chosen & span.mask.unsqueeze(-1)

    def update(self, x: Tensor, carry: Carry, span: Span) -> tuple[Folded, dict[str, Tensor], Routing]:
        weights, chosen = self.route(x, span)
        order = torch.argsort(~chosen.mT, dim=-1, stable=True)  # [B, M, T]: routed tokens first
        mask = chosen.mT.gather(-1, order)
        reset, stale = memory_resets(order, mask, carry.get("stale"), span)
        tokens = fold(gather_tokens(x.unsqueeze(1).expand(-1, self.count, -1, -1), order))
        old = {name.removeprefix("inner."): fold(z) for name, z in carry.items() if name.startswith("inner.")}
        update, new, extra = self.inner.update(tokens, old, Span(fold(mask), None if reset is None else fold(reset)))
        following = {f"inner.{name}": unfold(z, self.count) for name, z in new.items()}
        return Folded(update, self.count), {**following, "stale": stale}, Routing(weights.mT, order, tokens, extra)

    def output(self, o: Tensor, x: Tensor, extra: Routing) -> Tensor:
        linear = extra.extra is None
        outputs = unfold(o if linear else self.inner.output(o, extra.x, extra.extra), self.count).flatten(3)
        outputs = gather_tokens(outputs, extra.order.argsort(-1))  # back into the order of the text
        mixed = (extra.weights.to(outputs.dtype).unsqueeze(-1) * outputs).sum(1)
        return self.inner.output(mixed.view(*mixed.shape[:2], *o.shape[2:]), x, None) if linear else mixed
