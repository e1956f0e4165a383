"""Write, verify and find checkpoints, each of which is complete or absent.

    checkpoints/
      step-00000200/
        tensors/*.safetensors    weights and optimizer state, one or more files per process
        rng/00000.safetensors    random state of each process
        state.json               step, skipped steps, best step so far, versions
        manifest.json            size and SHA-256 of every other file

A checkpoint is written under a temporary name, synced, hashed and renamed. A damaged one (a flipped byte, a truncated or
missing file) is reported by file name and set aside; training resumes from the newest good one. Non-finite values are
never saved.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from prism.files import (
    Entries,
    commit_folder,
    entries,
    find_damage,
    fresh_folder,
    read_json,
    reason,
    remove_folder,
    sync,
    write_json,
    write_manifest,
)
from prism.train import tensors as tensor_files
from prism.train.distributed import World


class NotFiniteError(ValueError):
    """The run met NaN or infinity and cannot continue."""


def refuse_non_finite(tensors: dict[str, Tensor], where: str) -> None:
    """Raise NotFiniteError if a tensor has NaN or infinity; of a sharded tensor each process checks its own shard."""
    for name, value in tensors.items():
        local = value.to_local() if hasattr(value, "to_local") else value
        if local.is_floating_point() and not bool(torch.isfinite(local).all()):
            raise NotFiniteError(f"{name} is not finite: {where} is not written")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = read_json(self.folder / "state.json")
        return state

    @property
    def tensors(self) -> Path:
        return self.folder / "tensors"

    def rng(self, rank: int) -> dict[str, Tensor] | None:
        """Random state of a process; None if the checkpoint was written with fewer processes."""
        path = self.folder / "rng" / f"{rank:05d}.safetensors"
        return load_safetensors(path.read_bytes()) if path.exists() else None


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: a folder that every process can access.
        keep: number of newest checkpoints to keep; the best one that any of them names is kept as well.
    """

    def __init__(self, folder: Path, keep: int, world: World) -> None:
        self.folder, self.keep, self.world = folder, keep, world

    def save(self, tensors: dict[str, Tensor], rng: dict[str, Tensor], state: dict[str, Any]) -> Checkpoint:
        """Write a checkpoint of step `state["step"]`; if that fails, earlier ones are unchanged.

        `state["best"]` is None, or a dict whose `step` is the best so far.
        """
        name = name_of(state["step"])
        partial = self.folder / f".{name}.partial"
        try:
            self.world.together(lambda: refuse_non_finite(tensors, f"checkpoint {name}"))
            self.world.on_main(lambda: fresh_folder(partial / "rng"))
            tensor_files.save(partial / "tensors", tensors, self.world)
            self.world.together(lambda: _write_rng(partial / "rng" / f"{self.world.rank:05d}.safetensors", rng))
            self.world.on_main(lambda: write_json(partial / "state.json", state))
            files = self._digest(partial)
            self.world.on_main(lambda: self._commit(partial, self.folder / name, files))
            return Checkpoint(self.folder / name)
        except NotFiniteError:
            raise
        except Exception as error:
            if self.world.main:
                shutil.rmtree(partial, ignore_errors=True)  # free the space on a full disk
            raise OSError(self._explain(error, name)) from error

    def newest_good(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that passes all checks, or None; damaged newer ones are reported and set aside."""
        found = self.world.gather(self.world.on_main(lambda: self._clean_up(report)))[0]
        return None if found is None else Checkpoint(self.folder / found)

    def _clean_up(self, report: Callable[[str], None]) -> str | None:
        """Remove leftovers, set damaged checkpoints aside, and return the name of the newest good one."""
        for leftover in self.folder.glob(".step-*"):  # left by a killed writer
            shutil.rmtree(leftover)
        names, good = checkpoint_names(self.folder), find_newest_good(self.folder, report)
        if good is None:
            if names:
                raise all_damaged(self.folder)
            return None
        for name in names[names.index(good.folder.name) + 1 :]:
            aside = self.folder / f"{name}.damaged"
            if aside.exists():
                remove_folder(aside)
            (self.folder / name).rename(aside)
            report(f"{name} was renamed to {aside.name}")
        return good.folder.name

    def _digest(self, partial: Path) -> Entries:
        """Sync and hash all files; the processes share the work."""
        files = self.world.on_main(lambda: sorted(path for path in partial.rglob("*") if path.is_file()))
        mine = (self.world.gather(files)[0] or [])[self.world.rank :: self.world.size]

        def hash_mine() -> Entries:
            for path in mine:
                sync(path)
            return entries(partial, mine)

        shares = self.world.gather(self.world.together(hash_mine))
        return {name: entry for share in shares for name, entry in share.items()}

    def _commit(self, partial: Path, final: Path, files: Entries) -> None:
        """Write the manifest, rename the folder, and remove checkpoints that are no longer kept."""
        write_manifest(partial, files)
        commit_folder(partial, final)
        names = checkpoint_names(self.folder)
        kept = names[-self.keep :]
        best = [Checkpoint(self.folder / name).state.get("best") for name in kept]
        kept += [name_of(each["step"]) for each in best if each is not None]
        for name in set(names) - set(kept):
            remove_folder(self.folder / name)

    def _explain(self, error: Exception, name: str) -> str:
        """The message for a checkpoint that could not be written."""
        names = [other for other in checkpoint_names(self.folder) if other != name]
        last = f"the last good checkpoint, {names[-1]}, is unchanged" if names else "there is no earlier checkpoint"
        why, advice = reason(error), "run the same command again to resume"
        if "No space left" in why:
            advice = "free some space and " + advice
        return f"checkpoint {name} could not be written to {self.folder} ({why}): {last}; {advice}"


def name_of(step: int) -> str:
    """The folder name of a checkpoint."""
    return f"step-{step:08d}"


def checkpoint_names(folder: Path) -> list[str]:
    """Names of all checkpoints in a folder, damaged or not, oldest first."""
    return sorted(path.name for path in folder.glob("step-*") if path.name[5:].isdecimal())


def find_newest_good(folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that passes all checks, or None. Read-only, so it is safe while the run is training."""
    for name in reversed(checkpoint_names(folder)):
        damage = find_damage(folder / name)
        if damage is None:
            return Checkpoint(folder / name)
        report(f"checkpoint {name} is damaged: {damage}; trying the one before it")
    return None


def all_damaged(folder: Path) -> ValueError:
    """The error for a run with checkpoints of which none is good."""
    return ValueError(f"every checkpoint in {folder} is damaged: to start over, give another run folder")


def chosen_by(newest: Checkpoint) -> Checkpoint:
    """The checkpoint to export: the best one if the newest names it, else the newest."""
    best = newest.state.get("best")
    return newest if best is None else checkpoint_at(newest.folder.parent, best["step"])


def checkpoint_at(folder: Path, step: int) -> Checkpoint:
    """The checkpoint of this step; ValueError if it is damaged."""
    name = name_of(step)
    damage = find_damage(folder / name)
    if damage is not None:
        raise ValueError(f"checkpoint {name} in {folder} is damaged: {damage}")
    return Checkpoint(folder / name)


def _write_rng(path: Path, rng: dict[str, Tensor]) -> None:
    path.write_bytes(save_safetensors(rng))
