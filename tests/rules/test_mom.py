"""A mixture of memories: each is its inner rule on the tokens sent to it, and unchanged by the others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import prism
from prism import Mixer, rules
from prism.rules.mom import MemoryMaps
from prism.rules.rule import Span
from tests.helpers import assert_close
from tests.rules.rule_cases import SMALL_HEADS, SMALL_WIDTH, small_mixer, small_tokens

INNERS = [name for name in rules.names() if rules.get(name).constant_state and name != "mom"]


def of_one_memory(mom: Any, index: int, inner: str, **options: Any) -> Mixer:
    """The inner rule by itself, with the weights it has as memory `index`."""
    alone = small_mixer(inner, **options)
    weights: dict[str, Tensor] = {}
    for name, part in mom.inner.named_modules():
        for kind in ("weight", "bias"):
            if not isinstance(part, MemoryMaps) or getattr(part.maps[index], kind) is None:
                continue
            own = getattr(part.maps[index], kind)
            weights[f"{name}.{kind}"] = own if part.first is None else torch.cat([part.first.weight, own])
    common = {n: p for n, p in mom.inner.named_parameters() if ".maps." not in n and ".first." not in n}
    alone.rule.load_state_dict({**common, **weights}, strict=True)
    return alone


@pytest.mark.parametrize("inner", INNERS)
def test_one_memory_is_its_inner_rule(inner: str) -> None:
    mixture = small_mixer("mom", inner=inner, memories=1, top_k=1, shared=False)
    alone = of_one_memory(mixture.rule, 0, inner)
    x, mask = small_tokens(2, 21), torch.rand(2, 21) < 0.8
    reset = (torch.rand(2, 21) < 0.1) & mask
    for flags in ({}, {"mask": mask, "reset": reset}):
        y, state = mixture(x, **flags)
        expected, end = alone(x, **flags)
        assert_close("outputs", y, expected, 1e-12)
        following = small_tokens(2, 3)
        assert_close("what follows", mixture(following, state)[0], alone(following, end)[0], 1e-12)


@pytest.mark.parametrize("inner", INNERS)
def test_several_memories_of_any_rule_are_cut_packed_and_padded_as_one(inner: str) -> None:
    """What is routed is a ragged batch inside: rows stand at different places of their windows and mini-batches."""
    mixture = small_mixer("mom", inner=inner, memories=3)
    x, whole = small_tokens(2, 13), torch.zeros(2, 13, SMALL_WIDTH, dtype=torch.float64)
    reset = torch.zeros(2, 13, dtype=torch.bool)
    reset[0, [2, 6]] = reset[1, [1, 9]] = True
    for row, cuts in enumerate(((0, 2, 6, 13), (0, 1, 9, 13))):
        for begin, end in itertools.pairwise(cuts):
            whole[row, begin:end] = mixture(x[row : row + 1, begin:end])[0][0]
    assert_close("packed", mixture(x, reset=reset)[0], whole, 1e-10)
    first, state = mixture(x[:, :7], reset=reset[:, :7])
    second, _ = mixture(x[:, 7:], state, reset=reset[:, 7:])
    assert_close("cut", torch.cat([first, second], 1), whole, 1e-10)
    mask = torch.rand(2, 20).argsort(1).argsort(1) < 13
    padded = torch.full((2, 20, SMALL_WIDTH), torch.nan, dtype=torch.float64)
    padded[mask] = x.flatten(0, 1)
    again = torch.zeros_like(mask)
    again[mask] = reset.flatten()
    assert_close("padded", mixture(padded, mask=mask, reset=again)[0][mask], whole.flatten(0, 1), 1e-10)


@pytest.mark.parametrize("shared", [True, False])
def test_a_memory_is_its_inner_rule_on_the_tokens_sent_to_it(shared: bool) -> None:
    """Token by token from the definition: routed subsequences alone, their reads weighted and added, one output for all."""
    mixture = small_mixer("mom", shared=shared)
    rule: Any = mixture.rule
    x = small_tokens(1, 30)
    scores = (x @ rule.router.weight.T).softmax(-1)[0]
    reads = torch.zeros(1, 30, SMALL_HEADS, rule.value_dim, dtype=torch.float64)
    for m in range(4 + shared):
        chosen = [t for t in range(30) if m == 4 or m in scores[t].topk(2).indices]
        alone = of_one_memory(rule, m, "gated_delta")
        update, _, _ = alone.rule.update(x[:, chosen], {}, Span())
        o, _ = prism.memory(update, form="recurrent")
        for place, t in enumerate(chosen):
            weight = 1.0 if m == 4 else scores[t, m] / scores[t].topk(2).values.sum()
            reads[:, t] += weight * o[:, place]
    assert_close("outputs", mixture(x)[0], rule.inner.output(reads, x, None), 1e-12)


def test_what_is_not_routed_stands_still() -> None:
    mixture = small_mixer("mom", memories=3, top_k=1, shared=False)
    _, state = mixture(small_tokens(2, 12))
    x = small_tokens(2)
    chosen = (x @ mixture.rule.router.weight.T).argmax(-1)
    _, after = mixture.decode(x, state)
    for name, value in after.tensors().items():
        if name == "carry.stale":
            continue
        for row in range(2):
            for m in range(3):
                same = torch.equal(value[row, m], state.tensors()[name][row, m])
                assert same is (m != chosen[row].item()), name


def test_autocast_does_not_decide_where_tokens_go() -> None:
    """Scores differ by a hundredth of a per cent, which bfloat16 rounds to equal."""
    rule: Any = small_mixer("mom", torch.float32, shared=False, top_k=1).rule
    x = small_tokens(1, 200, dtype=torch.float32)
    rule.router.weight.copy_(rule.router.weight[:1] * (1 + 1e-4 * torch.arange(4.0)[:, None]))
    with torch.autocast("cpu", torch.bfloat16):
        _, chosen = rule.route(x, Span())
    assert torch.equal(chosen, rule.route(x, Span())[1])
    assert chosen.any(1).sum() == 2  # the largest and the smallest, by the sign of the score


def test_memories_differ_and_share_what_asks() -> None:
    mixture = small_mixer("mom")
    parameters = dict(mixture.rule.inner.named_parameters())
    assert {"qkv.first.weight", "out.weight", "gate.weight", "conv.weight", "decay.A_log"} <= parameters.keys()
    assert [name for name in parameters if name.startswith("qkv.maps")] == [f"qkv.maps.{m}.weight" for m in range(5)]
    assert len({parameters[f"beta.maps.{m}.weight"].sum().item() for m in range(5)}) == 5


ASK = {"mesa": "qk", "mlstm": "query", "rwkv6": "receptance", "rwkv7": "receptance"}
MIXED = ("mamba1", "longhorn", "hgrn", "rg_lru", "s4d", "slstm")
"""Rules that have no query, or find it by a map that does more."""


@pytest.mark.parametrize("inner", [name for name in INNERS if name not in MIXED])
def test_every_rule_with_a_query_asks_all_memories_the_same(inner: str) -> None:
    parameters = dict(Mixer("mom", SMALL_WIDTH, SMALL_HEADS, inner=inner, memories=2).rule.inner.named_parameters())
    ask = ASK.get(inner, "qkv")
    assert f"{ask}.first.weight" in parameters or f"{ask}.weight" in parameters


@pytest.mark.parametrize("inner", [name for name in INNERS if name != "s4d"])
def test_no_two_memories_write_alike(inner: str) -> None:
    """But for S4D, which has no map to what it writes."""
    parameters = Mixer(
        "mom", SMALL_WIDTH, SMALL_HEADS, inner=inner, memories=2, shared=False
    ).rule.inner.named_parameters()
    drawn = [p for name, p in parameters if ".maps." in name and p.count_nonzero()]
    assert len(drawn) >= 2 and len({p.sum().item() for p in drawn}) > len(drawn) / 2


def test_sizes_count_every_memory() -> None:
    plain = Mixer("gated_delta", SMALL_WIDTH, SMALL_HEADS)
    mixture = Mixer("mom", SMALL_WIDTH, SMALL_HEADS, memories=3, top_k=2)
    assert mixture.state_size == 4 * plain.state_size
    assert mixture.write_rank == 3
    assert Mixer("mom", SMALL_WIDTH, SMALL_HEADS, inner="hgrn").forms == rules.get("hgrn").forms


def test_the_balance_loss_is_least_when_all_memories_are_used() -> None:
    """M Σ fraction · probability over real tokens: top_k when balanced, more when not; layers add up."""
    mixture = small_mixer("mom", balance=1.0)
    x, mask = small_tokens(2, 400), torch.rand(2, 400) < 0.7
    mixture.rule.router.weight.mul_(1e-3)
    shared: dict[str, Tensor] = {}
    mixture(x, shared=shared)
    assert shared["balance_loss"].item() == pytest.approx(2.0, rel=0.02)
    mixture(x, shared=shared)
    assert shared["balance_loss"].item() == pytest.approx(4.0, rel=0.02)

    mixture.rule.router.weight.mul_(1e4)
    alone: dict[str, Tensor] = {}
    mixture(torch.where(mask.unsqueeze(-1), x, torch.nan), mask=mask, shared=alone)
    scores = (x[mask] @ mixture.rule.router.weight.T).softmax(-1)
    sent = torch.zeros_like(scores).scatter(-1, scores.topk(2, -1).indices, 1.0)
    assert_close("loss", alone["balance_loss"], 4 * (sent.mean(0) * scores.mean(0)).sum(), 1e-12)


def test_a_language_model_in_training_pays_for_imbalance() -> None:
    from prism.models import PrismConfig, PrismForCausalLM

    lm = PrismForCausalLM(
        PrismConfig(vocab_size=11, hidden_size=SMALL_WIDTH, num_heads=SMALL_HEADS, layers="mom*2+delta")
    )
    ids = torch.randint(0, 11, (2, 12))
    asked, trained = lm.eval()(ids, labels=ids), lm.train()(ids, labels=ids)
    assert 0.01 * 2 * 2 < asked.balance_loss.item() < 0.01 * 2 * 4  # two layers, between even and all to the same
    assert_close("loss", trained.loss, asked.loss + asked.balance_loss, 1e-6)
    plain = PrismForCausalLM(PrismConfig(vocab_size=11, hidden_size=SMALL_WIDTH, num_heads=SMALL_HEADS, layers="delta"))
    assert plain(ids).balance_loss is None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"inner": "mom"}, "inner must be a rule whose state has a constant size"),
        ({"inner": "softmax"}, "inner must be a rule whose state has a constant size"),
        ({"inner": "nonsense"}, "unknown rule 'nonsense'"),
        ({"memories": 0}, "memories must be an integer ≥ 1"),
        ({"top_k": 5}, "top_k must be one of 1 … memories = 4"),
        ({"inner_options": {"steps": 2}}, "rule 'gated_delta' has no option 'steps'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Mixer("mom", SMALL_WIDTH, SMALL_HEADS, **options)


def test_a_state_of_another_mixture_is_refused() -> None:
    _, state = small_mixer("mom", memories=3)(small_tokens(1, 4))
    with pytest.raises(ValueError, match="with M = 5"):
        small_mixer("mom")(
            small_tokens(1, 4), prism.State(state.memory, small_mixer("mom")(small_tokens(1, 4))[1].carry)
        )


def test_a_budget_sets_the_sizes_of_the_inner_rule() -> None:
    """So that a comparison gives every rule the same keys, values and convolution."""
    sizes = {"key_dim": 3, "value_dim": 5, "conv_size": 1}
    options = rules.get("mom").with_sizes(sizes, {"memories": 2, "inner_options": {"value_dim": 4}})
    assert options == {"memories": 2, "inner_options": {"key_dim": 3, "value_dim": 4, "conv_size": 1}}
    mixture = Mixer("mom", 8, 2, **options).rule
    assert (mixture.key_dim, mixture.value_dim, mixture.inner.conv.size) == (3, 4, 1)
    assert "conv_size" not in rules.get("mom").with_sizes(sizes, {"inner": "rwkv7"})["inner_options"]
    assert rules.get("prism").with_sizes(sizes, {"key_dim": 7}) == {**sizes, "key_dim": 7}
