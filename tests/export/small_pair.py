"""A small target and drafter taken through the stages: read, trace on meta, attach, place and bind, save, simplify."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from makers import make_drafter, make_target
from safetensors.torch import load_file, save_file

from dflash_trt.backends.onnxruntime import OrtSession
from dflash_trt.backends.torch import TorchSession
from dflash_trt.checkpoint.drafter import DrafterCheckpoint, read_drafter
from dflash_trt.checkpoint.spec import Dtype
from dflash_trt.checkpoint.target import TargetCheckpoint, read_target
from dflash_trt.export.contract import GraphSpec, drafter_graph, target_graph
from dflash_trt.export.trace import trace
from dflash_trt.export.weights import PlacedWeights, place_drafter, place_target
from dflash_trt.modeling.load import (
    drafter_tables,
    load_drafter,
    load_target,
    meta_drafter,
    meta_target,
    target_tables,
)
from dflash_trt.passes.attach_functions import AttachFunctions
from dflash_trt.passes.inline import InlineFunctions
from dflash_trt.passes.simplify import Simplify

TAPS, POSITIONS, LAYERS = (0, 1), 64, 2
WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@dataclass(frozen=True)
class Kind:
    """Which pair: small enough that tracing takes most of its time."""

    system: Literal["dflash", "dflare"] = "dflash"
    family: str = "qwen3"
    tie: bool = True
    windows: bool = True
    stored: str = "float32"
    dtype: Dtype = "float32"
    max_shard_size: str = "1GB"


@dataclass(frozen=True)
class Graph:
    """One graph: `traced` has no bodies and no weights; the folder holds portable.onnx and model.onnx."""

    spec: GraphSpec
    traced: ir.Model
    placed: PlacedWeights
    folder: Path
    progress: tuple[int, ...]
    module: torch.nn.Module

    def portable(self) -> ir.Model:
        """A copy of the traced graph with bodies and weights."""
        model = copy_model(self.traced)
        AttachFunctions()(model)
        self.placed.bind(model)
        return model

    def inlined(self) -> ir.Model:
        model = self.portable()
        InlineFunctions()(model)
        return model

    def ort(self, name: str = "model.onnx") -> OrtSession:
        return OrtSession(self.folder / name, self.spec, threads=1)

    def reference(self) -> TorchSession:
        return TorchSession(self.module, self.spec)


@dataclass(frozen=True)
class SmallPair:
    root: Path
    target_checkpoint: TargetCheckpoint
    drafter_checkpoint: DrafterCheckpoint
    target: Graph
    drafter: Graph

    def graph(self, role: str) -> Graph:
        return {"target": self.target, "drafter": self.drafter}[role]


def copy_model(model: ir.Model) -> ir.Model:
    """A deep copy by way of the proto; initialisers lose nothing, since they hold no data yet."""
    names = {name: (value.dtype, value.shape) for name, value in model.graph.initializers.items()}
    clone = model.clone()
    assert {name: (value.dtype, value.shape) for name, value in clone.graph.initializers.items()} == names
    return clone


def convert_file(file: Path, dtype: str, keep: tuple[str, ...] = ()) -> None:
    """Stores the tensors of a safetensors file in another dtype, but those named in `keep`."""
    tensors = load_file(file)
    changed = {n: t if n in keep else t.to(getattr(torch, dtype)).contiguous() for n, t in tensors.items()}
    save_file(changed, file, metadata={"format": "pt"})


def small_pair(kind: Kind | None = None) -> SmallPair:
    """Built once per process and kind; treat it as read-only."""
    return _build(kind or Kind())


@cache
def _build(kind: Kind) -> SmallPair:
    _KEPT.append(tempfile.TemporaryDirectory())
    root = Path(_KEPT[-1].name)
    make_target(
        root / "ck_target",
        family=kind.family,
        tie=kind.tie,
        num_hidden_layers=LAYERS,
        max_shard_size=kind.max_shard_size,
        **(WINDOWED if kind.windows and kind.family == "qwen3" else {}),
    )
    changes: dict[str, Any] = WINDOWED if kind.windows else {}
    make_drafter(root / "ck_drafter", root / "ck_target", list(TAPS), 4, layers=LAYERS, kind=kind.system, **changes)
    if kind.stored != "float32":
        for file in (*root.glob("ck_*/*.safetensors"),):
            convert_file(file, kind.stored)
    target, drafter = read_target(root / "ck_target"), read_drafter(root / "ck_drafter")
    spec = target_graph(target.spec, len(TAPS), kind.dtype)
    built = []
    for role, graph, module, tensors in (
        ("target", spec, meta_target(target.spec, TAPS, POSITIONS, kind.dtype), target.tensors),
        (
            "drafter",
            drafter_graph(drafter.spec, kind.dtype),
            meta_drafter(drafter.spec, target.spec, POSITIONS, kind.dtype),
            drafter.tensors,
        ),
    ):
        folder = root / role
        folder.mkdir()
        steps: list[int] = []
        if role == "target":
            tables = target_tables(target.spec, POSITIONS)
            placed = place_target(tensors, tables, kind.dtype, folder, steps.append)
            loaded: torch.nn.Module = load_target(target.spec, TAPS, tensors, POSITIONS, kind.dtype)
        else:
            tables = drafter_tables(drafter.spec, tensors, POSITIONS)
            placed = place_drafter(tensors, tables, built[0].placed, kind.dtype, folder, steps.append)
            loaded = load_drafter(drafter.spec, tensors, target.spec, target.tensors, POSITIONS, kind.dtype)
        result = Graph(graph, trace(module, graph), placed, folder, tuple(steps), loaded)
        ir.save(result.portable(), folder / "portable.onnx")
        model = result.inlined()
        Simplify()(model)
        ir.save(model, folder / "model.onnx")
        built.append(result)
    return SmallPair(root, target, drafter, *built)


def random_inputs(graph: GraphSpec, seed: int, context: int, vocab_size: int, batch: int, rows: int) -> dict[str, Any]:
    """Inputs of one pass after `context` tokens; `rows` new tokens, or features for a block of 3."""
    rng = np.random.default_rng(seed)
    start = np.full(batch, context)
    if graph.role == "target":
        chain = np.broadcast_to(np.arange(rows), (batch, rows))
        return {
            "input_ids": rng.integers(0, vocab_size, (batch, rows)),
            "position_ids": context + chain,
            "visibility": np.broadcast_to(np.tril(np.ones((rows, rows), bool)), (batch, rows, rows)),
            "context_len": start,
            "logit_rows": chain[:, -2:],
        }
    size = next(spec.shape[2] for spec in graph.inputs if spec.name == "context_features")
    valid = rng.integers(1, rows + 1, batch)
    features = rng.standard_normal((batch, rows, size)).astype(np.float32)
    return {
        "context_features": features.astype(ml_dtypes.bfloat16 if graph.dtype == "bfloat16" else graph.dtype),
        "feature_len": valid,
        "context_len": start,
        "block_ids": rng.integers(0, vocab_size, (batch, 3)),
        "block_position_ids": (start + valid)[:, None] + np.arange(3),
        "visibility": np.ones((batch, 3, 3), bool),
    }


def run_passes(session: Any, vocab_size: int, batch: int = 2, sizes: tuple[int, ...] = (5, 1, 4)) -> list[dict]:
    """Several passes over one cache; all outputs as numpy arrays, the caches after the last pass too."""
    cache, context, results = session.new_cache(batch, 24), 0, []
    names = [spec.name for spec in session.graph.outputs]
    for seed, rows in enumerate(sizes):
        inputs = random_inputs(session.graph, seed, context, vocab_size, batch, rows)
        results.append({name: _array(value) for name, value in session.run(inputs, names, cache).items()})
        context += rows
    results.append({f"cache {i}": _array(buffer).copy() for i, buffer in enumerate(cache.buffers)})
    return results


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return value


def assert_same(found: list[dict], expected: list[dict], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance, err_msg=name)


def model_bytes(model: ir.Model) -> bytes:
    """Everything but the data of the weights."""
    return ir.to_proto(model).SerializeToString(deterministic=True)
