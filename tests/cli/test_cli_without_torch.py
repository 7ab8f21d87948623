"""An ONNX Runtime bundle runs where neither torch nor transformers nor the exporter is installed."""

from __future__ import annotations

import json
import subprocess
import sys

BLOCKED = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "polygraphy")

SCRIPT = f"""
import sys

for name in {BLOCKED}:
    sys.modules[name] = None  # for Python: not installed
from dflash_trt.cli.main import main
try:
    main(sys.argv[1:])
finally:
    loaded = [name for name in {BLOCKED} if sys.modules[name] is not None]
    assert not loaded, loaded
"""


def _run(*args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", SCRIPT, *(str(arg) for arg in args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_run_needs_no_torch(bundle, run_cli):
    options = ("run", bundle, "--prompt", "Once upon", "--max-tokens", 12, "--temperature", 0.8, "--seed", 3, "--json")
    done = _run(*options)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["token_ids"] == json.loads(run_cli(*options).out)["token_ids"]


def test_the_python_interface_needs_no_torch(bundle):
    script = SCRIPT.split("from dflash_trt")[0] + (
        "import dflash_trt\n"
        "engine = dflash_trt.load(sys.argv[1])\n"
        "pieces = [event.text for event in engine.generate('abc', max_tokens=9, stream=True)]\n"
        "assert ''.join(pieces) == engine.generate('abc', max_tokens=9).text\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(bundle)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_inspecting_a_bundle_and_doctor_need_no_torch(bundle):
    assert json.loads(_run("inspect", bundle, "--json").stdout)["kind"] == "bundle"
    assert _run("inspect", bundle).returncode == 0
    found = json.loads(_run("doctor", "--json").stdout)["backends"]
    assert (found["torch"]["usable"], found["onnxruntime"]["usable"]) == (False, True)


def test_verify_without_torch_says_what_it_could_not_check(bundle):
    checks = {check["name"]: check for check in json.loads(_run("verify", bundle, "--json").stdout)["checks"]}
    assert checks["numbers: target"]["status"] == checks["numbers: drafter"]["status"] == "not run"
    assert "torch" in checks["numbers: target"]["reason"]
    assert checks["losslessness"]["status"] == "passed"
