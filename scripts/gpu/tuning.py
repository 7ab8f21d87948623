"""Which tile and how many splits are fastest for the shapes of decoding, to set plugins/kernels/tiling.py by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from dflash_trt.plugins.kernels.tiling import MAX_SPLITS, Tile
from gpu.attention_cases import DTYPES
from gpu.attention_speed_cases import Inputs
from gpu.context import Context
from gpu.results import Result, Table
from gpu.roofline import AttentionShape
from gpu.timing import graph_seconds, rotation

_SHAPES = list(itertools.product((1, 8), (2048, 8192, 32768)))
_SECONDS = 6.0  # what a tile may take with all shapes


def run(context: Context, result: Result) -> None:
    table = Table("Tuning", ["Q", "batch", "context", "rule", "rule, µs", "fastest", "its µs", "gain"])
    table.note = "Tiles as rows x columns / warps / stages, then splits. bf16."
    tried = result.data["tuning"] = []
    for queries in (16, 70):
        found: dict[tuple[int, int], list[tuple[float, str]]] = {}
        inputs = {}
        for batch, length in _SHAPES:
            shape = AttentionShape(batch, queries, length)
            inputs[batch, length] = [
                Inputs.random(shape, DTYPES["bf16"], context.options.device) for _ in range(rotation(shape.bytes))
            ]
        rule = {key: own[0].plan() for key, own in inputs.items()}
        for tile in [next(iter(rule.values()))[0], *_tiles(queries)]:
            if not context.budget.allows(_SECONDS):
                result.skipped.append(f"tuning, Q {queries}, tile {tile}: time")
                continue
            context.note(f"Q {queries}, {tile}")
            for key, own in inputs.items():
                for splits in _splits(rule[key][1]):
                    seconds, error = _timed(own, tile, splits)
                    tried.append({"queries": queries, "shape": key, "tile": str(tile), "splits": splits,
                                  "seconds": seconds, "error": error})  # fmt: skip
                    if seconds is not None:
                        found.setdefault(key, []).append((seconds, f"{_short(tile)}, {splits}"))
                if error is not None:
                    break
        for key, times in found.items():
            tile, splits = rule[key]
            by_rule = next((seconds for seconds, name in times if name == f"{_short(tile)}, {splits}"), None)
            seconds, name = min(times)
            shown = [None, None] if by_rule is None else [f"{by_rule * 1e6:.1f}", f"{by_rule / seconds:.2f}"]
            table.rows.append(
                [queries, *key, f"{_short(tile)}, {splits}", shown[0], name, f"{seconds * 1e6:.1f}", shown[1]]
            )
    result.tables.append(table)


def _tiles(queries: int) -> Iterator[Tile]:
    rows = (64, 16) if queries == 16 else (128, 64)
    for size, columns, stages, warps in itertools.product(rows, (64, 128, 32), (3, 2, 4), (4, 8)):
        if size == 16 and warps == 8:
            continue
        yield Tile(size, columns, warps, stages, 32)


def _splits(rule: int) -> list[int]:
    return sorted({1, rule, max(2, rule // 2), min(MAX_SPLITS, rule * 2), min(MAX_SPLITS, rule + rule // 2)})


def _timed(inputs: list[Inputs], tile: Tile, splits: int) -> tuple[float | None, str | None]:
    try:
        return graph_seconds([own.kernel(tile, splits) for own in inputs], replays=3), None
    except Exception as error:  # too much shared memory, too many registers
        torch.cuda.synchronize()
        return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _short(tile: Tile) -> Any:
    return f"{tile.rows}x{tile.columns}/{tile.num_warps}/{tile.num_stages}"
