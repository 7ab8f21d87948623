"""What a benchmark compares: ways to decode, each a `Mode` that makes a `Run` of a prompt."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dflash_trt.bundle import BundleInfo
from dflash_trt.errors import UsageError
from dflash_trt.evaluation.bench_weights import check_same_target, have_same_weights
from dflash_trt.loading import Device, open_engine, open_info
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.statistics import GenerationStatistics
from dflash_trt.runtime.trace import Branches, Drafts

PLAIN = "plain"


@dataclass(frozen=True)
class Run:
    """One output.

    Attributes:
        token_ids: new tokens.
        seconds, first_token_seconds: from the prompt's token ids to the last new token, and to the first.
        statistics: None where there are none.
    """

    token_ids: tuple[int, ...]
    seconds: float
    first_token_seconds: float
    statistics: GenerationStatistics | None = None

    @property
    def decode_seconds(self) -> float:
        """From the first new token to the last."""
        return self.seconds - self.first_token_seconds

    @property
    def decode_tokens(self) -> int:
        """New tokens behind the first."""
        return len(self.token_ids) - 1


class Mode(Protocol):
    """A way to decode."""

    @property
    def label(self) -> str:
        """Its name in tables; of one benchmark all differ."""

    def run(self, prompt: Sequence[int], max_tokens: int, sampling: Mapping[str, Any]) -> Run:
        """The output for a prompt.

        Args:
            sampling: "temperature" and "seed".
        """


@dataclass(frozen=True)
class Loaded:
    """A bundle that was opened.

    Attributes:
        drafter: number of the first of all bundles that has the same first drafter.
    """

    folder: Path
    info: BundleInfo
    engine: Engine
    drafter: int


@dataclass(frozen=True)
class EngineMode:
    """Decoding with a bundle.

    Attributes:
        options: of `Engine.generate`: "speculation", "branches", "drafts".
    """

    label: str
    bundle: Loaded
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_fixed(self) -> bool:
        """Whether every step does the same."""
        return "auto" not in self.options.values()

    def run(self, prompt: Sequence[int], max_tokens: int, sampling: Mapping[str, Any]) -> Run:
        started = time.perf_counter()
        events = self.bundle.engine.generate(
            prompt, stream=True, max_tokens=max_tokens, **self.options, **sampling
        )
        event = next(events)  # all that prefill yields
        first = time.perf_counter()
        for event in events:  # noqa: B007 - the last one has it all
            pass
        ended = time.perf_counter()
        assert event.generation is not None
        tokens, statistics = tuple(event.generation.token_ids), event.generation.statistics
        return Run(tokens, ended - started, first - started, statistics)


def open_bundles(folders: Sequence[Path], *, threads: int, device: Device = "cpu") -> list[Loaded]:
    """Bundles of one target.

    Raises:
        UsageError: their targets differ, or one was given twice. BundleError, BackendError: one cannot be opened.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError("a bundle was given twice", where="BUNDLE", mend="Give each once")
    infos = [(folder, open_info(folder)) for folder in folders]
    for folder, info in infos[1:]:
        check_same_target(*infos[0], folder, info)
    loaded: list[Loaded] = []
    for number, (folder, info) in enumerate(infos):
        same = (n for n in range(number) if _have_same_drafter(infos[n], infos[number]))
        engine = open_engine(folder, info, threads=threads, device=device)
        loaded.append(Loaded(folder, info, engine, next(same, number)))
    return loaded


def engine_modes(bundles: Sequence[Loaded], branches: Sequence[Branches], drafts: Sequence[Drafts]) -> list[EngineMode]:
    """Token by token, then what each bundle can do.

    Args:
        branches: to have in the steps of D2SD bundles; none: as many as built, and "auto" where costs were measured.
        drafts: of the first drafter's, how many to verify, besides modes that verify whole blocks.

    Raises:
        UsageError: `branches` without a bundle that can have any.
    """
    if branches and all(bundle.engine.vp_drafter is None for bundle in bundles):
        mend = "Leave it out, or give a bundle that was built with --vp-drafter"
        raise UsageError("none of the bundles has a VP drafter", where="--branches", mend=mend)
    modes = [EngineMode(PLAIN, bundles[0], {"speculation": False})]
    known: set[tuple[int, Any]] = set()
    for bundle in bundles:
        for name, options in _options(bundle, branches, drafts):
            # D2SD without branches is what its first drafter does alone, in whichever bundle.
            key = bundle.drafter, (name if not options.get("branches") else (name, bundle.folder))
            if key not in known:
                known.add(key)
                modes.append(EngineMode(name, bundle, options))
    return _told_apart(modes)


def _options(
    bundle: Loaded, branches: Sequence[Branches], drafts: Sequence[Drafts]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Labels, and options of `Engine.generate`."""
    has_branches = bundle.engine.vp_drafter is not None
    alone: dict[str, Any] = {"branches": 0} if has_branches else {}
    system = bundle.info.drafter.system
    yield system, alone
    for count in drafts:
        yield f"{system}:{count}", {**alone, "drafts": count}
    if has_branches:
        unasked: list[Branches] = [bundle.info.limits.branches]
        unasked += ["auto"] if bundle.engine.costs else []
        for width in branches or unasked:
            if width != 0:
                yield f"d2sd-{width}", {"branches": width}


def _told_apart(modes: list[EngineMode]) -> list[EngineMode]:
    """Where several have one label, the bundle's name goes into it, or all of its path."""
    for name in (lambda folder: folder.resolve().name, str):
        labels = [mode.label for mode in modes]
        modes = [
            mode if labels.count(mode.label) == 1 else EngineMode(
                f"{mode.label.partition(' of ')[0]} of {name(mode.bundle.folder)}", mode.bundle, mode.options
            )
            for mode in modes
        ]  # fmt: skip
    return modes


def _have_same_drafter(first: tuple[Path, BundleInfo], second: tuple[Path, BundleInfo]) -> bool:
    return first[1].block_size == second[1].block_size and have_same_weights(*first, *second, "drafter")
