"""Every kernel compiles for Hopper, also on a machine without a GPU (compile_for_gpu.py says what this checks)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")

KERNELS = {
    "memory": "prepare forward_scan segment_chain backward_scan backward_queries backward_writes backward_decay step",
    "sizes": "prepare forward_scan backward_scan backward_queries backward_writes backward_decay",
    "channels": "channel_prepare channel_forward_scan segment_chain channel_backward_scan channel_tokens",
    "around": "columns columns_backward solve solve_backward short_conv short_conv_backward token_losses unit_strip "
    "unit_strip_backward write_strip write_strip_backward",
    "pieces": "residual_norm residual_norm_backward product product_backward gated_norm gated_norm_backward",
    "networks": "serial_mlp serial_mlp_backward",
    "token": "normed maps gated delta_token",
}


LONG = {"around", "token", "networks", "sizes"}
"""Groups that take half a minute and more, or differ from another group in sizes only; `make test-slow` compiles them."""


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=[pytest.mark.slow] * (group in LONG)) for group in KERNELS]
)
def test_kernels_compile(group: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_for_gpu.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, group], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {f"{name}_kernel" for name in KERNELS[group].split()}
