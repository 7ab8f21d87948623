"""Modules with weights, and modules without: the reference backend's and the tracer's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from dflash_trt.checkpoint.rope import rope_tables
from dflash_trt.checkpoint.spec import DrafterSpec, Dtype, TargetSpec
from dflash_trt.checkpoint.target import EMBEDDING, LM_HEAD
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.modeling.dflash import DFlashDrafter
from dflash_trt.modeling.target import TargetModel


def meta_target(spec: TargetSpec, taps: tuple[int, ...], positions: int, dtype: Dtype) -> TargetModel:
    """A target without storage, for tracing; `positions` rows of rotary tables."""
    with torch.device("meta"):
        cos, sin = (torch.empty(positions, spec.rope.rotary_dim // 2) for _ in range(2))
        return _cast(TargetModel(spec, taps, cos, sin), dtype)


def meta_drafter(spec: DrafterSpec, target: TargetSpec, positions: int, dtype: Dtype) -> DFlashDrafter:
    """A drafter without storage, for tracing."""
    with torch.device("meta"):
        cos, sin = (torch.empty(positions, spec.rope.rotary_dim // 2) for _ in range(2))
        return _cast(DFlashDrafter(spec, target, cos, sin), dtype)


def load_target(
    spec: TargetSpec, taps: tuple[int, ...], tensors: TensorFolder, positions: int, dtype: Dtype
) -> TargetModel:
    """A target with the checkpoint's weights in `dtype`."""
    module = meta_target(spec, taps, positions, dtype)
    own = [name for name in module.state_dict() if not name.startswith("rope_") and name not in (EMBEDDING, LM_HEAD)]
    state = {name: _tensor(tensors, name, dtype) for name in own} | _shared(tensors, dtype)
    return _assign(module, state, rope_tables(spec.rope, positions))


def load_drafter(
    spec: DrafterSpec,
    tensors: TensorFolder,
    target: TargetSpec,
    target_tensors: TensorFolder,
    positions: int,
    dtype: Dtype,
) -> DFlashDrafter:
    """A drafter with the checkpoint's weights and the target's embedding and head in `dtype`."""
    module = meta_drafter(spec, target, positions, dtype)
    own = [name for name in module.state_dict() if not name.startswith(("rope_", "target."))]
    state = {name: _tensor(tensors, name, dtype) for name in own}
    state |= {f"target.{name}": tensor for name, tensor in _shared(target_tensors, dtype).items()}
    return _assign(module, state, rope_tables(spec.rope, positions))


def _cast(module: torch.nn.Module, dtype: Dtype):  # type: ignore[no-untyped-def]
    """Parameters to `dtype`; the rotary tables stay float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
        parameter.requires_grad_(False)
    return module


def _shared(tensors: TensorFolder, dtype: Dtype) -> dict[str, torch.Tensor]:
    """The target's embedding and head, which are one tensor when the checkpoint has no head of its own."""
    embedding = _tensor(tensors, EMBEDDING, dtype)
    head = _tensor(tensors, LM_HEAD, dtype) if LM_HEAD in tensors else embedding
    return {EMBEDDING: embedding, LM_HEAD: head}


def _tensor(tensors: TensorFolder, name: str, dtype: Dtype) -> torch.Tensor:
    array = tensors.read(name)
    if array.dtype.name == "bfloat16":  # numpy's is a foreign type to torch: hand the bits over
        tensor = torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array.copy())
    return tensor.to(getattr(torch, dtype))


def _assign(module, state: Mapping[str, torch.Tensor], tables: tuple[np.ndarray, np.ndarray]):  # type: ignore[no-untyped-def]
    cos, sin = (torch.from_numpy(table) for table in tables)
    module.load_state_dict({**state, "rope_cos": cos, "rope_sin": sin}, strict=True, assign=True)
    return module.eval()
