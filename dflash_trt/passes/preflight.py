"""Checks a graph against what TensorRT will make of it, before the parser and the builder see it.

They say little, say it late, and of some faults say nothing at all: a cache that is copied at every step, an attribute
that the plugin never sees.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as common

from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.backends.profiles import Profile
from dflash_trt.errors import ExportError
from dflash_trt.export.contract import GraphSpec
from dflash_trt.passes.check_in_place import cache_faults
from dflash_trt.preflight.fault import Fault, grouped
from dflash_trt.preflight.interface import DTYPES, capacity_faults, interface_faults, profile_faults
from dflash_trt.preflight.operators import mask_faults, operator_faults, typing_faults, weight_faults
from dflash_trt.preflight.plugins import LibraryRegistry, Registry, plugin_faults

_INFERENCE = common.ShapeInferencePass.__module__  # the name of its logger


@dataclass(frozen=True)
class PreflightTarget:
    """What a graph is checked against.

    Attributes:
        parser: whose ONNX parser will read it.
        graph: what its inputs and outputs must be; None: they are not compared, nor are weights' dtypes.
        profiles: what it will be built for; None: not checked. They need `graph`, whose dimensions they are of.
        registry: of a TensorRT with the plugin library loaded; None: custom nodes are compared with what the library
            is known to register.
    """

    parser: ParserVersion
    graph: GraphSpec | None = None
    profiles: Sequence[Profile] | None = None
    registry: Registry | None = None

    def __post_init__(self) -> None:
        if self.profiles is not None and self.graph is None:
            raise ValueError("profiles are of a graph's dimensions: give the graph")


class Preflight(ir.passes.InPlacePass):
    """Requires: nothing. Ensures: nothing is known against building the graph. Changes nothing."""

    def __init__(self, target: PreflightTarget) -> None:
        super().__init__()
        self._target = target

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Raises ExportError with every kind of fault, the first place that has it, and how many have."""
        faults = grouped(preflight_faults(model, self._target))
        if faults:
            raise ExportError(
                "\n  ".join((f"{self._target.parser} cannot build this graph:", *map(str, faults))), where="preflight"
            )
        return ir.passes.PassResult(model, False)


def preflight_faults(model: ir.Model, target: PreflightTarget) -> list[Fault]:
    """All that is wrong with a graph for `target`. The model is left as it is, and no weight is read."""
    model = _with_types(model)
    faults = [
        *plugin_faults(model, target.parser, target.registry or LibraryRegistry()),
        *operator_faults(model, target.parser),
        *typing_faults(model),
        *mask_faults(model, target.parser),
        *capacity_faults(model.graph, target.profiles, target.parser),
        *(Fault(value, "in-place", text) for value, text in cache_faults(model.graph)),
    ]
    if target.graph is not None:
        faults += weight_faults(model, DTYPES[target.graph.dtype])
        faults += interface_faults(model.graph, target.graph)
    if target.graph is not None and target.profiles is not None:
        faults += profile_faults(target.graph, target.profiles)
    return list(dict.fromkeys(faults))


def _with_types(model: ir.Model) -> ir.Model:
    """A copy, which shares the weights, with what dtypes and shapes can be inferred."""
    clone = model.clone()
    computed = [value for node in clone.graph.all_nodes() for value in node.outputs]
    if any(value.dtype is None or value.shape is None for value in computed):
        for value in (*clone.graph.inputs, *clone.graph.initializers.values(), *computed):
            value.type = copy.deepcopy(value.type)  # clones share them
        with _every_domain_imported(clone), _silence(_INFERENCE):
            common.ShapeInferencePass(check_type=False, strict_mode=False)(clone)
    return clone


@contextlib.contextmanager
def _every_domain_imported(model: ir.Model) -> Iterator[None]:
    """But for the standard one, for a while: inference gives up on the whole graph where one is not imported."""
    imports = dict(model.opset_imports)
    domains = {node.domain for node in model.graph.all_nodes() if node.domain}
    model.opset_imports.update(dict.fromkeys(domains - imports.keys(), 1))
    try:
        yield
    finally:
        model.opset_imports.clear()
        model.opset_imports.update(imports)


@contextlib.contextmanager
def _silence(name: str) -> Iterator[None]:
    """A logger, for a while: what cannot be inferred is a fault of its own, and needs no stack of somebody else's."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
