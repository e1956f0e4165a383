"""The sliced cross-entropy of a linear map against torch's, over all logits, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from prism.language.task import loss_sum
from prism.language.tokens import Batch
from prism.models.cross_entropy import linear_cross_entropy
from tests.helpers import examples
from tests.models.stacks import model, tokens

few = examples(25)


def case(rows: int, outputs: int, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden rows, weight and bias, all with gradients."""
    shapes = ((rows, width), (outputs, width), (outputs,))
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, z_loss: float, reduction: str, ignored: int
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    loss = F.cross_entropy(logits, targets, reduction=reduction, ignore_index=ignored)
    counted = targets != ignored
    penalty = (logits.logsumexp(-1).square() * counted).sum()
    return loss + z_loss * (penalty if reduction == "sum" else penalty / counted.sum())


@few
@given(
    rows=st.integers(1, 12),
    outputs=st.integers(1, 9),
    width=st.integers(1, 5),
    at_once=st.integers(1, 13),
    z_loss=st.sampled_from([0.0, 0.1]),
    biased=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    ignored=st.sampled_from([-100, 0]),
    seed=st.integers(0, 99),
)
def test_it_is_cross_entropy(
    rows: int,
    outputs: int,
    width: int,
    at_once: int,
    z_loss: float,
    biased: bool,
    reduction: str,
    ignored: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    hidden, weight, bias = case(rows, outputs, width)
    targets = torch.randint(0, outputs, (rows,))
    targets[torch.rand(rows) < 0.3] = ignored
    given = [hidden, weight, bias] if biased else [hidden, weight]
    own = bias if biased else None
    loss = linear_cross_entropy(
        hidden, weight, targets, own, z_loss=z_loss, reduction=reduction, ignore_index=ignored, rows=at_once
    )
    expected = reference(hidden, weight, targets, own, z_loss, reduction, ignored)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    if (targets != ignored).any():  # a mean over nothing is NaN, and so are torch's gradients
        torch.testing.assert_close(torch.autograd.grad(3 * loss, given), torch.autograd.grad(3 * expected, given))


def test_all_ignored() -> None:
    hidden, weight, _ = case(4, 5, 3)
    targets = torch.full((4,), -100)
    loss = linear_cross_entropy(hidden, weight, targets, reduction="sum", rows=3)
    assert loss == 0
    assert all(not g.any() for g in torch.autograd.grad(loss, (hidden, weight)))
    assert linear_cross_entropy(hidden, weight, targets).isnan()


def test_any_leading_shape_and_a_gradient_only_where_it_is_wanted() -> None:
    hidden, weight, _ = case(12, 5, 3)
    targets = torch.randint(0, 5, (12,))
    folded = linear_cross_entropy(hidden.view(2, 6, 3), weight.detach(), targets.view(2, 6), rows=5)
    (only,) = torch.autograd.grad(folded, hidden)
    torch.testing.assert_close(only, torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets), hidden)[0])
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets).requires_grad


@pytest.mark.parametrize("how", ["half inputs", "autocast"])
def test_half_precision_errs_at_most_twice_what_torch_does(how: str) -> None:
    """Torch's: logits in bfloat16, then everything in float32."""
    torch.manual_seed(0)
    exact = case(64, 300, 16)
    half = [z.detach().bfloat16() for z in exact]
    exact = [z.double().requires_grad_() for z in half]
    targets = torch.randint(0, 300, (64,))
    wanted = torch.autograd.grad(F.cross_entropy(F.linear(*exact), targets, reduction="sum"), exact)
    given = [(z if how == "half inputs" else z.float()).requires_grad_() for z in half]
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        loss = linear_cross_entropy(given[0], given[1], targets, given[2], reduction="sum", rows=10)
        theirs = F.cross_entropy(F.linear(*given).float(), targets, reduction="sum")
    assert loss.dtype == torch.float32
    got, torchs = (torch.autograd.grad(z, given) for z in (loss, theirs))
    for a, b, c in zip(got, torchs, wanted, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - c).norm() <= 2 * (b.double() - c).norm()


def test_in_compiled_code_it_is_one_operator() -> None:
    hidden, weight, bias = case(9, 5, 3, torch.float32)
    targets = torch.randint(0, 5, (9,))

    def loss(h: Tensor, w: Tensor, c: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(2 * h, w, y, c, z_loss=0.1, rows=4)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got, wanted = compiled(hidden, weight, bias, targets), loss(hidden, weight, bias, targets)
    torch.testing.assert_close(got, wanted)
    given = hidden, weight, bias
    torch.testing.assert_close(torch.autograd.grad(got, given), torch.autograd.grad(wanted, given))
    arguments = (hidden, weight, bias, targets, torch.float32, -100, 0.1, 4, [True, True, True])
    torch.library.opcheck(torch.ops.prism.linear_cross_entropy.default, arguments)


def test_there_are_no_second_derivatives() -> None:
    hidden, weight, _ = case(3, 4, 2)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 2]))
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"targets must be \[3\]"),
        ({"weight": torch.zeros(4, 3)}, r"weight must be \[V, D\] with D = 2"),
        ({"bias": torch.zeros(3)}, r"bias must be \[V\] = \[4\]"),
        ({"reduction": "none"}, "reduction must be one of mean, sum"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"hidden": torch.zeros(3, 2), "weight": torch.zeros(4, 2), "targets": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**given, **change})


def test_a_z_loss_that_would_be_ignored_is_refused() -> None:
    lm = model("prism")
    ids = tokens(1, 5)
    lm.lm_head.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="unmodified lm_head"):
        lm(ids, labels=ids, z_loss=0.1)


def test_a_wrapped_model_trains_with_its_balance_loss_too() -> None:
    lm = model("mom", torch.float32).train()
    ids = tokens(2, 6)
    batch = Batch(ids[:, :-1], ids[:, 1:], None)

    class Wrapped(nn.Module):
        def forward(self, **given: Any) -> Any:
            return lm(**given)

    torch.testing.assert_close(loss_sum(Wrapped().train(), batch), loss_sum(lm, batch))
