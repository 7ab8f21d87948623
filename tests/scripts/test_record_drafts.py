"""Recorded drafts are those of decoding: replayed with fixed settings they give the steps that the engine has."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from record_drafts import main
from runtime.replay import Machine, Setting, load, steps

import dflash_trt
from dflash_trt.runtime.branching import PassCosts

TINY = Path(__file__).parents[2] / "examples" / "tiny"
TEXTS = ["def add(first, second):", "class Stack:\n    def push(self"]
ONCE = PassCosts(draft=((1, 1.0), (8, 1.0)), redraft=((1, 1.0), (56, 1.0)), verify=((1, 1.0), (64, 1.0)))


def test_replayed_steps_are_the_engines(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    dflash_trt.build(
        target=TINY / "target", drafter=TINY / "dflash", vp_drafter=TINY / "vp_drafter", output=tmp_path / "b",
        branches=7, verify=False, max_seq_len=256,
    )  # fmt: skip
    options = ["--prompts", str(prompts), "--max-tokens", "60", "--threads", "1"]
    result = CliRunner().invoke(main, [str(tmp_path / "b"), str(tmp_path / "d.npz"), *options])
    assert result.exit_code == 0, result.output
    (outputs,) = load(tmp_path / "d.npz").values()
    engine = dflash_trt.load(tmp_path / "b", threads=1)
    for setting in (Setting(0), Setting(3), Setting(7), Setting(7, 2)):
        for text, output in zip(TEXTS, outputs, strict=True):
            kwargs = {"drafts": setting.drafts, "branches": setting.branches} if setting.drafts else {}
            real = engine.generate(text, max_tokens=60, speculation=bool(setting.drafts), **kwargs)
            assert output.tokens == real.token_ids
            replayed = [yielded for _, yielded in steps(output, Machine(ONCE, 0), setting)]
            assert replayed == real.statistics.acceptance_lengths


def test_a_bundle_with_too_few_branches_is_refused(tmp_path: Path) -> None:
    dflash_trt.build(target=TINY / "target", drafter=TINY / "dflash", output=tmp_path / "b", verify=False)
    result = CliRunner().invoke(main, [str(tmp_path / "b"), str(tmp_path / "d.npz")])
    assert result.exit_code == 2
    assert "build it with 7" in result.output
    assert not (tmp_path / "d.npz").exists()
