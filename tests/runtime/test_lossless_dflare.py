"""Speculative output equals token-by-token output with DFlare drafters: the same checks as with DFlash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import torch_engine
from makers import make_drafter, make_target
from test_lossless_random_pairs import SAMPLING, Seen, check

import dflash_trt
from dflash_trt.evaluation.numbers import compare_graphs
from dflash_trt.loading import open_info, open_session, reference_session

WINDOWED = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "use_sliding_window": True}
VARIANTS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"is_causal": True}, "window": WINDOWED}
VOCAB, BLOCK = 12, 6


def write_pair(folder: Path, seed: int = 5, **drafter: Any) -> None:
    make_target(folder / "t", tie=False, seed=seed, vocab_size=VOCAB)
    make_drafter(
        folder / "d", folder / "t", taps=[3, 0, 1], block_size=BLOCK, seed=seed + 1, kind="dflare", **drafter
    )


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, length).tolist() for length in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_torch(tmp_path: Path, variant: str) -> None:
    write_pair(tmp_path, **VARIANTS[variant])
    engine, seen = torch_engine(tmp_path / "t", tmp_path / "d", prefill_chunk=7), Seen()
    for number, sampling in enumerate(SAMPLING):
        check(engine, prompts(1, 20), 40, sampling, seen, accuracy=number / 4)
    assert seen.verdicts["equal"] == sum(seen.verdicts.values())
    assert len(seen.accepted) == BLOCK, seen.accepted


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, `t` and `d`, and its ONNX Runtime bundle `b`."""
    folder = tmp_path_factory.mktemp("built")
    write_pair(folder)
    dflash_trt.build(
        target=folder / "t", drafter=folder / "d", output=folder / "b", verify=False, max_seq_len=300,
        prefill_chunk=17,
    )  # fmt: skip
    return folder


def test_an_onnxruntime_bundle(built: Path) -> None:
    engine, seen = dflash_trt.load(built / "b", threads=1), Seen()
    for number, sampling in enumerate(SAMPLING):
        check(engine, prompts(1, 18, 60), 60, sampling, seen, accuracy=number / 4)
    assert seen.verdicts["different"] == 0
    assert len(seen.accepted) == BLOCK, seen.accepted


def test_the_bundle_equals_the_reference_loaded_from_it(built: Path) -> None:
    info = open_info(built / "b")
    assert (info.system, info.drafter.system) == ("dflare", "dflare")
    sessions = (open_session(built / "b", info, "drafter", threads=1), reference_session(built / "b", info, "drafter"))
    comparisons = list(compare_graphs(info, "drafter", *sessions))
    assert len(comparisons) == 4
    assert not [comparison for comparison in comparisons if not comparison.passed]


def test_both_backends_draft_the_same(built: Path) -> None:
    """Undisturbed drafts: the steps are of the same lengths, so the drafts are of the same worth."""
    engines = torch_engine(built / "t", built / "d"), dflash_trt.load(built / "b", threads=1)
    for prompt in prompts(3, 30):
        ours, theirs = (engine.generate(prompt, max_tokens=60) for engine in engines)
        assert ours.token_ids == theirs.token_ids
        assert ours.statistics.acceptance_lengths == theirs.statistics.acceptance_lengths


def test_a_row_alone_equals_the_row_in_a_batch(tmp_path: Path) -> None:
    write_pair(tmp_path)
    alone = torch_engine(tmp_path / "t", tmp_path / "d")
    together = torch_engine(tmp_path / "t", tmp_path / "d", max_batch_size=3)
    rows = prompts(1, 7, 30, 2)
    for sampling in SAMPLING[:2]:
        batch = together.generate(rows, max_tokens=30, **sampling)
        for prompt, row in zip(rows, batch, strict=True):
            assert alone.generate(prompt, max_tokens=30, **sampling).token_ids == row.token_ids
