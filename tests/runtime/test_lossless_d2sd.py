"""D2SD's output equals token-by-token output, and every step is what it says it is.

On random pairs of varied shape; drafts of both drafters are hinted (see `hints`), so that the first draft breaks
anywhere and branches win with tails of every length.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from engines import torch_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime.triples import (
    STOPS,
    SURE,
    SeenSteps,
    check,
    per_token,
    prompts_of,
    small_triple,
    triples,
    write_triple,
)

import dflash_trt
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.speculation_models import StepTimes

pytestmark = pytest.mark.usefixtures("fixed_rows")


def test_d2sd_equals_token_by_token() -> None:
    """With every number of branches; and what it saw is worth something: branches win, siblings merge, trunks grow."""
    seen = SeenSteps()

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=triples(),
        sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
        sampling=st.sampled_from(STOPS),
        chunk=st.integers(1, 20),
        branches=st.integers(0, 6),
        accuracy=st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.6, 1.0])),
        confidences=st.sampled_from([(), SURE]),
    )
    def holds(shape, sizes, sampling, chunk, branches, accuracy, confidences):
        with TemporaryDirectory() as name:
            folder = Path(name)
            write_triple(shape, folder)
            engine = torch_engine(
                folder / "t", folder / "d", folder / "v", branches=max(branches, 1), prefill_chunk=chunk,
                max_batch_size=len(sizes),
            )  # fmt: skip
            check(engine, prompts_of(engine, *sizes), sampling, seen, accuracy, branches, confidences)

    holds()
    assert seen.verdicts["tie"] <= 0.01 * sum(seen.verdicts.values())
    assert len(seen.accepted) >= 5, seen
    assert len(seen.gained) >= 3, seen
    assert min(sum(seen.gained.values()), seen.merged) >= 10, seen
    assert seen.extended >= 1, seen
    assert len(seen.branches) >= 4, seen


PRICES, LOW_PRICES = st.tuples(st.floats(0.2, 3), st.floats(0, 0.1)), st.tuples(st.floats(0, 0.5), st.floats(0, 0.01))


def test_d2sd_that_weighs_costs_equals_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever passes cost: the number of branches changes from step to step, and trees are pruned."""
    monkeypatch.setattr(StepTimes, "observe", lambda *args, **settings: None)  # they cost what is drawn, for good
    seen = SeenSteps()

    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=triples(),
        sizes=st.lists(st.integers(1, 20), min_size=1, max_size=2),
        sampling=st.sampled_from(STOPS),
        built=st.integers(1, 6),
        accuracy=st.tuples(st.sampled_from([0.5, 0.9]), st.sampled_from([0.6, 1.0])),
        confidences=st.sampled_from([(), SURE]),
        prices=st.tuples(PRICES, LOW_PRICES, PRICES),
    )
    def holds(shape, sizes, sampling, built, accuracy, confidences, prices):
        with TemporaryDirectory() as name:
            folder = Path(name)
            write_triple(shape, folder)
            draft, redraft, verify = (per_token(*price) for price in prices)
            engine = torch_engine(
                folder / "t", folder / "d", folder / "v", branches=built, max_batch_size=len(sizes),
                costs=PassCosts(draft=draft, redraft=redraft, verify=verify),
            )  # fmt: skip
            check(engine, prompts_of(engine, *sizes), sampling, seen, accuracy, "auto", confidences)

    holds()
    assert seen.verdicts["tie"] <= 0.01 * sum(seen.verdicts.values())
    assert len(seen.branches) >= 3, seen
    assert seen.pruned >= 10, seen
    assert sum(seen.gained.values()) >= 3, seen


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "vp_block_size", "branches"), [("dflash", 5, 4), ("dflash", 8, 2), ("dflare", 6, 3)])
def test_an_onnxruntime_bundle(tmp_path: Path, kind: str, vp_block_size: int, branches: int) -> None:
    """The same on built bundles, where a branch's tokens move in the cache from one slot to another in place."""
    small_triple(tmp_path, 5, vp_block_size, kind)
    dflash_trt.build(
        target=tmp_path / "t", drafter=tmp_path / "d", vp_drafter=tmp_path / "v", output=tmp_path / "b",
        branches=branches, verify=False, max_seq_len=100, max_batch_size=2, prefill_chunk=7,
    )  # fmt: skip
    engine, seen = dflash_trt.load(tmp_path / "b", threads=1), SeenSteps()
    assert engine.limits.branches == branches
    for sampling in STOPS:
        check(engine, prompts_of(engine, 3, 30), sampling, seen, (0.5, 0.6), branches, tokens=50)
    assert seen.verdicts["tie"] <= 1
    assert len(seen.gained) >= 3, seen


@pytest.mark.parametrize("vp_block_size", [5, 7])
def test_a_dflare_drafter_with_a_vp_drafter(tmp_path: Path, vp_block_size: int) -> None:
    engine = small_triple(tmp_path, vp_block_size=vp_block_size, kind="dflare", branches=3, max_batch_size=2)
    seen = SeenSteps()
    for sampling in STOPS[:3]:
        check(engine, prompts_of(engine, 3, 11), sampling, seen, (0.5, 0.6), 3)
    assert seen.verdicts["equal"] == sum(seen.verdicts.values())
    assert seen.gained, seen
