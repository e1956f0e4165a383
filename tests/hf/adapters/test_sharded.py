"""An adapted model on two processes with FSDP2: the same step as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.children import finish, start_children

FAMILIES = ("gated_delta", "qwen3_next")


def _step(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The adapter's weights after three steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _sharded(family: str, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from tests.hf.adapters.bases import adapted, perturb, tokens

    dist.init_process_group("gloo")
    model: Any = perturb(adapted(family)).train()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    after = _step(model, tokens(2).chunk(2)[dist.get_rank()])
    assert all(isinstance(p, DTensor) for p in after.values())
    whole = {name: p.full_tensor().detach() for name, p in after.items()}
    if dist.get_rank() == 0:
        torch.save(whole, folder / family)
    dist.destroy_process_group()


@pytest.mark.parametrize("family", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)])
def test_sharded_training_is_training(family: str, tmp_path: Path) -> None:
    from tests.hf.adapters.bases import adapted, close, perturb, tokens

    assert finish(start_children(_sharded, family, tmp_path, processes=2)) == [0, 0]
    alone = _step(perturb(adapted(family)).train(), tokens(2))
    sharded = torch.load(tmp_path / family)
    assert all(close(sharded[name], p.detach(), 1e-4) for name, p in alone.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_both_rows_count(family: str) -> None:
    """Otherwise the test above would not see that a process was ignored."""
    from tests.hf.adapters.bases import adapted, close, perturb, tokens

    both = _step(perturb(adapted(family)).train(), tokens(2))
    one = _step(perturb(adapted(family)).train(), tokens(2)[:1])
    assert not all(close(one[name].detach(), p.detach(), 1e-3) for name, p in both.items())
