"""Read and write the weights of a model folder one tensor at a time: safetensors, in one file or in several with an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prism.files import check_weights, read_json, write_json

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Weights:
    """The tensors of a model folder by name. A tensor is read when it is asked for, and never kept.

    Args:
        folder: a model folder with safetensors. Pickles are refused: opening one can run code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        check_weights(folder)
        self._files = {path.name: _open(path) for path in _files_of(folder)}
        self._home = {name: file for file, opened in self._files.items() for name in opened.keys()}  # noqa: SIM118
        for name, file in _index(folder).items():
            if self._home.get(name) != file:
                raise ValueError(f"{folder} has no tensor {name!r} in {file}, where its {INDEX} says it is")

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._home[name]].get_tensor(name)
        return tensor

    def like(self, name: str) -> Tensor:
        """A tensor of the same shape on the meta device: nothing is read."""
        return torch.empty(self._files[self._home[name]].get_slice(name).get_shape(), device="meta")


def _files_of(folder: Path) -> list[Path]:
    named = sorted(set(_index(folder).values()))
    if any(Path(name).name != name for name in named):
        raise ValueError(f"{folder / INDEX} is damaged: it names files outside of the folder")
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {missing[0]}, which its {INDEX} names")
    found = [folder / name for name in named] or sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickled = [path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLES]
    if pickled:
        raise ValueError(
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when opened: save the model with "
            "save_pretrained(…, safe_serialization=True) where you trust it, and convert that"
        )
    raise ValueError(f"{folder} has no weights: there is no safetensors file in it")


def _index(folder: Path) -> dict[str, str]:
    """The file of every tensor, if the folder has an index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{path} is damaged: it has no weight_map")
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt").__enter__()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], limit: int) -> None:
    """Write tensors to safetensors files of at most `limit` bytes (or one tensor), with an index if there are several.

    No more than one file's tensors are in memory. The files are not synced: `whole_folder` does that.
    """
    homes: dict[str, int] = {}
    held: dict[str, Tensor] = {}
    count = total = size = 0

    def flush() -> None:
        save_file(held, folder / f"{count}.part", metadata={"format": "pt"})
        homes.update(dict.fromkeys(held, count))
        held.clear()

    for name, tensor in tensors:
        more = tensor.numel() * tensor.element_size()
        if held and size + more > limit:
            flush()
            count, size = count + 1, 0
        held[name] = tensor.contiguous()
        size, total = size + more, total + more
    flush()
    if count == 0:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    names = [f"model-{number + 1:05}-of-{count + 1:05}.safetensors" for number in range(count + 1)]
    for number, name in enumerate(names):
        (folder / f"{number}.part").rename(folder / name)
    weight_map = {name: names[number] for name, number in sorted(homes.items())}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
