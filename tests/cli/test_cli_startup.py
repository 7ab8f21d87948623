"""`--help` is there at once: no command line imports what only work needs."""

from __future__ import annotations

import json
import subprocess
import sys

from dflash_trt.cli.main import COMMANDS

HEAVY = {
    "torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "transformers", "tokenizers", "safetensors", "ml_dtypes",
    "numpy", "pydantic", "yaml", "jinja2", "matplotlib", "polygraphy", "rich", "tensorrt", "tensorrt_rtx", "triton",
}  # fmt: skip

CODE = """
import contextlib, io, json, sys
from dflash_trt.cli.main import main

helped = {}
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([*command, "--help"])
    helped[" ".join(command)] = [printed.getvalue(), [name for name in sys.modules if "." not in name]]
print(json.dumps(helped))
"""


def helped(*commands: list[str]) -> dict[str, tuple[str, set[str]]]:
    """By command: what `--help` prints, and the packages imported so far."""
    command = [sys.executable, "-c", CODE, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return {name: (text, set(modules)) for name, (text, modules) in json.loads(done.stdout).items()}


def test_the_list_of_commands_imports_no_command() -> None:
    ((text, modules),) = helped([]).values()
    assert all(command in text for command in COMMANDS)
    assert modules & HEAVY == set()
    assert "click" in modules


def test_no_command_imports_what_its_help_does_not_need() -> None:
    for name, (text, modules) in helped(*([command] for command in COMMANDS)).items():
        assert f"Usage: dflash-trt {name}" in text
        assert modules & HEAVY == set(), name
