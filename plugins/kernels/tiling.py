"""How StaircaseAttention is cut into programs: tile sizes by device and head size, and splits of the context.

The rules are shared with the TensorRT plugin, which knows tiles from the registry of its variants and computes
splits by the same integer formula (`plugins/tensorrt`). Nothing here is tuned yet: no figures from a GPU exist.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_QUERIES = 128
HEAD_DIMS = (32, 64, 96, 128, 256)
PLUGIN_HEAD_DIMS = (64, 96, 128, 256)  # those compiled ahead of time
MAX_SPLITS = 64

# Programs that share a multiprocessor, by tile rows.
PROGRAMS_PER_SM = {16: 3, 64: 2, 128: 1}

# Bytes of shared memory a program may ask for. Cubins for 8.0 also serve 8.6 and 8.9, which have the least.
SHARED_MEMORY = {80: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@dataclass(frozen=True)
class Tile:
    """A program's share: `rows` (head, query) pairs of one KV head; `columns` context slots or `local_columns` new
    tokens per inner step."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    local_columns: int = 16


def block_dim(head_dim: int) -> int:
    """The head size as tiles hold it: the next power of two."""
    return 1 << (head_dim - 1).bit_length()


def architecture(compute_capability: tuple[int, int]) -> int:
    """Which of the compiled architectures serves a device.

    Raises:
        ValueError: none does.
    """
    major, minor = compute_capability
    if major == 8:
        return 80
    if (major, minor) in ((9, 0), (10, 0), (12, 0)):
        return major * 10
    raise ValueError(f"no kernels for compute capability {major}.{minor}; there are some for 8.x, 9.0, 10.0 and 12.0")


def tiles(cc: int, head_dim: int, itemsize: int = 2, masked: bool = False) -> list[Tile]:
    """The tiles there are for an architecture, smallest first; none of them spills registers.

    With fewer than three stages nothing is loaded while a step computes: there would be one buffer only.

    Args:
        cc: 80, 90, 100 or 120.
        itemsize: bytes of an element; float32 serves exactness, not speed, and has a small tile only.
        masked: the context has a window, which takes registers.
    """
    large = SHARED_MEMORY[cc] > 200_000
    dim = block_dim(head_dim)
    if itemsize == 4:
        return [Tile(16, 32, 4, 1)]
    if dim == 256:
        return [Tile(16, 32 if large else 16, 4, 3), Tile(64, 32 if large else 16, 8, 3)]
    padded = dim != head_dim  # one mask more
    local = 16 if masked or padded else 32
    available = [
        Tile(16, 32 if masked and padded else 64, 4, 3),
        Tile(64, 64, 4 if large or dim <= 64 else 8, 3, local),
    ]
    if not masked and (large or dim <= 64):
        available.append(Tile(128, 64, 8, 3, local))
    return available


def pick_tile(available: list[Tile], rows: int) -> Tile:
    """The smallest tile that holds all `rows`, else the largest."""
    return next((tile for tile in available if tile.rows >= rows), available[-1])


def choose_splits(programs: int, capacity: int, columns: int, slots: int) -> int:
    """Into how many parts to split the context.

    Known are shapes only, as lengths are read on the device. Few programs leave multiprocessors idle, many partial
    results cost a merge.

    Args:
        programs: batch * KV heads * row tiles.
        capacity: cache slots of a row.
        columns: of the tile.
        slots: programs the device runs at once.
    """
    blocks = -(-capacity // columns)

    def cost(splits: int) -> int:
        waves = -(-programs * splits // slots)
        return 4 * waves * (-(-blocks // splits) + 3) + (0 if splits == 1 else 16 + splits)

    return min(range(1, min(MAX_SPLITS, blocks) + 1), key=cost)
