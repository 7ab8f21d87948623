"""The plugins section of scripts/gpu_check.py as far as it goes without a GPU, and what the JIT makes of launches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import native
import pytest
from gpu import native_build
from gpu.context import Budget, Context, NotRunError, Options
from gpu.driver_script import Script
from gpu.results import Result
from gpu.sections import plugins

from dflash_trt.plugins.kernels.tiling import SHARED_MEMORY

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cpu(tmp_path: Path) -> Context:
    return Context(Options(device="cpu", seed=3), Budget(200.0), ROOT, tmp_path)


def test_a_build_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(NotRunError, match="there is no nvcc on PATH"):
        native_build.toolchain(None, ROOT)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")
    with pytest.raises(NotRunError, match=f"no NvInferRuntime.h in {tmp_path}"):
        native_build.toolchain(str(tmp_path), ROOT)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "NvInferRuntime.h").touch()
    assert native_build.toolchain(str(tmp_path), ROOT).headers == tmp_path / "include"


@pytest.mark.slow
def test_the_plugins_take_every_case(built: native.Built, cpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built as on a GPU, run over a stand-in CUDA runtime that launches nothing: so all is accepted, and all wrong."""
    native.nvcc()
    root, folder = cpu.root, cpu.scratch
    tools = native_build.toolchain(str(native.tensorrt_headers()), root)
    native_build.compile_kernels(root, folder / "generated", 90, (64,), ("fp16",))
    entries = json.loads((folder / "generated" / "kernels.json").read_text())["variants"]
    assert {entry["head_dim"] for entry in entries} == {0, 64}
    programs = native_build.build(root, tools, folder / "build", folder / "generated")
    signatures = folder / "signatures.txt"
    signatures.write_text("".join(f"{entry['symbol']} {native.SIGNATURES[entry['kernel']]}\n" for entry in entries))
    fake = {
        "LD_PRELOAD": str(built.folder / "tests" / "libfake_cudart.so"),
        "FAKE_CUDART_DEVICES": "90:132",
        "FAKE_CUDART_SIGNATURES": str(signatures),
    }
    programs = replace(programs, environment={**programs.environment, **fake})
    script = Script(folder)
    judges: plugins.Judges = []
    plugins.add_cases(script, judges, "fp16", 64, cpu)
    lines = script.run(programs)
    assert sum(line["event"] == "enqueue" for line in lines) == len(judges) == 11
    launched = {line["symbol"] for line in lines if line["event"] == "launch"}
    assert launched == {"kv_injection", "staircase_context", "staircase_merge"}
    assert all(judge() for _, judge in judges), "outputs that nobody wrote pass for right"
    monkeypatch.setattr(plugins, "HALVES", ("fp16",))
    monkeypatch.setattr(plugins, "DIMS", (64,))
    result = Result("plugins")
    plugins.check_enqueue(cpu, result, programs)
    assert len(result.checks) == 11
    script.commands.append("create NoSuchPlugin")
    with pytest.raises(RuntimeError, match="there is no creator NoSuchPlugin"):
        script.run(programs)


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dflash_trt.plugins.aot import Variant, signature, variants, _FUNCTIONS

ones = {"staircase_context": {"splits": 1, "has_sinks": 1, "causal": 1, "queries": 1, "group": 1, "kv_heads": 1},
        "staircase_merge": {"has_sinks": 1, "queries": 1}, "kv_injection": {"has_norm": 1, "has_count": 1, "rows": 1},
        "accept_path": {"nodes": 1, "path_capacity": 1}, "gather_features": {"nodes": 1, "out_rows": 1}}
for variant in variants(90):
    first = variant.head_dim in (0, 64) and variant.dtype in ("", "bf16") and variant.tile_rows <= 32
    if not first or variant.kernel not in ones:
        continue
    types, one = signature(variant), ones[variant.kernel]
    types |= {name: "constexpr" for name in one}  # as of an argument that is 1
    kinds = enumerate(types.values())
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in kinds if kind[0] == "*" or kind == "i32"}
    source = ASTSource(_FUNCTIONS[variant.kernel], types, constexprs={**variant.constexprs, **one}, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": variant.num_warps})
    print(variant.kernel, variant.features, compiled.metadata.shared)
"""


@pytest.mark.slow
def test_arguments_of_1_and_multiples_of_16_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, timeout=300, cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 7
    assert all(int(line.split()[-1]) <= SHARED_MEMORY[90] for line in done.stdout.splitlines())
