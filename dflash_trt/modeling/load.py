"""Modules with weights, and modules without: the reference backend's and the tracer's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from dflash_trt.checkpoint.decoder import SPEC_DTYPES
from dflash_trt.checkpoint.drafter_kinds import FUSION_WEIGHTS
from dflash_trt.checkpoint.rope import rope_tables
from dflash_trt.checkpoint.spec import DrafterSpec, Dtype, RopeSpec, TargetSpec
from dflash_trt.checkpoint.target import EMBEDDING, LM_HEAD
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.modeling.dflare import FUSION_SHARES, DFlareDrafter, fusion_shares
from dflash_trt.modeling.dflash import DFlashDrafter
from dflash_trt.modeling.drafter import BlockDrafter
from dflash_trt.modeling.target import TargetModel


def target_tables(spec: TargetSpec, positions: int) -> dict[str, np.ndarray]:
    """What a target's graph holds besides its weights: `rope_cos`, `rope_sin` float32 [positions, D/2]."""
    return _rope(spec.rope, positions)


def drafter_tables(spec: DrafterSpec, tensors: TensorFolder, positions: int) -> dict[str, np.ndarray]:
    """What a drafter's graph holds besides its weights: rotary tables, and DFlare's `fusion_shares` float32."""
    tables = _rope(spec.rope, positions)
    if spec.system == "dflare":
        tables[FUSION_SHARES] = fusion_shares(tensors.read_float32(FUSION_WEIGHTS))
    return tables


def meta_target(spec: TargetSpec, taps: tuple[int, ...], positions: int, dtype: Dtype) -> TargetModel:
    """A target without storage, for tracing; `positions` rows of rotary tables."""
    with torch.device("meta"):
        cos, sin = (torch.empty(positions, spec.rope.rotary_dim // 2) for _ in range(2))
        return _cast(TargetModel(spec, taps, cos, sin), dtype)


def meta_drafter(
    spec: DrafterSpec, target: TargetSpec, positions: int, dtype: Dtype, *, quantized: bool = False
) -> BlockDrafter:
    """A drafter without storage, for tracing; where it is to be `quantized`, each product has one weight."""
    with torch.device("meta"):
        cos, sin = (torch.empty(positions, spec.rope.rotary_dim // 2) for _ in range(2))
        drafter = {"dflash": DFlashDrafter, "dflare": DFlareDrafter}[spec.system](spec, target, cos, sin)
    if isinstance(drafter, DFlareDrafter):
        drafter.one_product = not quantized
    return _cast(drafter, dtype)


def load_target(
    spec: TargetSpec, taps: tuple[int, ...], tensors: TensorFolder, positions: int, dtype: Dtype
) -> TargetModel:
    """A target with the checkpoint's weights in `dtype`."""
    module = meta_target(spec, taps, positions, dtype)
    own = [name for name, _ in module.named_parameters() if name not in (EMBEDDING, LM_HEAD)]
    state = {name: _tensor(tensors, name, dtype) for name in own} | _shared(tensors, dtype)
    return _assign(module, state, target_tables(spec, positions))


def load_drafter(
    spec: DrafterSpec,
    tensors: TensorFolder,
    target: TargetSpec,
    target_tensors: TensorFolder,
    positions: int,
    dtype: Dtype,
) -> BlockDrafter:
    """A drafter with the checkpoint's weights and the target's embedding and head in `dtype`."""
    module = meta_drafter(spec, target, positions, dtype)
    own = [name for name, _ in module.named_parameters() if not name.startswith("target.")]
    state = {name: _tensor(tensors, name, dtype) for name in own}
    state |= {f"target.{name}": tensor for name, tensor in _shared(target_tensors, dtype).items()}
    return _assign(module, state, drafter_tables(spec, tensors, positions))


def replace_weights(module: torch.nn.Module, weights: Iterable[tuple[str, np.ndarray]]) -> None:
    """Gives linear layers other weights: float32 [N, K] by the name of the parameter.

    A head that was the embedding has its own then.
    """
    for name, weight in weights:
        owner, _, parameter = name.rpartition(".")
        layer = module.get_submodule(owner)
        setattr(layer, parameter, torch.nn.Parameter(torch.from_numpy(weight), requires_grad=False))


def _rope(rope: RopeSpec, positions: int) -> dict[str, np.ndarray]:
    cos, sin = rope_tables(rope, positions)
    return {"rope_cos": cos, "rope_sin": sin}


def _cast(module: torch.nn.Module, dtype: Dtype):  # type: ignore[no-untyped-def]
    """Parameters to `dtype`; the tables stay float32."""
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
    stored = getattr(torch, SPEC_DTYPES[tensors[name].dtype])
    # bits, because numpy has no bfloat16
    return torch.from_numpy(tensors.bits(name).copy()).view(stored).to(getattr(torch, dtype))


def _assign(module, state: Mapping[str, torch.Tensor], tables: Mapping[str, np.ndarray]):  # type: ignore[no-untyped-def]
    buffers = {name: torch.from_numpy(table) for name, table in tables.items()}
    module.load_state_dict({**state, **buffers}, strict=True, assign=True)
    return module.eval()
