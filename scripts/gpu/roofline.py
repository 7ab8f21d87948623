"""How fast a kernel could be: the larger of its bytes over bandwidth and its operations over the matmul peak."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """Measured: bytes/s of a large copy (read + written), and FLOP/s of a large matmul by dtype ("fp16", "bf16")."""

    bandwidth: float
    flops: dict[str, float]


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one StaircaseAttention call; `itemsize` bytes an element."""

    batch: int
    queries: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    itemsize: int = 2

    @property
    def bytes(self) -> int:
        """K and V of context and new tokens once per KV head, queries, output."""
        keys_values = 2 * self.kv_heads * (self.context + self.queries) * self.dim
        queries_output = 2 * self.heads * self.queries * self.dim
        return self.batch * (keys_values + queries_output) * self.itemsize

    @property
    def flops(self) -> int:
        """Two matmuls, each a multiplication and an addition per element."""
        return 4 * self.batch * self.heads * self.queries * (self.context + self.queries) * self.dim


def attention_floor(shape: AttentionShape, ceilings: Ceilings, dtype: str) -> float:
    """Seconds below which no kernel can be."""
    return max(shape.bytes / ceilings.bandwidth, shape.flops / ceilings.flops[dtype])


def injection_bytes(rows: int, batch: int, kv_heads: int = 8, dim: int = 128, itemsize: int = 2) -> int:
    """Keys and values read and written; a row's position, and its cos and sin (float32) once."""
    return batch * rows * (4 * kv_heads * dim * itemsize + 8 + 2 * (dim // 2) * 4)
