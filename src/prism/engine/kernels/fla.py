"""Run decays per key channel in flash-linear-attention's kernels, if it is installed and has an operator for the update.

| update | their operator |
|---|---|
| no erase, read after / before | GLA / RWKV-6 without its bonus |
| erase of the undecayed state | DPLR (RWKV-7): S_t = Diag(e^g) S + b̂ (âᵀ S) + k wᵀ with â = b, b̂ = -a |
| erase of the decayed state along the key written | Gated DeltaNet 2, whose erase and write have separate gates |

The package is imported only when one of its kernels runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prism.engine.inputs import repeat_heads, zero_padding
from prism.engine.kernels.available import installed_version
from prism.engine.update import Update

INSTALLED = (installed_version("flash-linear-attention", "fla-core") or (0, 0)) >= (0, 6)

WIDEST_KEY = 256


def refuses(u: Update) -> str | None:
    """Why their kernels cannot serve an update, in one clause; None if they can."""
    if not INSTALLED:
        return "needs flash-linear-attention 0.6 or newer, which is not installed"
    if not u.w.is_cuda:
        return f"needs a CUDA device, not {u.w.device.type}"
    if torch.compiler.is_compiling():
        return "cannot be compiled"
    if not u.per_channel:
        return "is used for decays per key channel only"
    if u.w.dtype not in (torch.bfloat16, torch.float16):
        return f"serves bfloat16 and float16, not {u.w.dtype}"
    if u.writes != 1 or u.substeps != 1:
        return "serves one write per token"
    if u.reset is not None:
        return "is not used for packed documents"
    if u.key_dim > WIDEST_KEY:
        return f"serves keys up to {WIDEST_KEY} wide, not {u.key_dim}"
    if u.erases and u.read != "after":
        return "has no erase with read='before'"
    if u.erases and u.erase_on == "decayed" and not u.erase_first:
        return "erases the decayed state only along the key written (erase_first)"
    return None


def run(u: Update, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run their kernel for an update: the outputs `[B, T, H, V]` and the final state `[B, H, K, V]`."""
    dtype, H = u.w.dtype, u.heads

    def converted(z: Tensor, dtype: torch.dtype = dtype) -> Tensor:
        return repeat_heads(zero_padding(z.to(dtype), u.mask), H).contiguous()

    assert u.log_decay is not None
    q, k, v = converted(u.q), converted(u.k[..., 0, :]), converted(u.w[..., 0, :])
    g = converted(u.log_decay, torch.float32)
    shared: dict[str, Any] = {"scale": 1.0, "initial_state": state, "output_final_state": True}
    if u.erase_key is None:
        if u.read == "after":
            from fla.ops.gla import chunk_gla

            return chunk_gla(q, k, v, g, **shared)
        from fla.ops.rwkv6 import chunk_rwkv6

        return chunk_rwkv6(q, k, v, g, torch.zeros_like(q[0, 0]), **shared)
    b = converted(u.erase_key)
    if u.erase_on == "undecayed":
        from fla.ops.generalized_delta_rule import chunk_dplr_delta_rule

        if u.erase_write is not None:
            a = converted(u.erase_write)
        else:
            assert u.erase_strength is not None  # an update with an erase has one or the other
            a = b * converted(u.erase_strength).unsqueeze(-1)
        return chunk_dplr_delta_rule(q, k, v, b, -a, g, **shared)
    from fla.ops.gdn2 import chunk_gdn2

    assert u.erase_strength is not None  # `refuses` admits no other
    beta = converted(u.erase_strength).unsqueeze(-1).expand_as(k).contiguous()
    return chunk_gdn2(q, k, v, g, beta, torch.ones_like(v), **shared)
