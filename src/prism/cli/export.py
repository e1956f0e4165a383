"""`prism export`: the model of a run that has not ended, or of one that was trained in shards, as one folder."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from prism.files import check_target
from prism.messages import say
from prism.train.checkpoint import all_damaged, checkpoint_names, chosen_by, find_newest_good
from prism.train.export import export as export_checkpoint


def export(run: Positional[Path], out: Path | None = None) -> None:
    """Write the newest good checkpoint of a run as a folder that transformers opens; with `validation.patience`, the best.

    Args:
        run: the run folder that `prism train lm` or `prism train rec` wrote to.
        out: where to write; `model` in the run folder unless given. Must not exist then.
    """
    if out is not None and out.exists():
        raise ValueError(f"{out} exists already: give another folder")
    check_target(run if out is None else out, folder=True, name="out")
    found = find_newest_good(run / "checkpoints", say)
    if found is None and checkpoint_names(run / "checkpoints"):
        raise all_damaged(run / "checkpoints")
    if found is None:
        raise ValueError(f"{run} has no checkpoint to export")
    chosen = chosen_by(found)
    print(f"{chosen.folder.name} is exported to {export_checkpoint(run, chosen, out or run / 'model')}")
