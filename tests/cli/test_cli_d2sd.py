"""D2SD on the command line: building with a VP drafter, choosing branches, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from makers import edit_json, edit_tensors, make_drafter, make_target

import dflash_trt
from dflash_trt.bundle import read_info


def generated(run_cli, bundle: Path, *options: object) -> dict:
    code, out, err = run_cli("run", bundle, "--prompt", "abc", "--max-tokens", 24, "--json", *options)
    assert code == 0, err
    return json.loads(out)


def test_the_bundle_records_roles_sizes_and_graphs(d2sd_bundle):
    info = read_info(d2sd_bundle)
    assert info.system == "d2sd"
    assert info.roles == ("target", "drafter", "vp_drafter")
    assert (info.limits.block_size, info.limits.vp_block_size, info.limits.branches) == (8, 10, 3)
    # the trunk extended to 10, and what prefixes of 0, 1 and 2 drafts leave of 9
    assert info.limits.tree_size == 10 + 9 + 8 + 7
    config = json.loads((d2sd_bundle / "config.json").read_text())
    assert config["build_config"]["max_draft_len"] == info.limits.tree_size - 1
    assert set(info.graphs) == {"target", "drafter", "vp_drafter"}
    assert (d2sd_bundle / "vp_drafter" / "model.onnx").is_file()
    assert info.graphs["vp_drafter"].spec.role == "vp_drafter"
    assert info.vp_drafter is not None
    assert info.vp_drafter.block_size == 10


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.9, "--seed", 5)], ids=["greedy", "sampled"])
def test_any_number_of_branches_gives_the_same_tokens(d2sd_bundle, run_cli, sampling):
    plain = generated(run_cli, d2sd_bundle, "--no-speculation", *sampling)
    for branches in ((), ("--branches", 0), ("--branches", 1), ("--branches", 3)):
        drafted = generated(run_cli, d2sd_bundle, *branches, *sampling)
        assert drafted["token_ids"] == plain["token_ids"]
        passes = drafted["statistics"]["redraft_passes"]
        assert passes == 0 if branches == ("--branches", 0) else passes > 0


def test_no_branches_is_dflash(bundle, d2sd_bundle, run_cli):
    """The same steps as the bundle of the pair alone."""
    alone, unbranched = generated(run_cli, bundle), generated(run_cli, d2sd_bundle, "--branches", 0)
    assert alone["acceptance_lengths"] == unbranched["acceptance_lengths"]
    assert unbranched["statistics"]["proposed_drafts"] == alone["statistics"]["proposed_drafts"]


@pytest.mark.parametrize("value", [4, -1, "many", "2.5"])
def test_run_refuses_branches_the_bundle_was_not_built_for(d2sd_bundle, run_cli, value):
    code, out, err = run_cli("run", d2sd_bundle, "--prompt", "x", "--branches", value)
    assert (code, out) == (2, "")
    assert "--branches" in err
    assert str(value) in err


def test_run_refuses_auto_without_a_cost_table(d2sd_bundle, run_cli):
    code, out, err = run_cli("run", d2sd_bundle, "--prompt", "x", "--branches", "auto")
    assert (code, out) == (2, "")
    assert "--no-verify" in err


@pytest.mark.parametrize("value", [0, 2, "auto"])
def test_run_refuses_branches_without_a_vp_drafter(bundle, run_cli, value):
    code, out, err = run_cli("run", bundle, "--prompt", "x", "--branches", value)
    assert (code, out) == (2, "")
    assert "--branches" in err
    assert "VP drafter" in err


def test_a_trace_records_every_step(d2sd_bundle, run_cli, tmp_path):
    result = generated(run_cli, d2sd_bundle, "--branches", 2, "--trace", tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    assert (trace["system"], trace["branches"]) == ("d2sd", 2)
    assert trace["token_ids"] == result["token_ids"]
    assert [len(step["emitted"]) for step in trace["steps"]] == result["acceptance_lengths"]
    emitted = [token for step in trace["steps"] for token in step["emitted"]]
    assert emitted == result["token_ids"][1:]
    first = trace["steps"][0]
    assert len(first["draft"]) == len(first["confidence"]) == 7
    kept = [branch["kept"] for branch in first["branches"]]
    assert len(kept) == 3  # two branches, and the extension of the trunk to the VP drafter's block
    assert kept == sorted(kept)
    assert kept[-1] == 7


def test_a_trace_without_speculation_says_so(d2sd_bundle, run_cli, tmp_path):
    generated(run_cli, d2sd_bundle, "--no-speculation", "--trace", tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    assert (trace["speculation"], trace["branches"]) == (False, 0)
    assert "token by token" in run_cli("inspect", tmp_path / "t.json").out
    code, _, err = run_cli("run", d2sd_bundle, "--prompt", "x", "--no-speculation", "--branches", 2)
    assert code == 2
    assert "--no-speculation" in err


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_generated(bundle, run_cli, tmp_path):
    """And one that would change the bundle."""
    (tmp_path / "folder.json").mkdir()
    for file, words in (
        (tmp_path / "nowhere" / "t.json", "folder does not exist"),
        (tmp_path / "folder.json", "no file"),
        (tmp_path / "t.trace", ".json"),
        (bundle / "config.json", "bundle"),
        (bundle / "target" / "t.json", "bundle"),
    ):
        code, out, err = run_cli("run", bundle, "--prompt", "x", "--trace", file)
        assert (code, out) == (2, "")
        assert "--trace" in err
        assert words in err
    generated(run_cli, bundle)  # it still loads


def test_a_vp_drafter_alone_is_a_dflash_drafter(pair, vp_drafter, tmp_path):
    """By format they are the same; the role says what it was used as."""
    dflash_trt.build(
        target=pair.target, drafter=vp_drafter, output=tmp_path / "b", backend="torch", verify=False, max_seq_len=64
    )
    info = read_info(tmp_path / "b")
    assert (info.system, info.roles) == ("dflash", ("target", "drafter"))


def test_more_branches_than_prefixes_are_as_many_as_there_are(pair, vp_drafter, tmp_path):
    dflash_trt.build(
        target=pair.target, drafter=pair.drafter, vp_drafter=vp_drafter, output=tmp_path / "b", backend="torch",
        verify=False, max_seq_len=64, block_size=3, branches=6,
    )  # fmt: skip
    limits = read_info(tmp_path / "b").limits
    assert (limits.block_size, limits.vp_block_size) == (3, 3)  # --block-size holds for both
    assert (limits.redraft_rows, limits.tree_size) == (2, 3 + 2 + 1)
    engine = dflash_trt.load(tmp_path / "b")
    traced = engine.generate("abc", max_tokens=12, branches=6, trace=True).trace
    assert traced is not None
    assert max(len(step.branches) for step in traced.steps) == 2


def test_every_graph_is_verified_and_passes_are_measured(tmp_path, agreeing_pair, run_cli):
    """Also that `auto` then runs, and losslessly."""
    output = tmp_path / "bundle"
    code, _, err = run_cli(
        "build", "--target", agreeing_pair.target, "--drafter", agreeing_pair.drafter, "--vp-drafter",
        agreeing_pair.drafter, "--branches", 2, "--output", output, "--max-seq-len", 96,
    )  # fmt: skip
    assert code == 0, err
    names = {check["name"] for check in json.loads((output / "report.json").read_text())["checks"]}
    for role, outputs in (
        ("target", ("logits", "token_ids", "context_features")),
        ("drafter", ("draft_ids", "confidence", "logits")),
        ("vp_drafter", ("draft_ids", "confidence", "logits")),
    ):
        for name in (*outputs, "present_key_*, present_value_*"):
            assert f"numbers: {role}.{name}" in names
    costs = read_info(output).costs
    assert costs is not None
    limits = read_info(output).limits
    for points, most in (
        (costs.draft, limits.block_size),
        (costs.redraft, limits.redraft_rows * limits.vp_block_size),
        (costs.verify, limits.tree_size),
    ):
        assert [tokens for tokens, _ in points] == sorted({tokens for tokens, _ in points})
        assert (points[0][0], points[-1][0]) == (1, most)
        assert all(seconds > 0 for _, seconds in points)
    acceptance = json.loads((output / "report.json").read_text())["checks"][-1]
    assert acceptance["measured"]["covered_breaks"] == 0  # these trunks never break
    auto = generated(run_cli, output, "--branches", "auto")
    assert auto["token_ids"] == generated(run_cli, output, "--no-speculation")["token_ids"]


def test_verify_reports_a_drafter_that_gives_nan(pair, vp_drafter, tmp_path, run_cli):
    """By name, and with the other checks."""
    broken = Path(shutil.copytree(vp_drafter, tmp_path / "v"))
    edit_tensors(broken, norm__weight=np.full(32, np.nan, np.float32))
    dflash_trt.build(
        target=pair.target, drafter=pair.drafter, vp_drafter=broken, output=tmp_path / "b", backend="torch",
        verify=False, max_seq_len=64,
    )  # fmt: skip
    code, out, err = run_cli("verify", tmp_path / "b", "--json")
    assert code == 1
    failed = json.loads(out)["checks"][-1]
    assert (failed["name"], failed["status"]) == ("losslessness", "failed")
    assert "vp_drafter graph" in failed["reason"]
    assert "NaN" in failed["reason"]
    assert "losslessness" in err


@pytest.fixture
def triple(tmp_path: Path) -> dict[str, Path]:
    """Folders to change."""
    make_target(tmp_path / "t")
    for name, seed in (("d", 1), ("v", 2)):
        make_drafter(tmp_path / name, tmp_path / "t", taps=[0, 2], block_size=4, seed=seed)
    return {"target": tmp_path / "t", "drafter": tmp_path / "d", "vp_drafter": tmp_path / "v"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 3}, ["block is 3", "--block-size 3"]),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]}}, ["mask_token_id is 7", "319"]),
        ({"dflash_config": {"mask_token_id": 319, "target_layer_ids": [2, 0]}}, ["target_layer_ids is [2, 0]"]),
        ({"num_target_layers": 5}, ["num_target_layers is 5", "4"]),
    ],
    ids=["block", "mask", "taps", "another target"],
)
def test_build_refuses_a_vp_drafter_that_does_not_fit(triple, run_cli, tmp_path, changes, words):
    edit_json(triple["vp_drafter"] / "config.json", **changes)
    refused(run_cli, tmp_path, triple, words)


def test_build_refuses_a_vp_drafter_of_another_size(triple, run_cli, tmp_path):
    make_target(tmp_path / "other", hidden_size=48)
    shutil.rmtree(triple["vp_drafter"])
    make_drafter(triple["vp_drafter"], tmp_path / "other", taps=[0, 2], block_size=4)
    refused(run_cli, tmp_path, triple, ["hidden_size is 48", "32"])


def test_build_refuses_a_vp_block_of_more_than_was_trained(triple, run_cli, tmp_path):
    refused(run_cli, tmp_path, triple, ["block size 9", "4"], "--vp-block-size", 9)


def refused(run_cli, tmp_path: Path, triple: dict[str, Path], words: list[str], *options: object) -> None:
    paths = [part for name, path in triple.items() for part in (f"--{name.replace('_', '-')}", path)]
    code, out, err = run_cli("build", *paths, "--output", tmp_path / "bundle", *options)
    assert (code, out) == (2, "")
    for word in words:
        assert word in err
    assert not (tmp_path / "bundle").exists()
