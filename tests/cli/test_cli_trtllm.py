"""`dflash-trt trtllm export` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dflash_trt

TINY = Path(dflash_trt.__file__).parents[1] / "examples" / "tiny"


def options(output: Path, drafter: str = "dflash") -> list[object]:
    pair = ["--target", TINY / "target", "--drafter", TINY / drafter]
    return ["trtllm", "export", *pair, "--output", output]


def test_prints_the_script(run_cli, tmp_path):
    code, out, err = run_cli(*options(tmp_path / "out"))
    assert (code, out) == (0, f"{tmp_path}/out/serve.sh\n")
    assert "not run with it" in err


def test_json(run_cli, tmp_path):
    code, out, err = run_cli(*options(tmp_path / "out", "dflare"), "--max-draft-len", 5, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["output"] == str(tmp_path / "out")
    assert (result["system"], result["max_draft_len"], result["max_batch_size"]) == ("dflare", 5, 8)
    assert all((tmp_path / "out" / name).is_file() for name in result["files"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--vp-drafter", TINY / "vp_drafter"], ["--vp-drafter", "D2SD", "one chain"]),
        (["--max-draft-len", 8], ["--max-draft-len", "block_size is 8"]),
        (["--max-draft-len", "many"], ["--max-draft-len", "many"]),
        (["--max-seq-len", 5000], ["--max-seq-len", "2048"]),
        (["--drafter", TINY / "target"], ["whole language model"]),
    ],
)
def test_refused_in_one_message(run_cli, tmp_path, more, words):
    code, out, err = run_cli(*options(tmp_path / "out"), *more)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    for word in words:
        assert word in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_force(run_cli, tmp_path):
    assert run_cli(*options(tmp_path / "out")).code == 0
    assert run_cli(*options(tmp_path / "out")).code == 2
    assert run_cli(*options(tmp_path / "out"), "--force").code == 0
