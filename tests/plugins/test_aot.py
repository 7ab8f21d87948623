"""The kernels compiled ahead of time, looked at from outside: what the cubins themselves say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from native import ROOT, SIGNATURES

from dflash_trt.plugins import SOURCES
from dflash_trt.plugins.resource_table import resource_table

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
GENERATED = ROOT / "build" / "plugins" / "generated"  # where `make` has the library built
# dynamic shared memory that every device of the architecture grants a block (CUDA programming guide, by capability);
# 8.0's cubins serve 8.6 and 8.9 too
SHARED_KIB = {80: 99, 90: 227, 100: 227, 120: 99}


@pytest.fixture(scope="module")
def registry() -> dict[str, Any]:
    file = GENERATED / "kernels.json"
    if not file.is_file():
        pytest.skip("the kernels are not compiled: make plugins")
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def variants(registry: dict[str, Any]) -> list[dict[str, Any]]:
    return registry["variants"]


def test_every_architecture_has_every_kernel(variants: list[dict[str, Any]]) -> None:
    uses: dict[int, set[tuple[Any, ...]]] = {}
    for entry in variants:
        use = tuple(entry[name] for name in ("kernel", "dtype", "head_dim", "features"))
        uses.setdefault(entry["compute_capability"], set()).add(use)
    assert set(uses) == {80, 90, 100, 120}
    expected = {("accept_path", "", 0, ""), ("move_rows", "", 0, ""), ("gather_features", "", 0, "")}
    for dim in (64, 96, 128, 256):
        expected |= {("kv_injection", dtype, dim, f) for dtype in ("fp16", "bf16", "fp32") for f in ("", "partial")}
        for dtype in ("fp16", "bf16"):
            expected |= {("staircase_context", dtype, dim, f) for f in ("", "window", "softcap")}
            expected |= {("staircase_merge", dtype, dim, "")}
    for cc, found in uses.items():
        assert found == expected, cc


def test_no_kernel_spills_and_all_fit(variants: list[dict[str, Any]]) -> None:
    for entry in variants:
        assert entry["spill_bytes"] == 0, entry["file"]
        assert 0 < entry["registers"] <= 255, entry["file"]
        assert entry["registers"] * 32 * entry["num_warps"] <= 65536, entry["file"]
        assert entry["shared_bytes"] <= SHARED_KIB[entry["compute_capability"]] * 1024, entry["file"]


@pytest.mark.parametrize("kernel", sorted(SIGNATURES))
def test_cubins_take_the_arguments_that_are_passed(kernel: str, variants: list[dict[str, Any]]) -> None:
    sizes = [8 if kind == "P" else 4 for kind in SIGNATURES[kernel]]
    offsets, at = [], 0
    for size in sizes:
        at = -(-at // size) * size
        offsets.append(at)
        at += size
    seen = set()
    for entry in (entry for entry in variants if entry["kernel"] == kernel):
        use = entry["compute_capability"], entry["features"]
        if use in seen:
            continue
        seen.add(use)
        cubin = GENERATED / "cubins" / entry["file"]
        text = subprocess.run([CUOBJDUMP, "-elf", cubin], check=True, capture_output=True, text=True).stdout
        arch = re.search(r"sm=(\d+)(a?),", text)
        assert arch is not None
        assert int(arch.group(1)) == entry["compute_capability"]
        # "a": runs on that very capability alone, which is what choosing a variant goes by
        assert bool(arch.group(2)) == (entry["compute_capability"] >= 90)
        assert f".text.{entry['symbol']}" in text
        found = re.findall(r"Ordinal : 0x([0-9a-f]+)\s+Offset\s+: 0x([0-9a-f]+)\s+Size\s+: 0x([0-9a-f]+)", text)
        parameters = sorted(tuple(int(number, 16) for number in group) for group in found)
        assert parameters == [(i, *pair) for i, pair in enumerate(zip(offsets, sizes, strict=True))], entry["file"]


def test_table_in_the_docs_lists_every_variant(registry: dict[str, Any], variants: list[dict[str, Any]]) -> None:
    table = (SOURCES.parent / "docs" / "kernels.md").read_text()
    version = re.search(r"compiled with triton ([\d.]+)", table)
    assert version is not None
    if version.group(1) == registry["versions"]["triton"]:
        assert table.endswith(resource_table(variants))
    listed = set(re.findall(r"^\| (\w+) \| (\w*) \| (\d*) \| (\w*) \| (\d*) \|", table, re.MULTILINE))
    names = ("kernel", "dtype", "head_dim", "features", "tile_rows")
    assert listed == {tuple(str(entry[name] or "") for name in names) for entry in variants}


@pytest.mark.parametrize("capability", ["86", "80,91"])
def test_architectures_without_kernels_are_refused(capability: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dflash_trt.plugins.aot", "--output", str(tmp_path / "out")]
    done = subprocess.run([*command, "--compute-capability", capability], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "must be of 80, 90, 100, 120" in done.stderr
    assert not (tmp_path / "out").exists()
