"""ONNX Runtime on the CPU: the embedded backend.

Each cache buffer is bound as past input and present output at once; TensorScatter then writes in place (the pass
`CheckInPlace` made sure that it can). Only the outputs that are asked for are bound, so unused logits are never copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from dflash_trt.backends.base import Array, SlicedCache, bucket, check_inputs
from dflash_trt.errors import BackendError
from dflash_trt.export.contract import GraphSpec


class OrtCache(SlicedCache):
    """Cache buffers as numpy arrays (see `backends.base.Cache`)."""

    def __init__(self, buffers: list[np.ndarray]) -> None:
        super().__init__(buffers)
        self.bindings: dict[tuple[str, ...], onnxruntime.IOBinding] = {}
        """By the outputs asked for, with the buffers bound: to bind them anew takes 2 % of a small model's pass."""

    def resized(self, capacity: int) -> OrtCache:
        kept = min(capacity, self.capacity)
        buffers = []
        for old in self.buffers:
            new = np.zeros((*old.shape[:2], capacity, old.shape[3]), old.dtype)
            new[:, :, :kept] = old[:, :, :kept]
            buffers.append(new)
        return OrtCache(buffers)

    def move(self, index: int, sources: Sequence[int], destination: int) -> None:
        for buffer in self.buffers:
            buffer[index, :, destination : destination + len(sources)] = buffer[index][:, list(sources)]


class OrtSession:
    """A graph opened in ONNX Runtime (see `backends.base.Session`)."""

    fixed_shapes = False
    keeps_features = True
    longest_pass: int | None = None
    whole_steps: bool | None = None

    def __init__(self, model: Path, graph: GraphSpec, threads: int = 0) -> None:
        """Opens `model`; `threads` 0 lets ONNX Runtime take one per physical core."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # Target and drafter have a thread pool each and take turns: threads of one that spin on after its run take the
        # cores from the other (two threads on two cores, tiny pair: 2.1 ms per token instead of 0.95).
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.graph = graph
        try:
            self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises a dozen classes without a common base
            raise BackendError(
                f"ONNX Runtime {onnxruntime.__version__} cannot open the graph: {error}", where=str(model)
            ) from error
        self._past = [spec.name for spec in graph.past()]
        self._present = [spec.name for spec in graph.present()]

    def new_cache(self, batch: int, capacity: int) -> OrtCache:
        shape = (batch, self.graph.num_kv_heads, capacity, self.graph.head_dim)
        return OrtCache([np.zeros(shape, np.dtype(self.graph.dtype)) for _ in self._past])

    def capacity_for(self, needed: int, limit: int) -> int:
        return bucket(needed, limit)

    def stack(self, features: Sequence[Sequence[np.ndarray]], rows: int) -> np.ndarray:
        like = features[0][0]
        stacked = np.zeros((len(features), rows, like.shape[-1]), like.dtype)
        for row, pieces in enumerate(features):
            joined = np.concatenate(pieces)[:rows]
            stacked[row, : len(joined)] = joined
        return stacked

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str], cache: OrtCache) -> dict[str, Array]:
        check_inputs(self.graph, inputs)
        binding = self._binding(tuple(outputs), cache)
        kept = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in kept.items():
            binding.bind_cpu_input(name, array)
        for name in outputs:
            binding.bind_output(name, "cpu")  # anew each time: what an earlier pass returned stays as it is
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # as above
            raise BackendError(f"ONNX Runtime failed: {error}", where=f"{self.graph.role} graph") from error
        return {name: value.numpy() for name, value in zip(outputs, binding.get_outputs(), strict=False)}

    def _binding(self, outputs: tuple[str, ...], cache: OrtCache) -> onnxruntime.IOBinding:
        if outputs not in cache.bindings:
            binding = self._session.io_binding()
            for name in outputs:  # before the caches: results come in the order of the first binding
                binding.bind_output(name, "cpu")
            for past, present, buffer in zip(self._past, self._present, cache.buffers, strict=True):
                place = ("cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
                binding.bind_input(past, *place)
                binding.bind_output(present, *place)
            cache.bindings[outputs] = binding
        return cache.bindings[outputs]
