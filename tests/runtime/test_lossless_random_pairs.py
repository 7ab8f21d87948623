"""Speculative output equals token-by-token output on random pairs of varied shape, token for token.

Random drafters are seldom right; so that steps of every acceptance length occur, drafts are also replaced by the right
tokens, each with a given probability.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from engines import torch_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makers import make_drafter, make_target

import dflash_trt
from dflash_trt.evaluation.losslessness import compare_outputs
from dflash_trt.runtime.branching import PassCosts

SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.3, "seed": 11, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.3},
)


@st.composite
def pairs(draw: st.DrawFn) -> dict:
    """Shapes of a target and a drafter."""
    kv_heads = draw(st.sampled_from([1, 2]))
    layers = draw(st.integers(1, 3))
    drafter_layers = draw(st.integers(1, 2))
    policy = draw(st.sampled_from(["full", "causal", "window"]))
    window = draw(st.integers(2, 12))
    return {
        "kind": draw(st.sampled_from(["dflash", "dflare"])),
        "family": draw(st.sampled_from(["qwen3", "llama"])),
        "tie": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
        "target": {
            "vocab_size": draw(st.integers(4, 24)),
            "num_hidden_layers": layers,
            "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
            "num_key_value_heads": kv_heads,
            "hidden_size": 24,  # divisible by every head count, which Llama asks for
            "head_dim": draw(st.sampled_from([8, 16])),
        },
        "taps": sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1))),
        "block_size": draw(st.integers(2, 16)),
        "drafter_layers": drafter_layers,
        "drafter": {
            "full": {},
            "causal": {"is_causal": True},
            "window": {
                "layer_types": ["sliding_attention"] * drafter_layers,
                "sliding_window": window,
                "use_sliding_window": True,
            },
        }[policy],
    }


def write_pair(shape: dict, folder: Path) -> None:
    make_target(folder / "t", shape["family"], shape["tie"], shape["seed"], **shape["target"])
    make_drafter(
        folder / "d",
        folder / "t",
        taps=shape["taps"],
        block_size=shape["block_size"],
        layers=shape["drafter_layers"],
        seed=shape["seed"] + 1,
        kind=shape["kind"],
        **shape["drafter"],
    )


class HintedDrafter:
    """A drafter session whose drafts are replaced, each with probability `accuracy`, by the known right tokens."""

    def __init__(self, session, sequence: list[int], accuracy: float) -> None:
        self._session = session
        self._sequence = np.asarray(sequence)
        self._accuracy = accuracy
        self._random = np.random.default_rng(0)

    def __getattr__(self, name: str):
        return getattr(self._session, name)

    def run(self, inputs, outputs, cache):
        results = self._session.run(inputs, outputs, cache)
        if "draft_ids" in results:
            positions = np.minimum(inputs["block_position_ids"], len(self._sequence) - 1)
            hinted = self._random.random(positions.shape) < self._accuracy
            results["draft_ids"] = np.where(hinted, self._sequence[positions], results["draft_ids"])
        return results


@dataclass
class Seen:
    """What the comparisons of one test saw: verdicts, and acceptance lengths and verified drafts of steps."""

    verdicts: Counter[str] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    proposed: Counter[int] = field(default_factory=Counter)


def check(
    engine, prompts: list[list[int]], tokens: int, sampling: dict, seen: Seen, accuracy: float, drafts=None
) -> None:
    drafter = engine.drafter
    for prompt in prompts:
        plain = engine.generate(prompt, speculation=False, max_tokens=tokens, **sampling)
        engine.drafter = HintedDrafter(drafter, [*prompt, *plain.token_ids], accuracy)
        drafted = engine.generate(prompt, max_tokens=tokens, drafts=drafts, **sampling)
        comparison = compare_outputs(engine, prompt, plain.token_ids, drafted.token_ids, **sampling)
        seen.verdicts[comparison.verdict] += 1
        assert comparison.verdict != "different", comparison
        if comparison.verdict == "equal":
            assert drafted.finish_reason == plain.finish_reason
            assert drafted.text == plain.text
            assert sum(drafted.statistics.acceptance_lengths) == len(drafted.token_ids) - 1
        seen.accepted.update(drafted.statistics.acceptance_lengths)
        seen.proposed.update(walk.trunk for walk in drafted.statistics.walks.elements())


def test_speculative_equals_token_by_token():
    """The property, and that what it saw is worth something: ties are rare, steps of many acceptance lengths occur."""
    seen = Seen()

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=pairs(),
        prompt_len=st.integers(1, 40),
        sampling=st.sampled_from(SAMPLING),
        chunk=st.integers(1, 20),
        accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    )
    def holds(shape, prompt_len, sampling, chunk, accuracy):
        with TemporaryDirectory() as folder:
            write_pair(shape, Path(folder))
            engine = torch_engine(Path(folder) / "t", Path(folder) / "d", prefill_chunk=chunk)
            random = np.random.default_rng(shape["seed"])
            prompt = random.integers(0, shape["target"]["vocab_size"], prompt_len).tolist()
            check(engine, [prompt], 40, sampling, seen, accuracy)

    holds()
    assert seen.verdicts["tie"] <= 0.01 * sum(seen.verdicts.values())
    assert len(seen.accepted) >= 4, seen.accepted


PRICES = (0.0, 0.05, 0.3)  # of another verified token, where a pass of one costs 1


@pytest.mark.parametrize("drafts", [1, 3, "auto"])
def test_any_number_of_drafts_equals_token_by_token(drafts):
    """A fixed number of verified drafts, and one that each step weighs, down to none."""
    seen = Seen()

    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=pairs().filter(lambda shape: shape["block_size"] >= 4),
        sampling=st.sampled_from(SAMPLING),
        accuracy=st.sampled_from([0.0, 0.5, 0.9]),
        price=st.sampled_from(PRICES),
    )
    def holds(shape, sampling, accuracy, price):
        costs = PassCosts(draft=((1, 0.5), (16, 0.5)), redraft=(), verify=((1, 1.0), (16, 1.0 + 15 * price)))
        with TemporaryDirectory() as folder:
            write_pair(shape, Path(folder))
            engine = torch_engine(Path(folder) / "t", Path(folder) / "d", costs=costs)
            check(engine, [[1, 2, 3], [2] * 20], 60, sampling, seen, accuracy, drafts)

    holds()
    assert seen.verdicts["tie"] <= 0.01 * sum(seen.verdicts.values())
    if drafts == "auto":
        assert 0 in seen.proposed
        assert len(seen.proposed) >= 3, seen.proposed
    else:
        assert max(seen.proposed) == drafts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_onnxruntime_bundles_of_random_pairs(seed, tmp_path):
    """The same on built bundles; shapes drawn from a seed, because each needs an export."""
    random = np.random.default_rng(seed)
    heads = int(random.choice([1, 2]))
    layers = int(random.integers(2, 4))
    shape = {
        "kind": ["dflash", "dflare"][seed // 2],
        "family": ["qwen3", "llama"][seed % 2],
        "tie": bool(seed // 2 % 2),
        "seed": seed,
        "target": {
            "vocab_size": int(random.integers(5, 20)),
            "num_hidden_layers": layers,
            "num_attention_heads": heads * int(random.integers(1, 4)),
            "num_key_value_heads": heads,
            "hidden_size": 24,
            "head_dim": int(random.choice([8, 16])),
        },
        "taps": sorted(random.choice(layers, size=2, replace=False).tolist()),
        "block_size": int(random.integers(2, 10)),
        "drafter_layers": 1 + seed % 2,
        "drafter": [
            {},
            {"is_causal": True},
            {},
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "use_sliding_window": True},
        ][seed],
    }
    write_pair(shape, tmp_path)
    dflash_trt.build(
        target=tmp_path / "t", drafter=tmp_path / "d", output=tmp_path / "b", verify=False, max_seq_len=300,
        max_batch_size=3, prefill_chunk=17,
    )  # fmt: skip
    engine = dflash_trt.load(tmp_path / "b", threads=1)
    prompts = [random.integers(0, shape["target"]["vocab_size"], n).tolist() for n in (1, 18, 60, 258)]
    for accuracy, sampling in enumerate(SAMPLING):
        check(engine, prompts, 60, sampling, Seen(), accuracy / 4)


@pytest.mark.parametrize("speculation", [True, False])
def test_a_row_alone_equals_the_row_in_a_batch(tmp_path, speculation):
    make_target(tmp_path / "t", vocab_size=12, seed=5)
    make_drafter(tmp_path / "d", tmp_path / "t", taps=[1, 2], block_size=5, seed=6)
    alone = torch_engine(tmp_path / "t", tmp_path / "d")
    together = torch_engine(tmp_path / "t", tmp_path / "d", max_batch_size=3)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 12, n).tolist() for n in (1, 7, 30, 2)]
    for sampling in SAMPLING[:3]:
        batch = together.generate(prompts, max_tokens=30, speculation=speculation, **sampling)
        for prompt, row in zip(prompts, batch, strict=True):
            single = alone.generate(prompt, max_tokens=30, speculation=speculation, **sampling)
            assert single.token_ids == row.token_ids
            if speculation and not sampling["temperature"]:
                assert single.statistics.acceptance_lengths[:-1] == row.statistics.acceptance_lengths[:-1]


def test_rejected_rows_left_in_the_cache_never_matter(tmp_path):
    """Poisons every slot beyond the committed length after each step."""
    make_target(tmp_path / "t", vocab_size=6, seed=8)
    make_drafter(tmp_path / "d", tmp_path / "t", taps=[0, 3], block_size=6, seed=9)
    engine = torch_engine(tmp_path / "t", tmp_path / "d")
    prompt = [1, 2, 3]
    expected = engine.generate(prompt, max_tokens=40)
    from dflash_trt.runtime import decode

    class Poisoned(decode.DecodeBatch):
        def step(self):
            super().step()
            drafter, committed = self._proposer._drafter, self.sequences[0].committed
            for cache, valid in ((self._target_cache, committed), (drafter.cache, int(drafter._injected[0]))):
                for buffer in cache.buffers:
                    buffer[:, :, valid:] = 1e4

    sequence = engine.sequence(prompt, decode_params(40))
    batch = Poisoned(engine.target, engine.drafter, [sequence], engine.limits, engine.mask_token_id)
    with torch.inference_mode():
        batch.prefill()
        while batch.active:
            batch.step()
    assert sequence.generated == expected.token_ids
    assert sequence.statistics.acceptance_lengths == expected.statistics.acceptance_lengths


def decode_params(tokens: int):
    from dflash_trt.runtime.sampling import SamplingParams

    return SamplingParams(max_tokens=tokens)


@pytest.mark.parametrize("room", [1, 2, 3, 7, 8, 9])
def test_capacity_ends_a_sequence_in_mid_block(tmp_path, room):
    """prompt + output never exceed max_seq_len, whatever the block."""
    make_target(tmp_path / "t", vocab_size=6, seed=8)
    make_drafter(tmp_path / "d", tmp_path / "t", taps=[0, 3], block_size=8, seed=9)
    engine = torch_engine(tmp_path / "t", tmp_path / "d", max_seq_len=20)
    prompt = [1] * (20 - room)
    drafted = engine.generate(prompt, max_tokens=1000)
    assert drafted.finish_reason == "length"
    assert len(drafted.token_ids) == room
    assert drafted.token_ids == engine.generate(prompt, max_tokens=1000, speculation=False).token_ids


def test_a_second_request_starts_afresh(tmp_path):
    """No stale lengths."""
    make_target(tmp_path / "t", vocab_size=9, seed=1)
    make_drafter(tmp_path / "d", tmp_path / "t", taps=[0, 3], block_size=4, seed=2)
    engine = torch_engine(tmp_path / "t", tmp_path / "d")
    first = engine.generate([1, 2, 3, 4, 5], max_tokens=20)
    engine.generate([7] * 30, max_tokens=60)
    again = engine.generate([1, 2, 3, 4, 5], max_tokens=20)
    assert again.token_ids == first.token_ids
    assert again.statistics.acceptance_lengths == first.statistics.acceptance_lengths
