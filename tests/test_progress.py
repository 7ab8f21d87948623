"""What the command line shows of long work, on stderr: how much, how fast, how long still."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rich.progress import DownloadColumn, TaskID, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from dflash_trt.progress import RichProgress, SilentProgress

Shown = Callable[[], str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What stands on stderr of a terminal of 80 columns; stdout must stay empty."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")

    def shown() -> str:
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return shown


def test_bytes_with_a_rate(shown: Shown) -> None:
    with RichProgress().stage("Hashing", 37_000_000_000, "bytes") as advance:
        for _ in range(4):
            advance(9_250_000_000)
    (line,) = shown().splitlines()
    assert re.search(r"Hashing \S+ 37\.0/37\.0 GB [\d.]+ \w?B/s (\d:\d\d:\d\d ?){2}$", line.rstrip()), line


def test_steps_with_a_rate(shown: Shown) -> None:
    with RichProgress().stage("Exporting the vp_drafter graph", 144) as advance:
        for _ in range(100):
            advance(1)
    (line,) = shown().splitlines()  # a stage that ends is done, whatever it counted
    assert re.search(r"Exporting the vp_drafter graph \S+ 144/144 [\d.]+/s (\d:\d\d:\d\d ?){2}$", line.rstrip()), line


def test_without_a_total_only_the_time(shown: Shown) -> None:
    with RichProgress().stage("Verifying numbers"):
        pass
    (line,) = shown().splitlines()
    assert re.search(r"Verifying numbers \S+ \d:\d\d:\d\d$", line.rstrip()), line


def test_the_estimate_is_of_the_rate(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter done in ten seconds leaves thirty."""
    clock, bars, add_task = [0.0], [], Bar.add_task

    def noticed(bar: Bar, *args: Any, **options: Any) -> TaskID:
        bars.append(bar)
        return add_task(bar, *args, **options)

    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    monkeypatch.setattr(Bar, "add_task", noticed)
    with RichProgress().stage("Hashing", 4_000_000_000, "bytes") as advance:
        for _ in range(10):
            clock[0] += 1
            advance(100_000_000)
        ((bar,), (task,)) = bars, bars[0].tasks
        rendered = {type(column): str(column(task)) for column in bar.columns if not isinstance(column, str)}
        assert rendered[DownloadColumn] == "1.0/4.0 GB"
        assert rendered[TransferSpeedColumn] == "100.0 MB/s"
        assert rendered[TimeRemainingColumn] == "0:00:30"


def test_any_thread_may_advance(shown: Shown) -> None:
    with RichProgress().stage("Hashing", 4000, "bytes") as advance:
        threads = [threading.Thread(target=lambda: [advance(1) for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "4.0/4.0 kB" in shown()


def test_an_interrupt_before_a_stage_keeps_it_from_beginning(shown: Shown) -> None:
    begun = []
    with pytest.raises(KeyboardInterrupt), RichProgress(lambda: True).stage("Hashing", 1, "bytes"):
        begun.append(True)
    assert begun == []


def test_an_interrupt_within_a_stage_ends_the_work_with_it(shown: Shown) -> None:
    interrupted = threading.Event()
    with pytest.raises(KeyboardInterrupt), RichProgress(interrupted.is_set).stage("Hashing", 1, "bytes"):
        interrupted.set()


def test_silence(shown: Shown) -> None:
    with SilentProgress().stage("Hashing", 1, "bytes") as advance:
        advance(1)
    SilentProgress().note("something")
    assert shown() == ""
