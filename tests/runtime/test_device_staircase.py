"""The candidates of a device step are those of the host loop: blocks, prefixes, trees, and what a walk accepts."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.hints import chance
from test_staircase import limits_of

from dflash_trt.ops.accepted_path import accept_path
from dflash_trt.runtime.acceptance import walk
from dflash_trt.runtime.branching import FixedBranches
from dflash_trt.runtime.device_staircase import (
    Branches,
    DeviceTree,
    blocks,
    chain,
    choose_branches,
    first_block,
    staircase,
)
from dflash_trt.runtime.drafter import Block
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.staircase import merge
from dflash_trt.runtime.tree import CandidateTree

MASK = 77
SURE = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 0.5, 1.0]))


class Row(NamedTuple):
    """One row of a batch: tokens that may come, its trunk and confidences at full size, and its re-drafts."""

    room: int
    trunk: list[int]
    confidence: list[float]
    redraft: list[list[int]]

    def sizes(self, limits: Limits) -> tuple[int, int]:
        return min(limits.block_size, self.room), min(limits.longest_path, self.room)

    def kept(self, limits: Limits) -> list[int]:
        size, longest = self.sizes(limits)
        return FixedBranches(limits.branches).choose(np.array(self.confidence[: size - 1]), longest)

    def candidates(self, limits: Limits) -> list[list[int]]:
        size, longest = self.sizes(limits)
        tails = zip(self.kept(limits), self.redraft, strict=False)
        return [self.trunk[:size], *(self.trunk[: keep + 1] + tail[keep + 1 : longest] for keep, tail in tails)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Limits, list[Row]]:
    """Of few tokens or many, so that siblings are equal often or never."""
    block = draw(st.integers(2, 10))
    limits = limits_of(block, block + draw(st.sampled_from([0, 1, 4])), draw(st.integers(1, 11)))
    token = st.integers(0, draw(st.sampled_from([1, 2, 50])))

    def tokens(size: int) -> st.SearchStrategy[list[int]]:
        return st.lists(token, min_size=size, max_size=size)

    row = st.builds(
        Row,
        room=st.integers(1, limits.vp_block_size + 2),
        trunk=tokens(block),
        confidence=st.lists(SURE, min_size=block - 1, max_size=block - 1),
        redraft=st.lists(tokens(limits.vp_block_size), min_size=limits.redraft_rows, max_size=limits.redraft_rows),
    )
    return limits, draw(st.lists(row, min_size=1, max_size=3))


def sizes_of(limits: Limits, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    size, longest = zip(*(row.sizes(limits) for row in rows), strict=True)
    return torch.tensor(size), torch.tensor(longest)


def branches_of(limits: Limits, rows: list[Row]) -> Branches:
    confidence = torch.tensor([row.confidence for row in rows], dtype=torch.float32)
    count, extend = min(limits.branches, limits.block_size - 1), limits.vp_block_size > limits.block_size
    return choose_branches(confidence, *sizes_of(limits, rows), count, extend)


def staircase_of(limits: Limits, rows: list[Row]) -> DeviceTree:
    trunk, redraft = torch.tensor([row.trunk for row in rows]), torch.tensor([row.redraft for row in rows])
    size, longest = sizes_of(limits, rows)
    return staircase(trunk, size, branches_of(limits, rows), redraft, longest, limits.tree_size)


def ancestors(tree: DeviceTree, row: int) -> np.ndarray:
    """Visibility from the parents, padding seeing itself."""
    size, total = tree.tokens.shape[1], int(tree.total[row])
    visible = np.eye(size, dtype=np.bool_)
    for node in range(1, total):
        visible[node] |= visible[tree.parents[row, node]]
    return visible


def spelled(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """What each node spells, the anchor left out."""
    texts: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        texts.append((*texts[parent], token))
    return texts


def target_choice(text: tuple[int, ...], texts: list[tuple[int, ...]], salt: int) -> int:
    """The target's token behind a text: often one that some candidate has there."""
    following = sorted({other[len(text)] for other in texts if len(other) > len(text) and other[: len(text)] == text})
    pick = chance(salt, text)
    return following[int(pick / 0.8 * len(following))] if following and pick < 0.8 else 60


def accepted(tree: DeviceTree, row: int, choices: list[int], path_capacity: int) -> list[int]:
    """Tokens that `accept_path` emits of one row."""
    padded = torch.tensor([choices + [0] * (tree.tokens.shape[1] - len(choices))])
    one = [part[row : row + 1] for part in (tree.tokens, tree.visibility, tree.parents)]
    path, length, bonus = accept_path(one[0], padded, one[1], one[2], path_capacity)
    nodes = path[0, : int(length)]
    return [*tree.tokens[row, nodes[1:]].tolist(), int(bonus)]


def test_staircases_are_those_of_the_host() -> None:
    """Chosen prefixes, nodes, and for any target the tokens that are accepted; and much was seen of each kind."""
    seen = Counter[str]()

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(batches(), st.integers(0, 10**6))
    def holds(batch: tuple[Limits, list[Row]], salt: int) -> None:
        limits, rows = batch
        branches, tree = branches_of(limits, rows), staircase_of(limits, rows)
        assert tree.tokens.shape[1] == limits.tree_size
        for number, row in enumerate(rows):
            used, kept = branches.used[number].tolist(), branches.kept[number].tolist()
            expected = row.kept(limits)
            assert used == [True] * len(expected) + [False] * (len(used) - len(expected))
            assert kept[: len(expected)] == expected

            candidates = row.candidates(limits)
            total = int(tree.total[number])
            tokens, parents = tree.tokens[number].tolist(), tree.parents[number].tolist()
            texts = spelled(tokens[:total], parents[:total])
            merged = merge(candidates).tree()
            assert {*texts} == {*spelled(merged.tokens.tolist(), merged.parents.tolist())}
            assert total == len(candidates[0]) + sum(
                len(own) - 1 - keep for own, keep in zip(candidates[1:], expected, strict=True)
            )
            assert tree.depths[number].tolist() == [*map(len, texts), *[0] * (limits.tree_size - total)]
            assert (tree.visibility[number].numpy() == ancestors(tree, number)).all()
            assert set(tokens[total:]) <= {row.trunk[0]}
            assert parents[0] == -1
            assert all(0 <= parent < node for node, parent in enumerate(parents) if node)

            choices = [target_choice(text, texts, salt) for text in texts]
            walked = walk(merged, lambda node, path, texts=texts: target_choice(path, texts, salt)).tokens
            assert accepted(tree, number, choices, limits.longest_path) == walked
            seen["unused branch"] += len(expected) < len(used)
            seen["extension"] += expected[-1:] == [limits.block_size - 1]
            seen["equal siblings"] += total > len(merged)
            seen["branch won"] += len(walked) > 1 and tuple(walked[:-1]) not in texts[: len(candidates[0])]
            seen["full trunk"] += len(candidates[0]) == limits.block_size
            seen[f"accepted {min(len(walked), 5)}"] += 1

    holds()
    assert min(seen.values()) >= 15, seen
    assert len(seen) == 10, seen


@given(batches())
@settings(max_examples=50, deadline=None)
def test_chains_are_those_of_the_host(batch: tuple[Limits, list[Row]]) -> None:
    limits, rows = batch
    size, _ = sizes_of(limits, rows)
    tree = chain(torch.tensor([row.trunk for row in rows]), size)
    assert tree.total.tolist() == size.tolist()
    for number, row in enumerate(rows):
        expected = CandidateTree.chain(row.trunk[: int(size[number])])
        tokens, visibility, depths = expected.padded(limits.block_size)
        assert tree.tokens[number].tolist() == tokens.tolist()
        assert tree.depths[number].tolist() == depths.tolist()
        assert (tree.visibility[number].numpy() == visibility).all()
        assert tree.parents[number, : len(expected)].tolist() == expected.parents.tolist()


@given(batches())
@settings(max_examples=50, deadline=None)
def test_blocks_are_those_of_the_host(batch: tuple[Limits, list[Row]]) -> None:
    """As `Drafter.draft` pads them."""
    limits, rows = batch
    size, longest = sizes_of(limits, rows)
    trunk = torch.tensor([row.trunk for row in rows])
    width, branches = limits.vp_block_size, branches_of(limits, rows)
    first = first_block(trunk[:, 0], size, limits.block_size, MASK)
    second = blocks(trunk, branches, longest, width, MASK)
    for number, row in enumerate(rows):
        one, room = [[row.trunk[0]]], int(size[number])
        check_block([part[number] for part in first], Block.of(one, room, MASK), [*range(room)])
        kept = row.kept(limits)
        expected = Block.of([row.trunk[: keep + 1] for keep in kept], int(longest[number]), MASK)
        places = [width * branch + place for branch in range(len(kept)) for place in range(int(longest[number]))]
        check_block([part[number] for part in second], expected, places)


def check_block(block: list[torch.Tensor], expected: Block, places: list[int]) -> None:
    """The host's block lies in `places`; all else is padding that sees itself."""
    ids, offsets, visibility, own = (part.numpy() for part in block)
    assert np.flatnonzero(own).tolist() == places
    assert ids[places].tolist() == expected.ids.tolist()
    assert offsets[places].tolist() == expected.offsets.tolist()
    assert (visibility[np.ix_(places, places)] == expected.visibility).all()
    padding = np.setdiff1d(np.arange(len(ids)), places)
    assert set(ids[padding].tolist()) <= {MASK}
    assert not offsets[padding].any()
    assert (visibility[padding] == np.eye(len(ids), dtype=np.bool_)[padding]).all()
    assert not visibility[np.ix_(places, padding)].any()


@pytest.mark.parametrize("count", range(1, 6))
def test_of_equal_prefixes_the_shorter_is_chosen(count: int) -> None:
    confidence = torch.tensor([[0.5, 0.0, 1.0, 1.0, 1.0]])  # r = .5 .5 0 0 0
    size = torch.tensor([6])
    branches = choose_branches(confidence, size, size, count, extend=False)
    assert branches.kept.tolist() == [[*range(count)]]
    assert branches.used.all()


def test_a_confidence_above_one_counts_as_one() -> None:
    """A rounded probability may be."""
    confidence = torch.tensor([[1.0000001, 1.0, 0.5]])  # r = 0 0 .5
    size = torch.tensor([4])
    assert choose_branches(confidence, size, size, 2, extend=False).kept.tolist() == [[0, 2]]


def test_r_is_in_double_precision() -> None:
    """As on the host, also where single precision would choose otherwise."""
    size, told_apart = torch.tensor([16]), 0
    for each in np.linspace(0.02, 0.06, 50):
        exact = 1 - each / (1 - each * np.arange(15))  # all r(i) would be the same
        confidence = exact.astype(np.float32)
        expected = FixedBranches(4).choose(confidence.astype(np.float64), 16)
        assert choose_branches(torch.tensor(confidence)[None], size, size, 4, extend=False).kept.tolist() == [expected]
        single = np.concatenate((np.ones(1, np.float32), np.cumprod(confidence)[:-1])) * (1 - confidence)
        told_apart += sorted(np.argsort(-single, kind="stable")[:4].tolist()) != expected
    assert told_apart >= 10


def test_confidences_that_are_not_numbers_stay_in_bounds() -> None:
    """The host ends the step with an error afterwards: until then no index may be out of range."""
    limits = limits_of(5, 7, 3)
    trunk, redraft = torch.arange(10).reshape(2, 5), torch.zeros(2, 4, 7, dtype=torch.int64)
    for value in (np.nan, np.inf, -np.inf):
        size, longest = torch.tensor([5, 2]), torch.tensor([7, 2])
        confidence = torch.full((2, 4), value)
        branches = choose_branches(confidence, size, longest, 3, extend=True)
        assert 0 <= int(branches.kept.min()) <= int(branches.kept.max()) <= 4
        tree = staircase(trunk, size, branches, redraft, longest, limits.tree_size)
        assert int(tree.total.max()) <= limits.tree_size
        assert int(tree.parents.max()) < limits.tree_size
