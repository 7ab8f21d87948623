"""The I/O of every graph: names, dtypes, symbolic shapes. Exporter and runtime share these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_trt.checkpoint.spec import DrafterSpec, Dtype, Frozen, TargetSpec

Role = Literal["target", "drafter", "vp_drafter"]


@dataclass(frozen=True, kw_only=True)
class TensorSpec(Frozen):
    """One graph input or output; a string dimension is dynamic: B batch, Q new tokens, R logit rows, N features, C
    capacity."""

    name: str
    dtype: Literal["int64", "bool", "float32", "float16", "bfloat16"]
    shape: tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True)
class GraphSpec(Frozen):
    """A graph's I/O without its caches, and the caches: `num_layers` pairs of [B, num_kv_heads, C, head_dim]."""

    role: Role
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Dtype

    def past(self) -> tuple[TensorSpec, ...]:
        """The cache inputs, in the order of the graph."""
        return self._caches("past")

    def present(self) -> tuple[TensorSpec, ...]:
        """The cache outputs: the same buffers as `past`."""
        return self._caches("present")

    def _caches(self, stem: str) -> tuple[TensorSpec, ...]:
        shape = ("B", self.num_kv_heads, "C", self.head_dim)
        return tuple(
            TensorSpec(name=f"{stem}_{kind}_{i}", dtype=self.dtype, shape=shape)
            for i in range(self.num_layers)
            for kind in ("key", "value")
        )


def target_graph(spec: TargetSpec, num_taps: int, dtype: Dtype) -> GraphSpec:
    """I/O of the target graph: one graph for prefill chunks and for verification."""
    return GraphSpec(
        role="target",
        inputs=(
            TensorSpec(name="input_ids", dtype="int64", shape=("B", "Q")),
            TensorSpec(name="position_ids", dtype="int64", shape=("B", "Q")),
            TensorSpec(name="visibility", dtype="bool", shape=("B", "Q", "Q")),
            TensorSpec(name="context_len", dtype="int64", shape=("B",)),
            TensorSpec(name="logit_rows", dtype="int64", shape=("B", "R")),
        ),
        outputs=(
            TensorSpec(name="logits", dtype="float32", shape=("B", "R", spec.vocab_size)),
            TensorSpec(name="token_ids", dtype="int64", shape=("B", "R")),
            TensorSpec(name="context_features", dtype=dtype, shape=("B", "Q", num_taps * spec.hidden_size)),
        ),
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
    )


def drafter_graph(spec: DrafterSpec, dtype: Dtype, role: Role = "drafter") -> GraphSpec:
    """I/O of a drafter graph: inject the pending features, then draft a block (a VP drafter: K blocks at once)."""
    return GraphSpec(
        role=role,
        inputs=(
            TensorSpec(
                name="context_features", dtype=dtype, shape=("B", "N", len(spec.taps) * spec.target_hidden_size)
            ),
            TensorSpec(name="feature_len", dtype="int64", shape=("B",)),
            TensorSpec(name="context_len", dtype="int64", shape=("B",)),
            TensorSpec(name="block_ids", dtype="int64", shape=("B", "Q")),
            TensorSpec(name="block_position_ids", dtype="int64", shape=("B", "Q")),
            TensorSpec(name="visibility", dtype="bool", shape=("B", "Q", "Q")),
        ),
        outputs=(
            TensorSpec(name="draft_ids", dtype="int64", shape=("B", "Q")),
            TensorSpec(name="confidence", dtype="float32", shape=("B", "Q")),
            TensorSpec(name="logits", dtype="float32", shape=("B", "Q", spec.vocab_size)),
        ),
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
    )
