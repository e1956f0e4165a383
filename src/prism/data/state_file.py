"""The state of something that goes on later, as one safetensors file that says what it is."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from prism.data.files import check_target, write_atomically


def check_state_target(path: Path, name: str) -> None:
    """Refuse a place for a state file before the work; `name` is the argument that gave it."""
    if path.suffix != ".safetensors":
        raise ValueError(f"{name} must be a file name that ends in .safetensors, got {path}")
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save the state in")
    check_target(path, folder=False, name=name)


def write_state(path: Path, format: str, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """The file is written whole or not at all. `format` is what `read_state` will ask for."""
    held = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}  # clones share nothing
    write_atomically(path, save(held, {"format": format, **about}))


def read_state(path: Path, format: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, on the CPU, and what was said about them."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no state file {path}")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a saved state: {error}") from error
    if about.get("format") != format:
        raise ValueError(f"{path} is not a saved state of the kind {format!r}")
    return tensors, about
