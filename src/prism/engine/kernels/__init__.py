"""Triton kernels of the linear memory with one decay per head: chunks, gradients, the decode step, and what surrounds them.

`ops` and `ops_beside` are the only doors: all else is imported by them, lazily, because `import prism` must not import Triton.

The chunk form, in the shape all kernels share. A token has J *columns*: keys X_j written with values Y_j. With an erase,
column 0 is the one it feeds: it looks up B (which is X_0 itself, unless `erase_write` was given) and writes what is left,

    Y_0 = W_0 - β ⊙ R,     R = (B ⊙ e^G) S + Σ_j tril(B X_jᵀ ⊙ Γ, -1) Y_j,        Y_j = W_j for j > 0
        = T⁻¹ (W_0 - β ⊙ [(B ⊙ e^G) S + Σ_{j>0} tril(B X_jᵀ ⊙ Γ, -1) W_j]),       T = I + β ⊙ tril(B X_0ᵀ ⊙ Γ, -1)
    O  = (Q ⊙ e^G) S + Σ_j tril(Q X_jᵀ ⊙ Γ) Y_j
    S' = e^{G_C} S + Σ_j (X_j ⊙ e^{G_C - G})ᵀ Y_j

so PRISM with L writes has J = L columns and the one triangular matrix T of Gated DeltaNet. Forward: `prepare.py` (gates, T⁻¹,
the grams), `scan.py` (the state from chunk to chunk, outputs). Backward: `reverse.py` (dS from chunk to chunk), `lookups.py`
and `writes.py` (every token's gradients from it), `decay.py`. Long sequences of few heads run as segments side by side that
`chain.py` links. `decode.py` is one token. Beside the memory: `short_conv.py`, `solver.py` (PRISM's writes), and `columns.py`
(all that a delta rule does between the two). On the host: `passes.py` and `segments.py` (which kernels when), `launch.py` and
`launch_beside.py` (grids and scratch memory), `compiled.py` and `programs.py` (compiling and starting), `operator.py` (how
torch gets there); `paths.py` and `fla.py` say what can be served.
"""
