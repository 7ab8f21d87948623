"""An ONNX Runtime bundle runs where neither torch nor transformers nor the exporter is installed."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "polygraphy")
ABSENT = f"import sys\nsys.modules.update(dict.fromkeys({HEAVY}))\n"  # None there means for Python: not installed
MAIN = "import sys\nfrom dflash_trt.cli.main import main\n"


def _run(script: str, *args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", script, *(str(arg) for arg in args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _command(*args: object) -> subprocess.CompletedProcess:
    return _run(ABSENT + MAIN + "main(sys.argv[1:])", *args)


def test_run_needs_no_torch(bundle, run_cli):
    options = ("run", bundle, "--prompt", "Once upon", "--max-tokens", 12, "--temperature", 0.8, "--seed", 3, "--json")
    done = _command(*options)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["token_ids"] == json.loads(run_cli(*options).out)["token_ids"]


def test_run_imports_no_torch_where_there_is_one(bundle):
    script = MAIN + f"try:\n    main(sys.argv[1:])\nfinally:\n    assert not {{*{HEAVY}}} & {{*sys.modules}}\n"
    done = _run(script, "run", bundle, "--prompt", "Once upon", "--max-tokens", 5, "--json")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_python_interface_needs_no_torch(bundle):
    script = ABSENT + (
        "import dflash_trt\n"
        "engine = dflash_trt.load(sys.argv[1])\n"
        "pieces = [event.text for event in engine.generate('abc', max_tokens=9, stream=True)]\n"
        "assert ''.join(pieces) == engine.generate('abc', max_tokens=9).text\n"
    )
    done = _run(script, bundle)
    assert (done.returncode, done.stderr) == (0, "")


def test_inspecting_a_bundle_and_doctor_need_no_torch(bundle):
    assert json.loads(_command("inspect", bundle, "--json").stdout)["kind"] == "bundle"
    assert _command("inspect", bundle).returncode == 0
    found = json.loads(_command("doctor", "--json").stdout)["backends"]
    assert (found["torch"]["usable"], found["onnxruntime"]["usable"]) == (False, True)


def test_verify_without_torch_says_what_it_could_not_check(bundle):
    checks = {check["name"]: check for check in json.loads(_command("verify", bundle, "--json").stdout)["checks"]}
    assert checks["numbers: target"]["status"] == checks["numbers: drafter"]["status"] == "not run"
    assert "torch" in checks["numbers: target"]["reason"]
    assert checks["losslessness"]["status"] == "passed"
