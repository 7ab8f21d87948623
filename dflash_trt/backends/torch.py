"""torch: the reference backend. It runs the very modules that are traced, eagerly: on a CPU with the operators'
references, on a CUDA device with their kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dflash_trt.backends.base import Array, SlicedCache, bucket, check_inputs
from dflash_trt.export.contract import GraphSpec


class TorchCache(SlicedCache):
    """Cache buffers as torch tensors (see `backends.base.Cache`)."""

    def resized(self, capacity: int) -> TorchCache:
        kept = min(capacity, self.capacity)
        buffers = []
        for old in self.buffers:
            new = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
            new[:, :, :kept] = old[:, :, :kept]
            buffers.append(new)
        return TorchCache(buffers)

    def move(self, index: int, sources: Sequence[int], destination: int) -> None:
        slots = torch.tensor(sources, dtype=torch.int64, device=self.buffers[0].device)  # once: a device waits for it
        for buffer in self.buffers:
            buffer[index, :, destination : destination + len(sources)] = buffer[index].index_select(1, slots)


class TorchSession:
    """A module run eagerly (see `backends.base.Session`); on CUDA whole steps are best, as captured graphs."""

    fixed_shapes = False
    keeps_features = True

    def __init__(self, module: torch.nn.Module, graph: GraphSpec, device: str = "cpu") -> None:
        self.graph = graph
        self.device = device
        self.module = module.to(device).eval()
        self.whole_steps: bool | None = torch.device(device).type == "cuda"
        self.longest_pass: int | None = None
        if self.whole_steps:
            from dflash_trt.ops.cuda import register
            from dflash_trt.plugins.kernels.tiling import MAX_QUERIES

            register()
            self.longest_pass = MAX_QUERIES

    def new_cache(self, batch: int, capacity: int) -> TorchCache:
        shape = (batch, self.graph.num_kv_heads, capacity, self.graph.head_dim)
        dtype = getattr(torch, self.graph.dtype)
        return TorchCache([torch.zeros(shape, dtype=dtype, device=self.device) for _ in self.graph.past()])

    def capacity_for(self, needed: int, limit: int) -> int:
        return bucket(needed, limit)

    def stack(self, features: Sequence[Sequence[torch.Tensor]], rows: int) -> torch.Tensor:
        like = features[0][0]
        stacked = like.new_zeros((len(features), rows, like.shape[-1]))
        for row, pieces in enumerate(features):
            joined = torch.cat(list(pieces))[:rows]
            stacked[row, : len(joined)] = joined
        return stacked

    @torch.inference_mode()
    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str], cache: TorchCache) -> dict[str, Array]:
        named = self.forward({name: _to_tensor(array).to(self.device) for name, array in inputs.items()}, cache)
        return {name: named[name] if name == "context_features" else _to_numpy(named[name]) for name in outputs}

    def forward(self, inputs: Mapping[str, torch.Tensor], cache: TorchCache) -> dict[str, torch.Tensor]:
        """All outputs of the graph for tensors that are on the device already: no copies, and nothing waits."""
        check_inputs(self.graph, inputs)
        results = self.module(*(inputs[spec.name] for spec in self.graph.inputs), *cache.buffers)
        return {spec.name: result for spec, result in zip(self.graph.outputs, results, strict=False)}


def _to_tensor(array: Array) -> torch.Tensor:
    """A tensor as it is, a numpy array of any layout and of bfloat16 too, which is a foreign type to torch."""
    if isinstance(array, torch.Tensor):
        return array
    array = np.require(array, requirements=["C", "W"])
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
