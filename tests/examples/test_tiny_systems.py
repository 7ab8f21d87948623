"""DFlare and D2SD on the trained checkpoints of the repository: lossless, and what their drafts are worth."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from safetensors.torch import load_file

import dflash_trt
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.errors import CheckFailed
from dflash_trt.evaluation.losslessness import compare_outputs

ROOT = Path(__file__).parents[2]
MODEL = "model.safetensors"
TINY = ROOT / "examples" / "tiny"
PROMPTS = [json.loads(line)["prompt"] for line in (TINY / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 42}}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Built with their verification."""
    folder = tmp_path_factory.mktemp("systems")
    loaded = {}
    for system in ("dflare", "d2sd"):
        result = dflash_trt.build(config=ROOT / "build_configs" / f"tiny-{system}.yaml", output=folder / system)
        assert result.report is not None
        assert {check.status for check in result.report.checks} == {"passed"}
        loaded[system] = dflash_trt.load(folder / system, threads=1)
    return loaded


def test_they_are_what_they_should_be():
    first, second, dflare = (read_drafter(TINY / name).spec for name in ("dflash", "vp_drafter", "dflare"))
    assert first == second
    assert (first.system, dflare.system) == ("dflash", "dflare")
    assert dflare.num_layers == first.num_layers + 1
    assert len(dflare.taps) > len(first.taps)
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) < 22e6


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("system", "branches"), [("dflare", None), ("d2sd", 4), ("d2sd", "auto")])
def test_speculation_is_lossless(engines, system, branches, sampling):
    engine, settings = engines[system], SAMPLING[sampling] | {"max_tokens": 48}
    verdicts, accepted = Counter(), 0
    for prompt in PROMPTS[:50]:
        ids = engine.tokenizer.encode(prompt)
        plain = engine.generate(ids, speculation=False, **settings)
        drafted = engine.generate(ids, branches=branches, **settings)
        verdicts[compare_outputs(engine, ids, plain.token_ids, drafted.token_ids, **settings).verdict] += 1
        accepted += drafted.statistics.accepted_drafts
    assert verdicts["different"] == 0
    assert verdicts["tie"] <= 0.02 * sum(verdicts.values())
    assert accepted > 0


def test_branches_lengthen_acceptance_by_a_tenth_at_least(engines):
    """Over all steps of the held-out prompts, against the same first drafter alone."""
    engine, tau = engines["d2sd"], {}
    for branches in (0, 4):
        runs = [engine.generate(prompt, max_tokens=96, branches=branches).statistics for prompt in PROMPTS]
        tau[branches] = sum(sum(run.acceptance_lengths) for run in runs) / sum(run.steps for run in runs)
    assert tau[4] >= 1.1 * tau[0]
    assert tau[0] >= 3.0


def test_no_step_accepts_less_than_its_trunk_alone(engines):
    """The trunk as a chain on the same state: leading nodes of the accepted path that are the trunk's."""
    gained = 0
    for prompt in PROMPTS[:10]:
        trace = engines["d2sd"].generate(prompt, max_tokens=48, trace=True).trace
        for step in trace.steps:
            accepted = [step.tokens[node] for node in step.path[1:]]
            trunk = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(accepted, step.draft, strict=False))))
            assert len(step.path) - 1 >= trunk
            gained += len(accepted) - trunk
    assert gained > 0


def test_dflare_accepts_drafts_on_held_out_prompts(engines):
    runs = [engines["dflare"].generate(prompt, max_tokens=96).statistics for prompt in PROMPTS]
    assert sum(sum(run.acceptance_lengths) for run in runs) / sum(run.steps for run in runs) >= 2.5


@pytest.mark.parametrize("role", ["drafter", "vp_drafter"])
def test_verification_finds_the_drafter_that_does_not_draft(role, tmp_path):
    """Each behind the other's back: a step is as long as the better one makes it."""
    folder = Path(shutil.copytree(TINY / "dflash", tmp_path / "shuffled"))
    random = np.random.default_rng(0)
    tensors = {name: random.permuted(tensor.float().numpy()) for name, tensor in load_file(folder / MODEL).items()}
    save_file(tensors, folder / MODEL)
    drafters = {"drafter": TINY / "dflash", "vp_drafter": TINY / "vp_drafter"} | {role: folder}
    with pytest.raises(CheckFailed, match=r"VP drafter|drafter does not draft") as failed:
        dflash_trt.build(target=TINY / "target", **drafters, output=tmp_path / "b", max_seq_len=256)
    assert ("VP drafter does not" in str(failed.value)) == (role == "vp_drafter")
    assert not (tmp_path / "b").exists()
