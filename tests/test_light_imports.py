"""Decoding with torch needs no package of the exporter's, nor pydantic: a machine with a GPU may have little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines import torch_engine
from makers import make_drafter, make_target
from safetensors.torch import load_file, save_file

LEFT_OUT = (
    "onnx", "onnx_ir", "onnxscript", "onnxruntime", "ml_dtypes", "pydantic", "pydantic_core", "matplotlib",
    "polygraphy",
)  # fmt: skip

# Not raised on sight: torch asks whether some of them are there.
HIDING = f"""
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {LEFT_OUT} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
"""

IMPORTING = """
import importlib, pkgutil

for package in ("checkpoint", "modeling", "ops", "runtime"):
    folder = importlib.import_module(f"dflash_trt.{package}")
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        if not module.name.endswith("_onnx"):
            importlib.import_module(module.name)
for name in ("backends.base", "backends.torch", "export.contract", "errors"):
    importlib.import_module(f"dflash_trt.{name}")
"""

DECODING = """
import json
from pathlib import Path
from engines import torch_engine

target, drafter, vp_drafter = map(Path, sys.argv[1:])
engine = torch_engine(target, drafter, vp_drafter, block_size=6)
print(json.dumps(engine.generate([1, 2, 3], max_tokens=12, trace=True).token_ids))
"""


def python(code: str, *arguments: Path) -> str:
    command = [sys.executable, "-c", HIDING + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_import() -> None:
    python(IMPORTING)


@pytest.mark.slow
def test_decodes(tmp_path: Path) -> None:
    """D2SD, with a target in bfloat16 and a DFlare drafter whose fusion weights are, too."""
    folders = target, drafter, vp_drafter = [tmp_path / name for name in ("target", "drafter", "vp_drafter")]
    make_target(target)
    make_drafter(drafter, target, taps=[0, 2, 3], kind="dflare")
    make_drafter(vp_drafter, target, taps=[0, 2, 3], seed=2)
    for folder in (target, drafter):
        file = folder / "model.safetensors"
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    expected = torch_engine(*folders, block_size=6).generate([1, 2, 3], max_tokens=12)
    assert json.loads(python(DECODING, *folders)) == expected.token_ids
