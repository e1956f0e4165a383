"""Manifests: size and SHA-256 of files in a folder, in a file that is hashed itself, so that damage is noticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prism.data.files import json_bytes, read_json, sha256, write_json

MANIFEST = "manifest.json"
Entries = dict[str, dict[str, Any]]


def entry(path: Path) -> dict[str, Any]:
    """What a manifest says of one file."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(folder: Path, files: Entries) -> None:
    """Write the manifest of a folder; `files` are entries by file name relative to it."""
    write_json(folder / MANIFEST, _signed(files))


def seal_weights(folder: Path) -> None:
    """Write a manifest of a model folder's weights, for `check_weights`.

    Only of the weights: configuration, tokenizer and README are for people to edit.
    """
    write_manifest(folder, entries(folder, sorted(folder.glob("*.safetensors"))))


def check_weights(folder: Path) -> None:
    """Refuse a model folder whose weights differ from its manifest; a folder without one is not checked."""
    if not (folder / MANIFEST).exists():
        return
    damage = find_damage(folder)
    if damage is not None:
        raise ValueError(
            f"the model in {folder} is damaged: {damage}; export or copy it again, or remove {MANIFEST} if the change "
            "is meant"
        )


def entries(folder: Path, paths: Iterable[Path]) -> Entries:
    """Entries of files in a folder, by name relative to it."""
    return {path.relative_to(folder).as_posix(): entry(path) for path in paths}


def find_damage(folder: Path) -> str | None:
    """The first file that is missing or differs in size or SHA-256 from the manifest, in words; None if all is well."""
    path = folder / MANIFEST
    if not path.is_file():
        return f"{MANIFEST} is missing"
    try:
        manifest = read_json(path)
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    if manifest != _signed(manifest["files"]) or path.read_bytes() != json_bytes(manifest):
        return f"{MANIFEST} does not have its SHA-256"
    for name, (size, digest) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if sha256(path) != digest:
            return f"{name} does not have its SHA-256"
    return None


def _signed(files: Entries) -> dict[str, Any]:
    """The manifest's content: it vouches for the files, and a hash in it for the manifest."""
    files = dict(sorted(files.items()))
    return {"files": files, "sha256": hashlib.sha256(json_bytes(files)).hexdigest()}
