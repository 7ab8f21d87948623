"""What a path holds: a checkpoint, a graph, a bundle or a trace, as plain data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from dflash_trt.bundle import CONFIG, is_bundle, read_info
from dflash_trt.checkpoint.spec import DrafterSpec, TargetSpec
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.documents import to_values
from dflash_trt.errors import CheckpointError, UsageError
from dflash_trt.runtime.trace import Trace


def describe(path: Path) -> dict[str, Any]:
    """Describes a checkpoint folder, an ONNX file, a bundle or a trace; "kind" says which.

    Raises:
        UsageError: none of the four, or a damaged graph or trace. CheckpointError, BundleError: one, but damaged.
    """
    if path.is_file() and path.suffix == ".onnx":
        return _graph(path)
    if is_trace(path):
        from dflash_trt.evaluation.trace_file import read_trace

        return describe_trace(path, read_trace(path))
    if not path.is_dir():
        raise UsageError(
            "is neither a folder nor an .onnx or .json file",
            where=str(path),
            mend="Give a checkpoint folder, a bundle, a graph or a trace",
        )
    if is_bundle(path):
        return _bundle(path)
    if (path / CONFIG).is_file():
        return _checkpoint(path)
    raise UsageError(f"has no {CONFIG}: neither a checkpoint nor a bundle", where=str(path))


def is_trace(path: Path) -> bool:
    """Whether a path is to be read as a trace: whether it is one, reading it says."""
    return path.is_file() and path.suffix == ".json"


def describe_trace(path: Path, trace: Trace) -> dict[str, Any]:
    """Describes the trace that was read from `path`."""
    from dflash_trt.evaluation.trace_summary import summarize

    return {"kind": "trace", "path": str(path), **summarize(trace).to_dict()}


def _bundle(path: Path) -> dict[str, Any]:
    info = read_info(path)
    return {"kind": "bundle", "path": str(path), **to_values(info)}


def _checkpoint(path: Path) -> dict[str, Any]:
    """Drafters are told from targets by their tensors."""
    from dflash_trt.checkpoint import drafter, target
    from dflash_trt.checkpoint.drafter_kinds import FC, FUSION_WEIGHTS

    tensors = TensorFolder.open(path)
    spec: TargetSpec | DrafterSpec
    if target.EMBEDDING in tensors:
        kind, spec = "target checkpoint", target.read_target(path).spec
        parameters = target.parameter_count(spec)
    elif not {FC, FUSION_WEIGHTS, "hidden_norm.weight"}.isdisjoint(tensors):
        kind, spec = "drafter checkpoint", drafter.read_drafter(path).spec
        parameters = drafter.parameter_count(spec)
    else:
        raise CheckpointError(
            f"holds neither a target ({target.EMBEDDING}) nor a drafter ({FC}, {FUSION_WEIGHTS})",
            where=str(path),
        )
    return {
        "kind": kind,
        "path": str(path),
        **to_values(spec),
        "tensors": len(tensors),
        "parameters": parameters,
        "bytes": sum(entry.nbytes for entry in tensors.values()),
        "files": [file.name for file in tensors.files()],
    }


def _graph(path: Path) -> dict[str, Any]:
    import onnx_ir as ir

    try:
        model = ir.load(path)
    except Exception as error:  # protobuf and onnx-ir raise different classes for a file that is no model
        raise UsageError(f"cannot be read as ONNX: {' '.join(str(error).split())}", where=str(path)) from error
    if not model.opset_imports:  # protobuf takes an empty file for an empty message
        raise UsageError("is not an ONNX model: it imports no operator set", where=str(path))

    def values(items: Any) -> list[dict[str, Any]]:
        return [
            {
                "name": value.name,
                "dtype": str(value.dtype),
                "shape": [d if isinstance(d, int) else str(d.value) for d in value.shape or ()],
            }
            for value in items
        ]

    external: Counter[str] = Counter()
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            external[str(value.const_value.location)] += value.const_value.nbytes
    return {
        "kind": "graph",
        "path": str(path),
        "opsets": dict(model.opset_imports),
        "inputs": values(model.graph.inputs),
        "outputs": values(model.graph.outputs),
        "operators": dict(Counter(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in model.graph)),
        "functions": ["::".join(part for part in identifier if part) for identifier in model.functions],
        "initializers": len(model.graph.initializers),
        "external_bytes": dict(external),
    }
