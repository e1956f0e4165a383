"""One token per row by its own way: the numbers of the forward pass, whatever changes between two tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from prism.engine import token, using
from prism.models import Decoder, PrismCache, PrismForCausalLM, decode
from tests.helpers import examples
from tests.models.stacks import HYBRIDS, STACKS, label, model, tokens


@torch.no_grad()
def read(lm: PrismForCausalLM, ids: Tensor, cache: PrismCache | None = None) -> PrismCache:
    """The cache after these tokens, in one pass."""
    cache = PrismCache() if cache is None else cache
    lm(ids, past_key_values=cache)
    return cache


@torch.no_grad()
def decoded(lm: PrismForCausalLM, cache: PrismCache, ids: Tensor) -> Tensor:
    """Logits after each token, one at a time."""
    return torch.cat([lm(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])], 1)


def forward(lm: PrismForCausalLM, cache: PrismCache, ids: Tensor) -> Tensor:
    """The same by the forward pass, which gradients ask for."""
    parts = [lm(ids[:, i : i + 1], past_key_values=cache).logits.detach() for i in range(ids.shape[1])]
    cache.states = [state.detach() for state in cache.states]
    return torch.cat(parts, 1)


def assert_equal_states(found: PrismCache, expected: PrismCache) -> None:
    assert found.tokens == expected.tokens
    for name, value in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[name], value, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("layers", STACKS, ids=label)
def test_every_stack_gives_the_numbers_of_forward(layers: Any) -> None:
    lm, ids = model(layers), tokens(3, 12)
    ours, theirs = read(lm, ids[:, :6]), read(lm, ids[:, :6])
    reset = torch.tensor([[False], [True], [False]])
    with torch.no_grad():
        for cache in (ours, theirs):
            lm(ids[:, 6:7], reset=reset, past_key_values=cache)
    expected = forward(lm, theirs, ids[:, 7:])
    torch.testing.assert_close(decoded(lm, ours, ids[:, 7:]), expected, atol=1e-12, rtol=1e-11)
    assert_equal_states(ours, theirs)
    assert ours.weights is not None and theirs.weights is None


@pytest.mark.parametrize("layers", ["prism*2", "gla+mamba2", *HYBRIDS])
def test_resuming_does_not_change_a_bit(layers: str) -> None:
    lm, ids = model(layers, torch.float32), tokens(1, 20)
    whole, resumed, answers = read(lm, ids[:, :7]), read(lm, ids[:, :7]), []
    for i in range(7, 16):
        if i in (7, 8, 12):
            resumed = PrismCache.load({name: x.clone() for name, x in resumed.tensors().items()})
        answers.append(decoded(lm, resumed, ids[:, i : i + 1]))
    assert torch.equal(torch.cat(answers, 1), decoded(lm, whole, ids[:, 7:16]))
    assert all(torch.equal(x, resumed.tensors()[name]) for name, x in whole.tensors().items())


@given(st.sampled_from(["prism*2", "delta*2", "kda+gla", "delta_product+softmax"]), st.data())
@examples(12)
def test_an_interrupted_token_changes_nothing(layers: str, data: st.DataObject) -> None:
    """Interrupted at any operation of torch."""
    lm, ids = model(layers, torch.float32), tokens(2, 9)
    cache = read(lm, ids[:, :6])
    decoded(lm, cache, ids[:, 6:7])
    before = {name: x.clone() for name, x in cache.tensors().items()}
    whole, after = Interrupt(None), cache.copy()
    with whole:
        expected = decoded(lm, after, ids[:, 7:8])
    with pytest.raises(KeyboardInterrupt), Interrupt(data.draw(st.integers(0, whole.count - 1))):
        decoded(lm, cache, ids[:, 7:8])
    if cache.tokens == after.tokens:  # what was interrupted shaped the answer
        assert all(torch.equal(x, after.tensors()[name]) for name, x in cache.tensors().items())
        return
    assert all(torch.equal(x, before[name]) for name, x in cache.tensors().items())
    assert torch.equal(decoded(lm, cache, ids[:, 7:8]), expected)


class Interrupt(torch.overrides.TorchFunctionMode):
    """Interrupts at the given operation; counts them."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if "grad_enabled" not in getattr(function, "__name__", ""):  # `no_grad` ends also when it is interrupted
            if self.count == self.at:
                raise KeyboardInterrupt
            self.count += 1
        return function(*arguments, **(named or {}))


def hooked(lm: PrismForCausalLM) -> None:
    lm.model.layers[0].mixer.register_forward_hook(lambda m, a, out: (2 * out[0], out[1]))


def hooked_layer(lm: PrismForCausalLM) -> None:
    lm.model.layers[0].register_forward_hook(lambda m, a, out: (out[0] + 1, out[1]))


def hooked_map(lm: PrismForCausalLM) -> None:
    lm.model.layers[0].mixer.rule.qkv.register_forward_hook(lambda m, a, out: 2 * out)


def hooked_model(lm: PrismForCausalLM) -> None:
    def louder(m: Any, a: Any, out: Any) -> Any:
        out.last_hidden_state = 2 * out.last_hidden_state
        return out

    lm.model.register_forward_hook(louder)


def weight_in_place(lm: PrismForCausalLM) -> None:
    with torch.no_grad():
        lm.model.layers[0].mixer.rule.qkv.weight.mul_(1.5)


def small_weight_in_place(lm: PrismForCausalLM) -> None:
    with torch.no_grad():
        lm.model.norm.weight.mul_(1.5)


def weight_replaced(lm: PrismForCausalLM) -> None:
    lm.lm_head.weight = nn.Parameter(lm.lm_head.weight.detach() * 2)


def data_replaced(lm: PrismForCausalLM) -> None:
    lm.lm_head.weight.data = lm.lm_head.weight.data * 2


def module_replaced(lm: PrismForCausalLM) -> None:
    lm.model.layers[0].mlp = copy.deepcopy(lm.model.layers[0].mlp)
    with torch.no_grad():
        lm.model.layers[0].mlp.down.weight.mul_(3)


def forward_replaced(lm: PrismForCausalLM) -> None:
    lm.model.norm.forward = lambda x: 2 * x


class Louder(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def subclassed(lm: PrismForCausalLM) -> None:
    """As quantised maps and those with LoRA are."""
    lm.model.layers[0].mlp.down.__class__ = Louder


CHANGES = [hooked, hooked_layer, hooked_map, hooked_model, weight_in_place, small_weight_in_place, weight_replaced]
CHANGES += [data_replaced, module_replaced, forward_replaced, subclassed]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_model_are_seen(change: Callable[[PrismForCausalLM], None]) -> None:
    lm, ids = model("prism+gla"), tokens(2, 14)
    ours, theirs = read(lm, ids[:, :7]), read(lm, ids[:, :7])
    torch.testing.assert_close(decoded(lm, ours, ids[:, 7:9]), forward(lm, theirs, ids[:, 7:9]))
    unchanged = decoded(lm, ours.copy(), ids[:, 9:10])
    change(lm)
    found, expected = decoded(lm, ours, ids[:, 9:12]), forward(lm, theirs, ids[:, 9:12])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-11)
    assert not torch.allclose(found[:, :1], unchanged, atol=1e-4), "it matters"


def test_merged_weights_are_shared_and_go_with_the_last_cache() -> None:
    lm, ids = model("prism*2"), tokens(1, 9)
    first, second = read(lm, ids[:, :5]), read(lm, ids[:, :5])
    for cache in (first, second):
        decoded(lm, cache, ids[:, 5:6])
    assert first.weights is second.weights
    del cache, first, second
    kept = decode._merged_weights.get(lm)
    assert kept is None or kept() is None


@pytest.mark.parametrize("case", ["autocast", "form", "gradients", "training", "unread"])
def test_what_asks_for_the_forward_pass(case: str) -> None:
    lm, ids = model("prism+gla", torch.float32), tokens(2, 10)
    cache = PrismCache(rollback=4) if case == "unread" else PrismCache()
    read(lm, ids[:, :6], cache)
    if case == "unread":
        decoded(lm, cache, ids[:, 6:9])
        cache.crop(-2)
        cache.weights = None
    lm.train(case == "training")
    modes = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "form": lambda: using(form="chunkwise")}
    mode = modes.get(case, lambda: torch.set_grad_enabled(case == "gradients"))
    with torch.no_grad(), mode():
        lm(ids[:, 6:7], past_key_values=cache)
    assert cache.weights is None


@pytest.mark.parametrize("started", [False, True])
def test_another_number_of_rows_is_refused_and_changes_nothing(started: bool) -> None:
    lm, ids = model("prism*2"), tokens(4, 9)
    cache = read(lm, ids[:, :5])
    if started:
        decoded(lm, cache, ids[:, 5:6])
    before = cache.tensors()
    for rows in (1, 3, 5):
        with pytest.raises(ValueError, match=rf"state has 4 rows \(memory .*\), x has {rows}"):
            decoded(lm, cache, tokens(rows, 1))
    assert all(torch.equal(x, before[name]) for name, x in cache.tensors().items())


def test_a_state_of_another_model_is_refused() -> None:
    lm, other, ids = model("prism"), model("prism", rule_options={"prism": {"conv_size": 3}}), tokens(2, 6)
    cache = read(other, ids[:, :5])
    with pytest.raises(ValueError, match="state does not fit rule 'prism'"):
        decoded(lm, cache, ids[:, 5:])


def test_memories_in_bfloat16_stay_so() -> None:
    lm, cache = model("prism", torch.float32), PrismCache(torch.bfloat16)
    read(lm, tokens(1, 4), cache)
    decoded(lm, cache, tokens(1, 2))
    assert cache.weights is not None and cache.states[0].memory.dtype == torch.bfloat16


def test_a_kept_state_does_not_change() -> None:
    lm, ids = model("prism+delta"), tokens(2, 9)
    cache = read(lm, ids[:, :5])
    decoded(lm, cache, ids[:, 5:6])
    duplicates = cache.copy(), copy.deepcopy(cache)
    saved = [{name: x.clone() for name, x in duplicate.tensors().items()} for duplicate in duplicates]
    decoded(lm, cache, ids[:, 6:8])
    for duplicate, old in zip(duplicates, saved, strict=True):
        assert all(torch.equal(x, old[name]) for name, x in duplicate.tensors().items())


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 30), st.sampled_from([0, 9]))
@examples(15)
def test_any_sizes(rows: int, key_dim: int, value_dim: int, width: int, hidden: int) -> None:
    options = {"key_dim": key_dim, "value_dim": value_dim, "rank": 3}
    lm = model("prism*2", rule_options={"prism": options}, hidden_size=width, intermediate_size=hidden)
    ids = tokens(rows, 8)
    ours, theirs = read(lm, ids[:, :5]), read(lm, ids[:, :5])
    torch.testing.assert_close(decoded(lm, ours, ids[:, 5:]), forward(lm, theirs, ids[:, 5:]), atol=1e-12, rtol=1e-11)


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("prism", {"steps": 3, "solver": "gelu"}),
    ("prism", {"steps": 3, "shared_key": True, "gain": False, "residual": "value", "nonlinearity": False}),
    ("prism", {"solver": "gelu", "gain": False, "negative_eigenvalues": True, "gate": False}),
    ("prism", {"forget": "channel", "gate_by": "sigmoid", "key_dim": 9}),
    ("prism", {"steps": 1, "conv_size": 2}),
    ("prism", {"conv_size": 1, "key_rank": 3, "rank": 2}),
    ("kda", {"lower_bound": -5.0, "key_dim": 9, "value_dim": 20}),
    ("delta_product", {"householders": 3, "forget_gate": True, "gate": True}),
]


@pytest.mark.parametrize(("rule", "options"), PLANS, ids=str)
def test_options_of_the_delta_family(rule: str, options: dict[str, Any]) -> None:
    lm, ids = model(rule, rule_options={rule: options}), tokens(2, 9)
    ours, theirs = read(lm, ids[:, :5]), read(lm, ids[:, :5])
    torch.testing.assert_close(decoded(lm, ours, ids[:, 5:]), forward(lm, theirs, ids[:, 5:]), atol=1e-12, rtol=1e-11)
    assert ours.weights is not None and isinstance(ours.weights.layers[0].mixer, token.Merged)


@pytest.mark.parametrize("layers", ["prism*2", "gated_delta+softmax"])
@pytest.mark.parametrize("sizes", [None, (2, 4)])
def test_texts_join_and_leave(layers: str, sizes: tuple[int, ...] | None) -> None:
    lm, ids = model(layers), tokens(4, 12)
    if sizes is not None and not lm.config.constant_state:
        with pytest.raises(ValueError, match="sizes must be None"):
            Decoder(lm, sizes)
        return
    decoder, at = Decoder(lm, sizes), dict.fromkeys(range(4), 5)
    with torch.no_grad():
        expected = lm(ids).logits
    for joins, leaves in (((0, 1), ()), ((2,), (0,)), ((3,), ()), ((), (1, 2)), ((0,), (3,))):
        decoder.leave([texts[i] for i in leaves])
        for i in joins:
            at[i] = 5 + i
            decoder.join(texts[i], read(lm, ids[i : i + 1, : at[i]]))
        for _ in range(2):
            numbers = [texts.index(text) for text in decoder.texts]
            found = decoder.step([int(ids[i, at[i]]) for i in numbers])
            for row, i in zip(found, numbers, strict=True):
                torch.testing.assert_close(row, expected[i, at[i]].float(), atol=1e-5, rtol=1e-4)
                at[i] += 1


texts = ["a", "b", "c", "d"]
