"""Sessions over engines, on engines that record what they are told and compute on the memory they are told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from backends.engine_sessions import (
    LIMITS,
    ROLES,
    SYSTEMS,
    VOCAB,
    outcomes,
    prompts_for,
    sessions_of,
    small,
    trained,
)
from backends.fake_engine import FakeExecution, executions, over_fakes
from export.small_pair import random_inputs

from dflash_trt.backends.base import DeviceSession
from dflash_trt.backends.engine_session import EngineSession
from dflash_trt.backends.profiles import profiles
from dflash_trt.errors import BackendError
from dflash_trt.export.contract import Role
from dflash_trt.runtime import device_step
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.sampling import SamplingParams

SAMPLING = ({}, {"temperature": 0.9, "seed": 7, "top_p": 0.95})


# -- the same as torch


@pytest.mark.parametrize("role", ROLES)
def test_passes_give_what_torch_gives(role: Role) -> None:
    found, expected = small(role)
    caches = [session.new_cache(2, LIMITS.capacity) for session in (found, expected)]
    names, context = [spec.name for spec in found.graph.outputs], 0
    for seed, rows in enumerate((4, 1, 3)):
        inputs = random_inputs(found.graph, seed, context, VOCAB, 2, rows)
        one, other = (s.run(inputs, names, c) for s, c in zip((found, expected), caches, strict=True))
        for name in names:
            np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), err_msg=name)
        context += rows
    for buffers in zip(*(cache.buffers for cache in caches), strict=True):
        torch.testing.assert_close(*buffers, rtol=0, atol=0)


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
@pytest.mark.parametrize("sizes", [(48,), (48, 7, 30)], ids=["alone", "batch"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_whole_decodes_are_those_of_torch(system: str, sizes: tuple[int, ...], sampling: dict[str, Any]) -> None:
    """Token for token and step for step, with and without speculation."""
    reference = trained(system)
    engine = over_fakes(reference)
    prompts = prompts_for(reference, *sizes)
    options = {"max_tokens": 24, "ignore_eos": True, **sampling}
    expected = outcomes(reference.generate(prompts, **options))
    assert outcomes(engine.generate(prompts, **options)) == expected
    assert len({length for _, lengths, _ in expected for length in lengths}) > 1
    plain = engine.generate(prompts[0], speculation=False, **options)
    assert plain.token_ids == expected[0][0]


@pytest.mark.parametrize("sizes", [(48,), (48, 7, 30)], ids=["alone", "batch"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_whole_steps_are_those_of_the_host_loop(system: str, sizes: tuple[int, ...]) -> None:
    """Nothing in a step reads what a later pass of the same session has overwritten."""
    reference = trained(system)
    engine = over_fakes(reference)
    prompts = prompts_for(reference, *sizes)
    expected = outcomes(reference.generate(prompts, max_tokens=24))
    engine.device_step = True
    assert outcomes(engine.generate(prompts, max_tokens=24)) == expected
    assert outcomes(engine.generate(prompts, max_tokens=24)) == expected


@pytest.mark.parametrize("branches", [0, 1, 2])
def test_branches_at_each_request(branches: int) -> None:
    reference = trained("d2sd")
    engine = over_fakes(reference)
    prompts = prompts_for(reference, 20, 33)
    options = {"max_tokens": 20, "branches": branches}
    expected = outcomes(reference.generate(prompts, **options))
    for device in (False, True):
        engine.device_step = device
        assert outcomes(engine.generate(prompts, **options)) == expected


def test_the_end_of_the_capacity() -> None:
    """Padded passes near the last slot stay in their caches, in every row: the fake would write beyond its memory."""
    reference = trained("d2sd", max_seq_len=52)
    engine = over_fakes(reference)
    prompts = prompts_for(reference, 51, 48, 20)
    expected = outcomes(reference.generate(prompts, max_tokens=100, ignore_eos=True))
    for device in (False, True):
        engine.device_step = device
        assert outcomes(engine.generate(prompts, max_tokens=100, ignore_eos=True)) == expected
    for session in sessions_of(engine):
        names = [spec.name for spec in session.graph.inputs]
        for execution in executions(session):
            for shapes in (own.shapes for own in execution.passes):
                written = shapes["visibility"][1]
                written += shapes["context_features"][1] if "context_features" in names else 0
                assert written <= engine.limits.step_slots or written <= engine.limits.prefill_chunk + 1


# -- what engines are told


def decode_passes(session: EngineSession) -> list[Any]:
    """Those of the profile for steps, in order."""
    return [own for execution in executions(session) if execution.profile.name == "decode" for own in execution.passes]


@pytest.mark.parametrize("device", [False, True], ids=["host loop", "device steps"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_cache_is_past_and_present_at_one_address(system: str, device: bool) -> None:
    engine = over_fakes(trained(system))
    engine.device_step = device
    engine.generate(prompts_for(engine, 48, 7), max_tokens=12)
    for session in sessions_of(engine):
        pairs = list(zip(session.graph.past(), session.graph.present(), strict=True))
        passes = [own for execution in executions(session) for own in execution.passes]
        assert len(passes) > 3
        for own in passes:
            assert [own.addresses[present.name] for _, present in pairs] == [own.addresses[p.name] for p, _ in pairs]
            assert len({own.addresses[past.name] for past, _ in pairs}) == len(pairs)


@pytest.mark.parametrize("device", [False, True], ids=["host loop", "device steps"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_steps_change_no_address_and_no_shape(system: str, device: bool) -> None:
    """After the first step an engine is told nothing: the sizes are the full ones, also of features."""
    engine = over_fakes(trained(system))
    engine.device_step = device
    prompts = prompts_for(engine, 48, 7)
    sequences = [engine.sequence(prompt, SamplingParams(max_tokens=24, ignore_eos=True)) for prompt in prompts]
    batch = engine._batch(sequences, engine._drafting(True, None))
    batch.prefill()
    batch.step()
    told = [len(execution.told) for session in sessions_of(engine) for execution in executions(session)]
    ran = [len(decode_passes(session)) for session in sessions_of(engine)]
    while batch.active:
        batch.step()
    assert [len(x.told) for session in sessions_of(engine) for x in executions(session)] == told
    for session, before in zip(sessions_of(engine), ran, strict=True):
        later = decode_passes(session)[before - 1 :]
        assert len(later) > 3
        assert all(own == later[0] for own in later)
    static = [spec.name for spec in (*engine.target.graph.inputs, *engine.target.graph.outputs)]
    everywhere = {
        tuple(own.addresses[name] for name in static)
        for execution in executions(sessions_of(engine)[0])
        for own in execution.passes
    }
    assert len(everywhere) == 1  # of all profiles


def test_features_that_wait_have_a_size_of_their_own() -> None:
    """A VP drafter that is asked now and then: two numbers of rows, whatever is pending."""
    costs = PassCosts(draft=((1, 1.0), (64, 1.0)), redraft=((1, 0.2), (64, 0.2)), verify=((1, 1.0), (64, 1.0)))
    reference = trained("d2sd", max_batch_size=1, costs=costs)
    engine = over_fakes(reference)
    (prompt,) = prompts_for(engine, 20)
    output = engine.generate(prompt, branches="auto", max_tokens=70, ignore_eos=True)
    assert output.token_ids == reference.generate(prompt, branches="auto", max_tokens=70, ignore_eos=True).token_ids
    limits, vp = engine.limits, sessions_of(engine)[2]
    drafts = [own.shapes for own in decode_passes(vp) if own.shapes["block_ids"][1] > 1]  # others inject a prompt
    assert {shapes["context_features"][1] for shapes in drafts} == {limits.longest_path, limits.longest_pending}


@pytest.mark.parametrize("role", ROLES)
def test_shapes_are_told_when_they_change(role: Role) -> None:
    session, _ = small(role)
    cache = session.new_cache(2, LIMITS.capacity)
    (fake, *_) = executions(session)
    inputs = random_inputs(session.graph, 0, 0, VOCAB, 2, 3)
    session.run(inputs, [], cache)
    fake.told.clear()
    session.run(inputs, [], cache)
    assert fake.told == []
    session.run(random_inputs(session.graph, 1, 3, VOCAB, 2, 4), [], cache)
    changed = "N" if role == "drafter" else "Q"
    assert [name for name, _ in fake.told] == [spec.name for spec in session.graph.inputs if changed in spec.shape]
    fake.told.clear()
    session.run(random_inputs(session.graph, 1, 3, VOCAB, 1, 4), [], cache.rows(1, 2))
    row = cache.rows(1, 2).buffers[0]
    assert [told for told in fake.told if "key_0" in told[0]] == [
        ("past_key_0", tuple(row.shape)), ("past_key_0", row.data_ptr()), ("present_key_0", row.data_ptr()),
    ]  # fmt: skip


def test_the_first_profile_that_fits_takes_a_pass() -> None:
    session, _ = small("target")
    decode, prefill = executions(session)
    for batch, tokens, taker in ((1, 1, decode), (3, LIMITS.tree_size, decode), (1, LIMITS.prefill_chunk, prefill)):
        inputs = random_inputs(session.graph, 0, 0, VOCAB, batch, tokens)
        inputs["logit_rows"] = inputs["logit_rows"][:, :1]
        before = len(taker.passes)
        session.run(inputs, ["token_ids"], session.new_cache(batch, LIMITS.capacity))
        assert len(taker.passes) == before + 1


@pytest.mark.parametrize(
    ("batch", "tokens", "message"),
    [
        (4, 2, r"target graph: a pass with B=4, C=\d+, Q=2, R=2 fits no optimisation profile: decode takes B 1..3"),
        (1, 13, r"Q=13, R=2 fits .*prefill takes B 1..1, Q 1..12, R 1..1, C \d+..\d+"),
    ],
)
def test_a_pass_that_fits_no_profile(batch: int, tokens: int, message: str) -> None:
    session, _ = small("target")
    inputs = random_inputs(session.graph, 0, 0, VOCAB, batch, tokens)
    with pytest.raises(BackendError, match=message):
        session.run(inputs, [], session.new_cache(batch, LIMITS.capacity))
    assert not any(execution.passes for execution in executions(session))


def test_too_many_features_to_stack() -> None:
    session, _ = small("drafter")
    width = int(session.graph.inputs[0].shape[-1])
    with pytest.raises(BackendError, match="drafter graph: a pass with B=2, N=7 fits no"):
        session.stack([[torch.zeros(1, width)]] * 2, 7)


def test_what_contradicts_the_contract() -> None:
    """Faults of the caller."""
    session, _ = small("drafter")
    cache = session.new_cache(2, LIMITS.capacity)
    inputs = random_inputs(session.graph, 0, 0, VOCAB, 2, 3)
    for name, wrong in (
        ("feature_len", inputs["feature_len"][:1]),
        ("block_position_ids", inputs["block_position_ids"][:, :2]),
        ("context_features", inputs["context_features"][..., 1:]),
        ("context_len", inputs["context_len"][None]),
    ):
        with pytest.raises(ValueError, match=f"drafter graph: {name} .* is not"):
            session.run(inputs | {name: wrong}, [], cache)
    with pytest.raises(TypeError):
        session.run(inputs | {"block_ids": inputs["block_ids"].astype(np.int32)}, [], cache)
    with pytest.raises(ValueError, match=r"context_features is torch\.float64"):
        session.run(inputs | {"context_features": torch.zeros(inputs["context_features"].shape).double()}, [], cache)
    with pytest.raises(ValueError, match="takes"):
        session.run({}, [], cache)
    with pytest.raises(ValueError, match=f"caches of {LIMITS.capacity} slots, not of 7"):
        session.new_cache(1, 7)
    with pytest.raises(ValueError, match=r"context_features .* at {'B': 1"):
        session.run(inputs, [], cache.rows(0, 1))


def test_an_execution_that_fails() -> None:
    engine = over_fakes(trained("dflash"))
    (prompt,) = prompts_for(engine, 20)
    for device in (False, True):
        engine.device_step = device
        for fake in executions(sessions_of(engine)[1]):
            fake.fails = True
        with pytest.raises(BackendError, match="the engine failed"):
            engine.generate(prompt, max_tokens=5)
        for fake in executions(sessions_of(engine)[1]):
            fake.fails = False
        assert len(engine.generate(prompt, max_tokens=5).token_ids) == 5


def test_what_a_session_says_of_itself() -> None:
    session, _ = small("target")
    assert session.fixed_shapes
    assert session.longest_pass == max(LIMITS.tree_size, LIMITS.prefill_chunk)
    assert session.capacity_for(3, 77) == 77
    device: DeviceSession = session
    assert device.device == "cpu"
    cache = session.new_cache(2, LIMITS.capacity)
    assert [tuple(buffer.shape) for buffer in cache.buffers] == [(2, 2, LIMITS.capacity, 16)] * 4
    assert not any(buffer.any() for buffer in cache.buffers)


# -- capture


class StandIn:
    """In place of a CUDA graph: the step runs as often as to capture it; a replay may tell no engine anything."""

    def __init__(self, step: Callable[[], None]) -> None:
        for _ in range(4):
            step()
        self._step = step

    def replay(self) -> None:
        self._step()

    def pool(self) -> Any:
        return self


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_captured_step_has_executions_of_its_own(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured pass was told never changes, whatever else runs in between."""
    monkeypatch.setattr(device_step, "captured", lambda step, device, pool: StandIn(step))
    reference = trained(system)
    engine = over_fakes(reference, whole_steps=True)
    assert engine.device_step
    prompts = prompts_for(reference, 48, 7, 30)
    captured = None
    for _ in range(2):
        for rows in (1, 3, 2):
            expected = outcomes(reference.generate(prompts[:rows], max_tokens=12))
            assert outcomes(engine.generate(prompts[:rows], max_tokens=12)) == expected
            engine.generate(prompts[0], max_tokens=5, temperature=0.5)  # the host loop, with caches of its own
        told = [
            len(told.execution.told)  # type: ignore[attr-defined]
            for session in sessions_of(engine)
            for told in session._captured.values()
        ]
        assert captured in (None, told)
        captured = told
    for session in sessions_of(engine):
        assert len(session._captured) == 3
        for own in session._captured.values():
            passes = own.execution.passes  # type: ignore[attr-defined]
            assert len(passes) > 4
            assert all(one == passes[0] for one in passes)
            assert own.execution not in [base.execution for base in session._told]


def test_steps_are_not_captured_where_an_execution_cannot_be() -> None:
    reference = trained("dflash")
    for capturable, asked, expected in (
        ((True, True), True, True), ((True, False), True, False), ((True, True), False, False),
        ((True, True), None, None),
    ):  # fmt: skip
        session: Any = reference.drafter
        fakes = [FakeExecution(session.module, session.graph, p) for p in profiles("drafter", reference.limits)]
        for fake, can in zip(fakes, capturable, strict=True):
            fake.can_be_captured = can
        opened = EngineSession(session.graph, fakes, reference.limits.capacity, "cpu", asked)
        assert opened.whole_steps is expected
