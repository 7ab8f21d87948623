"""Checks of TensorRT engines: what was asked for against what was built, and what could not be looked at and why.

Of a strongly typed network the parsed layers tell the precision already, on any machine; the engine's own layers and
its numbers take the GPU it was built for.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.backends.engine_precision import PrecisionCensus, float32_surplus, precision_faults
from dflash_trt.backends.engine_record import EngineRecord, gpu_compute_capability, load_faults
from dflash_trt.bundle import BundleInfo
from dflash_trt.evaluation.report import Check, Status
from dflash_trt.runtime.engine import Engine

FLOATS = ("float32", "float16", "bfloat16", "fp8", "fp4")
NEEDS_A_RUN = ("losslessness", "acceptance")


def why_not_runnable(record: EngineRecord) -> str:
    """Why engines just built cannot run on this machine; empty where they can."""
    return next((what for what, _ in load_faults(record, record.version, gpu_compute_capability())), "")


def preflight_checks(info: BundleInfo) -> Iterator[Check]:
    """The lowered graphs: they passed the preflight before the builder saw them, or there would be no bundle."""
    assert info.engines is not None
    limit = f"operators, plugin calls, dtypes, I/O, profiles and caches in place as {info.engines.parser} takes them"
    for role in info.roles:
        graph = info.graphs[role].spec
        measured = {
            "inputs": len(graph.inputs) + len(graph.past()),
            "outputs": len(graph.outputs) + len(graph.present()),
            "profiles": len(info.engines.profiles[role]),
        }
        yield Check(f"preflight: {role}", "passed", measured, limit, "checked in the build")


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
    """What takes a GPU, where it is not run."""
    for role in info.roles:
        yield Check(f"engine: {role}", "not run", {}, f"matrix products in {_floats(info)}", reason)
        yield Check(f"numbers: {role}", "not run", {}, "as the torch reference", reason)
    for name in NEEDS_A_RUN:
        yield Check(name, "not run", {}, "as in `dflash-trt verify`", reason)


def engine_checks(info: BundleInfo, engine: Engine) -> Iterator[Check]:
    """The engines' own layers, read back from the open sessions of `engine`.

    Their I/O was compared with the contract when they were opened.
    """
    from dflash_trt.backends.engine_session import EngineSession

    assert info.engines is not None
    limit = f"I/O as in the contract; matrix products in {_floats(info)}"
    for role, session in engine.sessions.items():
        assert isinstance(session, EngineSession)
        if session.precision is None:
            yield Check(f"engine: {role}", "not run", {}, limit, "the session cannot read its engine's layers")
            continue
        found = session.precision()
        if not found.tells:
            reason = "the inspector does not tell in which dtype any matrix product computes; I/O is as in the contract"
            yield Check(f"engine: {role}", "not run", _products(found), limit, reason)
            continue
        there = info.engines.facts[role].float32_products
        faults = [*precision_faults(info.precision, found)]
        status: Status = "failed" if faults else "passed"
        measured = {**_products(found), "float32 products of the graph": there}
        reason = "; ".join(filter(None, (*faults, float32_surplus(info.precision, found, there))))
        yield Check(f"engine: {role}", status, measured, limit, reason)


def _products(found: PrecisionCensus) -> dict[str, int]:
    return {f"products in {dtypes}": count for dtypes, count in found.products.items()}


def _floats(info: BundleInfo) -> str:
    return "float32" if info.precision == "float32" else f"{info.precision}, or float32 where the graph asks for it"
