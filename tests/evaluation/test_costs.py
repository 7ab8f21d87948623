"""The cost table: which passes are timed, and that noise cannot make a larger one cheaper."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from engines import torch_engine
from makers import make_drafter, make_target

from dflash_trt.evaluation import costs
from dflash_trt.evaluation.costs import measure_costs


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("costs")
    make_target(folder / "t", num_hidden_layers=1)
    for name in ("d", "v"):
        make_drafter(folder / name, folder / "t", taps=[0], block_size=6, layers=1)
    return torch_engine(folder / "t", folder / "d", folder / "v", branches=2, max_seq_len=64)


def test_every_size_a_step_can_have_is_covered(engine):
    table = measure_costs(engine)
    assert [tokens for tokens, _ in table.draft] == [1, 2, 3, 4, 6]
    assert [tokens for tokens, _ in table.redraft] == [1, 2, 3, 4, 6, 8, 12]
    assert [tokens for tokens, _ in table.verify] == [1, 2, 3, 4, 6, 8, 12, engine.limits.tree_size]
    assert engine.limits.tree_size == 6 + 5 + 4
    for points in (table.draft, table.redraft, table.verify):
        seconds = [seconds for _, seconds in points]
        assert seconds[0] > 0
        assert seconds == sorted(seconds)


def test_sizes_take_turns_and_the_least_counts(monkeypatch):
    """A clock under control: passes of 1 and 3 tokens take 4 s, of 2 take 1 s, and a busy moment 100 s more."""
    now, runs, asked = [0.0], Counter(), []

    def run(size: int) -> None:
        runs[size] += 1
        busy = 100.0 if runs.total() in (2, 3, 9) else 0.0
        now[0] += {1: 4.0, 2: 1.0, 3: 4.0}[size] + busy

    def before(size: int) -> None:
        asked.append(size)
        now[0] += 50.0  # is no part of it

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    assert costs._timed(run, 3, before) == ((1, 4.0), (2, 4.0), (3, 4.0))
    assert runs[1] == runs[2] == runs[3] - 1
    assert asked == [1, 2, 3] * runs[1]


def test_a_pass_is_timed_behind_what_it_follows_in_a_step(engine, monkeypatch):
    passes: list[tuple[str, int]] = []
    for role in ("target", "drafter", "vp_drafter"):
        session = getattr(engine, role)

        def recorded(inputs, outputs, cache, role=role, run=session.run):
            size = (inputs["input_ids"] if role == "target" else inputs["block_ids"]).shape[1]
            passes.append((role, size))
            return run(inputs, outputs, cache)

        monkeypatch.setattr(session, "run", recorded)
    measure_costs(engine)
    behind = {}
    for (before, _), (role, size) in pairwise(passes):
        behind.setdefault((role, size), Counter())[before] += 1
    assert behind["target", 8] == {"vp_drafter": costs._REPEATS}
    assert behind["vp_drafter", 8] == {"drafter": costs._REPEATS}
    assert behind["drafter", 3] == {"target": costs._REPEATS}
    assert behind["target", 1]["target"] >= costs._REPEATS  # token by token
