"""A real target and the drafters trained for it: every system gives the tokens that transformers gives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from makers import make_drafter
from oracles import AuthorsLoop, transformers_target
from smollm2_models import EXAMPLE

import dflash_trt
from dflash_trt.evaluation.costs import measure_costs
from dflash_trt.evaluation.losslessness import TIE, compare_outputs

PROMPTS, TOKENS = 20, 128
SEEDED = {"temperature": 0.7, "top_p": 0.95, "seed": 5}
PROMPT_SETS = Path(dflash_trt.__file__).parent / "evaluation" / "prompt_sets"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def d2sd(smollm2: Path, tmp_path_factory: pytest.TempPathFactory):
    """Both shipped drafters; without branches it is DFlash."""
    drafters = {"drafter": EXAMPLE / "dflash", "vp_drafter": EXAMPLE / "vp_drafter", "branches": 1}
    engine = built(smollm2, tmp_path_factory, **drafters)
    engine.costs = measure_costs(engine, 128)
    return engine


@pytest.fixture(scope="module")
def dflare(smollm2: Path, tmp_path_factory: pytest.TempPathFactory):
    """Its weights are not shipped: an untrained one is as lossless."""
    folder = tmp_path_factory.mktemp("untrained")
    make_drafter(folder, smollm2, kind="dflare", taps=[1, 8, 14, 20, 27], layers=2)
    return built(smollm2, tmp_path_factory, drafter=folder)


def built(target: Path, tmp_path_factory: pytest.TempPathFactory, **drafters):
    output = tmp_path_factory.mktemp("bundle") / "b"
    dflash_trt.build(target=target, output=output, verify=False, max_seq_len=512, max_batch_size=PROMPTS, **drafters)
    return dflash_trt.load(output, threads=1)


def prompts(engine) -> list[list[int]]:
    """Held-out prompts of every kind, chat messages in the template."""
    files = sorted(PROMPT_SETS.glob("*.jsonl"))
    some = -(-PROMPTS // len(files))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()[:some]]
    return [
        engine.tokenizer.encode(
            engine.tokenizer.apply_chat([{"role": "user", "content": r["prompt"]}]) if r["chat"] else r["prompt"],
            add_special_tokens=not r["chat"],
        )
        for r in records[:PROMPTS]
    ]


@pytest.fixture(scope="module")
def plain(d2sd) -> dict[str, list]:
    """Token by token, greedy and seeded."""
    return {
        name: d2sd.generate(prompts(d2sd), speculation=False, max_tokens=TOKENS, **sampling)
        for name, sampling in (("greedy", {}), ("seeded", SEEDED))
    }


@pytest.fixture(scope="module")
def dflash_greedy(d2sd) -> list:
    return d2sd.generate(prompts(d2sd), branches=0, max_tokens=TOKENS)


@pytest.fixture(scope="module")
def reference(smollm2: Path):
    return transformers_target(smollm2)


def test_greedy_is_what_transformers_gives(d2sd, plain, reference) -> None:
    """Each token is the likeliest after those before it, in one pass over all: greedy decoding, by induction.

    Where two choices are as good as equal, the outputs part by rounding, and that is counted.
    """
    ties = 0
    for prompt, output in zip(prompts(d2sd), plain["greedy"], strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(logits)), output.token_ids]
        behind = (logits.max(-1).values - chosen).tolist()
        assert max(behind) < TIE
        ties += sum(gap > 0 for gap in behind)
    assert ties <= 2
    assert sum(len(output.token_ids) for output in plain["greedy"]) > PROMPTS * TOKENS / 3


def test_dflash_equals_token_by_token(d2sd, plain, dflash_greedy) -> None:
    assert_equal(d2sd, plain["greedy"], dflash_greedy, {})


@pytest.mark.parametrize(
    ("system", "name"),
    [("dflash", "seeded"), ("d2sd", "greedy"), ("d2sd", "seeded"), ("dflare", "greedy"), ("dflare", "seeded")],
)
def test_every_system_equals_token_by_token(request: pytest.FixtureRequest, plain, system: str, name: str) -> None:
    engine = request.getfixturevalue("dflare" if system == "dflare" else "d2sd")
    options = {"dflash": {"branches": 0}, "d2sd": {}, "dflare": {"drafts": 1}}[system]
    sampling = SEEDED if name == "seeded" else {}
    outputs = engine.generate(prompts(engine), max_tokens=TOKENS, **options, **sampling)
    assert_equal(engine, plain[name], outputs, sampling)


@pytest.mark.parametrize("options", [{"branches": 0, "drafts": "auto"}, {"branches": "auto"}])
def test_what_is_chosen_step_by_step_changes_no_token(d2sd, plain, options: dict[str, Any]) -> None:
    """One sequence at a time, each decides for itself."""
    outputs = [d2sd.generate(prompt, max_tokens=TOKENS, **options) for prompt in prompts(d2sd)[::5]]
    assert_equal(d2sd, plain["greedy"], outputs, {}, every=5)


def assert_equal(engine, plain, outputs, sampling: dict[str, Any], every: int = 1) -> None:
    """Token for token; at most two part where two choices are as good as equal."""
    verdicts = Counter(
        compare_outputs(engine, prompt, one.token_ids, other.token_ids, **sampling).verdict
        for prompt, one, other in zip(prompts(engine)[::every], plain[::every], outputs, strict=True)
    )
    assert verdicts["different"] == 0, verdicts
    assert verdicts["tie"] <= 2, verdicts


def test_acceptance_lengths_are_those_of_the_authors_loop(d2sd, smollm2: Path, plain) -> None:
    authors = AuthorsLoop(smollm2, EXAMPLE / "dflash")
    for prompt in prompts(d2sd)[::7]:
        output = d2sd.generate(prompt, branches=0, max_tokens=48)
        tokens, lengths = authors.greedy(prompt, 48, [2])
        assert tokens == output.token_ids
        assert lengths == output.statistics.acceptance_lengths


def test_drafts_are_accepted(dflash_greedy) -> None:
    """On prompts that no training has seen."""
    steps = [length for output in dflash_greedy for length in output.statistics.acceptance_lengths]
    assert sum(steps) / len(steps) > 1.7
