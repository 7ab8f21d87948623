"""Progress of long work: stages with an optional size, reported on stderr by the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """Something that shows stages."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """A stage of work; the function it gives is called with what was done, in units of `total`."""

    def note(self, text: str) -> None:
        """Something to know that stays, between stages."""


class SilentProgress:
    """Shows nothing."""

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Advance]:
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
    def stage(self, name: str, total: int | None = None) -> Iterator[Advance]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._stop_where_interrupted()
        with Progress(*columns, console=Console(stderr=True)) as bar:
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
