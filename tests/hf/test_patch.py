"""`accelerate` replaces what it says, where it says, once; `restore` undoes it; upgrades that move things are seen."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import pickle
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prism
from prism.hf import fla_backend, patch
from prism.hf.families import FAMILIES, NOT_SERVED, modeling_file
from tests.hf.models import tiny, tokens, torch_functions, unwrapped

MODELS = [(family, name) for family in FAMILIES for name in family.models]


@pytest.fixture(autouse=True)
def _originals_afterwards() -> Any:
    yield
    prism.restore()


def everything() -> dict[str, Any]:
    """All functions that may be replaced, as they are now."""
    found = {}
    for family, name in MODELS:
        file = import_module(modeling_file(name))
        found |= {f"{name}.{function}": getattr(file, function) for function in family.functions}
        for where in family.replacements(name):
            owner, method = where.split(".")
            found[f"{name}.{where}"] = getattr(getattr(file, owner), method)
    return found


def _factor() -> int:
    return 2


def _scaled(x: int) -> int:
    return x * _factor()


def test_a_function_that_holds_itself_is_rebuilt_and_holds_the_new_one() -> None:
    def wrapped(function: Any) -> Any:
        def outermost(x: int) -> Any:
            return function(x), outermost

        return outermost

    function = wrapped(wrapped(_scaled))
    rebuilt = patch._rebuilt(function, {"_factor": lambda: 3})
    (value, inner), outer = rebuilt(5)
    assert (value, outer) == (15, rebuilt)
    assert inner(5) == (15, inner)
    (value, inner), outer = function(5)
    assert (value, outer) == (10, function)
    assert inner(5) == (10, inner)
    assert patch._rebuilt(function, {"another": _factor}) is function


@pytest.mark.parametrize(("family", "name"), MODELS, ids=[name for _, name in MODELS])
def test_transformers_has_the_functions_relied_on(family: Any, name: str) -> None:
    file = import_module(modeling_file(name))
    for theirs, ours in family.functions.items():
        assert hasattr(file, theirs), f"{modeling_file(name)} has no {theirs} in this transformers: see hf/families.py"
        wanted = [(p.name, p.kind) for p in inspect.signature(unwrapped(getattr(file, theirs))).parameters.values()]
        function = patch._function(ours)
        if ours.endswith(":no_fused_layer"):
            continue
        found = {p.name: p.kind for p in inspect.signature(function).parameters.values()}
        missing = [key for key, kind in wanted if kind is not inspect.Parameter.VAR_KEYWORD and key not in found]
        assert missing == [], f"{theirs} of {name} takes {missing} in this transformers, which {ours} does not know"
        order = [key for key, kind in wanted if kind is not inspect.Parameter.VAR_KEYWORD]
        assert list(found)[: len(order)] == order, f"{theirs} of {name} takes its arguments in another order: {order}"
    for where in family.replacements(name):
        owner, method = where.split(".")
        assert hasattr(getattr(file, owner, None), method), f"{modeling_file(name)} has no {where}: see hf/families.py"


@pytest.mark.parametrize("name", NOT_SERVED)
def test_families_that_are_not_served_exist(name: str) -> None:
    assert importlib.util.find_spec(f"transformers.models.{name}") is not None, f"{name} is gone: see hf/families.py"


def test_everything_is_replaced_once_and_restored() -> None:
    before = everything()
    importer = types.ModuleType("imports_by_name")
    importer.rule = before["qwen3_next.torch_chunk_gated_delta_rule"]  # type: ignore[attr-defined]
    sys.modules["imports_by_name"] = importer
    try:
        first = prism.accelerate(quiet=True)
        changed = everything()
        assert [key for key in before if changed[key] is before[key]] == []
        assert importer.rule is patch._function("prism.hf.delta:chunk_gated_delta_rule")
        steps = len(patch._undo)
        assert prism.accelerate(quiet=True) == first and len(patch._undo) == steps
        assert everything() == changed
        prism.restore()
        assert everything() == before and importer.rule is before["qwen3_next.torch_chunk_gated_delta_rule"]
    finally:
        del sys.modules["imports_by_name"]
    assert set(first.replaced) >= {name for _, name in MODELS} and set(first.kept) >= set(NOT_SERVED)


def test_the_report_is_printed_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    report = prism.accelerate(tiny("mamba2"), quiet=True)
    assert capsys.readouterr().out == ""
    prism.accelerate(tiny("mamba2"))
    assert capsys.readouterr().out == f"{report}\n" and "Mamba2Mixer" in str(report)


def test_one_model_is_changed_and_others_are_not() -> None:
    model, other, before = tiny("qwen3_next"), tiny("qwen3_next"), everything()
    kinds = [type(module) for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    first = prism.accelerate(model, quiet=True)
    assert everything() == before and [type(module) for module in other.modules()] == kinds
    changed = [type(module) for module in model.modules()]
    assert changed != kinds and prism.accelerate(model, quiet=True) == first
    assert [type(module) for module in model.modules()] == changed
    assert all(issubclass(new, old) and new.__name__ == old.__name__ for new, old in zip(changed, kinds, strict=True))
    x = tokens()
    assert torch.equal(copy.deepcopy(model)(x).logits, model(x).logits)
    prism.restore()
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_a_pickled_model_is_the_original(name: str, tmp_path: Path) -> None:
    model, x = tiny(name), tokens()
    kinds = [type(module) for module in model.modules()]
    prism.accelerate(model, quiet=True)
    changed = [type(module) for module in model.modules()]
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert [type(module) for module in loaded.modules()] == kinds
    assert [type(module) for module in pickle.loads(pickle.dumps(model, 0)).modules()] == kinds
    for twin in (copy.deepcopy(model), copy.copy(model)):
        assert [type(module) for module in twin.modules()] == changed
    twin = copy.deepcopy(model)
    assert next(twin.parameters()) is not next(model.parameters())
    if hasattr(model, "lm_head") and model.config.tie_word_embeddings:
        assert twin.lm_head.weight is twin.get_input_embeddings().weight
    prism.accelerate(loaded, quiet=True)
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_a_model_after_everything_and_everything_after_a_model() -> None:
    x, model = tokens(), tiny("mamba2")
    with torch_functions("mamba2"):
        wanted = model(x).logits
    for first, second in ((None, model), (model, None)):
        prism.accelerate(first, quiet=True)
        prism.accelerate(second, quiet=True)
        torch.testing.assert_close(model(x).logits, wanted, rtol=1e-4, atol=1e-4)
        prism.restore()


def test_a_forward_kept_by_a_device_hook_is_replaced() -> None:
    """The `accelerate` package puts a wrapper into `forward` and keeps the method in `_old_forward`."""
    model, x = tiny("qwen3_next"), tokens()
    layer = next(m for m in model.modules() if type(m).__name__ == "Qwen3NextGatedDeltaNet")
    layer._old_forward = kept = layer.forward
    layer.forward = lambda *a, **k: layer._old_forward(*a, **k)
    prism.accelerate(model, quiet=True)
    assert model(x).logits.isfinite().all()  # the original stops here where fla is installed and there is no GPU
    assert layer._old_forward != kept
    prism.restore()
    assert layer._old_forward == kept


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_compiled_code_uses_the_replacement_without_graph_breaks(name: str) -> None:
    model, x = tiny(name), tokens()
    prism.accelerate(model, quiet=True)
    wanted = model(x, use_cache=False).logits
    seen: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-4)
    assert any("prism.chunkwise" in each for each in seen)
    torch.compiler.reset()


@pytest.mark.skipif(importlib.util.find_spec("fla") is None or torch.cuda.is_available(), reason="fla without a GPU")
def test_flash_linear_attention_without_a_gpu() -> None:
    model, x = tiny("qwen3_next"), tokens()
    prism.accelerate(model, quiet=True)  # without it, fla's first call in a process stops with "0 active drivers"
    assert model(x).logits.isfinite().all()


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_callers_of_flash_linear_attention_get_ours() -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as theirs

    assert prism.accelerate(quiet=True).replaced["flash-linear-attention"]
    q, k, v = torch.randn(3, 1, 7, 2, 8)
    g, beta = -torch.rand(1, 7, 2), torch.rand(1, 7, 2)
    options = {"initial_state": torch.randn(1, 2, 8, 8), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found = theirs(q, k, v, g=g, beta=beta, **options)
    prism.restore()
    reference = unwrapped(import_module(modeling_file("qwen3_next")).torch_chunk_gated_delta_rule)
    for ours, wanted in zip(found, reference(q, k, v, g, beta, **options), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    table = import_module("fla.backends")._load_operation_registry("gated_delta_rule")._backends
    assert "prism" not in table
    assert not fla_backend.refuses(q, k, v, g, beta, state_v_first=True)[0]
    assert not fla_backend.refuses(q, k, v, g, beta, cu_seqlens=g, output_final_state=True)[0]


def test_linear_layers_of_another_kind_are_left_alone() -> None:
    """A quantised layer replaces nn.Linear; whatever it is, it stays and is called."""

    class Quantised(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Quantised.calls += 1
            return super().forward(x)

    model = tiny("qwen3_next")
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Quantised
    prism.accelerate(model, quiet=True)
    model(tokens())
    assert Quantised.calls > 4 and not any(type(module) is nn.Linear for module in model.modules())


@pytest.mark.filterwarnings("ignore")  # torch announces another package for this
@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
def test_quantised_linear_layers_keep_working(name: str) -> None:
    """Linear layers with weights of 8 bits, as torch itself makes them."""
    model = tiny(name)
    inner = torch.ao.quantization.quantize_dynamic(model.base_model, {nn.Linear}, torch.qint8)
    setattr(model, model.base_model_prefix, inner)
    assert sum("quantized" in type(module).__module__ for module in model.modules()) >= 4
    with torch_functions(name), torch.no_grad():
        wanted = model(tokens()).logits
    prism.accelerate(model, quiet=True)
    with torch.no_grad():
        found = model(tokens()).logits
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2  # a rounding of activations may go the other way
    assert model.generate(tokens(), max_new_tokens=3, do_sample=False).shape == (2, 24)


def test_nan_spreads_as_in_the_original() -> None:
    """A loss scaler skips a step whose gradients are not finite, so that NaN must come through."""
    from prism.hf.delta import chunk_gated_delta_rule

    q, k, v = torch.randn(3, 1, 6, 2, 4)
    g, beta = -torch.rand(1, 6, 2), torch.rand(1, 6, 2)
    g[0, 3, 1] = torch.nan
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
    assert o[0, :, 0].isfinite().all() and o[0, 3:, 1].isnan().all()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "model of type 'Linear' has nothing to replace: accelerate serves qwen3_next"),
        ("qwen3_next", "model must be a torch module"),
    ],
)
def test_a_model_without_memories_is_refused_in_one_sentence(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        prism.accelerate(model)
    assert "\n" not in str(raised.value)


def test_a_family_that_is_not_served_says_why() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=2))
    with pytest.raises(ValueError, match=r"'mamba' has nothing to replace .Mamba-1 has a decay per channel"):
        prism.accelerate(model)
