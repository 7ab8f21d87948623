"""From a trace's file to its pictures: what `inspect` does where matplotlib may be missing."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.errors import UsageError
from dflash_trt.runtime.trace import Trace


def draw_trace(trace: Trace, path: Path, output: Path | None = None, step: int | None = None) -> list[Path]:
    """Draws a trace's three pictures (see `trace_figures.write_figures`).

    Args:
        trace: a sound one (see `read_trace`).
        path: its file; the pictures are named after it.
        output: their folder, made if it is missing; by default the trace's.
        step: the step to draw, from 1 on; by default the most telling one.

    Returns:
        The files; none for a trace without steps.

    Raises:
        UsageError: matplotlib is not installed, no such step, or the pictures cannot be written.
    """
    try:
        from dflash_trt.evaluation.trace_figures import choose_step, write_figures
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        what = "is needed to draw a trace and is not installed"
        raise UsageError(what, where="matplotlib", mend="Install it: pip install matplotlib") from error
    number = choose_step(trace, step)
    if number is None:
        return []
    folder = path.parent if output is None else output
    if folder.exists() and not folder.is_dir():
        raise UsageError("is not a folder", where=f"--output {folder}", mend="Give a folder for the pictures")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return write_figures(trace, folder / path.stem, number)
    except OSError as error:
        what = f"pictures cannot be written there: {error.strerror}"
        raise UsageError(what, where=f"--output {folder}", mend="Name another folder") from error
