"""The columns of others: what they decode is what their own code decodes, on the weights of the bundle."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from makers import edit_json, make_drafter
from oracles import AuthorsLoop, greedy

import dflash_trt
from dflash_trt.errors import UsageError
from dflash_trt.evaluation.bench_baselines import baseline_modes
from dflash_trt.evaluation.bench_modes import engine_modes, open_bundles

pytest.importorskip("dflash.model")

GREEDY = {"temperature": 0.0, "seed": 0}


@pytest.fixture(scope="module")
def modes(torch_bundle, torch_d2sd_bundle):
    return engine_modes(open_bundles([torch_bundle, torch_d2sd_bundle], threads=1), (), ())


@pytest.fixture(scope="module")
def columns(modes, pair):
    return {mode.label: mode for mode in baseline_modes(modes, pair.target, pair.drafter, threads=1)}


def test_both_decode_what_the_bundle_decodes(modes, columns, pair):
    oracle = AuthorsLoop(pair.target, pair.drafter)
    assert list(columns) == ["transformers", "authors"]
    every = {mode.label: mode for mode in modes[:2]} | columns
    for prompt in ([5, 6, 7], list(range(30))):
        expected = greedy(oracle.target, prompt, 16)
        _, lengths = oracle.greedy(prompt, 16)
        runs = {label: mode.run(prompt, 16, GREEDY) for label, mode in every.items()}
        assert [list(run.token_ids) for run in runs.values()] == [expected] * 4
        theirs, ours = (runs[label].statistics for label in ("authors", "dflash"))
        assert theirs.acceptance_lengths == ours.acceptance_lengths == lengths
        assert theirs.target_passes == ours.target_passes == len(lengths) + 1
        assert runs["transformers"].statistics is None
    assert columns["authors"].same_steps_as == "dflash"


def test_drafts_of_the_authors_are_counted_as_verified(columns):
    """By the sizes of the target's passes; the first is the prompt's."""
    mode, sizes = columns["authors"], []
    hook = mode._target.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    try:
        statistics = mode.run([5, 6, 7], 20, GREEDY).statistics
    finally:
        hook.remove()
    assert statistics.target_passes == len(sizes)
    assert statistics.proposed_drafts == sum(size - 1 for size in sizes[1:]) > 0


def test_their_times_are_split_at_the_first_token(columns):
    for mode in columns.values():
        for tokens in (1, 6):
            run = mode.run([1, 2, 3], tokens, GREEDY)
            assert len(run.token_ids) == tokens
            assert 0 < run.first_token_seconds <= run.seconds
            assert run.decode_seconds >= 0


def test_threads_are_those_of_the_bundle(modes, pair):
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            baseline_modes(modes, pair.target, None, threads)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_stop_token_ends_them_alike(pair, tmp_path, modes):
    """Whatever the model says second is its end-of-sequence token in this bundle."""
    first = modes[0].run([5, 6, 7], 4, GREEDY).token_ids
    target = shutil.copytree(pair.target, tmp_path / "target")
    edit_json(target / "config.json", eos_token_id=int(first[1]))
    dflash_trt.build(
        target=target, drafter=pair.drafter, output=tmp_path / "b", max_seq_len=64, backend="torch", verify=False
    )
    own = engine_modes(open_bundles([tmp_path / "b"], threads=1), (), ())
    for mode in (*own, *baseline_modes(own, target, pair.drafter, threads=1)):
        assert mode.run([5, 6, 7], 20, GREEDY).token_ids == first[:2], mode.label


def test_refusals(modes, pair, vp_drafter, tmp_path, monkeypatch):
    assert baseline_modes(modes, None, None, 1) == []
    with pytest.raises(UsageError, match=r"--drafter: needs the target's folder, too\. Give --target"):
        baseline_modes(modes, None, pair.drafter, 1)
    with pytest.raises(UsageError, match=r"--drafter .*: its configuration is not that of the drafter in"):
        baseline_modes(modes, pair.target, vp_drafter, 1)
    make_drafter(tmp_path / "other", pair.target, taps=[0, 2, 3], seed=8)
    with pytest.raises(UsageError, match=r"tensor \S+ is not that of"):
        baseline_modes(modes, pair.target, tmp_path / "other", 1)
    monkeypatch.setitem(sys.modules, "dflash.model", None)
    with pytest.raises(UsageError, match=r"--drafter: needs the package dflash .* install --no-deps dflash==0\.1\.0"):
        baseline_modes(modes, pair.target, pair.drafter, 1)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"--target: needs the package transformers .* pip install transformers torch"):
        baseline_modes(modes, pair.target, None, 1)


def test_bundles_that_cannot_be_compared(pair, tmp_path):
    make_drafter(tmp_path / "dflare", pair.target, taps=[0, 2, 3], kind="dflare")
    common = {"target": pair.target, "max_seq_len": 64, "backend": "torch", "verify": False}
    dflash_trt.build(drafter=tmp_path / "dflare", output=tmp_path / "b", **common)
    dflash_trt.build(drafter=pair.drafter, output=tmp_path / "half", dtype="bfloat16", **common)
    dflare = engine_modes(open_bundles([tmp_path / "b"], threads=1), (), ())
    with pytest.raises(UsageError, match="the authors' loop runs DFlash alone, which no bundle has"):
        baseline_modes(dflare, pair.target, tmp_path / "dflare", 1)
    half = engine_modes(open_bundles([tmp_path / "half"], threads=1), (), ())
    with pytest.raises(UsageError, match="computes in bfloat16; what it is compared with does in float32"):
        baseline_modes(half, pair.target, None, 1)
