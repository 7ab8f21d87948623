"""The engines of one bundle, graph by graph: lowered, checked, estimated, compiled, recorded."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx_ir as ir

from dflash_trt.backends.engine_builder import TimingCache, build_engine
from dflash_trt.backends.engine_plan import EnginePlan
from dflash_trt.backends.engine_record import EngineFacts, EngineRecord, dotted
from dflash_trt.backends.estimate import estimate
from dflash_trt.backends.lowering import lower_tensorrt
from dflash_trt.backends.profiles import Profile, profiles
from dflash_trt.backends.tensorrt_api import MODULES, NAMES
from dflash_trt.errors import BackendError
from dflash_trt.export.contract import GraphSpec, Role
from dflash_trt.native import file_sha256
from dflash_trt.passes.preflight import Preflight, PreflightTarget
from dflash_trt.progress import Progress
from dflash_trt.runtime.limits import Limits

ENGINE = "rank0.engine"


class EngineStage:
    """Compiles the graphs of a bundle one after the other, by a plan.

    Says through `progress` what was chosen, and of each graph what it will cost.
    """

    def __init__(self, plan: EnginePlan, limits: Limits, progress: Progress) -> None:
        self._plan, self._limits, self._progress = plan, limits, progress
        self._profiles: dict[Role, tuple[Profile, ...]] = {}
        self._facts: dict[Role, EngineFacts] = {}
        self._cache = plan.timing_cache
        progress.note(f"Plugins: {'on' if plan.binds else 'off'} ({plan.plugins_reason})")
        progress.note(f"Graphs for the parser of {plan.parser}")
        if plan.missing:
            progress.note(plan.missing)
        if plan.library is not None and plan.api is not None:
            plan.api.load_plugins(plan.library)

    def lower(self, model: ir.Model) -> ir.Model:
        """Portable graph -> what the parser takes, in place."""
        return lower_tensorrt(model, self._limits.capacity, self._plan.parser, plugins=self._plan.binds)

    def compile(self, graph: GraphSpec, model: Path) -> Path:
        """Checks the lowered graph `model`, says what its engine will cost, and writes the engine beside it.

        Returns:
            The engine, which takes the graph's place; the graph, where the build stops before.

        Raises:
            ExportError: the preflight found faults. BackendError: the builder said no.
        """
        plan, given = self._plan, profiles(graph.role, self._limits)
        self._profiles[graph.role] = given
        lowered = ir.load(model)
        registry = plan.api if plan.library is not None else None
        Preflight(PreflightTarget(parser=plan.parser, graph=graph, profiles=given, registry=registry))(lowered)
        for line in estimate(lowered, graph, given).lines():
            self._progress.note(f"{graph.role}: {line}")
        if plan.stops:
            return model
        assert plan.api is not None  # or there would be no plan to compile
        engine = model.with_name(ENGINE)
        with self._progress.stage(f"Compiling the {graph.role} engine"):
            self._facts[graph.role] = build_engine(
                plan.api, model, graph, given, plan.options, engine,
                plugins=plan.binds, timing_cache=self._cache,
            )  # fmt: skip
        if self._cache is not None and self._cache.write is not None:
            self._cache = TimingCache(self._cache.write, self._cache.write)  # the next graph goes on from it
        model.unlink()
        return engine

    def finish(self, folder: Path) -> EngineRecord:
        """Puts the plugin library into the bundle in `folder`; returns what there is to say of all engines.

        Raises:
            BackendError: the library is not the one it was when the build began.
        """
        plan = self._plan
        if plan.library is not None and plan.plugins is not None:
            copy = folder / plan.plugins.file
            copy.parent.mkdir()
            shutil.copyfile(plan.library, copy)
            if file_sha256(copy) != plan.plugins.sha256:
                what = "the plugin library was replaced during the build"
                raise BackendError(what, where=str(plan.library), mend="Build the bundle again")
        return EngineRecord(
            name=NAMES[plan.flavour],
            stage="lowered" if plan.stops else "built",
            parser=str(plan.parser),
            version=None if plan.stops or plan.api is None else plan.api.version,
            compute_capabilities=plan.compute_capabilities,
            bound=plan.binds,
            plugins=plan.plugins,
            plugins_reason=plan.plugins_reason,
            profiles=self._profiles,
            options=plan.options,
            facts=self._facts,
        )

    def tool_versions(self) -> dict[str, str]:
        """What built the engines; nothing where the build stops before."""
        plan = self._plan
        return {} if plan.stops or plan.api is None else {MODULES[plan.flavour]: plan.api.version}

    def compute_capability(self) -> str | None:
        """As config.json has it: "8.6,12.0"; None where none was named."""
        return ",".join(map(dotted, self._plan.compute_capabilities)) or None
