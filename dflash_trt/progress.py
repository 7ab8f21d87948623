"""Progress of long work: stages with an optional size, reported on stderr by the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, Task

Advance = Callable[[int], None]
Unit = Literal["bytes", "steps"]


class Progress(Protocol):
    """Something that shows stages."""

    def stage(self, name: str, total: int | None = None, unit: Unit = "steps") -> AbstractContextManager[Advance]:
        """A stage of work; the function it gives is called with what was done, in units of `total`, by any thread."""

    def note(self, text: str) -> None:
        """Something to know that stays, between stages."""


class SilentProgress:
    """Shows nothing."""

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: Unit = "steps") -> Iterator[Advance]:
        yield lambda amount: None

    def note(self, text: str) -> None:
        pass


class RichProgress:
    """A bar with rate and estimate per stage, and notes, on stderr.

    Args:
        interrupted: asked at the ends of each stage; KeyboardInterrupt is raised where it says yes.
    """

    def __init__(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        self._interrupted = interrupted

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: Unit = "steps") -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import Progress

        self._stop_where_interrupted()
        with Progress(*_columns(total, unit), console=Console(stderr=True)) as bar:
            task = bar.add_task(name, total=total)
            yield lambda amount: bar.advance(task, amount)
            self._stop_where_interrupted()
            bar.update(task, completed=total or 1, total=total or 1)

    def note(self, text: str) -> None:
        from rich.console import Console

        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)

    def _stop_where_interrupted(self) -> None:
        if self._interrupted():
            raise KeyboardInterrupt


def _columns(total: int | None, unit: Unit) -> list[ProgressColumn]:
    """What is shown of a stage: how much is done, at which rate, since when, and for how long still."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        """Steps per second."""

        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            return Text("" if rate is None else f"{rate:.1f}/s", style="progress.data.speed")

    # a narrow bar: all of it fits into 80 columns
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=16)]
    if total is None:
        return [*columns, TimeElapsedColumn()]
    done = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), RateColumn()]
    return [*columns, *done, TimeElapsedColumn(), TimeRemainingColumn()]
