"""A build that ends early, at whatever moment and however, leaves no half bundle and loses none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflash_trt
from dflash_trt.bundle import read_info
from dflash_trt.errors import BundleError, CheckFailed, DflashError, ExportError
from dflash_trt.loading import open_info

_FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "shutil.rmtree", "shutil.copyfile"}


def _build(pair: Any, output: Path, **options: Any) -> None:
    """With the torch backend, which has no graph to export, so that it takes milliseconds."""
    dflash_trt.build(**pair._asdict(), output=output, **({"backend": "torch", "verify": False} | options))


def _build_and_die(pair: Any, output: Path, moment: int, **options: Any) -> int:
    """Builds in a forked process that kills itself before its `moment`-th step in the output's folder; exit status."""
    child = os.fork()
    if child == 0:
        left = moment

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            if event in _FILE_EVENTS and any(str(output.parent) in str(arg) for arg in args):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(hook)
            _build(pair, output, **options)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_at_every_step_a_build_leaves_no_bundle(pair, tmp_path):
    output = tmp_path / "bundle"
    for moment in range(1, 500):
        assert _build_and_die(pair, output, moment) == -signal.SIGKILL
        if output.exists():  # killed after the rename
            break
        assert len(list(tmp_path.iterdir())) <= 1  # at most its own partial folder: each build clears the one before
    else:
        pytest.fail("the build never ended")
    assert moment > 20
    assert list(tmp_path.iterdir()) == [output]
    assert dflash_trt.load(output).generate("abc", max_tokens=3).token_ids


def test_killed_at_every_step_a_forced_build_loses_no_bundle(pair, tmp_path):
    output = tmp_path / "bundle"
    _build(pair, output, max_seq_len=48)
    for moment in range(1, 500):
        status = _build_and_die(pair, output, moment, force=True, max_seq_len=64)
        assert open_info(output).limits.max_seq_len in (48, 64)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    else:
        pytest.fail("the build never ended")
    assert open_info(output).limits.max_seq_len == 64
    assert list(tmp_path.iterdir()) == [output]


def test_without_an_exchange_a_bundle_that_was_set_aside_is_put_back(pair, tmp_path, monkeypatch):
    """On filesystems that cannot swap two paths, a kill between the two renames."""
    output = tmp_path / "bundle"
    _build(pair, output, max_seq_len=48)
    monkeypatch.setattr("dflash_trt.output._exchange", lambda first, second: False)
    _build(pair, output, force=True, max_seq_len=64)
    assert list(tmp_path.iterdir()) == [output]
    output.rename(tmp_path / ".bundle.abc.replaced")
    with pytest.raises(BundleError, match="exists already"):
        _build(pair, output)
    assert open_info(output).limits.max_seq_len == 64
    assert list(tmp_path.iterdir()) == [output]


def test_what_a_running_build_holds_and_other_folders_are_left_alone(pair, tmp_path):
    kept = [".bundle.running.partial", ".bundle.1.2.partial", ".bundle2.abandoned.partial"]
    for name in (*kept, ".bundle.abandoned.partial"):
        (tmp_path / name).mkdir()
    held = os.open(tmp_path / kept[0], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    _build(pair, tmp_path / "bundle")
    os.close(held)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "bundle"}


def test_an_output_name_with_glob_characters_is_cleared_too(pair, tmp_path):
    output = tmp_path / "b[12]*"
    (tmp_path / ".b[12]*.999999999.partial").mkdir()
    (tmp_path / ".b1.999999999.partial").mkdir()
    _build(pair, output)
    assert {path.name for path in tmp_path.iterdir()} == {"b[12]*", ".b1.999999999.partial"}


# -- signals, to the real command


def _start(pair: Any, output: Path, *options: str) -> subprocess.Popen:
    paths = ["--target", str(pair.target), "--drafter", str(pair.drafter), "--output", str(output)]
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_trt", "build", *paths, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_signals,
    )


def _heed_signals() -> None:
    """A test run in the background ignores Ctrl-C, under nohup a hang-up, and its children would."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _wait_for(process: subprocess.Popen, folder: Path, pattern: str) -> None:
    while not list(folder.glob(pattern)):
        if process.poll() is not None:
            pytest.fail(f"the build ended first: {process.communicate()}")
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        (".bundle.*.partial/target/model.onnx", ()),
        (".bundle.*.partial/tokenizer/tokenizer.json", ("--backend", "torch")),  # while it verifies itself
    ],
    ids=["exporting", "verifying"],
)
def test_sigkill_leaves_no_bundle_and_the_next_build_clears_up(pair, tmp_path, pattern, options):
    output = tmp_path / "bundle"
    process = _start(pair, output, *options)
    _wait_for(process, tmp_path, pattern)
    process.kill()
    process.communicate()
    assert not output.exists()
    assert len(list(tmp_path.iterdir())) == 1
    _build(pair, output)
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_clears_up_at_once(pair, tmp_path, number):
    output = tmp_path / "bundle"
    process = _start(pair, output)
    _wait_for(process, tmp_path, ".bundle.*.partial/drafter/tables.safetensors")
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


# -- errors


def test_a_failing_verification_leaves_nothing(pair, tmp_path):
    with pytest.raises(CheckFailed, match="acceptance") as caught:
        _build(pair, tmp_path / "bundle", verify=True)
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failing_verification_keeps_the_bundle_to_replace(pair, tmp_path):
    output = tmp_path / "bundle"
    _build(pair, output, max_seq_len=48)
    with pytest.raises(CheckFailed):
        _build(pair, output, max_seq_len=64, verify=True, force=True)
    assert read_info(output).limits.max_seq_len == 48
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("error", [ExportError("no"), RuntimeError("no"), KeyboardInterrupt(), OSError(28, "full")])
@pytest.mark.parametrize("stage", ["place_target", "place_drafter", "export_graph", "write_config"])
def test_an_error_in_the_middle_leaves_nothing(pair, tmp_path, monkeypatch, stage, error):
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(f"dflash_trt.pipeline.{stage}", fail)
    with pytest.raises(type(error)):
        _build(pair, tmp_path / "bundle", backend="onnxruntime" if stage == "export_graph" else "torch")
    assert list(tmp_path.iterdir()) == []


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("damage", [_cut, _pointer, _no_weights])
def test_a_corrupt_checkpoint_leaves_nothing(pair, tmp_path, role, damage: Callable[[Path], None]):
    broken = Path(shutil.copytree(getattr(pair, role), tmp_path / "checkpoint"))
    damage(broken)
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(DflashError, match=str(broken)):
        _build(pair._replace(**{role: broken}), work / "bundle")
    assert list(work.iterdir()) == []


def test_a_tokenizer_that_cannot_be_read_fails_the_verification(agreeing_pair, tmp_path):
    broken = Path(shutil.copytree(agreeing_pair.target, tmp_path / "checkpoint"))
    (broken / "tokenizer.json").write_text("{}")
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        _build(agreeing_pair._replace(target=broken), work / "bundle", verify=True)
    assert list(work.iterdir()) == []


def test_an_output_that_appears_meanwhile_is_not_overwritten(pair, tmp_path, monkeypatch):
    import dflash_trt.pipeline as pipeline

    output, write = tmp_path / "bundle", pipeline.write_config

    def write_late(*args: Any) -> Any:
        output.mkdir()
        return write(*args)

    monkeypatch.setattr(pipeline, "write_config", write_late)
    with pytest.raises(BundleError, match="exists already"):
        _build(pair, output)
    assert list(tmp_path.iterdir()) == [output]
    assert list(output.iterdir()) == []


def test_force_replaces_a_link_to_a_bundle_and_keeps_what_it_led_to(pair, tmp_path):
    _build(pair, tmp_path / "old", max_seq_len=48)
    (tmp_path / "bundle").symlink_to("old")
    _build(pair, tmp_path / "bundle", max_seq_len=64, force=True)
    assert open_info(tmp_path / "bundle").limits.max_seq_len == 64
    assert open_info(tmp_path / "old").limits.max_seq_len == 48
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "old"}


def test_missing_parents_of_the_output_are_made(pair, tmp_path):
    _build(pair, tmp_path / "a" / "b" / "bundle")
    open_info(tmp_path / "a" / "b" / "bundle")


def test_an_interrupt_that_a_library_swallows_still_stops_the_build(pair, tmp_path, monkeypatch):
    """Bare `except:` clauses are met in lazy imports, for instance."""
    from dflash_trt import pipeline
    from dflash_trt.cli.main import main

    trace = pipeline.export_graph

    def swallowing(*args, **kwargs):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        return trace(*args, **kwargs)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(pipeline, "export_graph", swallowing)
    output = tmp_path / "bundle"
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):  # as the command finds them, whoever ran in this process before
            signal.signal(number, signal.SIG_DFL)
        with pytest.raises(SystemExit) as stopped:
            main(["build", "--target", str(pair.target), "--drafter", str(pair.drafter), "--output", str(output)])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stopped.value.code == 130
    assert list(tmp_path.iterdir()) == []
