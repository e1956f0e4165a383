"""Our functions as a local kernel of transformers: the folder loads, its layers fit, and a model computes with them."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from prism.hf.families import modeling_file
from prism.hf.local_kernel import FUNCTIONS, MODEL, kernel_config
from tests.hf.models import unwrapped

needs_kernels = pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs the package kernels")


def test_the_configuration_names_every_function(tmp_path: Path) -> None:
    config = kernel_config(tmp_path / "kernel")
    assert config.use_local_kernel and set(config.kernel_mapping) == set(FUNCTIONS)
    for name, where in config.kernel_mapping.items():
        folder, _, layer = where.rpartition(":")
        assert layer == name and Path(folder).is_absolute()
        assert (Path(folder) / "build" / "torch-universal" / "__init__.py").is_file()


def test_layers_are_stateless_and_take_the_arguments_of_the_originals() -> None:
    from prism.hf.local_kernel import layers

    file = importlib.import_module(modeling_file(MODEL))
    for name, (theirs, _) in FUNCTIONS.items():
        layer = getattr(layers, name)
        assert issubclass(layer, nn.Module) and layer.__init__ is nn.Module.__init__
        ours = list(inspect.signature(layer.forward).parameters.values())[1:]
        original = getattr(file, theirs)
        wanted = inspect.signature(unwrapped(original.forward if isinstance(original, nn.Module) else original))
        assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in wanted.parameters.values()]


SCRIPT = """
import sys
import torch
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from pathlib import Path
from prism.hf import delta, local_kernel
from tests.hf.models import tiny, tokens
import prism

calls = []
seen = local_kernel.FUNCTIONS["chunk_gated_delta_rule"]
counted = lambda *given, **named: calls.append(1) or seen[1](*given, **named)
local_kernel.FUNCTIONS["chunk_gated_delta_rule"] = (seen[0], counted)
folder = local_kernel.write_local_kernel(Path(sys.argv[1]))
model = tiny("qwen3_5")
prism.accelerate(model, quiet=True)
wanted = model(tokens()).logits
prism.restore()
mapping = {name: {"cpu": LocalLayerRepository(folder, layer_name=name)} for name in local_kernel.FUNCTIONS}
with use_kernel_mapping(mapping, inherit_mapping=False):
    kernelize(model, mode=Mode.INFERENCE, device="cpu")
torch.testing.assert_close(model(tokens()).logits, wanted, rtol=1e-4, atol=1e-4)
print("calls", len(calls))
"""


@needs_kernels
def test_a_model_computes_with_the_local_kernel(tmp_path: Path) -> None:
    """In a process of its own: the package `kernels` changes functions of transformers for good."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "kernel")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "calls 1" in done.stdout, done.stderr
