"""The plugin library in TensorRT's own plugin registry, older and newer than the headers it is built with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import native
import pytest

VERSIONS = ["10.16", "11.4"]


def installed(version: str) -> Path:
    """The folder TensorRT's lean runtime is installed in: in TENSORRT_LEAN, else where `make setup` puts it."""
    folder = Path(os.environ.get("TENSORRT_LEAN", native.ROOT / "build")) / f"tensorrt-lean-{version}"
    if not folder.exists():
        pytest.skip(f"the lean runtime of TensorRT {version} is not in {folder}")
    return folder


@pytest.mark.parametrize("kernels", ["stand-ins", "compiled"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_registry_loads_the_library_and_creates_both_plugins(tmp_path: Path, version: str, kernels: str) -> None:
    built = native.build() if kernels == "stand-ins" else native.build_with_real_kernels(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(installed(version))}
    command = [sys.executable, str(Path(__file__).with_name("registry_probe.py")), str(built.library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["version"].startswith(version)
    assert found["added"] == ["KVInjection", "StaircaseAttention"]
    common = {"build_interface": 2, "at_run_time": True}
    assert found["plugins"] == {
        "KVInjection": {
            "fields": [["eps", "FLOAT32"]],
            "identity": ["KVInjection", "1", "dflash_trt"],
            "outputs": 2,
            "metadata": "eps=1e-06",
            **common,
        },
        "StaircaseAttention": {
            "fields": [["scale", "FLOAT32"], ["sliding_window", "INT32"], ["causal", "INT32"], ["softcap", "FLOAT32"]],
            "identity": ["StaircaseAttention", "1", "dflash_trt"],
            "outputs": 1,
            "metadata": "scale=0.125 sliding_window=7 causal=1 softcap=0",
            **common,
        },
    }
    assert found["refused"] == ["missing", "unknown", "type", "range"]
    reasons = [line.split("createPlugin: ")[1] for line in done.stderr.splitlines() if "dflash_trt KVInjection" in line]
    assert reasons == [
        "field eps is missing",
        "unknown field epsilon",
        "field eps must be float32, not float64",
        "eps is -1; it must be greater than 0",
    ]
    assert found["other_version"]
    assert found["other_namespace"]
    assert found["left"] == []
