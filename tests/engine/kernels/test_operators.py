"""The kernels as torch operators: registration, compiled callers, unwritten memory, segments, and reproducibility."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import prism
from prism.engine import memory_
from tests.engine.kernels.problems import SMALLEST, leaves, tiles, update
from tests.engine.kernels.where import CAN_START, DEVICE, needs_kernels
from tests.helpers import unwritten_memory_is_nan

pytestmark = needs_kernels

if CAN_START:
    import triton
    import triton.language as tl

    from prism.engine.kernels.memory import operator as memory
    from prism.engine.kernels.memory import segments
    from prism.engine.kernels.memory.configurations import Tiling, forced
    from prism.engine.kernels.memory.launch import KernelInputs, Launch
    from prism.engine.kernels.memory.tiles import lasting_chunks
    from prism.engine.kernels.runtime import Compiled, compiled
    from prism.engine.kernels.token import decode

    @triton.jit
    def count_lasting(reach, found, near, count, direction):
        tl.store(found, lasting_chunks(reach, near, count, direction))


def everything(x: dict[str, Tensor], form: str, backend: str, **more) -> list[Tensor]:
    o, end = prism.memory(update(x, **more), x["state"], form, backend)
    loss = o.square().sum() + (end * torch.linspace(-1, 1, end.shape[-1])).sum()
    return [o, end, *torch.autograd.grad(loss, list(x.values()))]


def assert_same(x: dict[str, Tensor], tolerance: float = 1e-5, form: str = "chunkwise", **more) -> None:
    expected = everything(x, "recurrent", "torch", **more)
    single = {name: z.detach().float().requires_grad_() for name, z in x.items()}
    for name, got, wanted in zip(["o", "end", *x], everything(single, form, "triton", **more), expected, strict=True):
        error = ((got - wanted).norm() / wanted.norm()).item()
        assert error <= tolerance, f"{name}: {error:.2e}"


@pytest.mark.parametrize(("step", "chunk"), [(16, 16), (32, 64)])
def test_every_result_is_written(step: int, chunk: int) -> None:
    with unwritten_memory_is_nan(), forced(tiles(step, chunk)):
        assert_same(leaves(70, K=2 * SMALLEST))


def test_segments_in_parallel() -> None:
    """Chunks that do not divide evenly into segments, documents that end inside a segment, several key blocks."""
    x = leaves(90, H=1, G=1, K=2 * SMALLEST)
    reset = torch.zeros(1, 90, dtype=torch.bool)
    reset[0, [20, 41]] = True
    with forced(tiles(16, 16, segments=4)):
        assert_same(x)
        assert_same(x, reset=reset)


def test_segments_pass_on_what_is_not_forgotten() -> None:
    """Under a decay of e⁻⁸, head 0 forgets all but two chunks, and its maps are 0; the others forget less than all."""
    x = leaves(15 * 16 - 5, H=3, G=3)
    x["log_decay"] = torch.tensor([-8.0, -0.15, -1e-3]).expand(1, 15 * 16 - 5, 3).double().requires_grad_()
    with forced(tiles(16, 16, segments=3)):
        assert_same(x)


@pytest.mark.parametrize(
    ("reach", "expected"),
    [
        ([-100.0] * 3, 2),
        ([-191.0, -0.5, -0.4, -0.2], 4),  # all of the four, but nothing before them
        ([-191.0, -0.5], 3),  # and what came before
        ([-0.5, -65536.0, -0.5], 2),  # a document starts in the second
        ([-200.0, 150.0, -100.0, -60.0], 4),  # erases enlarge again what the first chunk left
        ([-1.0] * 300, 192),  # more than are summed together
        ([-1.0] * 100, 101),
        ([math.nan, -1000.0], 3),  # never forgotten
    ],
)
@pytest.mark.parametrize("direction", [1, -1])
def test_chunks_that_matter_at_a_border(reach: list[float], expected: int, direction: int) -> None:
    """192 bits are forgotten. The reaches are given from the border on."""
    given = torch.tensor(reach[::direction], device=DEVICE)
    found = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    count_lasting[(1,)](given, found, 0 if direction == 1 else len(reach) - 1, len(reach), direction)
    assert found.item() == expected


def test_segments_pass_on_what_erases_enlarge() -> None:
    """A long key turns and enlarges the state along it as much as the decay, e⁻², shrinks it, so that nothing is forgotten."""
    x = leaves(16 * 16)
    x["log_decay"] = torch.full((1, 16 * 16, 2), -2.0).double().requires_grad_()
    x["erase_strength"] = torch.ones(1, 16 * 16, 2).double().requires_grad_()
    key = torch.randn(16)
    key *= (1 + 0.999 * math.exp(2)) ** 0.5 / key.norm()
    x["k"] = key.expand(1, 16 * 16, 2, 2, 16).double().contiguous().requires_grad_()
    with forced(tiles(16, 16, segments=2)):
        assert_same(x, tolerance=1e-4)


def test_reach_bounds_the_norm_of_each_chunks_map() -> None:
    """It is the product of the decays and of ‖I - a bᵀ‖ over the tokens: here the norms are computed by torch."""
    a, b, beta = torch.randn(1, 21, 1, 16), torch.randn(1, 21, 1, 16) / 4, 2 * torch.rand(1, 21, 1)
    log_decay = -torch.rand(1, 21, 1)
    inputs = (a, a.unsqueeze(3), torch.randn(1, 21, 1, 1, 16), log_decay, b, beta, None)
    with forced(tiles(16, 16, segments=2)):
        u = KernelInputs(*(None if z is None else z.to(DEVICE).contiguous() for z in inputs))
        reach = Launch(u).prepare(segments=2).reach
    assert reach is not None
    outer = (beta.unsqueeze(-1) * a).unsqueeze(-1) * b.unsqueeze(-2)
    norms = torch.linalg.matrix_norm(torch.eye(16) - outer, 2).log2() + log_decay * math.log2(math.e)
    expected = torch.stack([norms[0, :16].sum(), norms[0, 16:].sum()])
    torch.testing.assert_close(reach.flatten().to(expected.device), expected, rtol=1e-4, atol=1e-4)


def test_grouped_heads_and_substeps() -> None:
    with forced(tiles(16, 16)):
        assert_same(leaves(9, H=4, G=2, n=2), substeps=2)


def test_one_token_with_gradients_on_the_decode_path() -> None:
    assert_same(leaves(1), form="recurrent")


def test_final_state_alone_has_gradients() -> None:
    x = leaves(5, dtype=torch.float32)
    got, expected = (
        torch.autograd.grad(prism.memory(update(x), x["state"], "chunkwise", backend)[1].sum(), x["w"])[0]
        for backend in ("triton", "torch")
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_detached_erase_key_keeps_its_own_gradient() -> None:
    """Sharing memory with k is not enough to treat the erase key as k's first key."""
    x = leaves(6, L=1, dtype=torch.float32)

    def gradient(backend: str) -> Tensor:
        fields = {name: z for name, z in x.items() if name != "state"}
        u = prism.Update(**fields, erase_key=x["k"].detach()[..., 0, :])
        o, _ = prism.memory(u, x["state"], "chunkwise", backend)
        return torch.autograd.grad(o.sum(), x["k"])[0]

    torch.testing.assert_close(gradient("triton"), gradient("torch"), rtol=1e-4, atol=1e-5)


def test_an_erase_key_taken_without_gradients_adds_nothing_to_those_of_k() -> None:
    """Although it is a view of k."""
    x = leaves(6, L=1, dtype=torch.float32)
    with torch.no_grad():
        key = x["k"][..., 0, :]

    def gradient(backend: str) -> Tensor:
        u = prism.Update(x["q"], x["k"], x["w"], erase_key=key, erase_strength=x["erase_strength"])
        return torch.autograd.grad(prism.memory(u, None, "chunkwise", backend)[0].sum(), x["k"])[0]

    torch.testing.assert_close(gradient("triton"), gradient("torch"), rtol=1e-4, atol=1e-5)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        return -d


def _hooked(b: Tensor) -> Tensor:
    b.register_hook(torch.zeros_like)
    return b


@pytest.mark.parametrize("changed", [_hooked, Reversed.apply])
def test_hooks_and_functions_on_an_erase_key_are_applied(changed: Any) -> None:
    x = leaves(6, dtype=torch.float32)

    def gradients(backend: str) -> tuple[Tensor, ...]:
        b = changed(x["k"][..., 0, :])
        u = prism.Update(x["q"], x["k"], x["w"], erase_key=b, erase_strength=x["erase_strength"])
        return torch.autograd.grad(prism.memory(u, None, "chunkwise", backend)[0].square().sum(), [x["k"], b])

    for got, wanted in zip(gradients("triton"), gradients("torch"), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["chunkwise", "recurrent"])
def test_forward_mode_gradients_raise_and_are_never_zero(form: str) -> None:
    x = {name: z.detach() for name, z in leaves(3, dtype=torch.float32).items()}

    def call(q: Tensor) -> Tensor:
        return prism.memory(update({**x, "q": q}), x["state"], form, "triton")[0]

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x["q"], torch.ones_like(x["q"]))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            call(dual)
        with pytest.raises(ValueError, match="memory_ has no gradients"):
            memory_(update({**x, "q": dual}), x["state"].clone(), "triton")
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(call, (x["q"],), (torch.ones_like(x["q"]),))


def test_second_derivatives_raise_and_are_never_wrong() -> None:
    x = leaves(3, dtype=torch.float32)
    o, _ = prism.memory(update(x), x["state"], "chunkwise", "triton")
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(o.sum(), x["q"], create_graph=True)


def test_results_may_be_modified_in_place() -> None:
    x = leaves(3, dtype=torch.float32)
    for result in prism.memory(update(x), x["state"], "chunkwise", "triton"):
        result.mul_(2)


def _other_strides(z: Tensor) -> Tensor:
    return z.mT.contiguous().mT if z.ndim > 1 else z


def _unaligned(z: Tensor) -> Tensor:
    place = z.new_empty(z.numel() + 1)[1:].view(z.shape)
    return place.copy_(z)


@pytest.mark.parametrize("brought_back", [_other_strides, _unaligned])
def test_hooks_may_change_the_strides_of_saved_tensors(brought_back: Any) -> None:
    x = leaves(40, dtype=torch.float32)
    with forced(tiles(16, 16, segments=2)):
        expected = everything(x, "chunkwise", "triton")
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, brought_back):
            got = everything(x, "chunkwise", "triton")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_results_are_reproducible_bit_for_bit() -> None:
    x = leaves(40, dtype=torch.float32)
    first, second = everything(x, "chunkwise", "triton"), everything(x, "chunkwise", "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_memory_is_a_proper_operator() -> None:
    x = leaves(3, H=1, G=1, L=1, dtype=torch.float32)
    documents = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    tensors = (x["q"], x["k"], x["w"], x["log_decay"], None, x["erase_strength"], documents, x["state"])
    with forced(tiles(16, 16)):
        torch.library.opcheck(memory.memory.registered, (*tensors, True))


def test_steps_are_proper_operators() -> None:
    x = {name: z.detach() for name, z in leaves(1, H=1, G=1, dtype=torch.float32).items()}
    tensors = (x["q"], x["k"], x["w"], x["log_decay"], x["k"][..., 0, :].clone(), x["erase_strength"], None, None, None)
    torch.library.opcheck(decode.step.registered, (*tensors, x["state"], 1))
    torch.library.opcheck(decode.step_, (*tensors, x["state"], 1))


def test_step_in_place() -> None:
    x = {name: z.detach() for name, z in leaves(1, dtype=torch.float32).items()}
    u = update(x)
    expected, end = prism.memory(u, x["state"], "recurrent", "torch")
    state = x["state"].clone()
    with unwritten_memory_is_nan():
        o = memory_(u, state, "triton")
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, end, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="state has shape"):
        memory_(u, state[..., :8, :].contiguous(), "triton")


def test_the_erase_reads_strided_keys_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of k, one vector for all tokens, a dimension of size 1 with an odd stride; and keys that must be copied."""
    B, T, H, K = 3, 2, 2, 16
    k, w, q = torch.randn(B, T, H, 2, K), torch.randn(B, T, H, 2, K), torch.randn(B, T, H, K)
    beta, state = torch.rand(B, T, H), torch.randn(B, H, K, K)
    one = torch.randn(B, 1, H, K)
    lone = torch.randn(B, 1, 1, K)
    turned = torch.randn(T, B, H, K).transpose(0, 1)
    cases = [(k[..., 0, :], True), (k[..., 1, :], True), (torch.randn(K).expand(B, T, H, K), True), (turned, False)]
    cases += [(one.expand(B, T, H, K), False), (lone.as_strided(lone.shape, (K, 5, 7, 1)), True)]
    started = []
    run = decode._launch
    monkeypatch.setattr(decode, "_launch", lambda given, *more: started.append(given) or run(given, *more))
    for b, in_place in cases:
        t = b.shape[1]
        given = q[:, :t], k[:, :t], w[:, :t], None, b, beta[:, :t], None, None, None, state, 1
        o, end = decode.step(*given)
        assert (started[-1][4].data_ptr() == b.data_ptr()) == in_place
        u = prism.Update(q[:, :t], k[:, :t], w[:, :t], erase_key=b.contiguous(), erase_strength=beta[:, :t])
        expected = prism.memory(u, state, "recurrent", "torch")
        torch.testing.assert_close((o, end), expected, rtol=1e-4, atol=1e-5)


def test_torch_compile_without_graph_breaks() -> None:
    x = leaves(5, dtype=torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Tensor, k: Tensor, w: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        u = prism.Update(q, k, w, g, erase_strength=beta, erase_first=True)
        return prism.memory(u, state, "chunkwise", "triton")

    tensors = list(x.values())
    compiled, eager = call(*tensors), prism.memory(update(x), x["state"], "chunkwise", "triton")
    gradients = [torch.autograd.grad(o.sum() + end.sum(), tensors) for o, end in (compiled, eager)]
    for got, wanted in zip((*compiled, *gradients[0]), (*eager, *gradients[1]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_fake_tensors_have_the_real_shapes() -> None:
    x = leaves(40, dtype=torch.float32)
    tensors = (x["q"], x["k"], x["w"], x["log_decay"], None, x["erase_strength"], None, None)
    real = memory.memory(*tensors, True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = memory.memory(*[None if z is None else mode.from_tensor(z) for z in tensors], True)
    assert [(z.shape, z.dtype) for z in fake] == [(z.shape, z.dtype) for z in real]


@pytest.mark.parametrize("initial", [True, False])
def test_other_lengths_batches_and_heads_compile_nothing(initial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a sequence is long enough to be split into segments."""
    started: set[Any] = set()
    program = Compiled.program

    def note(self: Compiled, kernel: Any, tiling: Tiling, constants: dict[str, Any]) -> Any:
        started.add((kernel.fn.__name__, tiling, *constants.values()))
        return program(self, kernel, tiling, constants)

    def compile_together(self: Compiled, run: Any, *kind: bool) -> None:
        if kind not in self.compiled_kinds:
            self.compiled_kinds.add(kind)
            run()

    monkeypatch.setattr(Compiled, "program", note)
    if DEVICE == "cpu":  # a GPU compiles what a rehearsal would start
        monkeypatch.setattr(Compiled, "compile", compile_together)
    monkeypatch.setattr(segments, "_may_be_split", lambda run: True)
    monkeypatch.setattr(segments, "_multiprocessors", lambda device: 132)

    def call(T: int, H: int, ended: bool) -> None:
        x = leaves(T, H, G=H, L=1, dtype=torch.float32)
        o, end = prism.memory(update(x), x["state"] if initial else None, "chunkwise", "triton")
        torch.autograd.grad(o.sum() + end.sum() if ended else o.sum(), x["w"])

    def call_registered(T: int) -> None:  # as compiled code does
        x = leaves(T, 1, G=1, L=1, dtype=torch.float32)
        state = x["state"] if initial else None
        tensors = x["q"], x["k"], x["w"], x["log_decay"], None, x["erase_strength"], None, state
        torch.autograd.grad(memory.memory.registered(*tensors, True)[0].sum(), x["w"])

    compiled.cache_clear()
    try:
        with forced(tiles(16, 16)):
            call(5, 2, ended=False)
            first = set(started)
            for T, ended in ((40, True), (520, False), (520, True)):
                call(T, 1, ended)
            call_registered(520)
        assert started == first and "segment_chain_kernel" in {name for name, *_ in first}
    finally:
        compiled.cache_clear()  # its entries say that everything was compiled


def test_a_direct_call_equals_the_registered_operator() -> None:
    x = leaves(40, dtype=torch.float32)
    tensors = (x["q"], x["k"], x["w"], x["log_decay"], None, x["erase_strength"], None, x["state"])
    given = [z for z in tensors if z is not None]
    with forced(tiles(16, 32, segments=2)):
        results = [call(*tensors, True)[:2] for call in (memory.memory, memory.memory.registered)]
        direct, registered = ([*out, *torch.autograd.grad([z.sum() for z in out], given)] for out in results)
    assert type(results[0][0].grad_fn) is not type(results[1][0].grad_fn), "two different paths"
    for a, b in zip(direct, registered, strict=True):
        assert torch.equal(a, b)


def test_an_operator_without_a_gradient_raises() -> None:
    u = update(leaves(1, dtype=torch.float32))
    o, _ = decode.step(u.q, u.k, u.w, u.log_decay, u.k[..., 0, :], u.erase_strength, None, None, None, None, 1)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        o.sum().backward()
