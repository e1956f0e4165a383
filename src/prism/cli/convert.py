"""`prism convert`: turn a Gated DeltaNet language model of another library into ours, or ours into one of fla's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from prism.messages import progress_bars
from prism.models.convert import convert_model
from prism.overrides import read_toml_value


def convert(
    model: Annotated[Positional[Path], arg(metavar="MODEL")],
    output: Path,
    to: Literal["prism", "fla"] = "prism",
    rule: Literal["gated_delta", "prism"] | None = None,
    steps: int | None = None,
    options: tuple[str, ...] = (),
    seed: int = 0,
    norm_eps: float | None = None,
    force: bool = False,
) -> None:
    """Convert a Gated DeltaNet language model of flash-linear-attention or transformers to ours, with the same logits.

    With --rule prism the layers get further writes that start with γ = 0: still the same logits, and training
    continues as PRISM. With --to fla a model of ours becomes one of flash-linear-attention.

    Args:
        model: Model folder with config.json and safetensors: Gated DeltaNet of fla, Qwen3-Next or Qwen3.5 without experts, or
            ours.
        output: Folder to write.
        to: prism: a PrismForCausalLM. fla: a GatedDeltaNetForCausalLM.
        rule: Rule of the Gated DeltaNet layers: gated_delta or prism. None: gated_delta.
        steps: Writes per token of --rule prism. None: 2.
        options: Options of PRISM's further writes as option=value, for example rank=32 keys=rotated.
        seed: Random seed of PRISM's new weights.
        norm_eps: Epsilon of all norms of the model of --to fla, for example 1e-5. It changes the logits a little where the
            model has another one. None: the model's, if it has one for all.
        force: Replace an existing model folder.
    """
    chosen = dict(_option(text) for text in options)
    if steps is not None:
        chosen["steps"] = steps
    bars = progress_bars()
    task = bars.add_task("converting", total=None)

    def report(done: int, total: int) -> None:
        bars.start()  # not before: a refused model shows one sentence and no bar
        bars.update(task, completed=done, total=total)

    try:
        written = convert_model(
            model,
            output,
            to=to,
            rule=rule,
            options=chosen,
            force=force,
            seed=seed,
            norm_eps=norm_eps,
            report=report,
        )
    finally:
        bars.stop()
    print(f"converted {model} to {written}")


def _option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise ValueError(f"options has {text!r}: write option=value, for example rank=32")
    return name, read_toml_value(value)
