"""A target of Qwen3-0.6B's shape becomes an engine: time and memory are printed at the end of the test run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rtx import tensorrt_rtx

SCRIPT = Path(__file__).with_name("rtx_qwen3.py")


@pytest.mark.slow
def test_qwen3_0_6b_compiles(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    tensorrt_rtx()
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False, timeout=1500,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    engine = tmp_path / "target" / "rank0.engine"
    size = engine.stat().st_size if engine.exists() else 0
    shutil.rmtree(tmp_path)  # gigabytes
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    weights = 2 * figures["parameters"]
    text = (
        f"Qwen3-0.6B's shape, {figures['parameters']:,} parameters: exported in {figures['exported']:.0f} s, "
        f"compiled in {figures['seconds']:.0f} s, engine {size / 1e6:,.0f} MB, "
        f"peak memory {figures['peak'] / 1e9:.1f} GB of {figures['estimated'] / 1e9:.1f} estimated"
    )
    record_property("figure", text)
    assert figures["parameters"] == 596_049_920  # of the published model
    assert size == figures["bytes"]
    assert weights < size < 1.1 * weights
    assert figures["layers"]["bfloat16"] > figures["layers"]["float32"] > 0
    assert weights < figures["peak"] < figures["estimated"]  # what `build` says before
