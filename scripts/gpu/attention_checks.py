"""Correctness of StaircaseAttention's kernels: which shapes, grouped so that few kernels have to be compiled.

A kernel is compiled anew for every dtype, head size, tile and feature, and also where an integer argument is 1 or a
multiple of 16. So a family has one of each, and its cases differ in what costs nothing: lengths, visibility, values.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_trt.plugins.kernels.staircase_attention import staircase_attention
from dflash_trt.plugins.kernels.tiling import HEAD_DIMS, Tile, architecture, tiles
from gpu import attention_cases
from gpu.attention_cases import DTYPES, VISIBILITIES
from gpu.context import Context
from gpu.results import Result

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "causal window": {"window": 37},
    "symmetric window": {"window": 21, "causal": 0},
    "softcap": {"softcap": 2.0},
    "everything": {"window": 50, "causal": 0, "softcap": 1.5, "sinks": True},
}
_SECONDS = 6.0  # what a family may take, compilation included


@dataclass(frozen=True)
class Family:
    """Cases of one kernel. `contexts`: a case each; `splits` go round; `tile`, `splits` None for those of the rules."""

    name: str
    dtype: str
    contexts: tuple[int, ...]
    splits: tuple[int | None, ...] = (None,)
    tile: Tile | None = None
    shape: dict[str, Any] = field(default_factory=dict)


def families(on_gpu: bool, quick: bool, seed: int) -> Iterator[Family]:
    """In the order of what matters most."""
    if not on_gpu:
        yield from _small()
        return
    yield from _by_feature()
    yield from _exact()
    if not quick:
        yield from _by_tile(architecture(torch.cuda.get_device_capability()), seed)


def _small() -> Iterator[Family]:
    """For the interpreter, which cannot multiply bfloat16."""
    shape = {"dim": 32, "group": 3, "queries": 3}
    for number, (name, feature) in enumerate(FEATURES.items()):
        dtype = ("fp16", "fp32")[number % 2]
        yield Family(f"{name}, {dtype}", dtype, (0, 45), (1, 2), Tile(16, 32, 4, 1), {**shape, **feature})


def _by_feature() -> Iterator[Family]:
    """The shapes of decoding, with the tiles and splits that will be used: heads of 128, 32 to 8."""
    decode = {"dim": 128, "kv_heads": 8, "group": 4}
    rules = (None, 1, None)
    for dtype in ("bf16", "fp16"):
        for queries in (16, 70):
            contexts = (0, 1, 63, 512, 4096)
            yield Family(f"{dtype}, Q {queries}", dtype, contexts, rules, shape={**decode, "queries": queries})
    for queries, group in ((1, 4), (128, 4), (17, 1), (2, 7)):
        shape = {**decode, "kv_heads": 3, "group": group, "queries": queries}
        yield Family(f"bf16, Q {queries}, group {group}", "bf16", (0, 300, 2049), rules, shape=shape)
    for name, feature in FEATURES.items():
        if name != "plain":
            shape = {**decode, "kv_heads": 2, "queries": 19, **feature}
            yield Family(f"fp16, {name}", "fp16", (0, 33, 1500), (None, 1), shape=shape)
    yield Family("bf16, more splits than steps", "bf16", (0, 70, 500), (40,), shape={**decode, "queries": 5})


def _exact() -> Iterator[Family]:
    """float32, which has one small tile."""
    for dim, name in ((128, "plain"), (32, "plain"), (64, "everything"), (96, "causal window"), (256, "sinks")):
        shape = {"dim": dim, "queries": 9, **FEATURES[name]}
        yield Family(f"fp32, head {dim}, {name}", "fp32", (0, 100, 1000), (1, 3), shape=shape)


def _by_tile(arch: int, seed: int) -> Iterator[Family]:
    """Every tile of this device with more rows than one holds; the seed says which half-precision dtype."""
    chance = random.Random(seed)
    for dim in HEAD_DIMS:
        for masked in (False, True):
            for tile in tiles(arch, dim, 2, masked):
                dtype = chance.choice(("fp16", "bf16"))
                feature: dict[str, Any] = {"sinks": chance.random() < 0.5}
                if masked:
                    feature |= {"window": 2 * tile.columns + 3, "causal": chance.randint(0, 1)}
                shape = {"dim": dim, "group": 3, "queries": tile.rows // 3 + 3, **feature}
                name = f"{dtype}, head {dim}, tile {tile.rows}x{tile.columns}{', window' if masked else ''}"
                yield Family(name, dtype, (0, 2 * tile.columns + 5, 900), (3, 5), tile, shape)


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated inside is full of NaN: torch fills uninitialised memory when it is to be deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_attention(context: Context, result: Result) -> None:
    """A check per family; what the time does not allow is named as skipped."""
    seed = context.options.seed
    device = context.options.device
    for number, family in enumerate(families(context.on_gpu, context.options.quick, seed)):
        name = f"staircase_attention: {family.name}"
        if not context.budget.allows(_SECONDS):
            result.skipped.append(f"{name}: time")
            continue
        context.note(name)
        try:
            worst = max(_distances(family, seed + 100 * number, device))
            result.check(name, worst <= 1, f"{worst:.2f} of the bound")
        except Exception as error:
            result.check(name, False, f"{type(error).__name__}: {error}")
            _raise_if_lost(context)


def _distances(family: Family, seed: int, device: str) -> Iterator[float]:
    for number, length in enumerate(family.contexts):
        queries = family.shape["queries"]
        # the capacity is no multiple of 16 in any case, as one is another kernel
        slack = 16 - (length + queries) % 16 + 5
        kind = VISIBILITIES[(seed + number) % len(VISIBILITIES)]
        case = attention_cases.make(
            seed + number, DTYPES[family.dtype], context=length, slack=slack, kind=kind, **family.shape
        ).to(device)
        splits = family.splits[number % len(family.splits)]
        with poisoned():
            found = staircase_attention(*case.arguments(), tile=family.tile, splits=splits)
        yield attention_cases.distance(found, *attention_cases.expected(case))


def _raise_if_lost(context: Context) -> None:
    """After an illegal access nothing works any more in this process, and no later check says anything."""
    if context.on_gpu:
        torch.cuda.synchronize()
