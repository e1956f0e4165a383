"""The branch against its definition: one memory with all writes, token by token, and PRISM's own layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism import Mixer
from prism.engine.layer_ops import l2_normalize, solved_writes
from prism.hf.adapters import PrismAdapterConfig
from prism.hf.adapters.branch import Branch, First, Sizes
from prism.hf.adapters.delta_net import Visit, document_starts
from prism.hf.adapters.rule import AdaptedRule
from prism.rules.rule import Span
from tests.hf.adapters.bases import close

SIZES = Sizes(12, 2, 4, 6)


def branch(seed: int = 0, **options: object) -> Branch:
    """A branch in float64 whose γ is not zero."""
    torch.manual_seed(seed)
    made = Branch(SIZES, PrismAdapterConfig(**{"steps": 3, "rank": 3, **options})).double()  # type: ignore[arg-type]
    torch.nn.init.normal_(made.writes.scale)  # type: ignore[arg-type]
    return made


def first_write(tokens: int, seed: int = 0) -> tuple[torch.Tensor, First]:
    """An input x `[2, T, width]` and a base layer's first write."""
    g = torch.Generator().manual_seed(seed)
    x, q, k, v, b, a = (
        torch.randn(2, tokens, *shape, generator=g, dtype=torch.float64)
        for shape in ((12,), (2, 4), (2, 4), (2, 6), (2,), (2,))
    )
    return x, First(q, l2_normalize(k), v, b.sigmoid(), -0.1 * a.exp())


def one_memory(made: Branch, x: torch.Tensor, f: First, reset: torch.Tensor | None = None) -> torch.Tensor:
    """Outputs of a single memory that gets all L writes: the definition, token by token."""
    span = Span(reset=reset)
    c, _ = made.writes(x, made.writes.anchor(x, {}, span)[0], {}, span)
    later = l2_normalize(c.keys) if c.keys is not None else f.k.unsqueeze(3).expand(-1, -1, -1, c.beta.shape[-1], -1)
    later = made.writes.placed(torch.cat([f.k.unsqueeze(3), later], 3), {}, Span())[0][..., 1:, :]
    w = solved_writes(f.v, c.expected, c.gains, c.beta, c.scale, c.solver)
    S, outputs = torch.zeros(2, 2, 4, 6, dtype=torch.float64), []
    for t in range(x.shape[1]):
        if reset is not None:
            S = torch.where(reset[:, t, None, None, None], 0.0, S)
        k, beta = f.k[:, t].unsqueeze(-1), f.beta[:, t, :, None, None]
        S = f.log_decay[:, t, :, None, None].exp() * S
        S = S - beta * k @ (k.mT @ S) + beta * k @ f.v[:, t].unsqueeze(-2) + later[:, t].mT @ w[:, t]
        outputs.append((f.q[:, t].unsqueeze(-2) @ S).squeeze(-2))
    return torch.stack(outputs, 1)


def base_alone(x: torch.Tensor, f: First, reset: torch.Tensor | None = None) -> torch.Tensor:
    """Outputs of the base layer's memory."""
    made = branch()
    torch.nn.init.zeros_(made.writes.scale)  # type: ignore[arg-type]
    return one_memory(made, x, f, reset)


@given(
    tokens=st.integers(1, 9),
    keys=st.sampled_from(["own", "orthogonal", "rotated", "shared"]),
    residual=st.sampled_from(["anchored", "value"]),
    solver=st.sampled_from(["closed", "gelu"]),
    conv_size=st.integers(1, 4),
)
def test_two_memories_are_one(tokens: int, keys: str, residual: str, solver: str, conv_size: int) -> None:
    made, (x, f) = branch(keys=keys, residual=residual, solver=solver, conv_size=conv_size), first_write(tokens)
    visit = Visit({"default": made}, x, None)
    scaled = f.q * 4**0.5  # the branch scales queries as transformers' functions do
    total = visit(base_alone(x, f), scaled, f.k, f.v, g=f.log_decay, beta=f.beta)
    assert visit.served
    assert close(total, one_memory(made, x, f), 1e-12)


def test_packed_documents_do_not_see_each_other() -> None:
    made, (x, f) = branch(), first_write(9)
    x, f = x[:1], First(*(z[:1] for z in f))
    o = torch.zeros(1, 9, 2, 6, dtype=torch.float64)
    lengths = torch.tensor([0, 4, 9])
    assert document_starts(x, lengths).nonzero()[:, 1].tolist() == [0, 4]
    packed = Visit({"default": made}, x, None)(o, f.q, f.k, f.v, g=f.log_decay, beta=f.beta, cu_seqlens=lengths)
    g = First(*(z[:, 4:] for z in f))
    alone = Visit({"default": made}, x[:, 4:], None)(o[:, 4:], g.q, g.k, g.v, g=g.log_decay, beta=g.beta)
    assert close(packed[:, 4:], alone, 1e-12)
    numbers = torch.tensor([[0] * 4 + [1] * 5])
    assert document_starts(x, None, numbers).nonzero()[:, 1].tolist() == [4]
    by_number = Visit({"default": made}, x, None)(o, f.q, f.k, f.v, g=f.log_decay, beta=f.beta, seq_idx=numbers)
    assert torch.equal(by_number, packed)


@pytest.mark.parametrize("negative_eigenvalues", [False, True])
def test_an_adapted_rule_is_prism_with_more_steps(negative_eigenvalues: bool) -> None:
    """With the same weights, up to rounding, padding and documents included."""
    torch.manual_seed(0)
    options = {"negative_eigenvalues": negative_eigenvalues}
    prism = Mixer("prism", 16, 2, steps=3, rank=4, gate_by="silu", **options).double()
    mixer = Mixer("gated_delta", 16, 2, **options).double()
    torch.nn.init.normal_(prism.rule.writes.scale)  # type: ignore[union-attr,arg-type]
    weights = prism.rule.state_dict()
    mixer.rule.load_state_dict({name: w for name, w in weights.items() if not name.startswith("writes.")})
    rule = mixer.rule
    layer = AdaptedRule(rule, Sizes(16, 2, rule.key_dim, rule.value_dim), ["default"])
    layer.update_layer("default", PrismAdapterConfig(steps=3, rank=4))
    added: Branch = layer.prism_branches["default"]  # type: ignore[assignment]
    added.load_state_dict({name: w for name, w in weights.items() if name.startswith("writes.")})
    mixer.rule = layer  # type: ignore[assignment]
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :3], mask[1, 5] = False, False
    reset = torch.zeros(2, 11, dtype=torch.bool)
    reset[:, 7] = True
    for given_options in ({}, {"mask": mask}, {"reset": reset}, {"mask": mask, "reset": reset}):
        assert close(mixer(x, **given_options)[0], prism(x, **given_options)[0], 1e-10)
    halves = mixer(x[:, :5])
    assert close(mixer(x[:, 5:], halves[1])[0], prism(x)[0][:, 5:], 1e-10)
