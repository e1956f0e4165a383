"""Save and load the tensors of a run: weights, optimizer state and random state.

Tensors have flat names, `model.<parameter>` and `optimizer.<parameter>.<key>`, and are loaded in place. torch's
distributed checkpoint does the work: every process writes its own shards as safetensors and reads what it needs from any
shard, so a run can resume on a different number of processes. Its default format stores a pickle next to the tensors; the
safetensors format used here does not: nothing is ever unpickled.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from prism.train.distributed import World
from prism.train.optimizer import Optimizers

if not hasattr(dcp, "HuggingFaceStorageWriter"):
    raise ImportError(f"checkpoints as safetensors need torch 2.9 or later, this is {torch.__version__}")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (tied ones once) and persistent buffers, by name; of a model with frozen parameters, those that are trained.

    Frozen ones are a base that was read from elsewhere, and will be again: a checkpoint of an adapter is small.
    """
    # The state dict first: with FSDP it puts the shards back in place of gathered parameters.
    buffers = {
        name: value for name, value in model.state_dict(keep_vars=True).items() if not isinstance(value, nn.Parameter)
    }
    parameters = dict(model.named_parameters())
    trained: dict[str, Tensor] = {name: value for name, value in parameters.items() if value.requires_grad}
    if len(trained) < len(parameters):
        return {f"model.{name}": value.detach() for name, value in trained.items()}
    named = {**trained, **buffers}
    return {f"model.{name}": value.detach() for name, value in named.items()}


def optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """The state of all optimizers, by parameter name and key."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"optimizer.{names[parameter]}.{key}": value
        for optimizer, parameter in optimizers.parameters()
        for key, value in optimizer.state[parameter].items()
    }


def save(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    """Write tensors as safetensors shards; every process must call it."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _plain_errors():
        dcp.save(tensors, storage_writer=writer, no_dist=world.parallel == "none")


def load(folder: Path, model: nn.Module, optimizers: Optimizers | None, world: World) -> None:
    """Load what `save` wrote into the model and its optimizers (None: the model only), in place."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    # only tensors are written, so all metadata is of tensors
    stored = cast(dict[str, TensorStorageMetadata], reader.read_metadata().state_dict_metadata)
    targets = model_tensors(model)
    _check_names(set(targets), {name for name in stored if name.startswith("model.")}, folder)
    for name, target in targets.items():
        if tuple(stored[name].size) != tuple(target.shape):
            raise ValueError(
                f"{folder}: {name} has shape {list(stored[name].size)}, the model expects {list(target.shape)}"
            )
    if optimizers is not None:
        targets |= _make_optimizer_state(stored, model, optimizers)
    with _plain_errors():
        dcp.load(targets, storage_reader=reader, no_dist=world.parallel == "none")


def read(folder: Path, kind: Literal["model", "optimizer"] = "model") -> dict[str, Tensor]:
    """The weights, or the optimizers' state, that `save` wrote, by name, without a model to load them into."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored = cast(dict[str, TensorStorageMetadata], reader.read_metadata().state_dict_metadata)
    weights = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in stored.items()
        if name.startswith(f"{kind}.")
    }
    with _plain_errors():
        dcp.load(dict(weights), storage_reader=reader, no_dist=True)
    return {name.removeprefix(f"{kind}."): value for name, value in weights.items()}


def _make_optimizer_state(
    stored: dict[str, TensorStorageMetadata], model: nn.Module, optimizers: Optimizers
) -> dict[str, Tensor]:
    """Zero state with the stored names and shapes, assigned to the optimizers and returned to be loaded into."""
    owners = {parameter: optimizer for optimizer, parameter in optimizers.parameters()}
    made: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter not in owners:  # frozen
            continue
        optimizer, prefix = owners[parameter], f"optimizer.{name}."
        for key in (stored_name.removeprefix(prefix) for stored_name in stored if stored_name.startswith(prefix)):
            size, dtype = stored[prefix + key].size, stored[prefix + key].properties.dtype
            if size == parameter.shape:
                value = torch.zeros_like(parameter, dtype=dtype)
            else:  # a step count: on the device for fused optimizers, else on the CPU
                fused = optimizer.defaults.get("fused")
                value = torch.zeros(size, dtype=dtype, device=parameter.device if fused else "cpu")
            optimizer.state[parameter][key] = made[prefix + key] = value
    return made


def _check_names(expected: set[str], found: set[str], folder: Path) -> None:
    """Raise ValueError unless the stored names are exactly the model's."""
    for what, names in (("has no", expected - found), ("has", found - expected)):
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"{folder} {what} {min(names)}{others}, unlike the model: is it of a different model?")


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the original error of a failed save or load. torch wraps it in a BaseException, which `except Exception` misses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # expected with one process
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


def seed(number: int) -> None:
    """Seed the random generators of torch and Python."""
    random.seed(number)
    torch.manual_seed(number)


def capture(device: torch.device) -> dict[str, Tensor]:
    """The random state of torch (CPU, and the GPU of the run if it has one) and of Python, as tensors to save."""
    version, words, _ = random.getstate()
    assert version == 3
    state = {"torch": torch.get_rng_state(), "python": torch.tensor(words, dtype=torch.int64)}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `capture` returned; a run may move between machines with and without a GPU."""
    torch.set_rng_state(state["torch"])
    random.setstate((3, tuple(state["python"].tolist()), None))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
