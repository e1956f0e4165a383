"""Fixtures of the tests of rules."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest

_NAIVE = {
    "delta_rule_recurrence": "delta_rule.naive",
    "dplr_recurrence": "generalized_delta_rule.dplr.naive",
    "naive_chunk_comba": "comba.naive",
    "naive_kda_gate": "kda.gate",
    "naive_kda_lowerbound_gate": "kda.gate",
    "naive_mesa_net_CG": "mesa_net.naive",
    "naive_mesa_net_exact": "mesa_net.naive",
    "naive_parallel_based": "based.naive",
    "naive_recurrent_gated_delta_product": "gated_delta_product.naive",
    "naive_recurrent_gated_delta_rule": "gated_delta_rule.naive",
    "naive_recurrent_gdn2": "gdn2.naive",
    "naive_recurrent_gla": "gla.naive",
    "naive_recurrent_gsa": "gsa.naive",
    "naive_recurrent_hgrn": "hgrn.naive",
    "naive_recurrent_kda": "kda.naive",
    "naive_recurrent_linear_attn": "linear_attn.naive",
    "naive_recurrent_rwkv6": "rwkv6.recurrent_naive",
    "naive_recurrent_simple_gla": "simple_gla.naive",
    "naive_retention": "retention.naive",
}


@pytest.fixture(scope="session")
def fla() -> SimpleNamespace:
    """Naive functions of flash-linear-attention. Importing it takes seconds, so only the tests that need it do."""
    with warnings.catch_warnings():  # on a machine without a GPU it says so on import
        warnings.simplefilter("ignore")
        pytest.importorskip("fla", reason="needs flash-linear-attention, which needs Triton: not on macOS")
        return SimpleNamespace(
            **{name: getattr(import_module(f"fla.ops.{path}"), name) for name, path in _NAIVE.items()}
        )
