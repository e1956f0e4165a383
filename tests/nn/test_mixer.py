"""Every rule in a mixer: all its forms agree, and tokens may be split, padded, packed or stepped."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from prism import Mixer, State, rules
from prism.engine import FORMS
from prism.nn.state import concatenate
from tests.helpers import Tensors, assert_close, examples, relative_error

WIDTH, HEADS, TOKENS = 16, 2, 66

# Variants to test in addition to every rule's defaults.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "prism": [
        {"steps": 1},
        {"steps": 3, "solver": "gelu", "value_dim": 5},
        {"steps": 4, "residual": "value", "negative_eigenvalues": True},
        {"steps": 2, "step_scale": 0.0},
        {"steps": 3, "shared_key": True, "gain": False},
        {"steps": 2, "nonlinearity": False, "gate": False, "conv_size": 1},
        {"preset": "paper", "steps": 1},
        {"preset": "paper", "steps": 2, "negative_eigenvalues": True},
        {"preset": "paper", "steps": 3, "solver": "closed", "key_dim": 5},
        {"preset": "paper", "steps": 4, "residual": "value", "value_dim": 3},
    ],
    "linear": [{"normalize": True}, {"feature_map": "identity", "conv_size": 4, "key_dim": 5}],
    "gated_delta": [{"negative_eigenvalues": True, "key_dim": 7, "value_dim": 3}, {"gate": False, "conv_size": 1}],
    "delta": [{"negative_eigenvalues": True}, {"gate": True, "conv_size": 2, "key_dim": 3}],
    "delta_product": [
        {"householders": 3, "forget_gate": True},
        {"householders": 1, "negative_eigenvalues": False, "gate": True},
    ],
    "kda": [{"lower_bound": -5.0, "negative_eigenvalues": True}],
    "gdn2": [{"negative_eigenvalues": True, "key_dim": 5, "value_dim": 3}],
    "comba": [{"gate": False, "conv_size": 1, "correction": 0.02}],
    "mamba2": [{"key_dim": 6}, {"key_dim": 4, "groups": 2, "value_dim": 5}],
    "mamba3": [
        {"key_dim": 4, "groups": 2, "value_dim": 5, "rotary_fraction": 1.0, "conv_size": 3},
        {"key_dim": 6, "trapezoidal": False, "bc_norm": False},
        {"key_dim": 5, "rotary_fraction": 0.0, "bc_bias": False},
    ],
    "efla": [{"key_dim": 5, "value_dim": 3, "gate": True}],
    "based": [{"key_dim": 3, "value_dim": 5}],
    "gsa": [{"slots": 5, "value_dim": 3, "conv_size": 4}],
    "mesa": [{"key_dim": 5, "value_dim": 3}],
    "mom": [{"inner": "mlstm", "memories": 3}, {"inner": "mamba2", "shared": False, "memories": 2}],
    "hgrn": [{"layer_index": 1, "layer_count": 3, "conv_size": 3}],
    "softmax": [{"kv_heads": 1, "rope_base": None}, {"conv_size": 4}],
    "sliding_window": [{"window": 5, "conv_size": 3}, {"window": 1}],
}
CASES = [
    pytest.param(name, options, id=f"{name}{'-' if options else ''}{','.join(f'{k}={v}' for k, v in options.items())}")
    for name in rules.names()
    for options in [{}, *VARIANTS.get(name, [])]
]
every_case = pytest.mark.parametrize(("name", "options"), CASES)


def build(name: str, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> Mixer:
    """The same weights every time, all of them away from zero so that every path carries a gradient."""
    torch.manual_seed(1)
    mixer = Mixer(name, WIDTH, HEADS, **options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return mixer.to(dtype)


def tokens(*shape: int, seed: int = 2) -> Tensor:
    """Numbers that float32 can represent, in float64."""
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def named(state: State) -> Tensors:
    return {f"state.{name}": x for name, x in state.tensors().items()}


def run(mixer: Mixer, x: Tensor, dtype: torch.dtype = torch.float64, **arguments: Any) -> Tensors:
    """Output, state, and the gradients of x and of all parameters."""
    x = x.to(dtype).requires_grad_()
    y, state = mixer(x, **arguments)
    generator = torch.Generator().manual_seed(3)
    outputs = {"y": y, **named(state)}
    loss = torch.zeros((), dtype=torch.float64)
    for value in outputs.values():
        if value.requires_grad:
            loss = loss + (value * torch.randn(value.shape, generator=generator).to(value.dtype)).double().sum()
    leaves = {"x": x, **dict(mixer.named_parameters())}
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        outputs[f"d {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return {name: value.detach() for name, value in outputs.items()}


def assert_same(got: Tensors, reference: Tensors, tolerance: float) -> None:
    assert got.keys() == reference.keys()
    largest = max(x.norm().item() for name, x in reference.items() if name.startswith("d "))
    for name, x in reference.items():
        # A gradient that is negligible compared with the others is measured against them, not against itself.
        share = 1e-3 if tolerance < 1e-8 else 3e-2
        assert_close(name, got[name], x, tolerance, share * largest if name.startswith("d ") else 0.0)


@every_case
def test_every_form_agrees(name: str, options: dict[str, Any]) -> None:
    """Values, state (memory and carry) and all gradients: against the recurrence in float64."""
    forms = rules.get(name).forms
    assert forms and set(forms) <= set(FORMS)
    first = "recurrent" if "recurrent" in forms else forms[0]
    reference = run(build(name, options), tokens(2, TOKENS), form=first)
    for form in (*forms, "auto"):
        if form != first:
            assert_same(run(build(name, options), tokens(2, TOKENS), form=form), reference, 1e-10)
        single = build(name, options, torch.float32)
        got = run(single, tokens(2, TOKENS), torch.float32, form=form)
        assert got["y"].dtype == torch.float32
        assert_same(got, reference, 1e-5)


@every_case
def test_a_form_that_is_not_claimed_is_refused(name: str, options: dict[str, Any]) -> None:
    mixer = build(name, options)
    for form in set(FORMS) - set(mixer.forms):
        with pytest.raises(ValueError, match=form):
            mixer(tokens(1, 3), form=form)


@every_case
def test_chained_segments_are_one_pass(name: str, options: dict[str, Any]) -> None:
    mixer = build(name, options)
    x = tokens(2, 40).requires_grad_()
    y, end = mixer(x)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).double()
    expected = torch.autograd.grad((y * weight).sum(), [x, *mixer.parameters()], allow_unused=True)
    for borders in ([1, 2, 3, 23], [37, 38]):
        state, outputs = None, []
        for piece in x.tensor_split(borders, 1):
            o, state = mixer(piece, state)
            outputs.append(o)
        joined = torch.cat(outputs, 1)
        assert_close("y", joined, y, 1e-10)
        assert_state(state, end)
        got = torch.autograd.grad((joined * weight).sum(), [x, *mixer.parameters()], allow_unused=True)
        for label, a, b in zip(["x", *dict(mixer.named_parameters())], got, expected, strict=True):
            assert (a is None) == (b is None), label
            if a is not None and b is not None:
                assert_close(f"d {label}", a, b, 1e-10, 1e-6)


def assert_state(got: State | None, expected: State, tolerance: float = 1e-10) -> None:
    assert got is not None
    assert got.tensors().keys() == expected.tensors().keys()
    for name, x in expected.tensors().items():
        if x.dtype.is_floating_point:
            assert_close(f"state.{name}", got.tensors()[name], x, tolerance)
        else:
            assert torch.equal(got.tensors()[name], x), name


@every_case
@torch.no_grad()
def test_steps_are_one_pass(name: str, options: dict[str, Any]) -> None:
    mixer = build(name, options)
    x = tokens(2, 12)
    y, end = mixer(x)
    state = None
    for t in range(x.shape[1]):
        out, state = mixer.decode(x[:, t], state)
        assert out.shape == (2, WIDTH)
        assert_close(f"y at {t}", out, y[:, t], 1e-10)
    assert_state(state, end)


PADDINGS = ("left", "right", "holes")


def pad(rows: list[Tensor], kind: str, total: int, poison: float) -> tuple[Tensor, Tensor]:
    """x `[B, total, width]` and its mask; `poison` stands in the padding."""
    x = torch.full((len(rows), total, WIDTH), poison, dtype=torch.float64)
    mask = torch.zeros(len(rows), total, dtype=torch.bool)
    for i, content in enumerate(rows):
        n = len(content)
        if kind == "holes":
            where = torch.randperm(total, generator=torch.Generator().manual_seed(i))[:n].sort().values
        else:
            where = torch.arange(n) + (total - n if kind == "left" else 0)
        mask[i, where] = True
        x[i, where] = content
    return x, mask


def assert_behaves(mixer: Mixer, got: State, expected: State) -> None:
    """Two states are the same if what follows is; for a memory that is one tensor, the tensors are the same too."""
    following = tokens(1, 6, seed=9)
    assert_close("what follows", mixer(following, got)[0], mixer(following, expected)[0], 1e-10)
    if isinstance(expected.memory, Tensor):
        assert_state(got, expected)


@every_case
@torch.no_grad()
def test_padding_changes_neither_outputs_nor_state(name: str, options: dict[str, Any]) -> None:
    """With NaN in the padding, and continuing from an earlier state. The last row has no real token at all."""
    mixer = build(name, options)
    _, before = mixer(tokens(4, 7, seed=4))
    rows = [tokens(n, seed=n).view(n, WIDTH) for n in (9, 2, 12)] + [torch.empty(0, WIDTH).double()]
    alone = []
    for i, content in enumerate(rows):
        earlier = before.index_select(torch.tensor([i]))
        alone.append(mixer(content.unsqueeze(0), earlier) if len(content) else (content.unsqueeze(0), earlier))
    for kind in PADDINGS:
        x, mask = pad(rows, kind, 13, float("nan"))
        y, state = mixer(x, before, mask=mask)
        assert torch.count_nonzero(y[~mask]) == 0, kind
        for i, (expected, end) in enumerate(alone):
            if len(rows[i]):
                assert_close(f"{kind}, row {i}", y[i][mask[i]], expected[0], 1e-10)
            assert_behaves(mixer, state.index_select(torch.tensor([i])), end)


@every_case
def test_padding_changes_no_gradient(name: str, options: dict[str, Any]) -> None:
    mixer = build(name, options)
    rows = [tokens(n, seed=n).view(n, WIDTH).requires_grad_() for n in (9, 2, 12)]
    parameters = list(mixer.parameters())

    def pulled_back(outputs: list[Tensor]) -> list[Tensor]:
        loss = sum(((y * torch.linspace(-1, 2, WIDTH).double()).sum() for y in outputs), torch.zeros(()))
        gradients = torch.autograd.grad(loss, [*rows, *parameters], allow_unused=True)
        return [torch.zeros(()) if g is None else g for g in gradients]

    expected = pulled_back([mixer(row.unsqueeze(0))[0][0] for row in rows])
    labels = ["row 0", "row 1", "row 2", *dict(mixer.named_parameters())]
    for kind in PADDINGS:
        x, mask = pad(rows, kind, 13, float("nan"))
        y, _ = mixer(x, mask=mask)
        got = pulled_back([y[i][mask[i]] for i in range(3)])
        for label, a, b in zip(labels, got, expected, strict=True):
            assert_close(f"{kind}, d {label}", a, b, 1e-10, 1e-6)


@every_case
@torch.no_grad()
def test_packed_documents_are_separate_runs(name: str, options: dict[str, Any]) -> None:
    """The first document continues the incoming state. Documents of one and two tokens are shorter than any window."""
    mixer = build(name, options)
    lengths = [5, 1, 2, 9, 1]
    x = tokens(1, sum(lengths))
    _, state = mixer(tokens(1, 6, seed=4))
    reset = torch.zeros(1, sum(lengths), dtype=torch.bool)
    expected, start = [], 0
    before: State | None = state
    for n in lengths:
        reset[0, start] = start > 0
        y, last = mixer(x[:, start : start + n], before)
        expected.append(y)
        before, start = None, start + n
    for form in mixer.forms:
        y, end = mixer(x, state, reset=reset, form=form)
        assert_close("y", y, torch.cat(expected, 1), 1e-10)
        assert_behaves(mixer, end, last)


@every_case
@torch.no_grad()
def test_reset_at_the_first_token_ignores_the_state(name: str, options: dict[str, Any]) -> None:
    mixer = build(name, options)
    _, old = mixer(tokens(2, 9, seed=4))
    reset = torch.zeros(2, 10, dtype=torch.bool)
    reset[0, 0] = True
    y, state = mixer(tokens(2, 10), old, reset=reset)
    fresh, after_fresh = mixer(tokens(2, 10)[:1])
    continued, after_old = mixer(tokens(2, 10)[1:], old.index_select(torch.tensor([1])))
    assert_close("y", y, torch.cat([fresh, continued]), 1e-10)
    assert_behaves(mixer, state.index_select(torch.tensor([0])), after_fresh)
    assert_behaves(mixer, state.index_select(torch.tensor([1])), after_old)
    assert relative_error(mixer(tokens(2, 10), old)[0][:1], fresh) > 1e-6 or mixer.state_size == 0


@every_case
@given(data=st.data())
@examples(3)
@torch.no_grad()
def test_padded_packed_and_chained_at_once(name: str, options: dict[str, Any], data: st.DataObject) -> None:
    """Random masks, resets and borders in one stream equal its documents alone."""
    mixer = build(name, options)
    total = 30
    flags = st.lists(st.booleans(), min_size=total, max_size=total)
    mask = torch.tensor(data.draw(flags, label="mask"))
    reset = torch.tensor(data.draw(flags, label="reset")) & torch.tensor(data.draw(flags, label="reset too"))
    borders = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=3), label="borders"))
    x = tokens(1, total)
    poisoned = torch.where(mask[:, None], x, torch.nan)

    state, outputs = None, []
    pieces = zip(*[part.tensor_split(borders, 1) for part in (poisoned, mask[None], reset[None])], strict=True)
    for piece, real, starts in pieces:
        y, state = mixer(piece, state, mask=real, reset=starts)
        outputs.append(y)
    got = torch.cat(outputs, 1)[0]

    expected, document = torch.zeros_like(got), None
    for t in range(total):
        if mask[t]:
            y, document = mixer.decode(x[:, t], None if reset[t] else document)
            expected[t] = y[0]
    assert_close("y", got, expected, 1e-10)


@every_case
@torch.no_grad()
def test_tokens_do_not_see_the_future_or_other_rows(name: str, options: dict[str, Any]) -> None:
    mixer = build(name, options)
    x = tokens(2, 20)
    y, _ = mixer(x)
    changed = x.clone()
    changed[0, 13:] += 1
    after, _ = mixer(changed)
    assert_close("before the change", after[0, :13], y[0, :13], 1e-12)
    assert_close("the other row", after[1], y[1], 1e-12)
    assert relative_error(after[0, 13:], y[0, 13:]) > 1e-3


@every_case
@torch.no_grad()
def test_sizes_are_as_reported(name: str, options: dict[str, Any]) -> None:
    mixer = build(name, options, torch.float32)
    assert mixer.write_rank >= 1
    x = tokens(3, 90).float()
    sizes = [mixer(x[:, :n])[1].nbytes for n in (30, 60, 90)]
    _, state = mixer(x[:, :30])
    if not mixer.rule.constant_state:
        assert sizes[0] < sizes[1] < sizes[2]
    elif isinstance(state.memory, Tensor):
        assert sizes[0] == sizes[1] == sizes[2]
        assert state.memory.numel() == 3 * mixer.state_size
    assert sizes[0] == sum(v.numel() * v.element_size() for v in state.tensors().values())
    for tensor in state.tensors().values():
        assert tensor.shape[0] == 3


@every_case
@torch.no_grad()
def test_a_state_can_be_picked_joined_saved_and_moved(name: str, options: dict[str, Any]) -> None:
    mixer = build(name, options)
    _, state = mixer(tokens(3, 8))
    x = tokens(3, 4, seed=6)
    y, _ = mixer(x, state)
    rows = torch.tensor([2, 0, 0])
    assert_close("picked", mixer(x[rows], state.index_select(rows))[0], y[rows], 1e-12)
    joined = concatenate([state.index_select(torch.tensor([i])) for i in range(3)])
    assert_close("joined", mixer(x, joined)[0], y, 1e-12)
    loaded = State.load({key: value.clone() for key, value in state.tensors().items()})
    assert loaded.tensors().keys() == state.tensors().keys()
    assert_close("loaded", mixer(x, loaded)[0], y, 0.0)
    moved = state.to("meta")
    assert all(tensor.device.type == "meta" for tensor in moved.tensors().values())
    assert moved.nbytes == state.nbytes
    assert [t.dtype for t in moved.tensors().values()] == [t.dtype for t in state.tensors().values()]


@every_case
def test_a_state_is_not_changed_by_what_follows(name: str, options: dict[str, Any]) -> None:
    """Beam search continues one state in several ways."""
    mixer = build(name, options)
    _, state = mixer(tokens(2, 8))
    before = {key: value.detach().clone() for key, value in state.tensors().items()}
    mixer(tokens(2, 5, seed=6), state)
    mixer.decode(tokens(2, seed=7), state)
    for key, value in state.tensors().items():
        assert torch.equal(value, before[key]), key


@every_case
@torch.no_grad()
def test_half_precision_is_near(name: str, options: dict[str, Any]) -> None:
    """A bfloat16 mixer gives bfloat16 tokens, near those of the same rounded weights in float64, and a float32 memory."""
    mixer = build(name, options, torch.float32).to(torch.bfloat16)
    x = tokens(2, 20).to(torch.bfloat16)
    y, state = mixer(x)
    assert y.dtype == torch.bfloat16
    if isinstance(state.memory, Tensor):
        assert state.memory.dtype == torch.float32
    exact = build(name, options)
    exact.load_state_dict(mixer.state_dict())
    reference, _ = exact(x.double())
    assert_close("y", y, reference, 0.05)


@every_case
def test_two_documents_of_a_batch_train_alike_in_any_order(name: str, options: dict[str, Any]) -> None:
    mixer = build(name, options)
    x, order = tokens(3, 10), torch.tensor([2, 0, 1])
    y, state = mixer(x)
    shuffled, shuffled_state = mixer(x[order])
    assert_close("y", shuffled, y[order], 1e-12)
    for key, value in state.index_select(order).tensors().items():
        assert_close(key, shuffled_state.tensors()[key], value, 1e-12)
