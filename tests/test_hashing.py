"""Hashing: the digests of hashlib, each file read once, and an end where somebody asks for it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.hashing import bytes_to_hash, sha256_of

MIB = 1 << 20


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 1000, MIB - 1, MIB, MIB + 1, 3 * MIB]), max_size=6), st.integers(0, 99))
def test_digests_and_bytes(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int) -> None:
    folder = tmp_path_factory.mktemp("files")
    expected = {}
    for number, size in enumerate(sizes):
        data = hashlib.shake_128(bytes([seed, number])).digest(size)
        (folder / str(number)).write_bytes(data)
        expected[folder / str(number)] = hashlib.sha256(data).hexdigest()
    counted: list[int] = []
    assert sha256_of(expected, counted.append) == expected
    assert sum(counted) == bytes_to_hash(expected) == sum(sizes)


def test_a_file_that_is_linked_is_read_once(tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    first.write_bytes(b"same")
    other.write_bytes(b"same")
    os.link(first, second)
    counted: list[int] = []
    found = sha256_of([first, second, other], counted.append)
    assert set(found.values()) == {hashlib.sha256(b"same").hexdigest()}
    assert found.keys() == {first, second, other}
    assert sum(counted) == bytes_to_hash([first, second, other]) == 8


def test_holes_are_hashed_as_the_zeros_they_read_as(tmp_path: Path) -> None:
    hole = tmp_path / "hole"
    with open(hole, "wb") as file:
        file.truncate(5 * MIB + 3)
    assert sha256_of([hole]) == {hole: hashlib.sha256(bytes(5 * MIB + 3)).hexdigest()}


def test_nothing_to_hash() -> None:
    assert sha256_of([]) == {}
    assert bytes_to_hash([]) == 0


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="gone"):
        sha256_of([tmp_path / "here", tmp_path / "gone"])


def test_an_interrupt_ends_all_of_it(tmp_path: Path) -> None:
    """The others are not read to their end: a build that is stopped must not go on hashing gigabytes."""
    files = [tmp_path / str(number) for number in range(20)]
    for file in files:
        with open(file, "wb") as stream:
            stream.truncate(50 * MIB)
    counted: list[int] = []

    def interrupt(amount: int) -> None:
        counted.append(amount)
        if len(counted) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sha256_of(files, interrupt)
    assert sum(counted) < 500 * MIB
