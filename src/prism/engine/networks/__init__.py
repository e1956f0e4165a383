"""Memories that are networks: what is remembered is what a small network has learned, by gradient steps, on the way.

Per head a network f with weights W answers queries. Every token is an example that it should answer key k with value v,
and weighs `rate` r. With the gradient g_j of token j's loss taken **at the weights W_start with which j's mini-batch of b
tokens began**, the tokens i of that mini-batch see

    U_i = μ_i U_{i-1} + Σ_{i-c < j ≤ i} r_j g_j          W_i = κ_i W_{i-1} - s_i P(U_i)          o_i = f(q_i; W_i)

`Momentum` is that rule: Titans has a window of c = 1, s = 1 and P the identity, ATLAS looks at c tokens and P is a
Newton-Schulz iteration. `Averaged` is TTT's: U restarts at 0 with every mini-batch (μ = 1), and W_i = W_start - τ_i U_i.
b = 1 is online gradient descent.

Three exact forms: `recurrent` is the definition, token by token; `chunkwise` computes a mini-batch in matrix products (the
dual form); `serial` is for b = 1, where one token's gradient needs the weights that the token before it left (in Triton,
for two layers, one kernel a sequence). A state is a flat dict of tensors and includes the open mini-batch, so that a
sequence may be cut anywhere. Importing this package registers `InnerUpdate` with `prism.memory`.

Read network.py (f and its gradient), update.py (what a rule says), recurrent.py, dual.py, in this order.
"""

from prism.engine.dispatch import Engine, Path, register
from prism.engine.networks.chunkwise import chunkwise
from prism.engine.networks.network import Network
from prism.engine.networks.recurrent import recurrent
from prism.engine.networks.serial import kernel_is_automatic, kernel_refuses, serial, serial_by_kernel
from prism.engine.networks.serial import refuses as serial_refuses
from prism.engine.networks.state import check_state
from prism.engine.networks.update import Averaged, InnerUpdate, Momentum


def _choose(update: InnerUpdate) -> str:
    if update.tokens == 1:
        return "recurrent"
    return "chunkwise" if serial_refuses(update) else "serial"


register(
    InnerUpdate,
    Engine(
        paths={
            ("recurrent", "torch"): Path(recurrent),
            ("chunkwise", "torch"): Path(chunkwise),
            ("serial", "triton"): Path(
                serial_by_kernel, lambda update: serial_refuses(update) or kernel_refuses(update), kernel_is_automatic
            ),
            ("serial", "torch"): Path(serial, serial_refuses),
        },
        choose=_choose,
        check_state=check_state,
    ),
)

__all__ = ["Averaged", "InnerUpdate", "Momentum", "Network"]
