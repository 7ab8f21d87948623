"""From the portable graph to what a backend loads."""

from __future__ import annotations

import importlib.util

import onnx_ir as ir

from dflash_trt.backends.base import BACKENDS
from dflash_trt.checkpoint.spec import Dtype
from dflash_trt.config import BackendName
from dflash_trt.errors import BackendError
from dflash_trt.passes.check_in_place import CheckInPlace
from dflash_trt.passes.inline import InlineFunctions
from dflash_trt.passes.share_capacity import ShareCapacity
from dflash_trt.passes.simplify import Simplify


def settle_precision(backend: BackendName, asked: Dtype | None) -> Dtype:
    """The precision a build uses.

    Raises:
        BackendError: a backend this version cannot lower to, that is not installed, or that cannot run the precision.
    """
    if backend not in BACKENDS:
        raise BackendError(
            f"backend {backend} cannot be built for in this version",
            where="--backend",
            mend=f"Use one of {', '.join(BACKENDS)}",
        )
    module, precisions = BACKENDS[backend]
    if importlib.util.find_spec(module) is None:
        raise BackendError(f"{module} is not installed", where=f"--backend {backend}", mend=f"pip install {module}")
    precision = asked or precisions[0]
    if precision not in precisions:
        raise BackendError(
            f"{backend} runs {', '.join(precisions)} on this machine, not {precision}",
            where="--dtype",
            mend=f"Build with --dtype {precisions[0]}, or for another backend",
        )
    return precision


def lower_onnxruntime(model: ir.Model) -> ir.Model:
    """Portable graph -> standard graph, in place.

    Raises:
        ExportError: a cache that cannot be updated in place.
    """
    InlineFunctions()(model)
    ShareCapacity()(model)
    Simplify()(model)
    CheckInPlace()(model)
    return model
