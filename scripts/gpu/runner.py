"""Runs the worker and watches it: what it finds is kept as it comes, and a section that hangs or dies ends alone."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpu import sections
from gpu.context import Options
from gpu.results import Result, not_run

_GRACE = 30.0  # seconds a section may take beyond its budget, for what it had begun
_START = 90.0  # seconds until a worker's first event: it imports torch
_WATCH = 0.5  # seconds between looks at the clock
DEVICE_LOST = 3  # exit code of a worker that can use its GPU no more


class Runner:
    """
    Args:
        command: starts a worker; the JSON of its work is added.
        on_result: is given each result as it comes.
        on_event: shows what is going on: (section, note).
        grace: seconds a section may take beyond its budget.
    """

    def __init__(
        self,
        command: Sequence[str],
        options: Options,
        on_result: Callable[[Result], None],
        on_event: Callable[[str, str], None] = lambda section, note: None,
        grace: float = _GRACE,
    ) -> None:
        self._command, self._options = list(command), options
        self._on_result, self._on_event, self._grace = on_result, on_event, grace
        self._ceilings: dict[str, Any] | None = None

    def run(self, names: Sequence[str], seconds: float) -> None:
        """Runs the sections within `seconds` from now."""
        deadline = time.time() + seconds
        left = list(names)
        while left:
            if time.time() >= deadline:
                for name in left:
                    self._on_result(not_run(name, "time"))
                return
            finished = self._run_worker(left, deadline)
            left = left[finished:]

    def _run_worker(self, names: list[str], deadline: float) -> int:
        """How many of the sections have a result after this worker; at least one."""
        work = {
            "options": self._options.to_dict(), "sections": names, "deadline": deadline, "ceilings": self._ceilings,
        }  # fmt: skip
        worker = subprocess.Popen(
            [*self._command, json.dumps(work)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        lines: queue.Queue[str | None] = queue.Queue()
        complaints: list[str] = []
        takers = ((worker.stdout, lines.put), (worker.stderr, lambda line: line and complaints.append(line)))
        readers = [threading.Thread(target=_read, args=taker, daemon=True) for taker in takers]
        for reader in readers:
            reader.start()
        finished, ends = 0, time.time() + _START
        reason = ""
        while finished < len(names) and not reason:
            try:
                line = lines.get(timeout=_WATCH)
            except queue.Empty:
                if time.time() > ends:
                    reason = "it took too long and was ended"
                continue
            if line is None:
                worker.wait()
                readers[1].join(timeout=5)
                # exit 0 or a lost device with all results in: nothing more comes
                reason = f"the process ended with {worker.returncode}: {''.join(complaints)[-1000:].strip()}"
                continue
            event = json.loads(line)
            if event["event"] == "start":
                ends = self._end(event["section"], deadline)
                self._on_event(event["section"], "")
            elif event["event"] == "note":
                self._on_event(names[finished], event["text"])
            else:
                finished += 1
                ends = time.time() + _START
                self._take(Result.from_dict(event["result"]))
        worker.kill()
        worker.wait()
        between = reason and worker.returncode == DEVICE_LOST and finished > 0
        if finished < len(names) and not between:
            self._on_result(Result(names[finished], status="error", reason=reason))
            finished += 1
        return finished

    def _end(self, section: str, deadline: float) -> float:
        now = time.time()
        return min(now + sections.seconds(section, self._options.tune), max(now, deadline)) + self._grace

    def _take(self, result: Result) -> None:
        if result.section == "ceilings" and "flops" in result.data:
            self._ceilings = result.data
        self._on_result(result)


def _read(stream: Any, take: Callable[[str | None], Any]) -> None:
    for line in stream:
        take(line)
    take(None)
