"""Serving a bundle of ONNX Runtime imports no exporter, and nothing that `requirements.txt` does not list."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.serving.repository import Options, write_repository
from dflash_trt.serving.texts import BACKENDS, SERVING

# What the stand-in for the server itself needs is imported before anything is looked at.
SCRIPT = """
import sys
from pathlib import Path
from models_here import serving_here

def packages():
    return {name.partition(".")[0] for name in sys.modules}


before = packages()
with serving_here(Path(sys.argv[1])) as server:
    for model in ("ensemble", "dflash_trt"):
        if model in server.configs:
            assert server.ask(model, text_input="Once upon", max_tokens=9, temperature=0.7, seed=1).joined()
            break
    print(*packages() - before)
"""
HEAVY = {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "polygraphy", "matplotlib", "safetensors"}
FOLLOW = {"annotated_types", "markupsafe", "pydantic_core", "typing_extensions", "typing_inspection"}
NAMES = {"pyyaml": "yaml", "ml-dtypes": "ml_dtypes"}  # a distribution's module, where it has another name


@pytest.mark.parametrize("layout", ["single", "ensemble"])
def test_only_what_is_listed(bundle, tmp_path, layout):
    write_repository(bundle, tmp_path / "r", Options(layout=layout, threads=1))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "r")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    imported = {name for name in done.stdout.split() if name not in sys.stdlib_module_names}
    listed = {NAMES.get(name, name) for name in (*SERVING, *BACKENDS["onnxruntime"])}
    assert not imported & HEAVY
    followers = FOLLOW | {name for name in imported if name.startswith("_") or name.startswith("model_of_")}
    assert imported - followers - {"dflash_trt", "triton_python_backend_utils"} <= listed
    assert listed - {"numpy", "ml_dtypes"} <= imported  # imported before; for bfloat16
