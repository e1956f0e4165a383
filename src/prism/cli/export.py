"""`prism export`: write the checkpoint of a run, finished or not, as one model folder or as ONNX."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from prism.files import check_target
from prism.messages import say
from prism.train.checkpoint import all_damaged, checkpoint_names, chosen_by, find_newest_good
from prism.train.export import write_export
from prism.train.run import CONFIG, stored_config

WRITERS = {
    "lm": "prism.language.export:write_model",
    "sft": "prism.language.tune_export:write_tuned",
    "dpo": "prism.language.tune_export:write_tuned",
    "rec": "prism.recommend.export:write_model",
    "adapt": "prism.language.adapt_export:write_adapter",
}
"""The function that writes the model of a run, by the run's task."""


def export(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    out: Path | None = None,
    format: Literal["model", "onnx"] = "model",
    merge: FlagCreatePairsOff[bool] = False,
) -> None:
    """Write the newest good checkpoint of a run (with early stopping, the best) as a model folder, or as ONNX.

    Args:
        run: Run folder of a `prism train` command or of `prism adapt`; for ONNX a language model, run or saved; with --merge
            a LoRA adapter, run or saved.
        out: Folder to write; it must not exist yet. None: `model` (`onnx`, `merged`) in the run folder, which is replaced.
        format: model: for transformers and the other commands. onnx: one token with states in and out, needs the extra onnx.
        merge: Write the whole model with the LoRA adapter merged into its weights, which every command takes.
    """
    if merge and format == "onnx":
        raise ValueError(
            "--merge and --format onnx are two steps: export the merged model first, then that folder as ONNX"
        )
    if out is not None and out.exists():
        raise ValueError(f"{out} exists already: give another folder with --out")
    check_target(run if out is None else out, folder=True, name="out")
    if format == "onnx":
        _export_onnx(run, out or run / "onnx")
        return
    if merge:
        from prism.language.adapted import write_merged

        print(f"merged the adapter and its base into {write_merged(run, out or run / 'merged')}")
        return
    stored = stored_config(run)
    if stored is None:
        raise ValueError(f"{run} is not a run folder: it has no {CONFIG}")
    found = find_newest_good(run / "checkpoints", say)
    if found is None and checkpoint_names(run / "checkpoints"):
        raise all_damaged(run / "checkpoints")
    if found is None:
        raise ValueError(f"{run} has no checkpoint to export")
    module, function = WRITERS[stored["task"]].split(":")
    write = getattr(import_module(module), function)
    chosen = chosen_by(found)
    print(f"exported {chosen.folder.name} to {write_export(write, run, chosen, out or run / 'model')}")


def _export_onnx(path: Path, out: Path) -> None:
    from prism.language.export import write_onnx_folder
    from prism.models.loading import is_run

    stored = stored_config(path) if is_run(path) else None
    if stored is not None and stored["task"] not in ("lm", "sft", "dpo"):
        raise ValueError(f"{path} is a run of task {stored['task']!r}: --format onnx writes language models")

    difference = write_onnx_folder(path, out)
    print(f"exported {path} to {out}: onnxruntime's logits differ from torch's by {difference:.0e}")
