"""Under autocast a rule's update is in half precision: a float32 tensor there would double memory and halve speed."""

import pytest
import torch

import prism
from prism.rules.rule import Span


@pytest.mark.parametrize("rule", ["prism", "gated_delta", "mamba2", "linear", "gla", "retnet"])
def test_queries_keys_and_writes_keep_the_low_precision(rule: str) -> None:
    mixer = prism.Mixer(rule, 32, 2)
    with torch.autocast("cpu", torch.bfloat16):
        update, _, _ = mixer.rule.update(torch.randn(1, 8, 32), {}, Span())
    assert {update.q.dtype, update.k.dtype, update.w.dtype} == {torch.bfloat16}
    if update.erase_key is not None:
        assert update.erase_key.dtype == torch.bfloat16
    if update.log_decay is not None:
        assert update.log_decay.dtype == torch.float32
