"""What the runtime asks of a backend: sessions that run a graph over caches updated in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from dflash_trt.checkpoint.spec import Dtype
from dflash_trt.export.contract import GraphSpec

# backend -> (the module it needs, precisions it runs; the first is the one it takes unasked)
BACKENDS: dict[str, tuple[str, tuple[Dtype, ...]]] = {
    "onnxruntime": ("onnxruntime", ("float32",)),
    "torch": ("torch", ("float32", "float16", "bfloat16")),
    "tensorrt": ("tensorrt", ("bfloat16", "float16", "float32")),
    "tensorrt-rtx": ("tensorrt_rtx", ("bfloat16", "float16", "float32")),
}

# A device array of the backend's own (numpy, torch): the runtime only slices it and hands it back.
Array = Any


class Cache(Protocol):
    """Keys and values of all layers of one graph: per layer two buffers [batch, num_kv_heads, capacity, head_dim].

    Which rows are valid is the runtime's business (lengths are graph inputs); the buffers are never cleared.
    """

    batch: int
    capacity: int

    @property
    def buffers(self) -> Sequence[Array]:
        """Key and value of layer 0, of layer 1, ..."""

    def rows(self, start: int, stop: int) -> Cache:
        """A cache that shares the memory of rows `start` to `stop` - 1."""

    def copy_row(self, source: int, destination: int, slots: int) -> None:
        """Copies the first `slots` slots of a row to another row, in every layer."""

    def clear_row(self, index: int) -> None:
        """Sets a row to zero: what is not finite would come through any mask."""

    def resized(self, capacity: int) -> Cache:
        """A cache of another capacity holding the same slots, up to the smaller capacity."""

    def move(self, index: int, sources: Sequence[int], destination: int) -> None:
        """Copies slots `sources` of row `index` to `destination`, `destination` + 1, ... in every layer."""


class SlicedCache:
    """What caches over numpy arrays and over torch tensors share (see `Cache`): both slice alike."""

    def __init__(self, buffers: list[Any]) -> None:
        self.buffers = buffers
        self.batch, _, self.capacity, _ = buffers[0].shape
        self._parts: dict[tuple[int, int], Self] = {}

    def rows(self, start: int, stop: int) -> Self:
        if (start, stop) == (0, self.batch):
            return self
        if (start, stop) not in self._parts:
            self._parts[start, stop] = type(self)([buffer[start:stop] for buffer in self.buffers])
        return self._parts[start, stop]

    def copy_row(self, source: int, destination: int, slots: int) -> None:
        for buffer in self.buffers:
            buffer[destination, :, :slots] = buffer[source, :, :slots]

    def clear_row(self, index: int) -> None:
        for buffer in self.buffers:
            buffer[index] = 0


class Session(Protocol):
    """One opened graph."""

    graph: GraphSpec
    fixed_shapes: bool
    """Whether decode steps must always bring the bundle's full block and tree sizes, padded."""
    keeps_features: bool
    """Whether `context_features` of a pass stay what they are in later ones, so that nobody need copy them."""
    longest_pass: int | None
    """New tokens a pass may have at most, a prompt's chunk too; None for any number."""
    whole_steps: bool | None
    """Whether greedy steps are best run whole on the device (`runtime/device_step.py`); None: they cannot be."""

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """A zeroed cache."""

    def capacity_for(self, needed: int, limit: int) -> int:
        """The capacity to allocate when `needed` slots are: engines of fixed shape take `limit` at once."""

    def stack(self, features: Sequence[Sequence[Array]], rows: int) -> Array:
        """The pieces [n, F] of each row back to back, cut or padded with zeros to [len(features), rows, F].

        Holds until the session's next pass.
        """

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str], cache: Any) -> dict[str, Array]:
        """Runs the graph; `cache` is updated in place.

        Args:
            cache: one this session made.
            inputs: numpy arrays in the dtypes of the contract; context_features may be what a session returned.
            outputs: the names wanted. `context_features` comes back as the backend's own array, others as numpy. That
                array may be a buffer of the session: it holds until the session's next pass.
        """


class DeviceSession(Session, Protocol):
    """A session whose passes can be steps of something larger on its device, which nothing waits for.

    Its caches hold torch tensors.
    """

    device: str

    def forward(self, inputs: Mapping[str, Array], cache: Any) -> dict[str, Array]:
        """All outputs of the graph but the caches, for torch tensors on the device: they hold until the next pass."""


def bucket(needed: int, limit: int) -> int:
    """The smallest capacity of a few that holds `needed`, at most `limit`.

    Where attention costs as much as its capacity, that should be near the length in use; but to grow is to copy. So
    capacities are multiples of 128, and of the largest power of two within a quarter of what is needed.
    """
    step = max(128, 1 << max(0, (needed // 4).bit_length() - 1))
    return min(-(-needed // step) * step, limit)


def check_inputs(graph: GraphSpec, inputs: Mapping[str, Array]) -> None:
    """Inputs must be exactly the contract's names; a wrong one is a fault of the caller, not of the user."""
    expected = {spec.name for spec in graph.inputs}
    if set(inputs) != expected:
        raise ValueError(f"{graph.role} graph takes {sorted(expected)}, got {sorted(inputs)}")


def numpy_dtype(name: str) -> np.dtype:
    """numpy's dtype of a contract dtype name, bfloat16 included."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
