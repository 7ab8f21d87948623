"""Checks of TensorRT engines: what was asked for against what was built, and what could not be looked at and why.

Of a strongly typed network the parsed layers tell the precision already, on any machine; the engine's own layers and
its numbers take the GPU it was built for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.backends.engine_record import EngineRecord, gpu_compute_capability, load_faults
from dflash_trt.bundle import BundleInfo
from dflash_trt.evaluation.report import Check, Status

FLOATS = ("float32", "float16", "bfloat16", "fp8", "fp4")
NEEDS_A_RUN = ("losslessness", "acceptance")


def why_not_runnable(record: EngineRecord) -> str:
    """Why engines just built cannot run on this machine; empty where they can."""
    return next((what for what, _ in load_faults(record, record.version, gpu_compute_capability())), "")


def network_checks(info: BundleInfo) -> Iterator[Check]:
    """The parsed networks: inputs, outputs, profiles and caches in place were compared before the builder saw them, or
    there would be no engine; how precisely their layers compute is compared here."""
    assert info.engines is not None
    wanted = {info.precision, "float32"}  # norms, rotations and fusions are in float32 by design
    limit = f"I/O, profiles and caches in place as in the contract; layers in {_floats(info)}"
    for role in info.roles:
        facts = info.engines.facts.get(role)
        if facts is None:
            yield Check(f"network: {role}", "not run", {}, limit, "the build stopped after lowering")
            continue
        floats = {name: count for name, count in facts.layers.items() if name in FLOATS}
        others = sorted(floats.keys() - wanted)
        reason = f"layers in {', '.join(others)}" if others else ""
        if info.precision not in floats:
            reason = f"no layer computes in {info.precision}"
        status: Status = "failed" if reason else "passed"
        yield Check(f"network: {role}", status, dict(facts.layers), limit, reason)


def not_run_checks(info: BundleInfo, reason: str) -> Iterator[Check]:
    """What takes a GPU, for machines without."""
    for role in info.roles:
        yield Check(f"engine: {role}", "not run", {}, f"matrix products in {_floats(info)}", reason)
        yield Check(f"numbers: {role}", "not run", {}, "as the torch reference", reason)
    for name in NEEDS_A_RUN:
        yield Check(name, "not run", {}, "as in `dflash-trt verify`", reason)


def _floats(info: BundleInfo) -> str:
    return "float32" if info.precision == "float32" else f"{info.precision}, or float32 where the graph asks for it"


def engine_checks(folder: Path, info: BundleInfo) -> Iterator[Check]:
    """The engines' own layers, read back; their I/O was compared with the contract when they were opened."""
    from dflash_trt.backends import tensorrt_api
    from dflash_trt.backends.engine_precision import engine_precision, precision_faults
    from dflash_trt.backends.tensorrt_session import read_engine

    assert info.backend in ("tensorrt", "tensorrt-rtx")
    assert info.engines is not None
    api = tensorrt_api.load(info.backend)
    limit = f"I/O as in the contract; matrix products in {_floats(info)}"
    for role in info.roles:
        opened = read_engine(api, folder / str(info.graphs[role].model), "cuda")
        found = engine_precision(api, opened.engine)
        faults = [*precision_faults(info.precision, found, info.engines.facts[role].float32_products)]
        measured = {f"products in {dtype}": count for dtype, count in found.products.items()}
        yield Check(f"engine: {role}", "failed" if faults else "passed", measured, limit, "; ".join(faults))
