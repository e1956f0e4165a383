"""The chunk form in torch with every matrix product in half precision, the reference of the kernels' accuracy."""

from __future__ import annotations

import torch
from torch import Tensor

import prism


def low_precision(u: prism.Update, S: Tensor, size: int = 64) -> tuple[Tensor, Tensor]:
    """The chunk form for half precision: matrix products in w's dtype, the rest in float32.

    Returns the outputs `[B, T, H, V]` and the final state `[B, H, K, V]`.
    """
    dtype, T = u.w.dtype, u.tokens
    reset = torch.zeros(u.batch, T, dtype=torch.bool, device=S.device) if u.reset is None else u.reset
    mask = torch.ones_like(reset) if u.mask is None else u.mask
    reset = reset & mask

    def rows(x: Tensor, start: int) -> Tensor:  # [B, T, H, ...] -> [B, H, C, ...], padding as zeros
        x = x[:, start : start + size]
        real = mask[:, start : start + size].reshape(u.batch, -1, *[1] * (x.ndim - 2))
        return torch.where(real, x, 0.0).transpose(1, 2)

    outputs = []
    for start in range(0, T, size):
        q, w, k = rows(u.q, start), rows(u.w, start).unbind(3), rows(u.k, start).unbind(3)
        G = torch.zeros_like(q[..., 0], dtype=torch.float32)
        if u.log_decay is not None:
            G = rows(u.log_decay, start).cumsum(-1)
        document = reset[:, start : start + size].cumsum(1).unsqueeze(1)
        keep = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        keep = keep & (document.unsqueeze(-1) == document.unsqueeze(-2))
        left = (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill(~keep, -torch.inf).exp()
        from_start = torch.where(document == 0, G.exp(), 0.0).unsqueeze(-1)
        last = document[..., -1:]
        to_end = torch.where(document == last, (G[..., -1:] - G).exp(), 0.0).unsqueeze(-1)
        carried = torch.where(last == 0, G[..., -1:].exp(), 0.0).unsqueeze(-1)
        incoming = S.to(dtype)

        def gram(x: Tensor, y: Tensor, strict: bool, left: Tensor = left) -> Tensor:
            return ((x @ y.mT).float() * left).tril(-1 if strict else 0).to(dtype)

        o = (q @ incoming).float() * from_start
        for key, value in zip(k, w, strict=True):
            o = o + (gram(q, key, False) @ value).float()
        S = carried * S
        for key, value in zip(k, w, strict=True):
            S = S + (key.mT @ (value.float() * to_end).to(dtype)).float()
        if u.erase_key is not None and u.erase_strength is not None:
            b = rows(u.erase_key, start)
            a = (rows(u.erase_strength, start).unsqueeze(-1) * b.float()).to(dtype)
            seen = (b @ incoming).float() * from_start
            for key, value in zip(k, w, strict=True):
                seen = seen + (gram(b, key, True) @ value).float()
            seen = torch.linalg.solve_triangular(gram(b, a, True).float(), seen, upper=False, unitriangular=True)
            o = o - (gram(q, a, False) @ seen.to(dtype)).float()
            S = S - (a.mT @ (seen * to_end).to(dtype)).float()
        outputs.append(o.to(dtype))
    return torch.cat(outputs, 2).transpose(1, 2), S
