"""Slots of whole device steps: one batch after the other, and what a step leaves behind."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime.device_steps import SYSTEMS, both, check, engine_of, hint
from runtime.triples import prompts_of

from dflash_trt.errors import BackendError
from dflash_trt.runtime import device_decode
from dflash_trt.runtime.device_decode import DeviceDecodeBatch
from dflash_trt.runtime.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("fixed_rows")


@pytest.mark.parametrize("system", SYSTEMS)
def test_slots_serve_one_request_after_the_other(tmp_path: Path, system: str) -> None:
    """Of any number of rows, with the caches and the states the last one left; a drafter's cache is as in new slots."""
    engine, fresh = (engine_of(tmp_path, system, max_batch_size=3) for _ in range(2))
    engine.device_step = fresh.device_step = True
    for sizes in ((3, 20, 9), (30,), (1, 2), (25,)):
        prompts = prompts_of(fresh, *sizes)
        fresh._free_slots.clear()
        outputs, expected = ([*own.generate(prompts, max_tokens=15)] for own in (engine, fresh))
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
    sequences = [engine.sequence(prompt, decode_params()) for prompt in prompts]
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
    sequences = [engine.sequence(prompt, params) for prompt, params in zip(prompts, wanted, strict=True)]
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
