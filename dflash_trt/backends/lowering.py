"""From the portable graph to what a backend loads or compiles."""

from __future__ import annotations

import importlib.util

import onnx_ir as ir

from dflash_trt.backends.base import BACKENDS
from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.checkpoint.spec import Dtype
from dflash_trt.config import BackendName
from dflash_trt.errors import BackendError
from dflash_trt.passes.additive_masks import AdditiveMasks
from dflash_trt.passes.bind_plugins import BindPlugins
from dflash_trt.passes.check_in_place import CheckInPlace
from dflash_trt.passes.exact_attention import ExactAttention
from dflash_trt.passes.expand_operators import ExpandOperators
from dflash_trt.passes.fix_capacity import FixCapacity
from dflash_trt.passes.flat_rows import FlatRows
from dflash_trt.passes.group_queries import GroupQueries
from dflash_trt.passes.inline import InlineFunctions
from dflash_trt.passes.quantize_weights import QuantizeWeights
from dflash_trt.passes.share_capacity import ShareCapacity
from dflash_trt.passes.simplify import Simplify


def settle_precision(backend: BackendName, asked: Dtype | None) -> Dtype:
    """The precision a build uses.

    Raises:
        BackendError: a backend that cannot run the precision.
    """
    _, precisions = BACKENDS[backend]
    precision = asked or precisions[0]
    if precision not in precisions:
        raise BackendError(
            f"{backend} runs {', '.join(precisions)} on this machine, not {precision}",
            where="--dtype",
            mend=f"Build with --dtype {precisions[0]}, or for another backend",
        )
    return precision


def check_installed(backend: BackendName) -> None:
    """Raises BackendError where the package that a backend is made of cannot be found."""
    module, _ = BACKENDS[backend]
    if importlib.util.find_spec(module) is None:
        raise BackendError(f"{module} is not installed", where=f"--backend {backend}", mend=f"pip install {module}")


def lower_onnxruntime(model: ir.Model, bits: int | None = None, *, trees: bool = False) -> ir.Model:
    """Portable graph -> what ONNX Runtime opens, in place.

    Args:
        bits: of the weights of linear layers, None for floats. Activations are rounded then, and no row may depend on
            those beside it by as much as a last bit.
        trees: whether the new tokens of a pass may be a tree.

    Raises:
        ExportError: a cache that cannot be updated in place.
    """
    InlineFunctions()(model)
    ShareCapacity()(model)
    Simplify()(model)
    if bits is not None:
        GroupQueries()(model)
        if trees:
            ExactAttention()(model)
        QuantizeWeights(bits)(model)
    else:
        AdditiveMasks()(model)
        FlatRows()(model)
    CheckInPlace()(model)
    return model


def lower_tensorrt(model: ir.Model, capacity: int, parser: ParserVersion, *, plugins: bool) -> ir.Model:
    """Portable graph -> what the ONNX parser of a TensorRT or TensorRT-RTX takes, in place.

    Args:
        capacity: of every cache.
        parser: whose operators there are.
        plugins: whether the custom operators become plugin calls; else they become standard operators, for which
            TensorRT has layers that update caches in place.

    Raises:
        ExportError: a cache that cannot be updated in place, a call no plugin serves, or an operator that the parser
            lacks and that cannot be written in others.
    """
    (BindPlugins() if plugins else InlineFunctions())(model)
    FixCapacity(capacity)(model)
    ExpandOperators(parser)(model)
    Simplify()(model)
    if not plugins:
        AdditiveMasks()(model)
    CheckInPlace()(model)
    return model
