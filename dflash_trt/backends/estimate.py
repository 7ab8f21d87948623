"""What an engine will cost, before it is built: memory of the build, size of the file, device memory of its buffers.

Measured with TensorRT-RTX 1.7.1 on a CPU, batch 1 to 4, one compute capability or two (which made no difference): the
peak resident memory of a process that builds and keeps the plan, and the plan's size. The small graphs are float16 and
bfloat16, the others bfloat16, of Qwen3's shape.

    weights     3.7 MB   6.6 MB   261 MB   517 MB   1193 MB
    peak         258 MB   295 MB  1019 MB  1801 MB   4386 MB
    plan        11.0 MB  14.9 MB   269 MB   529 MB   1218 MB

So 2.8 to 3.8 bytes for each further byte of weights: the file as it is mapped, the network's copy, the compiler's and
the plan. Where the same process exported the graph before, the largest took 5430 MB. Users of TensorRT itself saw
builds of 3 to 4 times the parameters. The estimates are to lie above all of these, by two thirds at most. A TensorRT
that times kernels on a GPU was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.backends.base import numpy_dtype
from dflash_trt.backends.profiles import Profile
from dflash_trt.export.contract import GraphSpec, TensorSpec

if TYPE_CHECKING:
    import onnx_ir as ir

_BUILD_BASE, _BUILD_PER_WEIGHT = 300_000_000, 5
_ENGINE_BASE, _ENGINE_PER_WEIGHT = 10_000_000, 1.03
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Estimate:
    """Of one graph, all in bytes; what a context needs for activations is known only once an engine is built.

    Attributes:
        weights_bytes: of the initialisers that nodes read.
        engine_bytes: the file.
        build_bytes: host memory, at most.
        cache_bytes, io_bytes: device memory of the caches, and of all other inputs and outputs, at the largest sizes of
            the profiles; None without profiles.
        available_bytes: host memory now; None where the system does not tell.
    """

    weights_bytes: int
    engine_bytes: int
    build_bytes: int
    cache_bytes: int | None
    io_bytes: int | None
    available_bytes: int | None

    @property
    def warning(self) -> str | None:
        """That the build may run out of memory; None where it fits, or nobody knows."""
        if self.available_bytes is None or self.build_bytes <= self.available_bytes:
            return None
        return (
            f"the build may need {_size(self.build_bytes)} of memory, and {_size(self.available_bytes)} are available: "
            "the system may kill it. Build where there is more"
        )

    def lines(self) -> list[str]:
        """For printing: what the build takes, what the engine takes when it runs, and the warning."""
        available = "" if self.available_bytes is None else f" of {_size(self.available_bytes)} available"
        lines = [
            f"{_size(self.weights_bytes)} of weights; the engine about {_size(self.engine_bytes)}; "
            f"the build up to {_size(self.build_bytes)} of memory{available}"
        ]
        if self.cache_bytes is not None and self.io_bytes is not None:
            lines.append(f"device memory: caches {_size(self.cache_bytes)}, other buffers {_size(self.io_bytes)}")
        if self.warning is not None:
            lines.append(f"warning: {self.warning}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the fields, and the warning."""
        return {**asdict(self), "warning": self.warning}


def estimate(model: ir.Model, graph: GraphSpec | None = None, profiles: Sequence[Profile] = ()) -> Estimate:
    """Estimates from a graph whose weights need not be there; buffers where `graph` and its profiles are given."""
    weights = weight_bytes(model)
    cache = io = None
    if graph is not None and profiles:
        cache = _largest(graph.past(), profiles)  # the cache outputs are the same buffers
        io = _largest((*graph.inputs, *graph.outputs), profiles)
    return Estimate(
        weights_bytes=weights,
        engine_bytes=round(_ENGINE_BASE + _ENGINE_PER_WEIGHT * weights),
        build_bytes=_BUILD_BASE + _BUILD_PER_WEIGHT * weights,
        cache_bytes=cache,
        io_bytes=io,
        available_bytes=available_memory(),
    )


def weight_bytes(model: ir.Model) -> int:
    """Of every initialiser that a node reads, as the graph has them; a tied one counts once."""
    total = 0
    for value in model.graph.initializers.values():
        if value.uses() and value.dtype is not None and value.shape is not None:
            total += math.ceil(math.prod(value.shape.numpy()) * value.dtype.itemsize)
    return total


def available_memory(meminfo: Path | None = None) -> int | None:
    """Memory that programs can take without swapping, in bytes; None where Linux does not tell."""
    try:
        lines = (meminfo or _MEMINFO).read_text().splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found) * 1024


def _largest(specs: Sequence[TensorSpec], profiles: Sequence[Profile]) -> int:
    """Bytes of buffers that hold every tensor of every profile."""
    return sum(
        numpy_dtype(spec.dtype).itemsize * max(math.prod(profile.shapes(spec)[2]) for profile in profiles)
        for spec in specs
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
