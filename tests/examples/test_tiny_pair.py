"""The trained pair that the repository ships: what it is, and that a bundle of it is lossless and accepts drafts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from oracles import AuthorsLoop, greedy, greedy_margins, transformers_target

import dflash_trt
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.target import read_target
from dflash_trt.cli.main import main
from dflash_trt.evaluation.losslessness import TIE, compare_outputs

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny"
PROMPTS = [json.loads(line)["prompt"] for line in (TINY / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
TOKENS = 64


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """Built as `make demo` builds it, its verification included."""
    output = tmp_path_factory.mktemp("tiny") / "bundle"
    result = dflash_trt.build(config=ROOT / "build_configs" / "tiny.yaml", output=output)
    assert result.report is not None
    assert result.report.passed
    return output


@pytest.fixture(scope="module")
def engine(bundle):
    return dflash_trt.load(bundle, threads=1)


@pytest.fixture(scope="module")
def outputs(engine) -> dict[str, dict]:
    """Speculative and plain greedy outputs of the first 50 held-out prompts."""
    return {
        prompt: {
            speculation: engine.generate(prompt, max_tokens=TOKENS, speculation=speculation)
            for speculation in (True, False)
        }
        for prompt in PROMPTS[:50]
    }


def test_it_is_small_and_in_the_published_formats():
    target, drafter = read_target(TINY / "target"), read_drafter(TINY / "dflash")
    assert target.spec.architecture == "Qwen3ForCausalLM"
    assert drafter.spec.block_size == 8
    assert len(drafter.tensors) == 11 * drafter.spec.num_layers + 3
    size = sum(file.stat().st_size for name in ("target", "dflash") for file in (TINY / name).iterdir())
    assert size < 15e6


def test_prompts_survive_the_tokenizer(engine):
    assert len(PROMPTS) >= 50
    for prompt in PROMPTS:
        assert engine.tokenizer.decode(engine.tokenizer.encode(prompt)) == prompt


def test_greedy_speculation_is_lossless(engine, outputs):
    verdicts = Counter()
    for prompt, generated in outputs.items():
        plain, drafted = generated[False], generated[True]
        ids = engine.tokenizer.encode(prompt)
        verdicts[compare_outputs(engine, ids, plain.token_ids, drafted.token_ids).verdict] += 1
    assert verdicts["different"] == 0
    assert verdicts["tie"] <= 0.01 * sum(verdicts.values())


def test_greedy_output_is_what_transformers_generates(engine, outputs):
    reference = transformers_target(TINY / "target")
    verdicts = Counter()
    for prompt, generated in outputs.items():
        ids = engine.tokenizer.encode(prompt)
        expected = greedy(reference, ids, TOKENS)
        ours = generated[True].token_ids
        if ours == expected:
            verdicts["equal"] += 1
            continue
        parted = next(i for i, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b)
        margin = greedy_margins(reference, [*ids, *expected], len(ids))[parted]
        verdicts["tie" if margin < TIE else "different"] += 1
    assert verdicts["different"] == 0
    assert verdicts["tie"] <= 0.01 * len(outputs)


def test_sampled_speculation_is_lossless(engine):
    settings = {"temperature": 0.8, "seed": 42, "max_tokens": TOKENS}
    verdicts, accepted = Counter(), 0
    for prompt in PROMPTS[:50]:
        ids = engine.tokenizer.encode(prompt)
        plain = engine.generate(ids, speculation=False, **settings)
        drafted = engine.generate(ids, **settings)
        verdicts[compare_outputs(engine, ids, plain.token_ids, drafted.token_ids, **settings).verdict] += 1
        accepted += drafted.statistics.accepted_drafts
    assert verdicts["different"] == 0
    assert verdicts["tie"] <= 0.01 * sum(verdicts.values())
    assert accepted > 0


def test_every_step_accepts_what_the_authors_loop_accepts(engine, outputs):
    authors = AuthorsLoop(TINY / "target", TINY / "dflash")
    for prompt in PROMPTS[:12]:
        ids = engine.tokenizer.encode(prompt)
        tokens, steps = authors.greedy(ids, TOKENS, stop=list(engine.eos_token_ids))
        assert outputs[prompt][True].token_ids == tokens
        assert outputs[prompt][True].statistics.acceptance_lengths == steps


def test_mean_acceptance_length_on_held_out_prompts(engine):
    """Over all steps, as the README gives it."""
    steps = [n for prompt in PROMPTS for n in engine.generate(prompt, max_tokens=96).statistics.acceptance_lengths]
    assert sum(steps) / len(steps) >= 3.0


@pytest.mark.parametrize("options", [[], ["--temperature", "0.8", "--seed", "5"]], ids=["greedy", "sampled"])
def test_the_command_line_gives_the_same_ids_with_and_without_speculation(bundle, capsys, options):
    results = []
    for more in ([], ["--no-speculation"]):
        arguments = ["run", str(bundle), "--prompt", PROMPTS[0], "--max-tokens", "64", "--json", *options, *more]
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["token_ids"] == results[1]["token_ids"]
    assert results[0]["mean_acceptance_length"] > 1 == results[1]["mean_acceptance_length"]


def test_a_copied_identifier_comes_out_uncorrupted(engine):
    """Text that copies from the prompt."""
    name = "zq_handler_8841"
    prompt = f"class {name}:\n    pass\n\n\nx = {name}()\ny = {name}()\nz = "
    drafted = engine.generate(prompt, max_tokens=48)
    assert drafted.token_ids == engine.generate(prompt, max_tokens=48, speculation=False).token_ids
