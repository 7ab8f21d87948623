"""The compilation, stage by stage: checkpoints -> traced modules -> portable graphs -> lowered graphs -> bundle."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch

from dflash_trt.backends.engine_plan import fit_limits, plan_engines
from dflash_trt.backends.engine_stage import EngineStage
from dflash_trt.backends.lowering import check_installed, lower_onnxruntime, settle_precision
from dflash_trt.build_rules import refuse_contradictions, settle_limits, tokenizer_files
from dflash_trt.bundle import (
    FORMAT,
    MODEL,
    REPORT,
    BundleInfo,
    GraphRecord,
    files_to_record,
    tool_versions,
    write_config,
    write_engine_config,
)
from dflash_trt.checkpoint import drafter as drafter_module
from dflash_trt.checkpoint import target as target_module
from dflash_trt.checkpoint.drafter import DrafterCheckpoint, read_drafter
from dflash_trt.checkpoint.spec import Dtype
from dflash_trt.checkpoint.target import TargetCheckpoint, read_target
from dflash_trt.config import BuildConfig
from dflash_trt.errors import CheckFailed
from dflash_trt.evaluation.costs import measure_costs
from dflash_trt.evaluation.engine_checks import why_not_runnable
from dflash_trt.evaluation.report import VerifyReport
from dflash_trt.evaluation.verify import report_not_run, verify
from dflash_trt.export.contract import GraphSpec, Role, drafter_graph, target_graph
from dflash_trt.export.quantization import BITS, QUANTIZED
from dflash_trt.export.trace import PASSES, trace
from dflash_trt.export.weights import (
    CONVERTED,
    SHARED,
    TABLES,
    TARGET_PREFIX,
    PlacedWeights,
    bytes_to_quantize,
    link,
    place_drafter,
    place_quantized,
    place_target,
)
from dflash_trt.hashing import bytes_to_hash
from dflash_trt.loading import open_engine
from dflash_trt.modeling.load import drafter_tables, meta_drafter, meta_target, target_tables
from dflash_trt.output import atomic_output
from dflash_trt.passes.attach_functions import AttachFunctions
from dflash_trt.progress import Advance, Progress, SilentProgress


@dataclass(frozen=True)
class GraphSummary:
    """One line of the table a build ends with."""

    role: str
    parameters: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class BuildResult:
    """What was built. `report` is None with `verify=False`, but for engines: of their graphs and networks it tells
    what the build saw."""

    output: Path
    info: BundleInfo
    graphs: tuple[GraphSummary, ...]
    report: VerifyReport | None


def build(config: BuildConfig, progress: Progress | None = None) -> BuildResult:
    """Builds a bundle.

    Raises:
        DflashError: bad input (nothing is written). CheckFailed: the verification said no (nothing is written either).
    """
    progress = progress or SilentProgress()

    # 1. Read and check the checkpoints, and settle every size before anything is written.
    refuse_contradictions(config)
    target, drafters = read_target(config.target), _read_drafters(config)
    drafter, vp_drafter = drafters["drafter"], drafters.get("vp_drafter")
    checkpoints: dict[Role, TargetCheckpoint | DrafterCheckpoint] = {"target": target, **drafters}
    config.check_expected({role: checkpoint.spec for role, checkpoint in checkpoints.items()})
    precision = settle_precision(config.backend, config.dtype)
    limits = settle_limits(config, target, drafter, vp_drafter)
    engines = None
    if config.backend in ("tensorrt", "tensorrt-rtx"):
        specs = {role: checkpoint.spec for role, checkpoint in checkpoints.items()}
        plan = plan_engines(config.backend, config, limits, specs, precision)
        limits = fit_limits(plan, limits)
        engines = EngineStage(plan, limits, progress)
    else:
        check_installed(config.backend)
    tokenizer = tokenizer_files(target.path)

    with atomic_output(config.output, force=config.force) as folder:
        # 2. Lay out the weights: linked where the dtype fits, converted once where it does not.
        placed = _place_weights(folder, target, drafters, precision, limits.capacity, progress)
        bits = BITS.get(config.weights)
        if bits is not None:
            _quantize_weights(placed, bits, progress)

        # 3. Trace each module without its weights, bind them, lower the graph.
        records, summaries = {}, []
        for role, checkpoint in checkpoints.items():
            started = time.perf_counter()
            model = None
            graph = _graph(role, checkpoint, drafter.spec.taps, precision)
            if config.backend != "torch":
                with progress.stage(f"Exporting the {role} graph", PASSES * graph.num_layers) as advance:
                    module = _meta_module(checkpoint, target, drafter.spec.taps, limits.capacity, precision, bits)
                    trees = role == "target" and limits.branches > 0
                    lower = partial(lower_onnxruntime, bits=bits, trees=trees) if engines is None else engines.lower
                    model = export_graph(module, graph, placed[role], folder / role, config.dump_ir, lower, advance)
            if engines is not None and model is not None:
                model = engines.compile(graph, model)
            records[role] = _record(folder, role, graph, placed[role], model)
            own = [path for path in (folder / role).iterdir() if not path.name.startswith(TARGET_PREFIX)]
            size = sum(path.stat().st_size for path in own)
            summaries.append(GraphSummary(role, records[role].parameters, size, time.perf_counter() - started))

        # 4. Tokenizer and config.json.
        (folder / "tokenizer").mkdir()
        for file in tokenizer:
            shutil.copyfile(file, folder / "tokenizer" / file.name)
        info = BundleInfo(
            format=FORMAT,
            digest="",
            system="d2sd" if vp_drafter else drafter.spec.system,
            roles=tuple(checkpoints),
            backend=config.backend,
            precision=precision,
            weights=config.weights,
            block_size=limits.block_size,
            trained_block_size=drafter.spec.block_size,
            mask_token_id=drafter.spec.mask_token_id,
            taps=drafter.spec.taps,
            limits=limits,
            target=target.spec,
            drafter=drafter.spec,
            vp_drafter=vp_drafter.spec if vp_drafter else None,
            graphs=records,
            tool_versions=tool_versions() | ({} if engines is None else engines.tool_versions()),
            compute_capability=None if engines is None else engines.compute_capability(),
            engines=None if engines is None else engines.finish(folder),
            costs=None,
            files={},
        )
        if config.backend == "tensorrt":
            for role in checkpoints:
                write_engine_config(folder, info, role)

        # 5. Verify what was written, before it appears at the output path.
        report = None
        if config.verify or info.engines is not None:
            idle = "" if config.verify else "--no-verify"
            if info.engines is not None:
                idle = idle or why_not_runnable(info.engines)
            engine = None if idle else open_engine(folder, info)
            report = report_not_run(folder, info, idle) if engine is None else verify(folder, info, engine, progress)
            report = replace(report, bundle=config.output.name)
            (folder / REPORT).write_text(report.to_json(), encoding="utf-8")
            if config.verify and not report.passed:
                raise CheckFailed(
                    f"the built bundle failed its verification: {report.failures()}",
                    where=str(config.output),
                    mend="Nothing was written; --no-verify writes it anyway, for `dflash-trt verify` to look at",
                )
            if engine is not None:
                with progress.stage("Measuring passes"):
                    info = replace(info, costs=measure_costs(engine))

        # 6. Seal it: sizes and hashes of all files.
        with progress.stage("Hashing", bytes_to_hash(files_to_record(folder)), "bytes") as advance:
            info = write_config(folder, info, advance)
    return BuildResult(config.output, info, tuple(summaries), report)


def export_graph(
    module: torch.nn.Module,
    graph: GraphSpec,
    weights: PlacedWeights,
    folder: Path,
    dump: Path | None,
    lower: Callable[[ir.Model], ir.Model] = lower_onnxruntime,
    advance: Advance = lambda amount: None,
) -> Path:
    """Trace -> portable graph -> lowered graph, saved as model.onnx beside its weights; returns the file."""
    model = trace(module, graph, advance)
    _dump(model, weights, dump, graph.role, "0-traced.onnx")
    AttachFunctions()(model)
    _dump(model, weights, dump, graph.role, "1-portable.onnx")
    lower(model)
    _dump(model, weights, dump, graph.role, "2-lowered.onnx")
    weights.bind(model)
    ir.save(model, folder / MODEL)
    return folder / MODEL


def _dump(model: ir.Model, weights: PlacedWeights, dump: Path | None, role: str, name: str) -> None:
    """Writes one stage's graph to `dump/role`, with links to its weights beside it, so that a runtime can open it."""
    if dump is None:
        return
    folder = dump / role
    folder.mkdir(parents=True, exist_ok=True)
    for file in {entry.file for entry in weights.entries.values()}:
        (folder / file.name).unlink(missing_ok=True)
        link(file, folder / file.name)
    weights.bind(model)
    ir.save(model, folder / name)


def _read_drafters(config: BuildConfig) -> dict[Role, DrafterCheckpoint]:
    drafters: dict[Role, DrafterCheckpoint] = {"drafter": read_drafter(config.drafter)}
    if config.vp_drafter is not None:
        drafters["vp_drafter"] = read_drafter(config.vp_drafter)
    return drafters


def _graph(
    role: Role, checkpoint: TargetCheckpoint | DrafterCheckpoint, taps: tuple[int, ...], precision: Dtype
) -> GraphSpec:
    if isinstance(checkpoint, TargetCheckpoint):
        return target_graph(checkpoint.spec, len(taps), precision)
    return drafter_graph(checkpoint.spec, precision, role)


def _meta_module(
    checkpoint: TargetCheckpoint | DrafterCheckpoint,
    target: TargetCheckpoint,
    taps: tuple[int, ...],
    positions: int,
    precision: Dtype,
    bits: int | None,
) -> torch.nn.Module:
    """The module to trace, without weights; `bits` as in `lower_onnxruntime`."""
    if isinstance(checkpoint, TargetCheckpoint):
        return meta_target(checkpoint.spec, taps, positions, precision)
    return meta_drafter(checkpoint.spec, target.spec, positions, precision, quantized=bits is not None)


def _place_weights(
    folder: Path,
    target: TargetCheckpoint,
    drafters: Mapping[Role, DrafterCheckpoint],
    precision: Dtype,
    positions: int,
    progress: Progress,
) -> dict[Role, PlacedWeights]:
    for role in ("target", *drafters):
        (folder / role).mkdir()
    # what the models need and no more: old checkpoints also hold rotary buffers, tied ones the head
    target_tensors = target.tensors.only(target_module.expected_tensors(target.spec))
    own = {role: d.tensors.only(drafter_module.expected_tensors(d.spec)) for role, d in drafters.items()}
    total = sum(entry.nbytes for tensors in (target_tensors, *own.values()) for entry in tensors.values())
    with progress.stage("Placing weights", total, "bytes") as advance:
        tables = target_tables(target.spec, positions)
        placed_target = place_target(target_tensors, tables, precision, folder / "target", advance)
        placed: dict[Role, PlacedWeights] = {"target": placed_target}
        for role, tensors in own.items():
            tables = drafter_tables(drafters[role].spec, tensors, positions)
            placed[role] = place_drafter(tensors, tables, placed_target, precision, folder / role, advance)
    return placed


def _quantize_weights(placed: Mapping[Role, PlacedWeights], bits: int, progress: Progress) -> None:
    total = sum(bytes_to_quantize(weights) for weights in placed.values())
    with progress.stage("Quantising weights", total, "bytes") as advance:
        for role, weights in placed.items():
            place_quantized(weights, bits, advance, None if role == "target" else placed["target"])


def _record(folder: Path, role: str, graph: GraphSpec, weights: PlacedWeights, model: Path | None) -> GraphRecord:
    own = {
        entry.name: entry
        for name, entry in weights.entries.items()
        if entry.file.name not in (TABLES, QUANTIZED) and not name.startswith(TARGET_PREFIX)
    }
    # converted files last: a linked file also holds the originals of what was converted
    files = sorted({entry.file for entry in own.values()}, key=lambda file: (file.name in (SHARED, CONVERTED), file))
    return GraphRecord(
        spec=graph,
        model=None if model is None else model.relative_to(folder).as_posix(),
        weights=tuple(file.relative_to(folder).as_posix() for file in files),
        parameters=sum(math.prod(entry.shape) for entry in own.values()),
    )
