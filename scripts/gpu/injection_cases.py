"""KVInjection: random cases, and what the caches must hold after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpu.attention_cases import FLOAT32_EPS, rounding


@dataclass(frozen=True)
class Injection:
    """Inputs and attributes, named and ordered as in the operator."""

    key: torch.Tensor
    value: torch.Tensor
    key_norm_weight: torch.Tensor | None
    position_ids: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    write_start: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    eps: float
    row_count: torch.Tensor | None = None

    def arguments(self) -> list[Any]:
        return [getattr(self, name) for name in self.__dataclass_fields__]


def make(
    seed: int,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    batch: int = 3,
    rows: int = 21,
    kv_heads: int = 2,
    dim: int = 128,
    passing: int = 0,
    norm: bool = True,
    counted: bool = False,
    capacity: int | None = None,
    positions: int = 47,
    inside: bool = False,
) -> Injection:
    """A random case. Caches are full of NaN, and so are rows that write nothing.

    Args:
        passing: pairs of components that do not rotate.
        counted: with a row count.
        inside: all slots and positions lie inside; else some lie outside and write nothing.
    """
    random = torch.Generator().manual_seed(seed)
    capacity = rows + 33 if capacity is None else capacity

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype).to(device)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random).to(device)

    out = 0 if inside else 2
    angles = 7 * torch.rand(positions, dim // 2 - passing, generator=random).to(device)
    cache = torch.full((batch, kv_heads, capacity, dim), float("nan"), dtype=dtype, device=device)
    case = Injection(
        key=normal(batch, rows, kv_heads, dim) * 5,
        value=normal(batch, rows, kv_heads, dim),
        key_norm_weight=normal(dim) if norm else None,
        position_ids=integers(-out, positions + out, batch, rows),
        cos=angles.cos(),
        sin=angles.sin(),
        write_start=integers(-out, capacity - rows + 1 + 2 * out, batch),
        key_cache=cache,
        value_cache=cache.clone(),
        eps=0.03,
        row_count=integers(0, rows + 2, batch) if counted else None,
    )
    ignored = torch.ones(batch, rows, dtype=torch.bool)
    for b, row, _ in written(case):
        ignored[b, row] = False
    ignored = ignored.to(device)
    case.key[ignored] = case.value[ignored] = float("nan")
    return case


def written(case: Injection) -> list[tuple[int, int, int]]:
    """(batch row, row, slot) of the rows that write."""
    batch, rows = case.position_ids.shape
    capacity, positions = case.key_cache.shape[2], len(case.cos)
    position_ids, starts = case.position_ids.tolist(), case.write_start.tolist()
    counts = [rows] * batch if case.row_count is None else case.row_count.tolist()
    return [
        (b, row, starts[b] + row)
        for b in range(batch)
        for row in range(min(rows, counts[b]))
        if 0 <= starts[b] + row < capacity and 0 <= position_ids[b][row] < positions
    ]


def keys(case: Injection) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [B, N, Hkv, D]: the normed and rotated keys, and how far from them rounding may lead: a few times in
    float32, and once to the dtype. Positions outside of the tables count as 0."""
    key = case.key.double()
    if case.key_norm_weight is not None:
        key = key / (key.square().mean(-1, keepdim=True) + case.eps).sqrt() * case.key_norm_weight.double()
    half = case.cos.shape[1]
    position_ids = case.position_ids.clamp(0, len(case.cos) - 1)
    cos, sin = (table[position_ids][:, :, None].double() for table in (case.cos, case.sin))
    first, second, rest = key.split((half, half, key.shape[-1] - 2 * half), dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    both = first.abs() + second.abs()
    magnitude = torch.cat((both, both, rest.abs()), dim=-1)
    return rotated, rounding(case.key.dtype) * rotated.abs() + 16 * FLOAT32_EPS * magnitude + 1e-7


def wrong(case: Injection, before: Injection) -> str:
    """What the caches of `case`, run, hold and should not; empty when all is right. `before`: as it was."""
    expected_keys, bound = keys(before)
    key_cache, value_cache = before.key_cache.clone(), before.value_cache.clone()
    worst = 0.0
    for b, row, slot in written(before):
        value_cache[b, :, slot] = before.value[b, row]
        key_cache[b, :, slot] = case.key_cache[b, :, slot]  # judged by its distance
        ratio = (case.key_cache[b, :, slot].double() - expected_keys[b, row]).abs() / bound[b, row]
        worst = max(worst, float(ratio.nan_to_num(nan=float("inf")).max()))
    found = [f"keys are {worst:.3g} times their bound away"] if worst > 1 else []
    found += [
        f"{name} outside of what is written, or a value"
        for name, cache, wanted in (
            ("key_cache", case.key_cache, key_cache),
            ("value_cache", case.value_cache, value_cache),
        )
        if not torch.equal(bits(cache), bits(wanted))
    ]
    return "; ".join(found)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, for comparing NaN too."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
