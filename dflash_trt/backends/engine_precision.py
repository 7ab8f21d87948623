"""In which dtypes an engine computes, as its inspector tells, compared with what was asked.

Networks are strongly typed: each layer computes in the dtype its graph gives it. What is read back here shows that the
engine at hand was built from such a graph, and not, say, in float32 where float16 was asked for. It is read off the
matrix products (attention is one), which the inspector names; pointwise layers are fused at will, and norms compute in
float32 whatever surrounds them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.backends.tensorrt_api import TensorRT
from dflash_trt.checkpoint.spec import Dtype, Frozen

# Parts of what the inspector says of a tensor ("Half", "Row major linear FP16 format") -> the contract's dtype.
# The first that is found counts: "BFLOAT16" has "FLOAT" in it.
_DTYPES = {
    "BFLOAT16": "bfloat16",
    "BF16": "bfloat16",
    "HALF": "float16",
    "FP16": "float16",
    "FLOAT": "float32",
    "FP32": "float32",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "BOOL": "bool",
}
_WIDEST_FIRST = ("float32", "bfloat16", "float16")
# parts of the type or tactic of layers that multiply matrices
_PRODUCTS = ("gemm", "gemv", "matmul", "matrixmultiply", "matrix_multiply", "mha", "attention")


@dataclass(frozen=True, kw_only=True)
class PrecisionCensus(Frozen):
    """Layers of an engine.

    Attributes:
        layers: all.
        outputs: by the dtype of their first output; "unknown" where the inspector does not tell.
        products: those that multiply matrices, by the dtype they read.
        float32_products: names of those that read float32.
    """

    layers: int
    outputs: dict[str, int]
    products: dict[str, int]
    float32_products: tuple[str, ...]


def engine_precision(api: TensorRT, engine: Any) -> PrecisionCensus:
    """The census of an engine (`ICudaEngine`) that was built with detailed profiling verbosity."""
    return census(api.layer_information(engine))


def census(information: str) -> PrecisionCensus:
    """The census of an inspector's JSON. Layers that it only names count as unknown."""
    layers = json.loads(information)["Layers"]
    detailed = [layer for layer in layers if isinstance(layer, dict)]
    outputs = Counter(_dtype(layer["Outputs"][0]) if layer.get("Outputs") else "unknown" for layer in detailed)
    outputs.update({"unknown": len(layers) - len(detailed)})
    products = [(layer.get("Name", ""), _computes_in(layer)) for layer in detailed if _is_product(layer)]
    return PrecisionCensus(
        layers=len(layers),
        outputs=dict(+outputs),
        products=dict(Counter(dtype for _, dtype in products)),
        float32_products=tuple(name for name, dtype in products if dtype == "float32"),
    )


def precision_faults(asked: Dtype, found: PrecisionCensus, float32_products: int = 0) -> Iterator[str]:
    """Where an engine computes in another dtype than asked.

    Args:
        float32_products: how many matrix products the graph itself has in float32. The builder merges some, so there
            may be fewer in the engine.
    """
    if not found.products:
        yield "the inspector names no matrix product, so the precision cannot be read back (was the build detailed?)"
        return
    if not found.products.get(asked):
        there = ", ".join(f"{count} in {dtype}" for dtype, count in found.products.items())
        yield f"no matrix product computes in {asked}: {there}"
    for dtype, count in found.products.items():
        if dtype not in (asked, "float32", "unknown"):
            yield f"{count} matrix products compute in {dtype} instead of {asked}"
    if asked != "float32" and len(found.float32_products) > float32_products:
        names = ", ".join(found.float32_products[:5])
        yield (
            f"{len(found.float32_products)} matrix products compute in float32 and the graph has {float32_products}: "
            f"{names}{', ...' if len(found.float32_products) > 5 else ''}"
        )


def _is_product(layer: Mapping[str, Any]) -> bool:
    text = f"{layer.get('LayerType', '')} {layer.get('TacticName', '')}".lower()
    return any(part in text for part in _PRODUCTS)


def _computes_in(layer: Mapping[str, Any]) -> str:
    """The widest dtype of the two operands: the first tensors that are no scalars (those scale the product)."""
    tensors = [*layer.get("Inputs", ()), *layer.get("Constants", ())]
    operands = [tensor for tensor in tensors if any(size != 1 for size in tensor["Dimensions"])]
    dtypes = {_dtype(tensor) for tensor in operands[:2]}
    return next((dtype for dtype in _WIDEST_FIRST if dtype in dtypes), "unknown")


def _dtype(tensor: Mapping[str, Any]) -> str:
    text = str(tensor.get("Format/Datatype", "")).upper()
    return next((dtype for part, dtype in _DTYPES.items() if part in text), "unknown")
