"""The rules by which StaircaseAttention is cut into programs."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.plugins.kernels.tiling import (
    HEAD_DIMS,
    MAX_SPLITS,
    PROGRAMS_PER_SM,
    SHARED_MEMORY,
    Tile,
    architecture,
    block_dim,
    choose_splits,
    pick_tile,
    tiles,
)


def slow_choice(programs: int, capacity: int, columns: int, slots: int) -> int:
    """The rule as it is written down: waves times steps and a start, and what a merge costs."""
    blocks = math.ceil(Fraction(capacity, columns))
    best = None
    for splits in range(1, 65):
        if splits > blocks:
            break
        waves = math.ceil(Fraction(programs * splits, slots))
        steps = math.ceil(Fraction(blocks, splits))
        cost = 4 * waves * (steps + 3)
        if splits > 1:
            cost += 16 + splits
        if best is None or cost < best[0]:
            best = (cost, splits)
    assert best is not None
    return best[1]


programs = st.integers(1, 3000)
capacities = st.integers(1, 70_000)
columns = st.sampled_from((16, 32, 64, 128))
slots = st.integers(1, 600)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(programs, capacities, columns, slots)
def test_splits_are_the_cheapest(programs: int, capacity: int, columns: int, slots: int) -> None:
    splits = choose_splits(programs, capacity, columns, slots)
    assert splits == slow_choice(programs, capacity, columns, slots)
    assert 1 <= splits <= min(MAX_SPLITS, math.ceil(capacity / columns))


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 8), capacities, columns, slots)
def test_whole_waves_are_not_split(waves: int, capacity: int, columns: int, slots: int) -> None:
    assert choose_splits(waves * slots, capacity, columns, slots) == 1


def test_splits_of_what_a_decode_step_brings() -> None:
    """Short contexts are not split, long ones are until the device is full, and more programs need fewer."""
    assert choose_splits(8, 256, 64, 264) == 1
    long = [choose_splits(programs, 32768, 64, 264) for programs in (4, 8, 16, 64, 132, 264)]
    assert long == sorted(long, reverse=True)
    assert long[0] > 30
    assert long[-1] == 1
    growing = [choose_splits(8, capacity, 64, 264) for capacity in (256, 1024, 4096, 16384, 32768)]
    assert growing == sorted(growing)
    assert 8 * growing[-1] <= 264


def test_pick_tile_takes_the_smallest_that_holds_the_rows() -> None:
    available = [Tile(16, 64, 4, 2), Tile(64, 64, 4, 2), Tile(128, 128, 8, 2)]
    for rows, expected in ((1, 16), (16, 16), (17, 64), (64, 64), (65, 128), (128, 128), (129, 128), (4096, 128)):
        assert pick_tile(available, rows).rows == expected


@pytest.mark.parametrize("cc", SHARED_MEMORY)
def test_tiles(cc: int) -> None:
    for dim, itemsize, masked in itertools.product(HEAD_DIMS, (2, 4), (False, True)):
        available = tiles(cc, dim, itemsize, masked)
        rows = [tile.rows for tile in available]
        assert rows == sorted(set(rows))
        assert rows[0] == 16
        for tile in available:
            assert tile.rows in PROGRAMS_PER_SM
            assert tile.columns in (16, 32, 64, 128)  # a power of two, and at least what a product takes
            assert tile.num_warps in (4, 8)


def test_block_dim_is_the_next_power_of_two() -> None:
    assert [block_dim(dim) for dim in HEAD_DIMS] == [32, 64, 128, 128, 256]


@pytest.mark.parametrize(
    ("capability", "served_by"),
    [((8, 0), 80), ((8, 6), 80), ((8, 9), 80), ((9, 0), 90), ((10, 0), 100), ((12, 0), 120)],
)
def test_architecture(capability: tuple[int, int], served_by: int) -> None:
    assert architecture(capability) == served_by


@pytest.mark.parametrize("capability", [(7, 5), (9, 1), (10, 3), (11, 0), (12, 1), (13, 0)])
def test_architecture_that_has_no_kernels(capability: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"no kernels for compute capability {capability[0]}\.{capability[1]};"):
        architecture(capability)
