"""Whole device steps do what the host loop does: the same tokens, by the same steps.

Here they run eagerly on a CPU, with the operators' references. That nothing in a step waits for the host is checked on
tensors without data (device "meta"), where whatever would read one fails.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import torch_engine
from hints import chance, hinted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makers import edit_tensors, make_drafter, make_target
from test_lossless_d2sd import SURE, triples, write_triple
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trt.backends.torch import TorchSession
from dflash_trt.errors import BackendError, UsageError
from dflash_trt.runtime import device_decode, device_step
from dflash_trt.runtime.decode import DecodeBatch
from dflash_trt.runtime.device_decode import DeviceDecodeBatch
from dflash_trt.runtime.device_step import DeviceStep
from dflash_trt.runtime.engine import Engine, Generation
from dflash_trt.runtime.sampling import SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples" / "tiny"
SYSTEMS = ("dflash", "dflare", "d2sd", "d2sd, longer")


class HintedModule(torch.nn.Module):
    """A drafter module whose drafts and confidences are `hints.Hinted`'s, whoever runs it."""

    def __init__(
        self, module: torch.nn.Module, rights: Sequence[list[int]], accuracy: float, salt: str, confidences: Any = ()
    ) -> None:
        super().__init__()
        self.module, self.rights, self.accuracy, self.salt = module, rights, accuracy, salt
        self.confidences = confidences

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, confidence, *rest = self.module(*inputs)
        ids, confidence = ids.clone(), confidence.clone()
        for row, (block, positions) in enumerate(zip(inputs[3].tolist(), inputs[4].tolist(), strict=True)):
            anchor = positions[0]
            starts = [place for place, position in enumerate(positions) if position == anchor]
            for start, end in zip(starts, [*starts[1:], len(block)], strict=True):
                own = block[start:end]
                drafts = hinted(ids[row, start:end].tolist(), own, anchor, self.rights[row], self.accuracy, self.salt)
                ids[row, start:end] = torch.tensor(drafts)
                for place in range(start, end) if self.confidences else ():
                    pick = chance("c", self.salt, anchor, tuple(own), place - start)
                    confidence[row, place] = self.confidences[int(pick * len(self.confidences))]
        return (ids, confidence, *rest)


def hint(
    engine: Engine, prompts: Sequence[list[int]], accuracy: Sequence[float] = (0.6, 0.6), confidences: Any = ()
) -> None:
    """Hints the drafters, one prompt a row, with what the target generates to the end of the capacity."""
    rights = [
        [*prompt, *engine.generate(prompt, speculation=False, max_tokens=1000, ignore_eos=True).token_ids]
        for prompt in prompts
    ]
    for name, share in zip(("drafter", "vp_drafter"), accuracy, strict=True):
        session = getattr(engine, name)
        if session is not None:
            module = session.module
            module = module.module if isinstance(module, HintedModule) else module
            session.module = HintedModule(module, rights, share, name, confidences)


def engine_of(folder: Path, system: str, **options: Any) -> Engine:
    """The same small random engine each time it is asked."""
    if not (folder / "t").exists():
        make_target(folder / "t", tie=False, vocab_size=9, num_hidden_layers=2, seed=4)
        for name, size, kind, seed in (
            ("dflash", 5, "dflash", 6), ("dflare", 5, "dflare", 6), ("vp", 5, "dflash", 7), ("longer", 8, "dflash", 7),
        ):  # fmt: skip
            make_drafter(folder / name, folder / "t", [0, 1], size, layers=1, seed=seed, kind=kind)  # type: ignore[arg-type]
    own = {"d2sd": ["dflash", "vp"], "d2sd, longer": ["dflash", "longer"]}.get(system, [system])
    return torch_engine(folder / "t", *(folder / name for name in own), **{"max_seq_len": 64, **options})


def prompts_of(engine: Engine, *sizes: int) -> list[list[int]]:
    random = np.random.default_rng(len(sizes))
    return [random.integers(0, engine.vocab_size, size).tolist() for size in sizes]


@dataclass
class Seen:
    """Acceptance lengths of steps, sequences by why and how they ended, and numbers of rows."""

    lengths: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)


def both(engine: Engine, generate: Callable[[Engine], list[Generation]]) -> list[list[Generation]]:
    """The host loop's outputs, and the device steps'."""
    outputs = []
    for device in (False, True):
        engine.device_step = device
        outputs.append(generate(engine))
    return outputs


def check(engine: Engine, prompts: list[list[int]], seen: Seen | None = None, **request: Any) -> list[Generation]:
    """One batch by both loops; returns the device's outputs."""
    host, device = both(engine, lambda own: own.generate_batch(prompts, **request))
    for expected, output in zip(host, device, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.text == expected.text
        assert output.finish_reason == expected.finish_reason
        own, other = output.statistics, expected.statistics
        assert own.acceptance_lengths == other.acceptance_lengths
        assert own.accepted_drafts == other.accepted_drafts
        assert own.target_passes == other.target_passes
        if engine.vp_drafter is None:
            assert own.proposed_drafts == other.proposed_drafts
        else:  # equal siblings count each
            assert own.proposed_drafts >= other.proposed_drafts
        if seen is not None:
            seen.lengths.update(own.acceptance_lengths)
            cut = len(output.prompt_token_ids) + len(output.token_ids) == engine.limits.max_seq_len
            seen.ends["capacity" if cut else output.finish_reason] += 1
    if seen is not None:
        seen.rows[len({len(output.statistics.acceptance_lengths) for output in device})] += 1
    return device


# -- the property


def test_device_steps_are_those_of_the_host_loop() -> None:
    """On random triples of every shape, and it was worth something: every acceptance length, end and mixture of rows.

    Without branches the drafter alone is at work, DFlash or DFlare.
    """
    seen, used = Seen(), Counter[int]()

    @settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=triples(),
        sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
        tokens=st.sampled_from([1000, 24]),
        branches=st.integers(0, 4),
        accuracy=st.tuples(st.sampled_from([0.7, 0.9]), st.sampled_from([0.6, 0.9])),
        confidences=st.sampled_from([(), SURE]),
        stops=st.sampled_from([(), (1,)]),
    )
    def holds(shape, sizes, tokens, branches, accuracy, confidences, stops):
        with TemporaryDirectory() as name:
            folder = Path(name)
            write_triple(shape, folder)
            engine = torch_engine(
                folder / "t", folder / "d", folder / "v", branches=4, max_seq_len=48, max_batch_size=4, prefill_chunk=9
            )
            prompts = prompts_of(engine, *sizes)
            hint(engine, prompts, accuracy, confidences)
            check(engine, prompts, seen, branches=branches, max_tokens=tokens, stop_token_ids=stops)
            used[branches] += 1

    holds()
    assert set(seen.lengths) >= {*range(1, 10)}, seen
    assert set(seen.ends) == {"capacity", "stop", "length"}, seen
    assert set(seen.rows) >= {1, 2, 3}, seen
    assert set(used) == {*range(5)}, used


@pytest.mark.parametrize("folders", [("dflash",), ("dflare",), ("dflash", "vp_drafter")], ids="-".join)
def test_a_trained_pair(folders: tuple[str, ...]) -> None:
    lines = (EXAMPLES / "heldout.jsonl").read_text().splitlines()
    engine = torch_engine(
        EXAMPLES / "target", *(EXAMPLES / name for name in folders), max_seq_len=160, max_batch_size=2, prefill_chunk=64
    )
    prompts = [engine.tokenizer.encode(json.loads(line)["prompt"]) for line in lines[:2]]
    seen = Seen()
    check(engine, prompts, seen, max_tokens=32, ignore_eos=True)
    assert len(seen.lengths) >= 3, seen


# -- ends of sequences


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_end_of_the_capacity(tmp_path: Path, system: str) -> None:
    """Prompt and output reach max_seq_len exactly, in mid-block too; prompts at the limit leave room for one token."""
    engine = engine_of(tmp_path, system, max_seq_len=20, max_batch_size=3)
    for room in (1, 2, 3, 5, 6, 9):
        prompts = prompts_of(engine, 20 - room, 20 - room // 2 - 1, 1)
        hint(engine, prompts, (0.7, 0.9))
        for output in check(engine, prompts, max_tokens=1000):
            assert output.finish_reason == "length"
            assert len(output.prompt_token_ids) + len(output.token_ids) == 20


class Bounded(TorchSession):
    """Looks at what a pass writes: it must fit the cache, its positions the rotary tables."""

    def __init__(self, session: TorchSession, capacity: int) -> None:
        super().__init__(session.module, session.graph)
        self.capacity, self.furthest = capacity, 0

    def forward(self, inputs: Any, cache: Any) -> dict[str, torch.Tensor]:
        written = inputs["visibility"].shape[1]
        written += inputs["context_features"].shape[1] if "context_features" in inputs else 0
        self.furthest = max(self.furthest, int(inputs["context_len"].max()) + written)
        assert self.furthest <= cache.capacity == self.capacity
        positions = inputs["position_ids" if "position_ids" in inputs else "block_position_ids"]
        assert 0 <= int(positions.min()) <= int(positions.max()) < self.capacity
        return super().forward(inputs, cache)


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_pass_writes_beyond_its_cache(tmp_path: Path, system: str) -> None:
    """Nor do those of rows that ended at the last position while others went on."""
    engine = engine_of(tmp_path, system, max_seq_len=20, max_batch_size=2)
    prompts = prompts_of(engine, 14, 2)
    hint(engine, prompts, (1.0, 1.0))
    engine.device_step = True
    capacity = engine.limits.capacity
    for name in ("target", "drafter", "vp_drafter"):
        if getattr(engine, name) is not None:
            setattr(engine, name, Bounded(getattr(engine, name), capacity))
    outputs = engine.generate_batch(prompts, max_tokens=1000)
    assert all(len(output.prompt_token_ids) + len(output.token_ids) == 20 for output in outputs)
    assert len(outputs[0].statistics.acceptance_lengths) < len(outputs[1].statistics.acceptance_lengths)
    assert engine.target.furthest > 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("system", SYSTEMS)
def test_stop_tokens_and_strings_in_mid_block(tmp_path: Path, system: str) -> None:
    engine = engine_of(tmp_path, system, max_batch_size=3)
    prompts = prompts_of(engine, 3, 9, 17)
    hint(engine, prompts, (0.9, 0.9))
    wholes, in_block = engine.generate_batch(prompts, max_tokens=40), 0
    for stop in {*wholes[0].token_ids[3:]}:
        for output, whole in zip(check(engine, prompts, max_tokens=40, stop_token_ids=[stop]), wholes, strict=True):
            ends = itertools.accumulate(whole.statistics.acceptance_lengths, initial=1)
            in_block += output.finish_reason == "stop" and len(output.token_ids) not in ends
    assert in_block >= 3
    words = wholes[0].text.split()
    (cut,) = check(engine, prompts[:1], max_tokens=40, stop=" ".join(words[5:8]))
    assert cut.finish_reason == "stop"


@pytest.mark.parametrize("system", SYSTEMS)
def test_few_tokens(tmp_path: Path, system: str) -> None:
    """The first token may be the last, of one row or of all."""
    engine = engine_of(tmp_path, system, max_batch_size=2)
    prompts = prompts_of(engine, 4, 11)
    hint(engine, prompts)
    for tokens in range(1, 8):
        check(engine, prompts, max_tokens=tokens)
    first = engine.generate(prompts[0], max_tokens=1).token_ids
    for output in check(engine, prompts, max_tokens=20, stop_token_ids=first)[:1]:
        assert output.token_ids == first


# -- one batch after the other, and what a step leaves behind


@pytest.mark.parametrize("system", SYSTEMS)
def test_slots_serve_one_request_after_the_other(tmp_path: Path, system: str) -> None:
    """Of any number of rows, with the caches and the states the last one left; a drafter's cache is as in new slots."""
    engine, fresh = (engine_of(tmp_path, system, max_batch_size=3) for _ in range(2))
    engine.device_step = fresh.device_step = True
    for sizes in ((3, 20, 9), (30,), (1, 2), (25,)):
        prompts = prompts_of(fresh, *sizes)
        fresh._free_slots.clear()
        outputs, expected = ([*own.generate_batch(prompts, max_tokens=15)] for own in (engine, fresh))
        for output, other in zip(outputs, expected, strict=True):
            assert output.token_ids == other.token_ids
            assert output.statistics.acceptance_lengths == other.statistics.acceptance_lengths
        (used,), (new,) = engine._free_slots, fresh._free_slots
        for cache, other_cache in zip(used._caches, new._caches, strict=True):
            for row, prompt in enumerate(prompts):
                for buffer, other_buffer in zip(cache.buffers, other_cache.buffers, strict=True):
                    own = (buffer[row, :, : len(prompt)], other_buffer[row, :, : len(prompt)])
                    torch.testing.assert_close(*own, atol=1e-4, rtol=1e-4)


def test_streams_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    """Each has slots of its own; those of a stream given up serve the next."""
    engine = engine_of(tmp_path, "d2sd")
    engine.device_step = True
    prompts = prompts_of(engine, 4, 9)
    expected = [engine.generate(prompt, max_tokens=20).token_ids for prompt in prompts]
    (only,) = engine._free_slots
    never_begun = engine.generate(prompts[1], stream=True, max_tokens=20)
    given_up = engine.generate(prompts[1], stream=True, max_tokens=20)
    next(given_up)
    assert not engine._free_slots
    given_up.close()
    never_begun.close()
    assert engine._free_slots == [only]
    streams = [engine.generate(prompt, stream=True, max_tokens=20) for prompt in prompts]
    tokens: list[list[int]] = [[], []]
    for events in itertools.zip_longest(*streams):
        for own, event in zip(tokens, events, strict=True):
            own += event.token_ids if event else []
    assert tokens == expected
    assert len(engine._free_slots) == 2


class Poisoned(DeviceDecodeBatch):
    """Ruins every slot behind those in use after each step."""

    def step(self) -> None:
        super().step()
        step = self._device_step
        target, *drafters = step.caches
        pending = step.state.feature_len
        for row in range(len(self.sequences)):
            committed = int(step.state.context_len[row])
            for cache, valid in [(target, committed), *((own, committed - int(pending[row])) for own in drafters)]:
                for buffer in cache.buffers:
                    buffer[row, :, valid:] = 1e4


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_rejected_rows_leave_in_the_caches_never_matters(
    tmp_path: Path, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tmp_path, system, max_batch_size=2)
    prompts = prompts_of(engine, 3, 12)
    hint(engine, prompts)
    monkeypatch.setattr(device_decode, "DeviceDecodeBatch", Poisoned)
    check(engine, prompts, max_tokens=30)


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_that_are_not_active_keep_what_they_have(tmp_path: Path, system: str) -> None:
    """Their state, and their committed slots; the others go on as before."""
    engine = engine_of(tmp_path, system, max_batch_size=3)
    prompts = prompts_of(engine, 5, 12, 8)
    hint(engine, prompts)
    engine.device_step = True
    sequences = [engine._sequence(prompt, decode_params()) for prompt in prompts]
    batch = engine._batch(sequences, engine._drafting(True, None))
    assert isinstance(batch, DeviceDecodeBatch)
    batch.prefill()
    batch.step()
    step, row = batch._device_step, 1
    step.stop([row])
    committed = int(step.state.context_len[row])
    kept = [buffer[row, :, :committed].clone() for buffer in step.caches[0].buffers]
    written = committed - int(step.state.feature_len[row])
    kept += [buffer[row, :, :written].clone() for cache in step.caches[1:] for buffer in cache.buffers]
    names = ("context_len", "anchor", "remaining", "features", "feature_len")
    before = [getattr(step.state, name)[row].clone() for name in names]
    others = step.state.context_len.clone()
    for _ in range(3):
        assert step.run()[row].tokens == []
    assert all(torch.equal(getattr(step.state, n)[row], old) for n, old in zip(names, before, strict=True))
    now = [buffer[row, :, :committed] for buffer in step.caches[0].buffers]
    now += [buffer[row, :, :written] for cache in step.caches[1:] for buffer in cache.buffers]
    assert all(torch.equal(new, old) for new, old in zip(now, kept, strict=True))
    assert (step.state.context_len > others).tolist() == [True, False, True]


def decode_params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, **changes})


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_are_active_while_their_sequences_are(tmp_path: Path, system: str) -> None:
    """Whatever ended them: a stop token, the host says; a limit, the device knows by itself."""
    engine = engine_of(tmp_path, system, max_batch_size=3)
    prompts = prompts_of(engine, 5, 12, 8)
    plain = engine.generate(prompts[0], max_tokens=60)
    hint(engine, prompts)
    engine.device_step = True
    wanted = (decode_params(stop_token_ids=plain.token_ids[9:10]), decode_params(max_tokens=12), decode_params())
    sequences = [engine._sequence(prompt, params) for prompt, params in zip(prompts, wanted, strict=True)]
    batch = engine._batch(sequences, engine._drafting(True, None))
    assert isinstance(batch, DeviceDecodeBatch)
    batch.prefill()
    step, reasons = batch._device_step, set()
    while batch.active:
        batch.step()
        reasons |= {sequence.finish_reason for sequence in sequences}
        assert step.state.active.nonzero()[:, 0].tolist() == batch.active
    assert reasons == {None, "stop", "length"}
    step.load([5, 12, 8], [1, 2, 3], [3, 9, 0], [True, True, False])
    for _ in range(9):
        step.advance()
    assert not step.state.active.any()
    assert (step.state.context_len <= torch.tensor([5 + 4, 12 + 10, 8])).all()


@pytest.mark.parametrize("longest", [3, 4, 100])
def test_a_prompt_in_passes_the_session_can_take(tmp_path: Path, longest: int) -> None:
    """Kernels take fewer tokens at once than a bundle's chunk may have."""
    engine = engine_of(tmp_path, "d2sd", prefill_chunk=6)
    prompt = prompts_of(engine, 13)[0]
    expected = engine.generate(prompt, max_tokens=10).token_ids
    engine.target.longest_pass = longest
    for output in both(engine, lambda own: [own.generate(prompt, max_tokens=10)]):
        assert output[0].token_ids == expected
        chunks = -(-13 // min(longest, 6))
        assert output[0].statistics.target_passes == chunks + output[0].statistics.steps


# -- errors


def nan_weights(folder: Path, name: str, tensor: str) -> None:
    edit_tensors(folder / name, **{tensor.replace(".", "__"): np.full(32, np.nan, np.float32)})


@pytest.mark.parametrize(
    ("name", "message"), [("dflash", "drafter graph: a confidence"), ("vp", "drafter graph: a confidence")]
)
def test_a_confidence_that_is_not_finite(tmp_path: Path, name: str, message: str) -> None:
    engine_of(tmp_path, "d2sd")
    nan_weights(tmp_path, name, "norm.weight")
    engine = engine_of(tmp_path, "d2sd")
    for device in (False, True):
        engine.device_step = device
        with pytest.raises(BackendError, match=message):
            engine.generate([1, 2, 3], max_tokens=10)
        for tokens in (1, 2):  # nothing is drafted for the last one
            engine.generate([1, 2, 3], max_tokens=tokens)
        if name == "vp":
            engine.generate([1, 2, 3], max_tokens=10, branches=0)


@pytest.mark.parametrize("system", SYSTEMS)
def test_logits_that_are_not_finite(tmp_path: Path, system: str) -> None:
    """From some position on: the first token is fine."""
    engine = engine_of(tmp_path, system)
    (prompt,) = prompts_of(engine, 6)
    hint(engine, [prompt])
    for cut in (6, 7, 9, 13):
        rope = engine.target.module.rope_cos  # type: ignore[attr-defined]
        kept = rope.clone()
        rope[cut:] = np.nan
        outcomes = []
        for device in (False, True):
            engine.device_step = device
            with pytest.raises(BackendError, match="target graph: the target's logits are NaN or infinite") as error:
                engine.generate(prompt, max_tokens=20)
            outcomes.append(str(error.value))
        assert outcomes[0] == outcomes[1]
        rope.copy_(kept)


def test_slots_of_a_failed_request_are_not_used_again(tmp_path: Path) -> None:
    """What was not finite would stay in their caches."""
    engine = engine_of(tmp_path, "dflash")
    engine.device_step = True
    expected = engine.generate([1, 2, 3], max_tokens=10).token_ids
    rope = engine.target.module.rope_cos  # type: ignore[attr-defined]
    kept = rope.clone()
    rope[5:] = np.nan
    with pytest.raises(BackendError):
        engine.generate([1, 2, 3], max_tokens=10)
    assert not engine._free_slots
    rope.copy_(kept)
    assert engine.generate([1, 2, 3], max_tokens=10).token_ids == expected


@pytest.mark.parametrize(("vp", "branches"), [(False, 1), (True, 0), (True, 5), (True, -1)])
def test_branches_that_do_not_fit(tmp_path: Path, vp: bool, branches: int) -> None:
    engine: Any = engine_of(tmp_path, "d2sd")
    with pytest.raises(ValueError, match="branches of at most 4"):
        DeviceStep(
            engine.target, engine.drafter, engine.limits, 0, 1, vp_drafter=engine.vp_drafter if vp else None,
            branches=branches,
        )  # fmt: skip


# -- which requests it serves


@pytest.mark.parametrize(
    ("request_", "device"),
    [
        ({}, True),
        ({"branches": 2}, True),
        ({"branches": 0}, True),
        ({"stop": "t1 t2"}, True),
        ({"speculation": False}, False),
        ({"branches": "auto"}, False),
        ({"temperature": 0.5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"trace": True}, False),
    ],
    ids=str,
)
def test_what_needs_the_host_runs_in_the_host_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any], device: bool
) -> None:
    from test_lossless_d2sd import BALANCED

    engine = engine_of(tmp_path, "d2sd", costs=BALANCED)
    assert not engine.device_step  # on a CPU it has to be asked for
    used: list[type] = []
    for kind in (DecodeBatch, DeviceDecodeBatch):
        step = kind._step
        monkeypatch.setattr(kind, "_step", lambda self, rows, step=step: (used.append(type(self)), step(self, rows))[1])
    engine.device_step = True
    output = engine.generate([1, 2, 3], max_tokens=6, seed=1, **request_)
    assert set(used) == {DeviceDecodeBatch if device else DecodeBatch}
    engine.device_step = False
    assert output.token_ids == engine.generate([1, 2, 3], max_tokens=6, seed=1, **request_).token_ids


def test_sessions_that_cannot(tmp_path: Path) -> None:
    own = engine_of(tmp_path, "dflash")
    rest = {"mask_token_id": 8, "eos_token_ids": (), "vocab_size": 9}
    other: Any = SimpleNamespace(whole_steps=None)
    with pytest.raises(UsageError, match="device_step: needs sessions on a device"):
        Engine(other, own.drafter, own.tokenizer, own.limits, device_step=True, **rest)
    assert not Engine(other, own.drafter, own.tokenizer, own.limits, **rest).device_step
    assert Engine(own.target, own.drafter, own.tokenizer, own.limits, device_step=True, **rest).device_step


# -- capture


class StandIn:
    """In place of a CUDA graph: the step runs as often as to capture it, and then at each replay."""

    def __init__(self, step: Callable[[], None], pool: Any) -> None:
        for _ in range(4):
            step()
        self._step, self._pool, self.replays = step, pool, 0

    def replay(self) -> None:
        self.replays += 1
        self._step()

    def pool(self) -> Any:
        return self if self._pool is None else self._pool


def test_each_step_is_captured_once_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may come of the runs of the capture; all graphs share their memory."""
    engine, expected = (engine_of(tmp_path, "d2sd", max_batch_size=2) for _ in range(2))
    graphs: list[StandIn] = []

    def captured(step: Callable[[], None], device: str, pool: Any) -> StandIn:
        graphs.append(StandIn(step, pool))
        return graphs[-1]

    monkeypatch.setattr(device_step, "captured", captured)
    for session in engine.sessions.values():
        session.whole_steps = True
    engine.device_step = True
    steps = 0
    for sizes, branches in (((3,), 4), ((8,), 4), ((3, 8), 4), ((9,), 4), ((9,), 1), ((4, 4), 4)):
        prompts = prompts_of(engine, *sizes)
        outputs = engine.generate_batch(prompts, max_tokens=15, branches=branches)
        for output, plain in zip(outputs, expected.generate_batch(prompts, max_tokens=15), strict=True):
            assert output.token_ids == plain.token_ids
        steps += max(output.statistics.steps for output in outputs)
    assert len(graphs) == 3
    assert sum(graph.replays for graph in graphs) == steps
    assert [graph.pool() for graph in graphs] == [graphs[0]] * 3


def test_a_capture_leaves_no_row_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = engine_of(tmp_path, "dflash")
    monkeypatch.setattr(device_step, "captured", lambda step, device, pool: StandIn(step, pool))
    step = DeviceStep(engine.target, engine.drafter, engine.limits, engine.mask_token_id, 2)
    step.load([3, 4], [1, 1], [9, 9], [True, True])
    step.capture()
    assert not step.state.active.any()
    assert step.state.context_len.tolist() == [3, 4]


class OnDevice(TorchDispatchMode):
    """Fails where an operation takes or gives a tensor that is not on the device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.operations = device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != self.device:
                raise AssertionError(f"{func} with a tensor on {tensor.device}")
        self.operations += 1
        return result


class NothingFromTheHost(TorchFunctionMode):
    """Fails where values of the host become a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy)
        return func(*args, **(kwargs or {}))


def without_data(engine: Engine, batch: int, branches: int) -> DeviceStep:
    """A step all of whose tensors are on the device "meta", which has no memory."""
    sessions: dict[str, Any] = {
        role: TorchSession(copy.deepcopy(session.module), session.graph, "meta")  # type: ignore[attr-defined]
        for role, session in engine.sessions.items()
        if branches or role != "vp_drafter"
    }
    return DeviceStep(
        sessions["target"], sessions["drafter"], engine.limits, engine.mask_token_id, batch,
        vp_drafter=sessions.get("vp_drafter"), branches=branches,
    )  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_never_waits_for_the_host(tmp_path: Path, system: str) -> None:
    """No operation reads a value, has a shape that depends on one, or takes a tensor from the host."""
    engine = engine_of(tmp_path, system)
    for branches in (0, 1, 4) if engine.vp_drafter else (0,):
        step = without_data(engine, 3, branches)
        with OnDevice("meta") as mode, NothingFromTheHost():
            step.step()
        assert mode.operations > 100
        assert step.state.outcome.shape == (3, 3 + step.limits.longest_path)


@pytest.mark.parametrize(
    "wait",
    [
        lambda state: state.anchor[0].item(),
        lambda state: state.anchor.tolist(),
        lambda state: bool(state.active.any()),
        lambda state: state.anchor[state.active],
        lambda state: state.active.nonzero(),
        lambda state: state.anchor + torch.arange(3),
        lambda state: state.anchor.gather(0, torch.tensor([1])),
        lambda state: state.anchor.copy_(torch.tensor([1, 2, 3])),
        lambda state: torch.tensor([1, 2, 3], device="meta"),
    ],
    ids=["item", "tolist", "branch", "mask", "nonzero", "host tensor", "host index", "host copy", "host list"],
)
def test_a_step_that_would_wait_is_found(tmp_path: Path, wait: Callable[[Any], Any]) -> None:
    state = without_data(engine_of(tmp_path, "dflash"), 3, 0).state
    with torch.inference_mode(), pytest.raises((RuntimeError, AssertionError)):  # noqa: SIM117
        with OnDevice("meta"), NothingFromTheHost():
            wait(state)
