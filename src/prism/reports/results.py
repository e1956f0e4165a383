"""Results as files: JSON with the machine's name and the command, written whole or not at all."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from prism.files import write_json


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def write_results(path: Path, results: Any, **about: Any) -> Path:
    """Write results with the machine they come from; `about` (the command, say) is stored with them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"machine": machine(), **about, "results": results})
    return path
