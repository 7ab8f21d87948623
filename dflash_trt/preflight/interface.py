"""A graph's inputs and outputs against the contract, the capacity of its caches, and its optimisation profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from dflash_trt.backends import profiles as profile_rules
from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.backends.profiles import CAPACITY, Profile
from dflash_trt.export.contract import GraphSpec, TensorSpec
from dflash_trt.preflight.fault import Fault, lowering

DTYPES = {
    "int64": ir.DataType.INT64,
    "bool": ir.DataType.BOOL,
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
_CAPACITY_AXIS = 2


def interface_faults(graph: ir.Graph, spec: GraphSpec) -> Iterator[Fault]:
    """Names in order, dtypes, and shapes but for the capacity, which `capacity_faults` is for."""
    ends: tuple[tuple[str, Sequence[ir.Value], tuple[TensorSpec, ...]], ...] = (
        ("input", graph.inputs, (*spec.inputs, *spec.past())),
        ("output", graph.outputs, (*spec.outputs, *spec.present())),
    )
    for kind, values, specs in ends:
        found, wanted = [str(value.name) for value in values], [each.name for each in specs]
        by_name = dict(zip(wanted, specs, strict=True))
        for name in (name for name in wanted if name not in found):
            yield Fault(f"{kind} {name}", "interface", f"is missing from the {spec.role} graph")
        for name in (name for name in found if name not in by_name):
            yield Fault(f"{kind} {name}", "interface", f"is no {kind} of a {spec.role} graph. Remove it")
        if sorted(found) == sorted(wanted) and found != wanted:
            index = next(i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1])
            yield Fault(f"{kind} {found[index]}", "interface", f"is {kind} {index}, where {wanted[index]} must be")
        for value in values:
            if value.name in by_name:
                yield from _value_faults(f"{kind} {value.name}", value, by_name[value.name])


def _value_faults(where: str, value: ir.Value, spec: TensorSpec) -> Iterator[Fault]:
    if value.dtype != DTYPES[spec.dtype]:
        yield Fault(where, "interface", f"is {value.dtype or 'of no known dtype'}; it must be {DTYPES[spec.dtype]}")
    found = None if value.shape is None else [_dim(dim) for dim in value.shape]
    wanted = list(spec.shape)
    if found is not None and len(found) == len(wanted) and CAPACITY in wanted:
        found[wanted.index(CAPACITY)] = CAPACITY
    if found != wanted:
        shown = "of no known shape" if found is None else f"[{', '.join(map(str, found))}]"
        yield Fault(where, "interface", f"is {shown}; it must be [{', '.join(map(str, wanted))}]")


def capacity_faults(graph: ir.Graph, given: Sequence[Profile] | None, parser: ParserVersion) -> Iterator[Fault]:
    """Every cache has one fixed capacity, that of the profiles: engines update no other in place."""
    expected = {profile.name: profile.dims[CAPACITY].max for profile in given or () if CAPACITY in profile.dims}
    caches = [
        (f"{kind} {value.name}", _capacity(value))
        for kind, values in (("input", graph.inputs), ("output", graph.outputs))
        for value in values
        if is_cache(value)
    ]
    varying = [(where, size) for where, size in caches if not isinstance(size, int)]
    if varying:
        where, size = varying[0]
        more = f", and so do {len(varying) - 1} others" if varying[1:] else ""
        text = f"has a capacity that varies (dimension {_CAPACITY_AXIS} is {size}){more}. {lowering(parser)}"
        yield Fault(where, "capacity", text)
    fixed = [(where, size) for where, size in caches if isinstance(size, int)]
    for where, found in fixed:
        if found != fixed[0][1]:
            text = f"has {found} slots, {fixed[0][0]} has {fixed[0][1]}; all must have as many. {lowering(parser)}"
            yield Fault(where, "capacity", text)
        for name, slots in expected.items():
            if found != slots:
                text = f"has {found} slots, profile {name} {slots}. {lowering(parser)}"
                yield Fault(where, "capacity", text)


def is_cache(value: ir.Value) -> bool:
    """Whether an input or output is a cache, by its name."""
    return str(value.name).startswith(("past_", "present_"))


def _capacity(value: ir.Value) -> int | str | None:
    known = value.shape is not None and len(value.shape) > _CAPACITY_AXIS
    return _dim(value.shape[_CAPACITY_AXIS]) if known and value.shape is not None else None


def profile_faults(spec: GraphSpec, given: Sequence[Profile]) -> Iterator[Fault]:
    """Dimensions without a range, of length zero, or out of order."""
    for message in profile_rules.faults(spec, given):
        where, _, text = message.partition(": ")
        yield Fault(where, "profile", text)


def _dim(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim.value if isinstance(dim, ir.SymbolicDim) else dim
