"""`bench`: bundles on prompts, in one process and on the same threads, speculation on, off and per system in turns."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_trt.bundle import tool_versions
from dflash_trt.errors import UsageError
from dflash_trt.evaluation.bench_baselines import baseline_modes
from dflash_trt.evaluation.bench_costs import cost_tables
from dflash_trt.evaluation.bench_figures import context_of, set_figures
from dflash_trt.evaluation.bench_measure import Measured, Task, measure, physical_cores
from dflash_trt.evaluation.bench_modes import Loaded, Mode, engine_modes, open_bundles
from dflash_trt.evaluation.bench_prompts import PromptSet, encode, prompt_sets
from dflash_trt.evaluation.bench_report import BenchReport, SetFigures
from dflash_trt.evaluation.losslessness import Verdict, compare_outputs
from dflash_trt.loading import Device
from dflash_trt.progress import Progress, SilentProgress
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.sampling_params import SamplingParams
from dflash_trt.runtime.trace import Branches, Drafts

_PACKAGES = ("onnxruntime", "torch", "transformers", "dflash")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure; see `dflash-trt bench --help`.

    Attributes:
        prompts: files or names of sets; none: all that come with the package.
        limit: prompts of each set; None for all.
        chat: whether prompts are put into the chat template; None: as each record says, else where there is one.
        threads: of everything; 0 for as many as physical cores.
        branches, drafts: see `engine_modes`.
        target, drafter: checkpoint folders, for the columns of transformers and of the authors' loop.
    """

    prompts: Sequence[str] = ()
    limit: int | None = None
    max_tokens: int = 128
    chat: bool | None = None
    temperature: float = 0.0
    seed: int = 0
    threads: int = 0
    turns: int = 3
    branches: Sequence[Branches] = ()
    drafts: Sequence[Drafts] = ()
    target: Path | str | None = None
    drafter: Path | str | None = None
    device: Device = "cpu"

    def check(self) -> None:
        """Raises UsageError where one is out of range, or two do not go together."""
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)
        for name in ("turns", "limit"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UsageError(f"{value!r} must be an integer >= 1", where=f"--{name}", mend="Change or omit it")
        if isinstance(self.prompts, str):
            raise UsageError(f"{self.prompts!r} must be a list", where="prompts", mend=f"Give [{self.prompts!r}]")
        if self.target is not None and self.temperature > 0:
            mend = "Leave out --target, or --temperature"
            raise UsageError("its columns are greedy, this run samples", where="--target", mend=mend)


def run_bench(folders: Sequence[Path], settings: BenchSettings, progress: Progress | None = None) -> BenchReport:
    """Measures.

    Args:
        folders: bundles of one target, at least one.

    Raises:
        UsageError: settings that cannot be used. RequestError: a prompt that does not fit. BundleError, BackendError:
            a bundle that cannot be run.
    """
    settings.check()
    if not folders:
        raise UsageError("there is no bundle", where="BUNDLE", mend="Give at least one")
    progress = progress or SilentProgress()
    sets = prompt_sets(settings.prompts, settings.limit)  # before anything is loaded: names are easily misspelt
    threads = settings.threads or physical_cores()
    with progress.stage("Loading"):
        bundles = open_bundles(folders, threads=threads, device=settings.device)
        own = engine_modes(bundles, settings.branches, settings.drafts)
        modes: list[Mode] = [*own, *baseline_modes(own, _path(settings.target), _path(settings.drafter), threads)]
    tasks = [_tasks(one, bundles, settings) for one in sets]
    sampling = {"temperature": settings.temperature, "seed": settings.seed}
    measured = [
        measure(one.name, each, modes, sampling, settings.turns, progress)
        for one, each in zip(sets, tasks, strict=True)
    ]
    with progress.stage("Timing passes", settings.turns) as advance:
        costs = cost_tables(bundles, [context_of(one) for one in measured], settings.turns, advance)
    with progress.stage("Comparing outputs", len(measured)) as advance:
        figures = []
        for number, one in enumerate(measured):
            by_mode = {mode.label: costs[mode.bundle.folder][number].costs for mode in own}
            figures.append(_figures(one, modes, by_mode, sampling, bundles[0]))
            advance(1)
    return BenchReport(
        machine={"cpu": _cpu(), "threads": threads, "device": settings.device, "versions": tool_versions(_PACKAGES)},
        settings=_plain(settings),
        bundles=tuple(map(_described, bundles)),
        modes=tuple({"label": mode.label, "bundle": str(mode.bundle.folder), **mode.options} for mode in own),
        sets=tuple(figures),
        costs=tuple(dict.fromkeys(table for tables in costs.values() for table in tables)),
        passed=not any(mode.lossless["different"] for one in figures for mode in one.modes)
        or any(bundle.info.precision != "float32" for bundle in bundles),
    )


def _tasks(one: PromptSet, bundles: Sequence[Loaded], settings: BenchSettings) -> list[Task]:
    """The prompts of a set as token ids; those and the output fit all bundles."""
    room = min(bundle.info.limits.max_seq_len for bundle in bundles)
    tasks = []
    for prompt in one.prompts:
        ids = encode(prompt, one.name, [bundle.engine for bundle in bundles], settings.chat)
        tasks.append(Task(prompt.id, tuple(ids), min(settings.max_tokens, room - len(ids))))
    return tasks


def _figures(
    measured: Measured, modes: Sequence[Mode], costs: Mapping[str, PassCosts], sampling: Mapping[str, Any], by: Loaded
) -> SetFigures:
    def judge(prompt: Sequence[int], plain: Sequence[int], output: Sequence[int]) -> Verdict:
        return compare_outputs(by.engine, prompt, plain, output, **sampling).verdict

    return set_figures(measured, modes, costs, judge)


def _described(bundle: Loaded) -> dict[str, Any]:
    info = bundle.info
    return {
        "path": str(bundle.folder),
        "system": info.system,
        "backend": info.backend,
        "precision": info.precision,
        "weights": info.weights,
        "block_size": info.block_size,
        "vp_block_size": info.limits.vp_block_size,
        "branches": info.limits.branches,
    }


def _path(value: Path | str | None) -> Path | None:
    return None if value is None else Path(value)


def _plain(settings: BenchSettings) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}


def _cpu() -> str:
    """The processor's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
