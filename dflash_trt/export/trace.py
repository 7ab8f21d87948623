"""Tracing: a module on the meta device -> an ONNX graph that calls the custom operators.

The module holds no weights: initialisers keep their names and shapes, `export/weights.py` says where their bytes are.
"""

from __future__ import annotations

import logging
import warnings

import onnx_ir as ir
import onnxscript
import torch
from torch.overrides import TorchFunctionMode

from dflash_trt.errors import ExportError
from dflash_trt.export.contract import GraphSpec, TensorSpec
from dflash_trt.ops import DOMAIN, OPSET, VERSION, kv_injection_onnx, staircase_attention_onnx
from dflash_trt.progress import Advance

# How often torch 2.13 goes through a module, from layer to layer, until it is a graph. Only progress depends on it.
PASSES = 4

# Sizes of the example inputs, all different and none 0 or 1, so that torch.export keeps every dimension dynamic.
_EXAMPLE_SIZES = {"B": 2, "Q": 5, "R": 3, "N": 7, "C": 24}

_ONNX_DTYPE_NAMES = {
    "int64": "INT64",
    "bool": "BOOL",
    "float32": "FLOAT",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
}

_KV_INJECTION = onnxscript.values.Op(
    onnxscript.values.Opset(DOMAIN, VERSION), kv_injection_onnx.NAME, kv_injection_onnx.schema()
)
_STAIRCASE_ATTENTION = onnxscript.values.Op(
    onnxscript.values.Opset(DOMAIN, VERSION), staircase_attention_onnx.NAME, staircase_attention_onnx.schema()
)


def _translate_kv_injection(  # type: ignore[no-untyped-def]
    key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache, eps
):
    return _KV_INJECTION(
        key, value, key_norm_weight, position_ids, cos, sin, write_start, key_cache, value_cache, eps=eps
    )


def _translate_staircase_attention(  # type: ignore[no-untyped-def]
    query, key_cache, value_cache, context_len, visibility, sinks, position_ids, scale, sliding_window, causal, softcap
):
    return _STAIRCASE_ATTENTION(
        query, key_cache, value_cache, context_len, visibility, sinks, position_ids,
        scale=scale, sliding_window=sliding_window, causal=causal, softcap=softcap,
    )  # fmt: skip


def _example(spec: TensorSpec) -> torch.Tensor:
    shape = tuple(_EXAMPLE_SIZES[size] if isinstance(size, str) else size for size in spec.shape)
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")


def _dynamic(spec: TensorSpec, dims: dict[str, torch.export.Dim]) -> dict[int, torch.export.Dim]:
    return {axis: dims[size] for axis, size in enumerate(spec.shape) if isinstance(size, str)}


class _CountLayers(TorchFunctionMode):
    """Tells `advance` of every layer that torch goes through."""

    def __init__(self, advance: Advance) -> None:
        super().__init__()
        self._advance = advance

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.dflash_trt.staircase_attention.default:  # a layer calls it once
            self._advance(1)
        return func(*args, **(kwargs or {}))


def trace(module: torch.nn.Module, graph: GraphSpec, advance: Advance = lambda amount: None) -> ir.Model:
    """Exports `module` (on the meta device) to ONNX.

    The model calls `dflash_trt::KVInjection` and `dflash_trt::StaircaseAttention`, without function bodies yet; its
    initialisers have names, dtypes and shapes but no data.

    Args:
        advance: called with the number of layers gone through, about PASSES times for each layer in all.

    Raises:
        ExportError: torch cannot trace the module with these inputs, or the exported I/O is not the contract's.
    """
    inputs = [*graph.inputs, *graph.past()]
    outputs = [*graph.outputs, *graph.present()]
    dims = {name: torch.export.Dim(name, min=1) for name in _EXAMPLE_SIZES}
    named = tuple(_dynamic(spec, dims) for spec in graph.inputs)
    caches = tuple(_dynamic(spec, dims) for spec in graph.past())
    try:
        with _CountLayers(advance):
            program = _export(module, inputs, outputs, (*named, caches))
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ExportError(f"torch {torch.__version__} cannot trace the module: {reason}", where=graph.role) from error
    if program is None:
        raise ExportError("torch.onnx.export returned no program", where=graph.role)
    _check_ranges(program, graph)
    for value in program.model.graph.initializers.values():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, torch.Tensor) and raw.is_meta:
            value.const_value = None
    _check_io(program.model, graph)
    return program.model


def _export(
    module: torch.nn.Module, inputs: list[TensorSpec], outputs: list[TensorSpec], dynamic_shapes: tuple[object, ...]
) -> torch.onnx.ONNXProgram | None:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        return torch.onnx.export(
            module.eval(),
            tuple(_example(spec) for spec in inputs),
            input_names=[spec.name for spec in inputs],
            output_names=[spec.name for spec in outputs],
            dynamic_shapes=dynamic_shapes,
            opset_version=OPSET,
            dynamo=True,
            optimize=False,
            verbose=False,
            custom_translation_table={
                torch.ops.dflash_trt.kv_injection.default: _translate_kv_injection,
                torch.ops.dflash_trt.staircase_attention.default: _translate_staircase_attention,
            },
        )


def _check_ranges(program: torch.onnx.ONNXProgram, graph: GraphSpec) -> None:
    """A module that branches on a length is traced along one branch, and only these ranges say so."""
    assert program.exported_program is not None
    for allowed in program.exported_program.range_constraints.values():
        if allowed.lower > 1 or allowed.upper < 1 << 31:
            raise ExportError(
                f"tracing narrowed a dynamic dimension to {allowed.lower}..{allowed.upper}",
                where=f"{graph.role} graph",
                mend="This is a fault of the module: it must not branch on lengths",
            )


def _check_io(model: ir.Model, graph: GraphSpec) -> None:
    """The exported I/O must be the contract's, dynamic dimensions included: tracing can specialise them silently."""
    expected = [*graph.inputs, *graph.past(), *graph.outputs, *graph.present()]
    exported = [*model.graph.inputs, *model.graph.outputs]
    if len(exported) != len(expected):
        raise ExportError(
            f"exported with {len(exported)} inputs and outputs, the contract has {len(expected)}",
            where=f"{graph.role} graph",
        )
    for spec, value in zip(expected, exported, strict=True):
        dims = () if value.shape is None else tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)
        found = (value.name, str(value.dtype), dims)
        wanted = (spec.name, _ONNX_DTYPE_NAMES[spec.dtype], spec.shape)
        if found != wanted:
            raise ExportError(
                f"exported as {found}, the contract says {wanted}",
                where=f"{graph.role} graph, {spec.name}",
                mend="This is a fault of the exporter: the installed torch traces this module differently",
            )
