"""Memories that are small networks, trained by gradient steps while they read.

Per head a network f with weights W answers queries. Every token is an example: f should answer key k with value v. The
example weighs `rate` r. With the gradient g_j of token j's loss taken **at the weights W_start with which j's mini-batch
of b tokens began**, the tokens i of that mini-batch see

    U_i = μ_i U_{i-1} + Σ_{i-c < j ≤ i} r_j g_j          W_i = κ_i W_{i-1} - s_i P(U_i)          o_i = f(q_i; W_i)

`Momentum` is that rule: Titans has c = 1, s = 1 and P the identity; ATLAS takes the last c examples, and P is a
Newton-Schulz iteration. `Averaged` is TTT's rule: U restarts at 0 with every mini-batch (μ = 1), and
W_i = W_start - τ_i U_i. b = 1 is online gradient descent.

Three exact forms:

    recurrent   the definition, token by token
    chunkwise   a mini-batch in matrix products (the literature's dual form)
    serial      for b = 1, where one token's gradient needs the weights that the previous token left (on a GPU, one Triton
                kernel for networks of two layers)

A state is a flat dict of tensors and includes the current partial mini-batch, so a sequence may be cut anywhere.

Read network.py (f and its gradient), update.py (the inputs), recurrent.py and chunkwise.py, in this order.
"""

from prism.engine.networks.network import Network
from prism.engine.networks.update import Averaged, InnerUpdate, Momentum

__all__ = ["Averaged", "InnerUpdate", "Momentum", "Network"]
