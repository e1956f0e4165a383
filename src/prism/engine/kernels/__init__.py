"""Triton kernels: the linear memory with a decay per head or per key channel, and the operations around it.

**The chunk form** that all kernels of the memory share. A token has J *columns*: keys X_j, written with values Y_j. With an
erase, column 0 is special. It looks up B (X_0 itself, unless the update has `erase_write`) and writes the remainder:

    Y_0 = W_0 - β ⊙ R,     R = (B ⊙ e^G) S + Σ_j tril(B X_jᵀ ⊙ Γ, -1) Y_j,        Y_j = W_j for j > 0
        = T⁻¹ (W_0 - β ⊙ [(B ⊙ e^G) S + Σ_{j>0} tril(B X_jᵀ ⊙ Γ, -1) W_j]),       T = I + β ⊙ tril(B X_0ᵀ ⊙ Γ, -1)
    O  = (Q ⊙ e^G) S + Σ_j tril(Q X_jᵀ ⊙ Γ) Y_j
    S' = e^{G_C} S + Σ_j (X_j ⊙ e^{G_C - G})ᵀ Y_j

S is the state before a chunk and S' after it, G the cumulative log-decay inside the chunk, and Γ the fraction of each
column's write that remains at each row. PRISM with L writes has J = L columns, and the same triangular matrix T as Gated
DeltaNet. An erase along another key than the first one written gets its own column 0, with W_0 = 0: J = L + 1. Heads may share
queries and keys, and a token may take several rows (sub-steps): `memory/tiles.py` says how.

**One call.** `engine/memory.py` asks `memory/dispatch.py` whether the kernels serve an update. That turns the update into
`KernelInputs` and calls the operator in `memory/operator.py`, which runs the passes in order:

    forward     prepare (T⁻¹ and the products inside each chunk), then a scan that carries the state from chunk to chunk
    backward    a scan that carries the state's gradient back, then queries, writes and decays of all chunks in parallel

A long sequence with few heads is cut into segments that run in parallel. Tile sizes come from a table of measured
configurations; nothing is tuned at run time. The first call of a kind compiles all its kernels in parallel.

| file | what it holds |
|---|---|
| available.py | whether kernels can run here: versions, device, tile widths |
| runtime.py | compiling and starting kernels; `Operator`, the shortest path from torch to them |
| compat.py | private Triton calls, each with a fallback |
| fla.py | decays per key channel through flash-linear-attention, if it is named |
| memory/dispatch.py | which updates the kernels serve, and how an `Update` becomes `KernelInputs` |
| memory/operator.py | the chunk operator: torch registration, order of the passes |
| memory/launch.py | `KernelInputs`, scratch memory and grids of each pass |
| memory/forward.py, backward_scan.py, backward_queries.py, backward_writes.py | the kernels of these passes |
| memory/tiles.py | device functions that these kernels share |
| memory/segments.py | how a sequence is cut into segments, and the kernel that links them |
| memory/configurations.py | measured tile sizes per shape and GPU |
| memory/channel_dispatch.py, _operator, _launch, _configurations | the same for a decay per key channel |
| memory/channel_prepare.py, channel_scan.py, channel_tokens.py | its kernels |
| ops/short_conv.py, solver.py, columns.py | one operation around the memory each (engine/layer_ops.py) |
| ops/conv_columns.py, strips.py, strips_backward.py | convolution and columns in one: launch and operator, kernels |
| ops/layer_ops.py, cross_entropy.py, sigmoid.py | norms, sums, products; the loss over a vocabulary; a gate's sigmoid |
| token/decode.py | one token of a memory: kernel, launch and operator |
| token/layer_maps.py, layer_memory.py | one token through a whole layer (engine/token.py): its maps, its memory |
| network/serial_mlp.py | online gradient descent of a two-layer network (engine/networks/serial.py) |

Modules with kernels import Triton. Others import them inside functions, because `import prism` must not import Triton.
"""
