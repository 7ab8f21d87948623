"""One small random pair and its bundles, built once a session: read them, copy them where a test changes something."""

from __future__ import annotations

import os

# Kernels run in Triton's interpreter, which is decided when triton is imported; transformers' models import it.
os.environ["TRITON_INTERPRET"] = "1"

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

MAX_SEQ_LEN = 96

# helper modules that assert: pytest shows the values of theirs, too
pytest.register_assert_rewrite("runtime.triples", "runtime.device_steps", "plugins.c_api")


class Pair(NamedTuple):
    """The checkpoint folders of a pair; one character is one token, id 256 is special, 257.. have no text."""

    target: Path
    drafter: Path


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random float32 pair (Qwen3, tied, block of 8)."""
    from makers import make_drafter, make_target

    folder = tmp_path_factory.mktemp("pair")
    make_target(folder / "target")
    make_drafter(folder / "drafter", folder / "target", taps=[0, 2, 3])
    return Pair(folder / "target", folder / "drafter")


@pytest.fixture(scope="session")
def agreeing_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose final norms are zero: all logits are equal, so both always choose token 0 and a build verifies."""
    import numpy as np
    from makers import edit_tensors, make_drafter, make_target

    folder = tmp_path_factory.mktemp("agreeing")
    make_target(folder / "target", num_hidden_layers=2)
    make_drafter(folder / "drafter", folder / "target", taps=[0, 1], block_size=4, layers=1)
    edit_tensors(folder / "target", model__norm__weight=np.zeros(32, np.float32))
    edit_tensors(folder / "drafter", norm__weight=np.zeros(32, np.float32))
    return Pair(folder / "target", folder / "drafter")


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `bundle`'s build left its stages; empty before it."""
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="session")
def bundle(pair: Pair, dumps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair's ONNX Runtime bundle, of MAX_SEQ_LEN tokens and two sequences, not verified."""
    return _build(pair, tmp_path_factory, dump_ir=dumps)


@pytest.fixture(scope="session")
def torch_bundle(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for the torch backend."""
    return _build(pair, tmp_path_factory, backend="torch")


@pytest.fixture(scope="session")
def vp_drafter(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second random drafter for the pair's target, with a longer block than the first one's: 10."""
    from makers import make_drafter

    folder = tmp_path_factory.mktemp("vp") / "vp_drafter"
    make_drafter(folder, pair.target, taps=[0, 2, 3], block_size=10, seed=2)
    return folder


@pytest.fixture(scope="session")
def d2sd_bundle(pair: Pair, vp_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair's ONNX Runtime bundle with a VP drafter and three branches."""
    return _build(pair, tmp_path_factory, vp_drafter=vp_drafter, branches=3)


def _build(pair: Pair, tmp_path_factory: pytest.TempPathFactory, **options: object) -> Path:
    import dflash_trt

    output = tmp_path_factory.mktemp("bundle") / "bundle"
    dflash_trt.build(
        **pair._asdict(), output=output, max_seq_len=MAX_SEQ_LEN, max_batch_size=2, verify=False, **options
    )
    return output


@pytest.fixture
def damaged(bundle: Path, tmp_path: Path) -> Path:
    """A copy of `bundle` to damage; its files are linked to nothing."""
    return Path(shutil.copytree(bundle, tmp_path / "damaged"))


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs a command in this process: `run_cli("run", bundle, "--prompt", "x", stdin=b"...")`."""
    from dflash_trt.cli.main import main

    def run(*args: object, stdin: bytes = b"") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return Outcome(stopped.value.code, captured.out, captured.err)

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests measured: `record_property("figure", text)`."""
    properties = [pair for report in terminalreporter.getreports("passed") for pair in report.user_properties]
    figures = [text for name, text in properties if name == "figure"]
    if figures:
        terminalreporter.section("figures")
        for text in figures:
            terminalreporter.write_line(str(text))
