"""The process that uses the GPU: runs sections one after the other and says on stdout, line by line, what happens.

    {"event": "start", "section": ...}    {"event": "note", "text": ...}    {"event": "result", "result": {...}}

After an illegal access a process can do nothing more on its GPU. Then it ends, and the runner starts another for the
sections that are left.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from gpu import sections
from gpu.context import Budget, Context, NotRunError, Options
from gpu.results import Result
from gpu.roofline import Ceilings
from gpu.runner import DEVICE_LOST

ROOT = Path(__file__).resolve().parents[2]


def main(argument: str) -> None:
    """`argument`: JSON with `options`, `sections`, `deadline` (seconds since the epoch), `ceilings` or null."""
    work = json.loads(argument)
    # what libraries print is no event, so from here on stdout is stderr to all but the events
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ceilings = Ceilings(**work["ceilings"]) if work["ceilings"] else None
    options = Options(**work["options"])
    # read when triton is imported, which only sections do
    os.environ.pop("TRITON_INTERPRET", None)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    sys.exit(run_sections(options, work["sections"], work["deadline"], ceilings, lambda event: _say(out, event)))


def _say(out: TextIO, event: dict[str, Any]) -> None:
    out.write(json.dumps(event, default=str) + "\n")
    out.flush()


def run_sections(
    options: Options,
    names: Sequence[str],
    deadline: float,
    ceilings: Ceilings | None,
    say: Callable[[dict[str, Any]], None],
) -> int:
    """Runs the sections; the exit code."""
    for name in names:
        say({"event": "start", "section": name})
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
            budget = Budget(min(sections.seconds(name, options.tune), deadline - time.time()))
            note = lambda text: say({"event": "note", "text": text})  # noqa: E731
            context = Context(options, budget, ROOT, Path(scratch), ceilings, note)
            result = run_section(name, context)
        ceilings = context.ceilings
        say({"event": "result", "result": result.to_dict()})
        if context.on_gpu and not _device_works():
            return DEVICE_LOST
    return 0


def run_section(name: str, context: Context) -> Result:
    """A section's result, whatever it raises."""
    result = Result(name)
    begin = time.monotonic()
    if not context.budget.allows():
        result.status, result.reason = "not run", "time"
        return result
    try:
        sections.load(name)(context, result)
        result.settle()
    except NotRunError as error:
        result.status, result.reason = "not run", str(error)
    except Exception as error:
        result.status, result.reason = "error", f"{type(error).__name__}: {error}"
        result.data["traceback"] = traceback.format_exc()
    result.seconds = round(time.monotonic() - begin, 1)
    return result


def _device_works() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return float(torch.ones(4, device="cuda").sum()) == 4.0
    except RuntimeError:
        return False
