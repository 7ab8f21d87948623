"""The command line's contract, spelled out here a second time: commands, options, help."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import dflash_trt

OPTIONS = {
    "build": "target drafter vp-drafter output backend config dtype max-batch-size max-seq-len max-input-len "
    "block-size branches dump-ir no-verify force",
    "run": "prompt prompt-file max-tokens temperature top-k top-p seed stop no-speculation chat no-chat json "
    "branches trace bad-word min-tokens",
    "inspect": "json",
    "verify": "json",
    "doctor": "json",
}
HEAVY = {"numpy", "torch", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "transformers", "pydantic", "rich"}
BACKENDS = ("onnxruntime", "tensorrt", "tensorrt-rtx", "torch")
DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("command", OPTIONS)
def test_a_command_has_the_options_of_the_contract(run_cli, command):
    code, out, err = run_cli(command, "--help")
    assert (code, err) == (0, "")
    assert set(OPTIONS[command].split()) <= set(re.findall(r"--([a-z-]+)", out))


def test_build_offers_every_backend_and_dtype(run_cli):
    text = run_cli("build", "--help").out
    assert f"[{'|'.join(BACKENDS)}]" in text
    assert f"[{'|'.join(DTYPES)}]" in re.sub(r"\s+", "", text)


def test_help_lists_the_commands(run_cli):
    code, out, _ = run_cli("--help")
    assert code == 0
    assert set(OPTIONS) <= set(re.findall(r"^  ([a-z]+) ", out, re.MULTILINE))


def test_version(run_cli):
    code, out, _ = run_cli("--version")
    assert (code, out.split()[-1]) == (0, dflash_trt.__version__)


@pytest.mark.parametrize("args", [(), ("nonsense",), ("run",), ("doctor", "--nonsense"), ("run", "b", "--top-k", "x")])
def test_bad_usage_is_exit_code_2_and_goes_to_stderr(run_cli, args):
    code, out, err = run_cli(*args)
    assert (code, out) == (2, "")
    assert "Usage: dflash-trt" in err


def test_help_imports_nothing_heavy():
    script = (
        "import sys\n"
        "from dflash_trt.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        f"loaded = {HEAVY} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Commands:" in done.stdout


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "dflash_trt", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == dflash_trt.__version__
