"""Write a language model's decode step as ONNX, and check it in onnxruntime against torch.

A folder holds `model.onnx` (weights included; above 1 GiB they are in `model.onnx.data`) and `step.json`, which names the
inputs and outputs. Imports onnx, onnxscript and onnxruntime when called: the extra `onnx`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from prism.files import write_json
from prism.models.decode_step import DecodeStep
from prism.models.language import PrismForCausalLM

MODEL, ABOUT = "model.onnx", "step.json"
FORMAT = 1
LARGEST_FILE = 2**30
"""Bytes of weights up to which they are inside model.onnx; a protobuf must stay below 2 GiB."""
TOLERANCE = 1e-4
EXAMPLE = 13
"""Rows of the traced example: torch takes a batch for a constant if a number of heads or channels is the same."""


def write_onnx(model: PrismForCausalLM, folder: Path, **about: Any) -> DecodeStep:
    """Write `model.onnx` and `step.json` into a folder; `about` is added to the latter.

    Inputs are `input_ids` `[batch]` and the states, outputs `logits` `[batch, vocab_size]` and the new states. The batch may
    have any size.
    """
    import onnx  # noqa: F401  (a missing library of the extra is reported before the work)
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401

    step = DecodeStep(model)
    names = [state.name for state in step.states]
    batch = {0: torch.export.Dim("batch")}
    ids = torch.zeros(EXAMPLE, dtype=torch.int64)
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                step,
                (ids, *step.empty(EXAMPLE)),
                dynamo=True,
                verbose=False,
                input_names=["input_ids", *names],
                output_names=["logits", *(f"new.{name}" for name in names)],
                dynamic_shapes=(batch, tuple(batch for _ in names)),
            )
            size = sum(weight.nbytes for weight in step.parameters())
            program.save(str(folder / MODEL), external_data=size > LARGEST_FILE)
    except Exception as error:
        if isinstance(error, OSError):
            raise
        rules = ", ".join(dict.fromkeys(layer.mixer.rule.name for layer in model.model.layers))
        raise ValueError(f"torch cannot write a step of this model ({rules}) as ONNX: {_reason(error)}") from error
    write_json(folder / ABOUT, {**_description(step), **about})
    return step


def check_onnx(folder: Path, step: DecodeStep, steps: int = 8, batch: int = 3) -> float:
    """Run some steps in onnxruntime and in torch; the largest difference of logits, relative to the largest logit.

    Raises a ValueError if it exceeds `TOLERANCE`.
    """
    from onnxruntime import InferenceSession

    session = InferenceSession(str(folder / MODEL), providers=["CPUExecutionProvider"])
    states = step.empty(batch)
    arrays = {shape.name: state.numpy() for shape, state in zip(step.states, states, strict=True)}
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for _ in range(steps):
        ids = torch.randint(step.model.config.vocab_size, (batch,), generator=generator)
        with torch.no_grad():
            logits, *states = step(ids, *states)
        found, *new = session.run(None, {"input_ids": ids.numpy(), **arrays})
        arrays = dict(zip(arrays, new, strict=True))
        difference = (torch.from_numpy(found) - logits).abs().max() / logits.abs().max().clamp_min(1.0)
        worst = max(worst, float(difference))
    if not worst <= TOLERANCE:
        raise ValueError(f"onnxruntime's logits differ from torch's by {worst:.1e}, more than {TOLERANCE:g}")
    return worst


def _description(step: DecodeStep) -> dict[str, Any]:
    states = [
        {"input": name, "output": f"new.{name}", "shape": ["batch", *shape], "dtype": str(dtype).split(".")[1]}
        for name, shape, dtype in step.states
    ]
    config = step.model.config
    return {
        "format": FORMAT,
        "model": MODEL,
        "input": {"name": "input_ids", "shape": ["batch"], "dtype": "int64"},
        "output": {"name": "logits", "shape": ["batch", config.vocab_size], "dtype": "float32"},
        "states": states,
        "states_start_as": "zeros",
        "layers": [layer.mixer.rule.name for layer in step.model.model.layers],
        "end_token": config.eos_token_id,
    }


def _reason(error: BaseException) -> str:
    """The first line of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's lines about its own progress and about libraries that are not needed."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
