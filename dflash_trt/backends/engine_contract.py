"""What an engine must have in common with its graph: names, dtypes, shapes, profiles, and caches updated in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_trt.backends.base import numpy_dtype
from dflash_trt.backends.profiles import Profile
from dflash_trt.backends.tensorrt_api import TensorRT
from dflash_trt.errors import BundleError
from dflash_trt.export.contract import GraphSpec, TensorSpec

ALIGNMENT = 256  # bytes, of every address an engine is given


def check_engine(
    api: TensorRT,
    engine: Any,
    file: Path,
    graph: GraphSpec,
    profiles: Sequence[Profile],
    capacity: int,
    *,
    plugins: bool,
) -> None:
    """Raises BundleError where the engine of a file is not this graph's."""
    faults = [*engine_io_faults(api, engine, graph, profiles, plugins=plugins), *row_faults(graph, profiles, capacity)]
    if faults:
        what = "\n  ".join((f"is not the engine of this bundle's {graph.role} graph:", *faults))
        raise BundleError(what, where=str(file), mend="Build the bundle again")


def engine_io_faults(
    api: TensorRT, engine: Any, graph: GraphSpec, profiles: Sequence[Profile], *, plugins: bool
) -> Iterator[str]:
    """Where an engine (`ICudaEngine`) differs from its graph's contract.

    Args:
        plugins: whether plugins update the caches. Of those TensorRT may not tell that an output is an input.
    """
    modes = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        modes[name] = engine.get_tensor_mode(name).name
    inputs, outputs = (*graph.inputs, *graph.past()), (*graph.outputs, *graph.present())
    expected = {spec.name: "INPUT" for spec in inputs} | {spec.name: "OUTPUT" for spec in outputs}
    for name in modes.keys() - expected.keys():
        yield f"has {modes[name].lower()} {name}, which the graph does not have"
    found = []
    for spec in (*inputs, *outputs):
        if modes.get(spec.name) != expected[spec.name]:
            yield f"has no {expected[spec.name].lower()} {spec.name}"
        else:
            found.append(spec)
            yield from _tensor_faults(api, engine, spec, profiles)
    if engine.num_optimization_profiles != len(profiles):
        yield f"has {engine.num_optimization_profiles} optimisation profiles instead of {len(profiles)}"
    else:
        for spec in inputs:
            if spec in found and -1 in tuple(engine.get_tensor_shape(spec.name)):
                yield from _profile_faults(engine, spec, profiles)
    for past, present in zip(graph.past(), graph.present(), strict=True):
        if past in found and present in found:
            yield from _alias_faults(api, engine, past.name, present.name, plugins)


def row_faults(graph: GraphSpec, profiles: Sequence[Profile], capacity: int) -> Iterator[str]:
    """Whether the rows of a cache, which a prompt's passes are given alone, begin where an engine takes an address."""
    slot = graph.num_kv_heads * graph.head_dim * numpy_dtype(graph.dtype).itemsize
    if max(profile.dims["B"].max for profile in profiles) > 1 and slot * capacity % ALIGNMENT:
        step = ALIGNMENT // math.gcd(ALIGNMENT, slot)
        yield (
            f"a cache row of {capacity} slots has {slot * capacity} bytes, and an address must be a multiple of "
            f"{ALIGNMENT}: the capacity must be a multiple of {step}"
        )


def _tensor_faults(api: TensorRT, engine: Any, spec: TensorSpec, profiles: Sequence[Profile]) -> Iterator[str]:
    dtype, shape = api.dtype(engine.get_tensor_dtype(spec.name)), tuple(engine.get_tensor_shape(spec.name))
    if dtype != spec.dtype:
        yield f"{spec.name} is {dtype} instead of {spec.dtype}"
    wanted = [{dim} if isinstance(dim, int) else _sizes(dim, profiles) for dim in spec.shape]
    if len(shape) != len(wanted) or any(size not in sizes for size, sizes in zip(shape, wanted, strict=True)):
        yield f"{spec.name} has shape {_shown(shape)} instead of {_shown(spec.shape)}"
    if engine.get_tensor_location(spec.name).name != "DEVICE":
        yield f"{spec.name} is read from or written to host memory instead of the GPU's"


def _sizes(dim: str, profiles: Sequence[Profile]) -> set[int]:
    """What an engine may say of a dynamic dimension: -1, or its size where all profiles have that one only."""
    ranges = [profile.dims[dim] for profile in profiles]
    sizes = {size for r in ranges for size in (r.min, r.max)}
    return {-1} | (sizes if len(sizes) == 1 else set())


def _profile_faults(engine: Any, spec: TensorSpec, profiles: Sequence[Profile]) -> Iterator[str]:
    for index, profile in enumerate(profiles):
        built = [tuple(shape) for shape in engine.get_tensor_profile_shape(spec.name, index)]
        for which, shape, wanted in zip(("min", "opt", "max"), built, profile.shapes(spec), strict=True):
            if shape != wanted:
                yield f"profile {profile.name}: {spec.name} has {which} {_shown(shape)} instead of {_shown(wanted)}"


def _alias_faults(api: TensorRT, engine: Any, past: str, present: str, plugins: bool) -> Iterator[str]:
    shared = api.aliased_input(engine, present)
    if shared is None and (plugins or not api.tells_aliases(engine)):
        return
    if shared != past:
        yield f"{present} is {shared or 'memory of its own'} instead of {past}: the cache would not be updated in place"


def _shown(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
