"""Optimisation profiles: the sizes an engine is built for, derived from a bundle's limits.

Two for every graph, since its two uses have nothing in common: many rows of one sequence at a time ("prefill"), or the
full blocks and trees of a step of all sequences ("decode"). The caches have the bundle's whole capacity in both: an
engine updates a cache in place only where its length is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dflash_trt.checkpoint.spec import Frozen
from dflash_trt.errors import BackendError
from dflash_trt.export.contract import GraphSpec, Role, TensorSpec
from dflash_trt.runtime.limits import Limits

ProfileName = Literal["decode", "prefill"]
CAPACITY = "C"


@dataclass(frozen=True, kw_only=True)
class DimRange(Frozen):
    """The sizes of one dynamic dimension: the least, the one to optimise for, the most."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True, kw_only=True)
class Profile(Frozen):
    """The ranges of a graph's dynamic dimensions, by the names that `TensorSpec.shape` has for them."""

    name: ProfileName
    dims: dict[str, DimRange]

    def shapes(self, spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """An input's shapes: min, opt, max."""
        ranges = [DimRange(min=d, opt=d, max=d) if isinstance(d, int) else self.dims[d] for d in spec.shape]
        return tuple(r.min for r in ranges), tuple(r.opt for r in ranges), tuple(r.max for r in ranges)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether every dimension has a size in range."""
        return all(self.dims[name].min <= size <= self.dims[name].max for name, size in sizes.items())


def profiles(role: Role, limits: Limits) -> tuple[Profile, ...]:
    """The profiles of a bundle's graph; "decode" is profile 0."""
    batch, chunk = limits.max_batch_size, limits.prefill_chunk
    if role == "target":
        tree = _up_to(limits.tree_size)
        return (
            _profile("decode", limits, B=_up_to(batch), Q=tree, R=tree),
            _profile("prefill", limits, B=_up_to(1), Q=_up_to(chunk), R=_up_to(1)),
        )
    block, pending = limits.block_size, limits.longest_path
    if role == "vp_drafter":
        block, pending = max(1, limits.redraft_rows) * limits.vp_block_size, limits.longest_pending
    features = DimRange(min=1, opt=limits.longest_path, max=pending)
    return (
        _profile("decode", limits, B=_up_to(batch), Q=_up_to(block), N=features),
        _profile("prefill", limits, B=_up_to(1), Q=_up_to(1), N=_up_to(chunk)),
    )


def _profile(name: ProfileName, limits: Limits, **dims: DimRange) -> Profile:
    fixed = DimRange(min=limits.capacity, opt=limits.capacity, max=limits.capacity)
    return Profile(name=name, dims={**dims, CAPACITY: fixed})


def _up_to(size: int) -> DimRange:
    return DimRange(min=1, opt=size, max=size)


def faults(graph: GraphSpec, given: Sequence[Profile]) -> Iterator[str]:
    """What a builder would refuse, or worse accept: a dimension without a range, of length zero, or out of order."""
    if not given:
        yield f"{graph.role} graph: has no optimisation profile, and its dimensions are dynamic"
    for profile in given:
        place = f"{graph.role} graph, profile {profile.name}"
        for spec in (*graph.inputs, *graph.past()):
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str) and dim not in profile.dims:
                    yield f"{place}: input {spec.name} has no range for dimension {axis} ({dim})"
        for name, r in profile.dims.items():
            if r.min < 1:
                yield f"{place}: dimension {name} has min {r.min}; it must be at least 1"
            if not r.min <= r.opt <= r.max:
                yield f"{place}: dimension {name} has min {r.min}, opt {r.opt}, max {r.max}; they must be in this order"
        capacity = profile.dims.get(CAPACITY)
        if capacity is not None and capacity.min != capacity.max:
            yield f"{place}: dimension C is {capacity.min}..{capacity.max}; a cache has one fixed capacity"


def check(graph: GraphSpec, given: Sequence[Profile]) -> None:
    """Raises BackendError where `faults` finds any."""
    found = list(faults(graph, given))
    if found:
        raise BackendError(
            "\n  ".join(("cannot be built with these optimisation profiles:", *found)),
            where=f"{graph.role} graph",
            mend="They follow from --max-batch-size, --max-seq-len, --block-size, --branches and prefill_chunk",
        )
