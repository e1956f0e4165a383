"""Several memories per sequence, folded into the batch: the results of the wrapped update, in all its forms."""

from __future__ import annotations

import pytest
import torch

import prism
from prism.engine import engine_of
from prism.engine.memories.folded import Folded
from prism.engine.networks import Averaged, InnerUpdate, Network


def network() -> InnerUpdate:
    q, k, v = (torch.randn(6, 3, 1, 4) for _ in range(3))
    weights = torch.randn(1, 4, 8), torch.randn(1, 8, 4)
    return InnerUpdate(q, k, v, torch.full((6, 3, 1), 0.01), Network(weights), Averaged(torch.ones(1)), 1)


def linear() -> prism.Update:
    return prism.Update(torch.randn(6, 3, 2, 4), torch.randn(6, 3, 2, 1, 4), torch.randn(6, 3, 2, 1, 4))


@pytest.mark.parametrize(
    ("draw", "form"),
    [(draw, form) for draw, kind in ((network, InnerUpdate), (linear, prism.Update)) for form in engine_of(kind).forms],
)
def test_folded_memories_have_every_form_of_the_wrapped_update(draw, form: str) -> None:
    update, folded, plain = draw(), None, None
    for _ in range(2):  # from an empty memory, then from its state
        got, folded = prism.memory(Folded(update, 3), folded, form)
        wanted, plain = prism.memory(update, plain, form)
        assert torch.equal(got, wanted)
        named = plain if isinstance(plain, dict) else {"memories": plain}
        assert all(torch.equal(x.flatten(0, 1), named[name]) and x.shape[:2] == (2, 3) for name, x in folded.items())


def test_a_form_that_the_wrapped_update_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="form 'scan' cannot serve InnerUpdate, which has the forms"):
        prism.memory(Folded(network(), 3), form="scan")
    with pytest.raises(ValueError, match="unknown form 'fast'"):
        prism.memory(Folded(network(), 3), form="fast")
