"""PRISM's `lm` preset: Gated DeltaNet's modules and state-dict names, and L - 1 solver writes beside its own."""

from __future__ import annotations

from torch import Tensor

from prism.engine.fused import Corrections
from prism.rules.gated_delta import GatedDelta
from prism.rules.objectives import RESIDUAL_PROXY
from prism.rules.parts import Carry
from prism.rules.prism import Prism, check_solver
from prism.rules.residual_writes import ResidualWrites
from prism.rules.span import Span


class LanguagePrism(GatedDelta):
    """The `lm` preset: Gated DeltaNet and L - 1 solver writes.

    Args:
        steps: L; 1 is Gated DeltaNet itself.
        solver: `"closed"` or `"gelu"`.
        residual: `"anchored"` starts from v - W_u u, `"value"` from v.
        rank: of the low-rank maps; max(8, width / 32) unless given, which keeps the extra under 10 % of the mixer.
        step_scale: where γ starts; 0 makes a model that begins exactly as Gated DeltaNet (adapters).
        gain, nonlinearity, shared_key: ablations, as in `PaperPrism`.
    """

    name = "prism"
    objective = RESIDUAL_PROXY
    forgetting = Prism.forgetting

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        steps: int = 2,
        solver: str = "closed",
        residual: str = "anchored",
        gain: bool = True,
        nonlinearity: bool = True,
        shared_key: bool = False,
        rank: int | None = None,
        step_scale: float = 1.0,
        conv_size: int = 4,
        gate: bool = True,
        negative_eigenvalues: bool = False,
    ) -> None:
        check_solver(steps, solver, residual)
        super().__init__(
            width,
            heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_size=conv_size,
            gate=gate,
            negative_eigenvalues=negative_eigenvalues,
        )
        self.write_rank = steps
        self.writes = None
        if steps > 1:
            self.writes = ResidualWrites(
                width,
                heads,
                self.key_dim,
                self.value_dim,
                steps=steps,
                solver=solver,
                residual=residual,
                gain=gain,
                nonlinearity=nonlinearity,
                shared_key=shared_key,
                rank=max(8, width // 32) if rank is None else rank,
                step_scale=step_scale,
                conv_size=conv_size,
            )

    def corrections(self, x: Tensor, carry: Carry, span: Span) -> tuple[Corrections | None, dict[str, Tensor]]:
        if self.writes is None:
            return None, {}
        corrections, window = self.writes(x, carry.get("anchor"), span)
        return corrections, {"anchor": window}
