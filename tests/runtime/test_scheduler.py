"""Continuous batching: whoever comes and goes, every request gets what it would get alone."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import torch_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runtime.serving_load import Knowing, Request, erratic_scheduler, serve
from runtime.triples import small_triple, triples, write_triple
from test_lossless_random_pairs import SAMPLING

import dflash_trt
from dflash_trt.errors import BackendError, QueueFullError, RequestError, UsageError
from dflash_trt.evaluation.losslessness import compare_outputs
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.slots import SlotBatch

SLOTS = 16
Outputs = dict[int, list[int]]


def alone(engine: Engine, request: Request) -> list[int]:
    return engine.generate(request.prompt, speculation=False, **request.options).token_ids


@st.composite
def loads(draw: st.DrawFn, vocab_size: int, longest: int) -> list[Request]:
    """More requests than slots; arrivals in bursts and one by one, some of them given up at any time."""
    random = np.random.default_rng(draw(st.integers(0, 999)))
    requests = []
    for number in range(draw(st.integers(2, SLOTS + 6))):
        sampling = dict(draw(st.sampled_from(SAMPLING)))
        if sampling.get("temperature"):
            sampling["seed"] = number
        arrives = draw(st.integers(0, 12))
        requests.append(
            Request(
                random.integers(0, vocab_size, draw(st.integers(1, longest))).tolist(),
                {"max_tokens": draw(st.integers(1, 30)), **sampling},
                arrives,
                draw(st.one_of(st.none(), st.none(), st.integers(arrives, arrives + 12))),
            )
        )
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("roles", [["d"], ["d", "v"]], ids=["one drafter", "two drafters"])
def test_whoever_comes_and_goes_a_row_is_as_alone(roles: list[str]) -> None:
    verdicts, plans = Counter[str](), set()

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(shape=triples(), data=st.data(), chunk=st.sampled_from([1, 5, 16]), accuracy=st.sampled_from([0.2, 0.7, 1]))
    def holds(shape: dict, data: st.DataObject, chunk: int, accuracy: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_triple(shape, Path(folder))
            drafters = [Path(folder) / role for role in roles]
            engine = torch_engine(
                Path(folder) / "t", *drafters, max_batch_size=SLOTS, prefill_chunk=chunk, branches=3
            )
            requests = data.draw(loads(engine.vocab_size, 60))
            expected = [alone(engine, request) for request in requests]
            rights = [[*request.prompt, *tokens] for request, tokens in zip(requests, expected, strict=True)]
            engine.drafter = Knowing(engine.drafter, rights, accuracy)
            if engine.vp_drafter is not None:
                engine.vp_drafter = Knowing(engine.vp_drafter, rights, accuracy)
            scheduler, policy = erratic_scheduler(engine, shape["seed"])
            serve(engine, scheduler, requests)
            plans.update(policy.plans)
            for request, tokens in zip(requests, expected, strict=True):
                sequence = request.sequence
                assert sequence is not None
                assert sequence.error is None
                found = sequence.generated
                if sequence.finish_reason is None:
                    assert sequence.cancelled
                    tokens = tokens[: len(found)]
                sampling = {key: value for key, value in request.options.items() if key != "max_tokens"}
                comparison = compare_outputs(engine, request.prompt, tokens, found, **sampling)
                verdicts[comparison.verdict] += 1
                assert comparison.verdict != "different", comparison
            load = scheduler.load()
            assert (load.slots_in_use, load.queue_depth) == (0, 0)
            totals = load.totals
            assert totals.requests == len(requests) == totals.finished + totals.cancelled

    holds()
    assert verdicts["equal"] > 100
    assert verdicts["tie"] <= 0.01 * sum(verdicts.values())
    assert {plan.drafts for plan in plans} >= {0, 1, 2}
    assert {plan.branches for plan in plans} == ({0} if roles == ["d"] else {0, 1, 2, 3})


@pytest.mark.parametrize("speculation", ["auto", "on", "off"])
@pytest.mark.parametrize("system", ["dflash", "d2sd"])
def test_lists_of_prompts(tmp_path: Path, system: str, speculation: Any) -> None:
    """`generate` of a list, and the scheduler's policies, with more prompts than slots."""
    triple = small_triple(tmp_path, max_batch_size=3, branches=2)
    engine = triple if system == "d2sd" else torch_engine(tmp_path / "t", tmp_path / "d", max_batch_size=3)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 9, size).tolist() for size in (1, 40, 3, 18, 7, 5, 60)]
    options = {"max_tokens": 20, "temperature": 0.7, "seed": 3}
    expected = [engine.generate(prompt, speculation=False, **options) for prompt in prompts]
    listed = engine.generate(prompts, speculation=speculation != "off", **options)
    for own, plain in zip(listed, expected, strict=True):
        assert (own.token_ids, own.text, own.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
        assert own.prompt_token_ids == plain.prompt_token_ids
    requests = [Request(prompt, options, 0) for prompt in prompts]
    serve(engine, engine.scheduler(speculation=speculation), requests)
    assert [r.sequence.generated for r in requests if r.sequence] == [plain.token_ids for plain in expected]
    drafted = sum(r.sequence.statistics.proposed_drafts for r in requests if r.sequence)
    assert (drafted > 0) == (speculation != "off")


def test_a_list_is_not_a_stream(tmp_path: Path) -> None:
    engine = small_triple(tmp_path)
    with pytest.raises(UsageError, match="takes one prompt, not a list"):
        engine.generate([[1], [2]], stream=True)  # type: ignore[call-overload]
    assert [len(row.token_ids) for row in engine.generate([[1]], max_tokens=2)] == [2]


def test_running_requests_go_on_while_a_prompt_is_prefilled(tmp_path: Path) -> None:
    """One chunk a step at most, shared in turns: a short prompt does not wait for a long one to be through."""
    engine = small_triple(tmp_path, max_batch_size=4, prefill_chunk=4)
    scheduler = engine.scheduler(speculation="on")
    sequences = {
        name: engine.sequence([1] * size, SamplingParams(max_tokens=60, ignore_eos=True))
        for name, size in {"running": 3, "long": 41, "short": 2}.items()
    }
    scheduler.submit(sequences["running"])
    scheduler.step()
    scheduler.submit(sequences["long"])
    scheduler.submit(sequences["short"])
    steps_of_long = 0
    while not sequences["long"].is_prefilled:
        before = {name: (len(s.generated), s.committed) for name, s in sequences.items()}
        scheduler.step()
        steps_of_long += 1
        assert len(sequences["running"].generated) > before["running"][0]
        through = sum(
            s.committed - before[name][1] for name, s in sequences.items() if not before[name][0] and not s.generated
        )
        assert through <= 4
        if steps_of_long == 3:
            assert sequences["short"].generated
    assert steps_of_long >= 11


def test_rows_are_kept_together_and_capacity_follows_the_longest(tmp_path: Path) -> None:
    """What is left of sixteen is moved to the first rows; the room a long sequence took is given up after it."""
    engine = small_triple(tmp_path, max_batch_size=4, max_seq_len=2000, prefill_chunk=512)
    batch = SlotBatch(engine.target, engine.drafter, engine.limits, engine.mask_token_id, engine.vp_drafter)
    scheduler, _ = erratic_scheduler(engine, 0, batch)
    sizes = {"first": (5, 3), "second": (9, 3), "third": (1500, 5), "last": (7, 150)}
    sequences = {
        name: engine.sequence([size % 9] * size, SamplingParams(max_tokens=tokens, ignore_eos=True))
        for name, (size, tokens) in sizes.items()
    }
    expected = {
        name: engine.generate(s.prompt, speculation=False, max_tokens=s.params.max_tokens, ignore_eos=True).token_ids
        for name, s in sequences.items()
    }
    for sequence in sequences.values():
        scheduler.submit(sequence)
    capacities, last_row = [], []
    while not scheduler.is_idle:
        scheduler.step()
        capacities.append(batch._target_cache.capacity)
        last_row += [row for row, sequence in batch.rows.items() if sequence is sequences["last"]]
    assert {name: s.generated for name, s in sequences.items()} == expected
    assert last_row[0] == 3
    assert last_row[-1] == 0
    assert max(capacities) > 1500
    assert capacities[-1] <= max(capacities) / 4


# -- the queue


def test_a_full_queue_refuses_at_once(tmp_path: Path) -> None:
    engine = small_triple(tmp_path, max_batch_size=2)
    scheduler = engine.scheduler(max_queue=3)
    sequences = [engine.sequence([1, 2], SamplingParams(max_tokens=5)) for _ in range(6)]
    for sequence in sequences[:5]:  # two for the slots, three to wait
        scheduler.submit(sequence)
    with pytest.raises(QueueFullError, match=r"3 requests wait already \(max_queue is 3\)"):
        scheduler.submit(sequences[5])
    scheduler.step()
    assert (scheduler.load().slots_in_use, scheduler.load().queue_depth) == (2, 3)
    while not scheduler.is_idle:
        scheduler.step()
    scheduler.submit(sequences[5])
    while not scheduler.is_idle:
        scheduler.step()
    assert len({tuple(sequence.generated) for sequence in sequences}) == 1
    totals = scheduler.load().totals
    assert (totals.requests, totals.refused, totals.finished) == (6, 1, 6)
    assert totals.generated_tokens == 30
    assert totals.prompt_tokens == 12
    assert totals.step_tokens == 24  # a prefill yields the first of each


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_a_queue_of_no_size_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UsageError, match="max_queue"):
        small_triple(tmp_path).scheduler(max_queue=value)


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'sometimes' must be auto, on or off"):
        small_triple(tmp_path).scheduler(speculation="sometimes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'off' must be True or False"):
        small_triple(tmp_path).generate([1, 2], speculation="off")  # type: ignore[call-overload]


def test_a_list_of_texts_is_no_prompt(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="must be one text, or token ids"):
        small_triple(tmp_path).sequence(["a", "b"], SamplingParams())  # type: ignore[arg-type]


# -- faults


class Faulty:
    """A session whose outputs for sequences at one position are not numbers, or which raises there."""

    def __init__(self, session: Any, position: int, output: str) -> None:
        self._session, self._position, self._output = session, position, output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, inputs: dict, outputs: Any, cache: Any) -> dict:
        positions = inputs["position_ids" if "position_ids" in inputs else "block_position_ids"]
        rows = np.flatnonzero(positions[:, 0] == self._position)
        if len(rows) and self._output == "raise":
            raise MemoryError("no more")
        results = self._session.run(inputs, outputs, cache)
        if len(rows) and self._output in results:
            wrong = results[self._output].copy()
            wrong[rows] = -1 if wrong.dtype == np.int64 else np.nan
            results = {**results, self._output: wrong}
            for buffer in cache.buffers:
                buffer[rows.tolist()] = float("nan")  # what such numbers leave behind
        return results


@pytest.mark.parametrize(
    ("role", "output", "options"),
    [
        ("target", "token_ids", {}),
        ("target", "logits", {"temperature": 0.5, "seed": 1}),
        ("drafter", "confidence", {}),
        ("vp_drafter", "confidence", {}),
    ],
)
def test_numbers_that_are_not_finite_end_that_request_alone(
    tmp_path: Path, role: str, output: str, options: dict
) -> None:
    """And leave nothing in the slot for the next one."""
    engine = small_triple(tmp_path, max_batch_size=2, branches=2)
    options = {"max_tokens": 12, "ignore_eos": True, **options}
    requests = [Request([size % 9] * size, options, 0) for size in (50, 3, 6, 4)]
    expected = [alone(engine, request) for request in requests]
    setattr(engine, role, Faulty(getattr(engine, role), 50, output))
    serve(engine, engine.scheduler(speculation="on"), requests)
    bad, *good = [request.sequence for request in requests]
    assert bad is not None
    assert isinstance(bad.error, BackendError)
    assert [sequence.generated for sequence in good if sequence] == expected[1:]


@pytest.mark.parametrize("role", ["target", "drafter", "vp_drafter"])
def test_a_pass_that_fails_ends_who_was_in_it(tmp_path: Path, role: str) -> None:
    engine = small_triple(tmp_path, max_batch_size=2, branches=2)
    requests = [
        Request([size % 9] * size, {"max_tokens": 30, "ignore_eos": True}, arrives)
        for size, arrives in ((50, 0), (3, 0), (6, 1), (4, 1))
    ]
    expected = [alone(engine, request) for request in requests]
    setattr(engine, role, Faulty(getattr(engine, role), 50, "raise"))
    scheduler = engine.scheduler(speculation="on")
    serve(engine, scheduler, requests)
    bad = [request.sequence for request in requests[:2] if request.sequence]
    assert isinstance(bad[0].error, BackendError)
    assert "MemoryError: no more" in str(bad[0].error)
    for request, tokens in zip(requests, expected, strict=True):
        assert request.sequence is not None
        assert request.sequence.error is not None or request.sequence.generated == tokens
    assert [request.sequence.error for request in requests[2:] if request.sequence] == [None, None]
    assert scheduler.load().totals.failed == sum(sequence.error is not None for sequence in bad)


class Overflowing:
    """An ONNX Runtime target in which one token leaves NaN in the cache, from its slot on."""

    TOKEN = 7

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, inputs: dict, outputs: Any, cache: Any) -> dict:
        results = self._session.run(inputs, outputs, cache)
        for row, place in np.argwhere(inputs["input_ids"] == self.TOKEN):
            start = int(inputs["context_len"][row])
            for buffer in cache.buffers:
                buffer[row, :, start + place : start + inputs["input_ids"].shape[1]] = np.nan
        return results


@pytest.mark.parametrize("moved", [False, True])
def test_nothing_is_left_in_a_slot_whatever_ended_its_request(bundle: Path, moved: bool) -> None:
    """A request with NaN in its cache that is cancelled, or moved to another row and then fails."""
    engine = dflash_trt.load(bundle, threads=1)
    engine.limits = replace(engine.limits, prefill_chunk=16)
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    good = Request([1, 2, 3], options, 0)
    expected = alone(engine, good)
    engine.target = Overflowing(engine.target)
    scheduler = engine.scheduler(speculation="off")
    first = engine.sequence([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
    bad = engine.sequence([Overflowing.TOKEN] + [5] * 60, SamplingParams(**options))
    for sequence in [first, bad] if moved else [bad]:
        scheduler.submit(sequence)
    while not scheduler.is_idle:
        scheduler.step()
        bad.cancelled = not moved
    assert isinstance(bad.error, BackendError) == moved
    requests = [good, Request([1, 2, 3], options, 0)]
    serve(engine, scheduler, requests)
    assert [request.sequence.generated for request in requests if request.sequence] == [expected, expected]
