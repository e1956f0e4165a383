"""Update parameters with AdamW, or with Muon for hidden matrices and AdamW for the rest.

Muon is momentum whose matrix is made orthogonal before it is applied (Jordan et al., 2024).

Design choices
- Muon's update is scaled by 0.2·√max(rows, columns), which gives it the size of an AdamW update (Moonshot, 2025): one
  learning rate and one weight decay serve both optimizers.
- Muon's products run in bfloat16 on a GPU, in float32 elsewhere (bfloat16 products are not safe on every CPU).
- A sharded matrix is gathered, made orthogonal in every process, and sharded again: the result does not depend on
  sharding.
- `settings.groups` gives parameters whose names match a pattern another learning rate or weight decay. A pattern that no
  parameter takes is an error: misspelt, it would change nothing. Gates, norms and biases are never decayed.
- A step can be skipped on the device, by torch's own protocol (`found_inf`, see `Optimizers.step`): the host does not
  have to know whether loss and gradient are finite. Both ways of skipping leave the same weights and state, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from prism.nn import no_weight_decay
from prism.train.settings import OptimizerSettings, parse_group

# Coefficients of the Newton-Schulz iteration, chosen by Jordan: steep at zero, so that five iterations bring every
# singular value near 1 (not exactly to it).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon, for matrices only: all other parameters need another optimizer.

    Attributes:
        found_inf: as in torch's fused optimizers, a float32 scalar tensor: 1 makes `step` change nothing, 0 or None
            lets it update. The value stays on the device.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            if any(parameter.ndim != 2 for parameter in group["params"]):
                raise ValueError("Muon takes matrices only: give other parameters to AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one matrix `[M, N]` in-place; everything but `orthogonalize` works on the local shard.

        A skipped update is the same arithmetic with factors that change nothing (0 and 1), so no copy of the weights or
        the momentum is needed. Not finite numbers are zeroed first, because 0 · NaN is NaN.
        """
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = _shard(state["momentum"])
        keep = 1.0 if self.found_inf is None else 1 - self.found_inf
        if self.found_inf is not None:
            _shard(gradient).masked_fill_(self.found_inf.bool(), 0)
        momentum.lerp_(_shard(gradient), (1 - group["momentum"]) * keep)
        ahead = gradient.lerp(state["momentum"], group["momentum"])  # Nesterov: one step further along
        direction = _shard(_in_full(orthogonalize, ahead))
        if self.found_inf is not None:
            direction.masked_fill_(self.found_inf.bool(), 0)
        # Not 1 - keep·lr·decay, which a float32 tensor would round differently from the float of an update that no
        # tensor can skip.
        weights = _shard(parameter)
        weights.mul_((1 - group["lr"] * group["weight_decay"]) * keep + (1 - keep))
        weights.add_(direction, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def orthogonalize(x: Tensor) -> Tensor:
    """Approximate U Vᵀ of x = U Σ Vᵀ: singular values end between about 0.7 and 1.2. `[M, N]` → `[M, N]`."""
    wide = x if x.shape[0] <= x.shape[1] else x.T  # the Gram matrix below is the smaller of the two
    y = wide.bfloat16() if x.is_cuda else wide.float()
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = y @ y.T
        y = _A * y + (_B * gram + _C * gram @ gram) @ y
    return (y if wide is x else y.T).to(x.dtype)


def _in_full(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to a whole matrix that may be sharded over processes; the result is sharded the same way."""
    if not isinstance(x, DTensor):
        return function(x)
    everywhere = [Replicate()] * x.device_mesh.ndim
    whole = DTensor.from_local(function(x.full_tensor()), x.device_mesh, everywhere, run_check=False)
    return whole.redistribute(placements=x.placements)


def _shard(x: Tensor) -> Tensor:
    """The part of a tensor that this process holds, in the same memory."""
    return x.to_local() if isinstance(x, DTensor) else x


class Rates(NamedTuple):
    """What the parameters of a group have in common."""

    factor: float
    """Multiplies the learning rate."""
    weight_decay: float


class Optimizers:
    """One or two optimizers used as one."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self.settings = settings
        hidden = _hidden_matrices(model) if settings.name == "muon" else set()
        exempt = no_weight_decay(model)
        adamw: dict[Rates, list[nn.Parameter]] = {Rates(1.0, settings.weight_decay): []}
        muon: dict[Rates, list[nn.Parameter]] = {}
        for name, rates in _rates(model, settings, exempt).items():
            groups = muon if name in hidden and name not in exempt else adamw
            groups.setdefault(rates, []).append(model.get_parameter(name))
        device = next(model.parameters()).device
        self.all: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                _as_groups(adamw),
                lr=settings.lr,
                betas=settings.betas,
                eps=settings.eps,
                fused=device.type in ("cpu", "cuda"),
            )
        ]
        if muon:
            self.all.append(Muon(_as_groups(muon), settings.lr, settings.momentum))

    def step(self, factor: float, skip: Tensor | None = None) -> None:
        """Update every parameter that has a gradient.

        Args:
            factor: multiplies the learning rate.
            skip: float32 scalar on the parameters' device; 1 leaves weights, moments and step counts as they are, 0
                updates them. The device decides and the host does not wait. It needs the fused AdamW (CPU, CUDA).
                None: update.
        """
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.lr * factor * group["factor"]
            optimizer.found_inf = skip  # type: ignore[attr-defined]  # the GradScaler protocol
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def parameters(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
        """Every parameter and the optimizer it belongs to."""
        for optimizer in self.all:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, parameter


def _hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the weights of linear layers, without the output head (tied or not); embeddings are not linear layers."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def _rates(model: nn.Module, settings: OptimizerSettings, exempt: set[str]) -> dict[str, Rates]:
    """The rates of every trained parameter by name. Raises a ValueError for a pattern of `settings.groups` that none takes."""
    groups = [parse_group(text) for text in settings.groups]
    taken = [0] * len(groups)
    rates = {}
    for name in (name for name, parameter in model.named_parameters() if parameter.requires_grad):
        found = next((i for i, group in enumerate(groups) if fnmatchcase(name, group.pattern)), None)
        factor, decay = 1.0, settings.weight_decay
        if found is not None:
            taken[found] += 1
            _, factor, own = groups[found]
            decay = decay if own is None else own
        rates[name] = Rates(factor, 0.0 if name in exempt else decay)
    for text, count in zip(settings.groups, taken, strict=True):
        if not count:
            raise ValueError(
                f"optimizer.groups has {text!r}, which no parameter takes: a pattern must match whole names such as "
                f"{list(rates)[-1]!r}, and of several that match the first counts"
            )
    return rates


def _as_groups(groups: dict[Rates, list[nn.Parameter]]) -> list[dict[str, Any]]:
    return [{"params": params, **rates._asdict()} for rates, params in groups.items()]
