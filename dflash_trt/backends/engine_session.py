"""Sessions over compiled engines: all memory is torch's, made once, and its addresses are what an engine is told.

An engine reads and writes where it was told to, in shapes it was told. So each input and output has one static buffer
that holds the largest shape of any profile, and a pass copies its inputs there. A cache is bound twice, as past and as
present, to the same address: it is updated where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from dflash_trt.backends.base import Array, Cache, check_inputs, numpy_dtype
from dflash_trt.backends.engine_precision import PrecisionCensus
from dflash_trt.backends.profiles import CAPACITY, Profile
from dflash_trt.backends.torch import TorchCache
from dflash_trt.errors import BackendError
from dflash_trt.export.contract import GraphSpec, TensorSpec

FEATURES = "context_features"


class Execution(Protocol):
    """One execution context of an engine, on one optimisation profile.

    It keeps what it is told. Every method raises BackendError where the engine refuses.
    """

    profile: Profile

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """The shape of an input from the next execution on."""

    def set_address(self, name: str, address: int) -> None:
        """Where an input is read or an output written from the next execution on."""

    def execute(self, stream: int) -> None:
        """Enqueues one pass on a CUDA stream (its handle; 0 where the device is a CPU)."""

    def capturable(self, stream: int) -> bool:
        """Whether a pass of these shapes may be captured in a CUDA graph."""

    def another(self) -> Execution:
        """A new context on the same profile, told nothing yet."""


class EngineSession:
    """A graph as a compiled engine (see `backends.base.DeviceSession`). One thread at a time uses it.

    `context_features` that `run` returns, all that `forward` returns, and what `stack` returns are views of static
    buffers. They hold until this session's next pass (or `stack`); callers copy what they keep.

    Args:
        executions: one for each profile; of those that a pass fits, the first takes it.
        capacity: slots of every cache.
        whole_steps: of `backends.base.Session`; True becomes False where an execution cannot be captured.
        precision: reads from the engine in which dtypes it computes; None where nothing can.
    """

    fixed_shapes = True
    keeps_features = False

    def __init__(
        self,
        graph: GraphSpec,
        executions: Sequence[Execution],
        capacity: int,
        device: str,
        whole_steps: bool | None,
        precision: Callable[[], PrecisionCensus] | None = None,
    ) -> None:
        self.graph = graph
        self.precision = precision
        self.device = device
        self.capacity = capacity
        profiles = [execution.profile for execution in executions]
        self.longest_pass: int | None = max(p.dims["Q"].max for p in profiles if p.dims["B"].min == 1)
        self._cuda = torch.device(device).type == "cuda"
        self._own_stream = torch.cuda.Stream(device) if self._cuda else None
        self._specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        sizes = {name: _most_elements(spec, profiles) for name, spec in self._specs.items()}
        with torch.inference_mode():
            self._buffers = {
                name: torch.empty(size, dtype=getattr(torch, self._specs[name].dtype), device=device)
                for name, size in sizes.items()
            }
            self._staging = {spec.name: self._host(spec, sizes[spec.name]) for spec in graph.inputs}
        self._past = [spec.name for spec in graph.past()]
        self._present = [spec.name for spec in graph.present()]
        self._told = [self._tell(execution) for execution in executions]
        self._captured: dict[tuple[int, ...], _Told] = {}
        self.whole_steps = whole_steps and self._capturable()

    def _host(self, spec: TensorSpec, size: int) -> tuple[torch.Tensor, np.ndarray]:
        """Memory of the host that a device copies from without waiting, as torch and as numpy know it."""
        staged = torch.empty(size, dtype=getattr(torch, spec.dtype), pin_memory=self._cuda)
        return staged, staged.view(torch.uint8).numpy().view(numpy_dtype(spec.dtype))

    def _tell(self, execution: Execution) -> _Told:
        return _Told(execution, {name: buffer.data_ptr() for name, buffer in self._buffers.items()})

    def _capturable(self) -> bool:
        """Whether all profiles are, at the shapes they are best at."""
        specs = (*self.graph.inputs, *self.graph.past())
        with self._stream() as stream:
            for told in self._told:
                told.shapes({spec.name: told.profile.shapes(spec)[1] for spec in specs})
            return all(told.execution.capturable(stream) for told in self._told)

    # --- caches and features ---

    def new_cache(self, batch: int, capacity: int) -> TorchCache:
        if capacity != self.capacity:
            raise ValueError(f"{self.graph.role} engine has caches of {self.capacity} slots, not of {capacity}")
        shape, dtype = (batch, self.graph.num_kv_heads, capacity, self.graph.head_dim), getattr(torch, self.graph.dtype)
        return TorchCache([torch.zeros(shape, dtype=dtype, device=self.device) for _ in self._past])

    def capacity_for(self, needed: int, limit: int) -> int:
        return limit

    @torch.inference_mode()
    def stack(self, features: Sequence[Sequence[torch.Tensor]], rows: int) -> torch.Tensor:
        """See `backends.base.Session`. The result is where the engine reads it."""
        sizes = {"B": len(features), "N": rows}
        self._fitting(sizes)
        stacked = self._view(self._specs[FEATURES], sizes)
        for row, pieces in enumerate(features):
            end = 0
            for piece in pieces:
                start, end = end, min(end + len(piece), rows)
                stacked[row, start:end].copy_(piece[: end - start])
            stacked[row, end:].zero_()
        return stacked

    # --- passes ---

    @torch.inference_mode()
    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str], cache: TorchCache) -> dict[str, Array]:
        with self._stream() as stream:
            results = self._pass(inputs, cache, stream, keep=False)
            asked = {name: results[name] for name in outputs}
            arrays = {
                name: result if name == FEATURES else result.to("cpu", copy=True, non_blocking=True)
                for name, result in asked.items()
            }
            if self._cuda:
                torch.cuda.current_stream(self.device).synchronize()
        return {name: array if name == FEATURES else array.numpy() for name, array in arrays.items()}

    @torch.inference_mode()
    def forward(self, inputs: Mapping[str, torch.Tensor], cache: Cache) -> dict[str, torch.Tensor]:
        """All outputs of the graph but the caches, for tensors that are on the device already; nothing waits.

        Where whole steps are captured, each combination of sizes and cache has an execution of its own: a graph holds
        what its execution was told, which must then not change.
        """
        with self._stream() as stream:
            return self._pass(inputs, cache, stream, keep=bool(self.whole_steps))

    def _pass(
        self, inputs: Mapping[str, Array], cache: Cache, stream: int, *, keep: bool
    ) -> dict[str, torch.Tensor]:
        """Enqueues a pass and gives all outputs; `keep`: with an execution for such passes alone."""
        check_inputs(self.graph, inputs)
        sizes = self._sizes(inputs, cache)
        told = self._fitting(sizes)
        for spec in self.graph.inputs:
            self._load(self._view(spec, sizes), inputs[spec.name], spec.name)
        addresses = tuple(buffer.data_ptr() for buffer in cache.buffers)
        if keep:
            key = (*sizes.values(), *addresses)
            if key not in self._captured:
                self._captured[key] = self._tell(told.execution.another())
            told = self._captured[key]
        told.shapes({spec.name: _at(spec, sizes) for spec in (*self.graph.inputs, *self.graph.past())})
        told.caches(self._past, self._present, addresses)
        told.execution.execute(stream)
        return {spec.name: self._view(spec, sizes) for spec in self.graph.outputs}

    def _sizes(self, inputs: Mapping[str, Array], cache: Cache) -> dict[str, int]:
        """The size of every dynamic dimension; a shape that contradicts another is a fault of the caller."""
        sizes = {"B": cache.batch, CAPACITY: cache.capacity}
        for spec in self.graph.inputs:
            shape = tuple(inputs[spec.name].shape)
            for dim, size in zip(spec.shape, shape, strict=False):
                if isinstance(dim, str):
                    sizes.setdefault(dim, size)
            if shape != _at(spec, sizes):
                raise ValueError(f"{self.graph.role} graph: {spec.name} {shape} is not {spec.shape} at {sizes}")
        return sizes

    def _fitting(self, sizes: Mapping[str, int]) -> _Told:
        """The execution whose profile holds these sizes."""
        for told in self._told:
            if told.profile.holds(sizes):
                return told
        asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise BackendError(
            f"a pass with {asked} fits no optimisation profile: {'; '.join(map(_ranges, self._told))}",
            where=f"{self.graph.role} graph",
            mend="Ask for less at once, or build the bundle for more",
        )

    def _load(self, buffer: torch.Tensor, given: Array, name: str) -> None:
        """Copies an input into its buffer; of one that is there, torch copies nothing."""
        if not isinstance(given, torch.Tensor):
            staged, array = self._staging[name]
            np.copyto(array[: given.size].reshape(given.shape), given, casting="equiv")
            given = staged[: given.size].view(buffer.shape)
        if given.dtype != buffer.dtype:
            raise ValueError(f"{self.graph.role} graph: {name} is {given.dtype}, not {buffer.dtype}")
        buffer.copy_(given, non_blocking=True)

    def _view(self, spec: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor:
        """The first elements of a tensor's buffer, in its shape at these sizes."""
        shape = _at(spec, sizes)
        return self._buffers[spec.name][: math.prod(shape)].view(shape)

    @contextmanager
    def _stream(self) -> Iterator[int]:
        """The current stream's handle; in place of CUDA's default stream, where engines wait for the whole device, that
        of a stream of the session's own."""
        if self._own_stream is None:
            yield 0
            return
        current = torch.cuda.current_stream(self.device)
        if current != torch.cuda.default_stream(self.device):
            yield current.cuda_stream
            return
        self._own_stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._own_stream):
                yield self._own_stream.cuda_stream
        finally:
            current.wait_stream(self._own_stream)


class _Told:
    """An execution and what it was told last: it is told again only what has changed."""

    def __init__(self, execution: Execution, addresses: Mapping[str, int]) -> None:
        self.execution, self.profile = execution, execution.profile
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._caches: tuple[int, ...] | None = None
        for name, address in addresses.items():
            execution.set_address(name, address)

    def shapes(self, named: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in named.items():
            if self._shapes.get(name) != shape:
                self.execution.set_shape(name, shape)
                self._shapes[name] = shape

    def caches(self, past: Iterable[str], present: Iterable[str], addresses: tuple[int, ...]) -> None:
        """Binds each cache as past and as present to one address."""
        if self._caches == addresses:
            return
        self._caches = None  # neither these nor those, until all are set
        for read, written, address in zip(past, present, addresses, strict=True):
            self.execution.set_address(read, address)
            self.execution.set_address(written, address)
        self._caches = addresses


def _ranges(told: _Told) -> str:
    """What a profile takes, in words."""
    dims = told.profile.dims.items()
    return f"{told.profile.name} takes " + ", ".join(f"{name} {dim.min}..{dim.max}" for name, dim in dims)


def _at(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor at these sizes."""
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)


def _most_elements(spec: TensorSpec, profiles: Sequence[Profile]) -> int:
    """Elements of the largest shape that any profile allows."""
    return max(math.prod(profile.shapes(spec)[2]) for profile in profiles)
