"""Whole device steps do what the host loop does: the same tokens, by the same steps.

Here they run eagerly on a CPU, with the operators' references.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import torch_engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makers import edit_tensors
from runtime.device_steps import SYSTEMS, Seen, check, engine_of, hint
from runtime.triples import BALANCED, SURE, prompts_of, triples, write_triple

from dflash_trt.backends.torch import TorchSession
from dflash_trt.errors import BackendError, UsageError
from dflash_trt.runtime.decode import DecodeBatch
from dflash_trt.runtime.device_decode import DeviceDecodeBatch
from dflash_trt.runtime.device_step import DeviceStep
from dflash_trt.runtime.engine import Engine

pytestmark = pytest.mark.usefixtures("fixed_rows")

EXAMPLES = Path(__file__).parents[2] / "examples" / "tiny"


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
    outputs = engine.generate(prompts, max_tokens=1000)
    assert all(len(output.prompt_token_ids) + len(output.token_ids) == 20 for output in outputs)
    assert len(outputs[0].statistics.acceptance_lengths) < len(outputs[1].statistics.acceptance_lengths)
    assert engine.target.furthest > 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("system", SYSTEMS)
def test_stop_tokens_and_strings_in_mid_block(tmp_path: Path, system: str) -> None:
    engine = engine_of(tmp_path, system, max_batch_size=3)
    prompts = prompts_of(engine, 3, 9, 17)
    hint(engine, prompts, (0.9, 0.9))
    wholes, in_block = engine.generate(prompts, max_tokens=40), 0
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
