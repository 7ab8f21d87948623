"""Repositories as `dflash-trt triton` writes them, on a real tritonserver: moved, copied, and with files missing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from triton_clients import Client
from triton_server import ServerFailedError, serving

import dflash_trt

MODELS = {"single": "dflash_trt", "ensemble": "ensemble"}
PROMPT = "class Reader(io.BufferedIOBase):"
KNOWN = {"text_input": PROMPT, "max_tokens": 16}


@pytest.fixture(scope="module")
def text(tiny_engine) -> str:
    """The right answer to KNOWN."""
    return tiny_engine("dflash").generate(PROMPT, max_tokens=KNOWN["max_tokens"]).text


def test_a_repository_and_its_bundle_move_together(tiny_bundle, text, layout, run_cli, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(tiny_bundle("dflash"), first / "bundle")
    code, _, err = run_cli(
        "triton", first / "bundle", "--output", first / "served" / "repository", "--layout", layout, "--threads", 1
    )
    assert code == 0, err
    first.rename(second)
    with serving(second / "served" / "repository", tmp_path / "server") as server:
        client = Client(server.http, server.grpc, MODELS[layout])
        assert client.generate(KNOWN).text == text
        assert "torch" not in _mapped(server.pids())

        (second / "bundle").rename(second / "gone")  # what was loaded is served on
        assert client.generate(KNOWN).text == text
        shutil.rmtree(second / "gone")
        assert client.grpc_stream(KNOWN).text == text


def test_a_repository_that_holds_its_bundle(tiny_bundle, text, layout, run_cli, tmp_path: Path) -> None:
    original = shutil.copytree(tiny_bundle("dflash"), tmp_path / "bundle")
    code, _, err = run_cli(
        "triton", original, "--output", tmp_path / "repository", "--layout", layout, "--copy", "--threads", 1
    )
    assert code == 0, err
    shutil.rmtree(original)
    (tmp_path / "repository").rename(tmp_path / "moved")
    with serving(tmp_path / "moved", tmp_path / "server") as server:
        assert Client(server.http, server.grpc, MODELS[layout]).generate(KNOWN).text == text


@pytest.mark.parametrize(
    ("layout", "missing"),
    [
        ("single", "config.json"),
        ("single", "target/model.onnx"),
        ("ensemble", "drafter/model.onnx"),
        ("ensemble", "tokenizer/tokenizer.json"),
    ],
)
def test_a_file_that_is_missing_is_named(tiny_bundle, layout: str, missing: str, run_cli, tmp_path: Path) -> None:
    bundle = shutil.copytree(tiny_bundle("dflash"), tmp_path / "bundle")
    code, _, err = run_cli("triton", bundle, "--output", tmp_path / "repository", "--layout", layout)
    assert code == 0, err
    (bundle / missing).unlink()
    with pytest.raises(ServerFailedError) as failed, serving(tmp_path / "repository", tmp_path / "server"):
        pass
    assert re.search(rf"Error: .*{re.escape(missing)}", str(failed.value))


def test_a_bundle_of_the_torch_backend(torch_bundle: Path, run_cli, tmp_path: Path) -> None:
    expected = dflash_trt.load(torch_bundle, threads=1).generate("ab", max_tokens=8).token_ids
    code, _, err = run_cli(
        "triton", torch_bundle, "--output", tmp_path / "repository", "--layout", "single", "--threads", 1
    )
    assert code == 0, err
    with serving(tmp_path / "repository", tmp_path / "server") as server:
        client = Client(server.http, server.grpc, "dflash_trt")
        assert client.generate({"text_input": "ab", "max_tokens": 8}).token_ids == expected


def _mapped(pids: list[int]) -> str:
    """The names of all files that the processes have mapped."""
    return "\n".join(Path(line).name for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().split())
