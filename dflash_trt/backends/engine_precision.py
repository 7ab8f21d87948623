"""In which dtypes an engine computes, as its inspector tells, compared with what was asked.

Networks are strongly typed: each layer computes in the dtype its graph gives it. What is read back here shows that the
engine at hand was built from such a graph, and not, say, in float32 where float16 was asked for. It is read off the
matrix products (attention is one), which the inspector names; pointwise layers are fused at will, and norms compute in
float32 whatever surrounds them.

A cast may be fused into a product, which then reads what the cast does: float32, though it computes in float16. So
only what no fusion explains is a fault.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
_FLOATS = ("float32", "bfloat16", "float16")
# Where a tensor's dtype is told: apart in TensorRT 11 and TensorRT-RTX, with its format in TensorRT 10.
_DTYPE_KEYS = ("Datatype", "Format/Datatype")
# parts of the type or tactic of layers that multiply matrices
_PRODUCTS = ("gemm", "gemv", "matmul", "matrixmultiply", "matrix_multiply", "mha", "attention")


@dataclass(frozen=True, kw_only=True)
class PrecisionCensus(Frozen):
    """Layers of an engine.

    Attributes:
        layers: all.
        outputs: by the dtype of their first output; "unknown" where the inspector does not tell.
        products: those that multiply matrices, by the dtype of their operands; "bfloat16 and float32" where these
            differ, since one is cast in the product; "unknown" where the inspector does not tell.
        float32_products: names of those that read float32 alone.
    """

    layers: int
    outputs: dict[str, int]
    products: dict[str, int]
    float32_products: tuple[str, ...]

    @property
    def tells(self) -> bool:
        """Whether the dtype of any product is known."""
        return any(dtypes != "unknown" for dtypes in self.products)


def census(information: str) -> PrecisionCensus:
    """The census of an inspector's JSON, of an engine that was built with detailed profiling verbosity.

    Layers that it only names count as unknown.
    """
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


def precision_faults(asked: Dtype, found: PrecisionCensus) -> Iterator[str]:
    """Where an engine certainly computes in another dtype than asked; nothing where the inspector tells nothing."""
    known = {dtypes: count for dtypes, count in found.products.items() if dtypes != "unknown"}
    if known and not any(asked in _parts(dtypes) for dtypes in known):
        there = ", ".join(f"{count} in {dtypes}" for dtypes, count in known.items())
        yield f"no matrix product computes in {asked}: {there}"
    for dtypes, count in known.items():
        others = [dtype for dtype in _parts(dtypes) if dtype not in (asked, "float32")]
        if others:
            yield f"{count} matrix products compute in {', '.join(others)} instead of {asked}"


def float32_surplus(asked: Dtype, found: PrecisionCensus, float32_products: int) -> str:
    """What there is to say of products that read float32 where less was asked; empty where the graph explains them.

    Args:
        float32_products: how many matrix products the graph itself has in float32. The builder merges some, so there
            may be fewer in the engine.
    """
    names = found.float32_products
    if asked == "float32" or len(names) <= float32_products:
        return ""
    return (
        f"{len(names)} matrix products read float32 and the graph has {float32_products}, a cast may be fused into "
        f"the others: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
    )


def _parts(dtypes: str) -> list[str]:
    return dtypes.split(" and ")


def _is_product(layer: Mapping[str, Any]) -> bool:
    text = f"{layer.get('LayerType', '')} {layer.get('TacticName', '')}".lower()
    return any(part in text for part in _PRODUCTS)


def _computes_in(layer: Mapping[str, Any]) -> str:
    """The float dtypes of the two operands: the first tensors that are no scalars (those scale the product)."""
    tensors = [*layer.get("Inputs", ()), *layer.get("Constants", ())]
    operands = [tensor for tensor in tensors if not _is_scalar(tensor)]
    dtypes = {_dtype(tensor) for tensor in operands[:2]}
    return " and ".join(sorted(dtypes.intersection(_FLOATS))) or "unknown"


def _is_scalar(tensor: Mapping[str, Any]) -> bool:
    dimensions = tensor.get("Dimensions")
    return dimensions is not None and all(size == 1 for size in dimensions)


def _dtype(tensor: Mapping[str, Any]) -> str:
    text = " ".join(str(tensor.get(key, "")) for key in _DTYPE_KEYS).upper()
    return next((dtype for part, dtype in _DTYPES.items() if part in text), "unknown")
