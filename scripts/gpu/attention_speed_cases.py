"""One StaircaseAttention call of the speed section, and torch's own ways to the same result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from dflash_trt.plugins.kernels.staircase_attention import plan, staircase_attention
from dflash_trt.plugins.kernels.tiling import Tile
from gpu.roofline import AttentionShape

Call = Callable[[], torch.Tensor]
_CAPACITY_STEP = 128


@dataclass(frozen=True)
class Inputs:
    """Full causal visibility among the new tokens, no padding in the cache but up to a multiple of 128 slots."""

    shape: AttentionShape
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    context_len: torch.Tensor
    visibility: torch.Tensor
    position_ids: torch.Tensor

    @classmethod
    def random(cls, shape: AttentionShape, dtype: torch.dtype, device: str = "cuda") -> Inputs:
        used = shape.context + shape.queries
        capacity = -(-used // _CAPACITY_STEP) * _CAPACITY_STEP
        visibility = torch.ones(shape.queries, shape.queries, dtype=torch.bool, device=device).tril()
        index = torch.arange(shape.queries, device=device)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, dtype=dtype, device=device)

        return cls(
            shape,
            normal(shape.batch, shape.heads, shape.queries, shape.dim),
            normal(shape.batch, shape.kv_heads, capacity, shape.dim),
            normal(shape.batch, shape.kv_heads, capacity, shape.dim),
            torch.full((shape.batch,), shape.context, device=device),
            visibility.repeat(shape.batch, 1, 1),
            (shape.context + index).repeat(shape.batch, 1),
        )

    def kernel(self, tile: Tile | None = None, splits: int | None = None) -> Call:
        arguments = (self.query, self.key_cache, self.value_cache, self.context_len, self.visibility, None)
        rest = (self.position_ids, self.shape.dim**-0.5, 0, 1, 0.0)
        return lambda: staircase_attention(*arguments, *rest, tile=tile, splits=splits)

    def plan(self) -> tuple[Tile, int]:
        """The tile and the splits the rules choose here."""
        shape = self.shape
        rows = shape.heads // shape.kv_heads * shape.queries
        capacity, dim = self.key_cache.shape[2:]
        pairs = shape.batch * shape.kv_heads
        return plan(self.query.device, pairs, rows, capacity, dim, self.query.element_size(), masked=False)

    def _columns(self) -> int:
        """Slots that torch's ways look at: up to a multiple of 16, which they are fastest with."""
        return -(-(self.shape.context + self.shape.queries) // 16) * 16

    def mask(self) -> torch.Tensor:
        """bool [B, 1, Q, columns]: the context, and among the new tokens what they see."""
        shape = self.shape
        mask = self.visibility.new_zeros(shape.batch, 1, shape.queries, self._columns())
        mask[..., : shape.context] = True
        mask[:, 0, :, shape.context : shape.context + shape.queries] = self.visibility
        return mask

    def _used(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_cache[:, :, : self._columns()], self.value_cache[:, :, : self._columns()]

    def sdpa_grouped(self, mask: torch.Tensor) -> Call:
        """Torch repeats the KV heads itself."""
        keys, values = self._used()
        return lambda: scaled_dot_product_attention(self.query, keys, values, attn_mask=mask, enable_gqa=True)

    def sdpa_expanded(self, mask: torch.Tensor) -> Call:
        """The KV heads repeated beforehand, which costs nothing here, but four times the memory."""
        group = self.shape.heads // self.shape.kv_heads
        keys, values = (cache.repeat_interleave(group, dim=1) for cache in self._used())
        return lambda: scaled_dot_product_attention(self.query, keys, values, attn_mask=mask)

    def sdpa_folded(self, mask: torch.Tensor) -> Call:
        """The queries of a group side by side as more queries of one head, with the mask repeated."""
        shape = self.shape
        group = shape.heads // shape.kv_heads
        keys, values = self._used()
        query = self.query.view(shape.batch, shape.kv_heads, group * shape.queries, shape.dim)
        repeated = mask.repeat(1, 1, group, 1)
        return lambda: scaled_dot_product_attention(query, keys, values, attn_mask=repeated)


WAYS = {"enable_gqa": Inputs.sdpa_grouped, "expanded": Inputs.sdpa_expanded, "folded": Inputs.sdpa_folded}
"""Torch's ways. The third is not what one writes first, but it reads the cache once per KV head as the kernel does."""
