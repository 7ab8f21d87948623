"""Running the prompts of a set through all modes, in turns, so that a busy moment of the machine slows all of them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.evaluation.bench_modes import Mode, Run
from dflash_trt.progress import Progress

_WARM_UP = 16  # tokens; the first pass of a session allocates


@dataclass(frozen=True)
class Task:
    """A prompt, encoded, and how many tokens to generate at most."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Measured:
    """The runs of one set.

    Attributes:
        runs: by mode, then by task, then by turn.
    """

    name: str
    tasks: tuple[Task, ...]
    runs: Mapping[str, Sequence[Sequence[Run]]]


def measure(
    name: str, tasks: Sequence[Task], modes: Sequence[Mode], sampling: Mapping[str, Any], turns: int, progress: Progress
) -> Measured:
    """Every task with every mode, `turns` times. Modes take turns within a task, and none always goes first."""
    for mode in modes:
        mode.run(tasks[0].prompt, min(_WARM_UP, tasks[0].max_tokens), sampling)
    runs: dict[str, list[list[Run]]] = {mode.label: [[] for _ in tasks] for mode in modes}
    stage = progress.stage(f"{name}, {len(tasks)} prompts", turns * len(tasks) * len(modes))
    with _objects_at_rest(), stage as advance:
        for turn in range(turns):
            for number, task in enumerate(tasks):
                first = (turn + number) % len(modes)
                for mode in [*modes[first:], *modes[:first]]:
                    runs[mode.label][number].append(mode.run(task.prompt, task.max_tokens, sampling))
                    advance(1)
    return Measured(name, tuple(tasks), runs)


@contextmanager
def _objects_at_rest() -> Iterator[None]:
    """The garbage collector passes over what is there already: with torch and transformers loaded, a collection takes a
    tenth of a second, from whatever mode is just running."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def physical_cores() -> int:
    """Cores that this process may use, hyperthreads not counted where Linux tells which are."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(tuple((topology / name).read_text() for name in ("physical_package_id", "core_id")))
        except OSError:
            cores.add((f"{cpu}",))
    return len(cores)
