"""Profiles derived from limits: in order, and every pass that the runtime makes fits one. Faults of others are named.

The runtime is driven with stand-ins for its sessions, which answer at random and look at the sizes they are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.backends.profiles import CAPACITY, DimRange, Profile, check, faults, profiles
from dflash_trt.backends.torch import TorchCache
from dflash_trt.errors import BackendError
from dflash_trt.evaluation import costs
from dflash_trt.export.contract import GraphSpec, Role, TensorSpec, drafter_graph, target_graph
from dflash_trt.runtime.branching import FixedBranches
from dflash_trt.runtime.decode import DecodeBatch
from dflash_trt.runtime.device_decode import DeviceDecodeBatch, DeviceSlots
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.sequence import SequenceState

VOCAB, MASK = 3, 2  # so few tokens that drafts are often right
ROLES: tuple[Role, ...] = ("target", "drafter", "vp_drafter")
_MODEL: Any = SimpleNamespace(
    vocab_size=VOCAB, hidden_size=1, target_hidden_size=1, taps=(0,), num_layers=1, num_kv_heads=1, head_dim=1
)
GRAPHS: dict[Role, GraphSpec] = {
    "target": target_graph(_MODEL, 1, "float32"),
    "drafter": drafter_graph(_MODEL, "float32"),
    "vp_drafter": drafter_graph(_MODEL, "float32", "vp_drafter"),
}
DFLASH = Limits(max_batch_size=4, max_seq_len=1000, max_input_len=900, block_size=16, prefill_chunk=256)
SLOTS = DFLASH.capacity
D2SD = replace(DFLASH, vp_block_size=16, branches=4)
LONGER = replace(DFLASH, block_size=8, vp_block_size=10, branches=3)


@st.composite
def some_limits(draw: st.DrawFn, longest: int = 400) -> Limits:
    """Of bundles with one drafter and with two."""
    block, seq = draw(st.integers(2, 17)), draw(st.integers(2, longest))
    branches = draw(st.integers(0, 6))
    return Limits(
        max_batch_size=draw(st.integers(1, 5)),
        max_seq_len=seq,
        max_input_len=seq - 1,
        block_size=block,
        prefill_chunk=draw(st.integers(1, 300)),
        vp_block_size=block + draw(st.integers(0, 5)) if branches else 0,
        branches=branches,
    )


def roles_of(limits: Limits) -> tuple[Role, ...]:
    return ROLES if limits.branches else ROLES[:2]


# --- what they are


@given(some_limits())
def test_they_are_in_order_and_the_capacity_is_fixed(limits: Limits) -> None:
    for role in roles_of(limits):
        given = profiles(role, limits)
        assert [profile.name for profile in given] == ["decode", "prefill"]
        for profile in given:
            assert all(1 <= r.min <= r.opt <= r.max for r in profile.dims.values())
            assert profile.dims[CAPACITY] == ranges(limits.capacity, limits.capacity, limits.capacity)
            dims = {d for spec in (*GRAPHS[role].inputs, *GRAPHS[role].past()) for d in spec.shape}
            assert profile.dims.keys() == {d for d in dims if isinstance(d, str)}
        assert list(faults(GRAPHS[role], given)) == []
        check(GRAPHS[role], given)


def ranges(low: int, best: int, high: int) -> DimRange:
    return DimRange(min=low, opt=best, max=high)


@pytest.mark.parametrize(
    ("limits", "role", "decode", "prefill"),
    [
        (DFLASH, "target", {"B": (1, 4, 4), "Q": (1, 16, 16), "R": (1, 16, 16)}, {"Q": (1, 256, 256), "R": (1, 1, 1)}),
        (DFLASH, "drafter", {"B": (1, 4, 4), "Q": (1, 16, 16), "N": (1, 16, 16)}, {"Q": (1, 1, 1), "N": (1, 256, 256)}),
        (D2SD, "target", {"B": (1, 4, 4), "Q": (1, 70, 70), "R": (1, 70, 70)}, {"Q": (1, 256, 256), "R": (1, 1, 1)}),
        (D2SD, "drafter", {"B": (1, 4, 4), "Q": (1, 16, 16), "N": (1, 16, 16)}, {"Q": (1, 1, 1), "N": (1, 256, 256)}),
        (
            D2SD,
            "vp_drafter",
            {"B": (1, 4, 4), "Q": (1, 64, 64), "N": (1, 16, 64)},
            {"Q": (1, 1, 1), "N": (1, 256, 256)},
        ),
        # VP blocks are longer: a step accepts up to 10, and the extension of the trunk is one block more
        (LONGER, "drafter", {"B": (1, 4, 4), "Q": (1, 8, 8), "N": (1, 10, 10)}, {"Q": (1, 1, 1), "N": (1, 256, 256)}),
        (
            LONGER,
            "vp_drafter",
            {"B": (1, 4, 4), "Q": (1, 40, 40), "N": (1, 10, 40)},
            {"Q": (1, 1, 1), "N": (1, 256, 256)},
        ),
    ],
)
def test_the_ranges_of_bundles_as_they_are_built(
    limits: Limits, role: Role, decode: dict[str, Any], prefill: dict[str, Any]
) -> None:
    capacity = {CAPACITY: (limits.capacity,) * 3}
    wanted = [decode | capacity, {"B": (1, 1, 1)} | prefill | capacity]
    assert [dict(profile.dims) for profile in profiles(role, limits)] == [
        {name: ranges(*of) for name, of in dims.items()} for dims in wanted
    ]


def test_shapes_of_an_input() -> None:
    decode, prefill = profiles("target", DFLASH)
    past = GRAPHS["target"].past()[0]
    assert prefill.shapes(past) == ((1, 1, SLOTS, 1),) * 3
    spec = TensorSpec(name="x", dtype="int64", shape=("B", 7, "Q", "R"))
    assert decode.shapes(spec) == ((1, 7, 1, 1), (4, 7, 16, 16), (4, 7, 16, 16))
    assert prefill.shapes(spec) == ((1, 7, 1, 1), (1, 7, 256, 1), (1, 7, 256, 1))


@pytest.mark.parametrize(
    ("sizes", "holds"),
    [
        ({}, True),
        ({"B": 4, "Q": 16, "R": 1, "C": SLOTS}, True),
        ({"B": 1, "Q": 1, "R": 1}, True),
        ({"B": 5, "Q": 16, "R": 1}, False),
        ({"B": 4, "Q": 17, "R": 1}, False),
        ({"B": 0, "Q": 1, "R": 1}, False),
        ({"B": 1, "Q": 1, "R": 1, "C": SLOTS - 1}, False),
    ],
)
def test_holds(sizes: dict[str, int], holds: bool) -> None:
    assert profiles("target", DFLASH)[0].holds(sizes) == holds


# --- every pass fits


class StandIn:
    """A session that asserts of each pass that a profile holds its sizes, and answers at random.

    `used` has the names of the profiles.
    """

    fixed_shapes, keeps_features, longest_pass, whole_steps, device = True, False, None, False, "cpu"

    def __init__(self, role: Role, limits: Limits, random: np.random.Generator) -> None:
        self.graph, self.random = GRAPHS[role], random
        self.profiles = profiles(role, limits)
        self.used: set[str] = set()

    def new_cache(self, batch: int, capacity: int) -> TorchCache:
        return TorchCache([torch.zeros(batch, 1, capacity, 1) for _ in range(2)])

    def capacity_for(self, needed: int, limit: int) -> int:
        assert needed <= limit
        return limit

    def stack(self, features: Sequence[Any], rows: int) -> torch.Tensor:
        return torch.zeros(len(features), rows, 1)

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str], cache: Any) -> dict[str, Any]:
        arrays = {name: np.array(value) for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
        results = self.forward({**inputs, **{name: torch.from_numpy(a) for name, a in arrays.items()}}, cache)
        return {name: results[name] if name == "context_features" else results[name].numpy() for name in outputs}

    def forward(self, inputs: Mapping[str, torch.Tensor], cache: Any) -> dict[str, torch.Tensor]:
        sizes = {"B": cache.batch, CAPACITY: cache.capacity}
        for spec in self.graph.inputs:
            for dim, size in zip(spec.shape, inputs[spec.name].shape, strict=True):
                assert size == (dim if isinstance(dim, int) else sizes.setdefault(dim, size))
        fitting = [profile.name for profile in self.profiles if profile.holds(sizes)]
        assert fitting, f"{self.graph.role}: {sizes}"
        self.used.add(fitting[0])
        return {spec.name: torch.as_tensor(self._answer(spec, sizes)) for spec in self.graph.outputs}

    def _answer(self, spec: TensorSpec, sizes: Mapping[str, int]) -> np.ndarray:
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape]
        if spec.dtype == "int64":
            return self.random.integers(0, MASK, shape)
        return self.random.random(shape, np.float32)


class Reluctant(FixedBranches):
    """Often wants no branch at all, so that features wait for the VP drafter."""

    def __init__(self, count: int, random: np.random.Generator) -> None:
        super().__init__(count)
        self._random = random

    def choose(self, confidence: Any, size: int) -> list[int]:
        return super().choose(confidence, size) if self._random.random() < 0.2 else []


def sequences(limits: Limits, random: np.random.Generator, **sampling: Any) -> list[SequenceState]:
    """As many as a batch has at most, of random lengths."""
    text: Any = SimpleNamespace(
        feed=lambda token: SimpleNamespace(text="", stopped=False),
        finish=lambda: SimpleNamespace(text="", stopped=False),
    )
    params = SamplingParams(max_tokens=limits.max_seq_len, seed=0, **sampling)
    batch = random.integers(1, limits.max_batch_size + 1)
    lengths = [limits.max_input_len, *random.integers(1, limits.max_input_len + 1, batch - 1)]
    return [SequenceState([0] * length, params, limits, (), text) for length in random.permutation(lengths)]


def stand_ins(limits: Limits, random: np.random.Generator) -> list[Any]:
    return [StandIn(role, limits, random) for role in roles_of(limits)]


SHORT = some_limits(longest=80)


@settings(max_examples=40, deadline=None)
@given(SHORT, st.integers(0, 9), st.booleans(), st.booleans(), st.booleans())
def test_every_pass_of_the_host_loop_fits(
    limits: Limits, seed: int, drafts: bool, samples: bool, reluctant: bool
) -> None:
    random = np.random.default_rng(seed)
    sessions = stand_ins(limits, random)
    policy = Reluctant(limits.branches, random) if reluctant else FixedBranches(limits.branches)
    given = sequences(limits, random, **({"temperature": 1.0} if samples else {}))
    used = sessions if drafts else sessions[:1]
    target, drafter, vp_drafter = [*used, None, None][:3]
    DecodeBatch(target, drafter, given, limits, MASK, vp_drafter, policy if vp_drafter else None).run()
    assert all(sequence.finish_reason == "length" for sequence in given)
    assert used[0].used
    if drafts and any(sequence.statistics.proposed_drafts for sequence in given):
        assert all(session.used for session in used[:2])


@settings(max_examples=40, deadline=None)
@given(SHORT, st.integers(0, 9), st.integers(0, 6))
def test_every_pass_of_steps_on_a_device_fits(limits: Limits, seed: int, branches: int) -> None:
    random = np.random.default_rng(seed)
    sessions = stand_ins(limits, random)
    slots = DeviceSlots(*[*sessions, None][:3], limits, MASK)
    given = sequences(limits, random)
    DeviceDecodeBatch(slots, given, min(branches, limits.branches), lambda slots: None).run()
    assert all(sequence.finish_reason == "length" for sequence in given)
    assert all(session.used for session in sessions[: 3 if min(branches, limits.branches) else 2])


def test_these_decodes_use_both_profiles() -> None:
    limits, random = replace(D2SD, max_seq_len=200, max_input_len=150), np.random.default_rng(0)
    sessions = stand_ins(limits, random)
    DecodeBatch(*sessions[:2], sequences(limits, random), limits, MASK, sessions[2], FixedBranches(4)).run()
    assert [session.used for session in sessions] == [{"decode", "prefill"}] * 3


@settings(max_examples=20, deadline=None)
@given(SHORT.filter(lambda limits: limits.branches), st.integers(0, 9))
def test_every_pass_that_is_timed_fits(limits: Limits, seed: int) -> None:
    sessions = stand_ins(limits, np.random.default_rng(seed))
    engine: Any = SimpleNamespace(
        target=sessions[0], drafter=sessions[1], vp_drafter=sessions[2], limits=limits, mask_token_id=MASK
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "_REPEATS", 1)
        assert costs.measure_costs(engine).redraft


# --- faults


def changed(profile: Profile, **dims: DimRange | None) -> Profile:
    """With other ranges; None takes one out."""
    merged = {**profile.dims, **dims}
    return replace(profile, dims={name: of for name, of in merged.items() if of is not None})


DECODE, PREFILL = profiles("target", DFLASH)
FAULTS: dict[str, tuple[list[Profile], list[str]]] = {
    "no profile": ([], ["target graph: has no optimisation profile, and its dimensions are dynamic"]),
    "a dimension without a range": (
        [changed(DECODE, R=None), PREFILL],
        ["target graph, profile decode: input logit_rows has no range for dimension 1 (R)"],
    ),
    "no capacity": (
        [DECODE, changed(PREFILL, C=None)],
        [
            "target graph, profile prefill: input past_key_0 has no range for dimension 2 (C)",
            "target graph, profile prefill: input past_value_0 has no range for dimension 2 (C)",
        ],
    ),
    "nothing at least": (
        [changed(DECODE, B=ranges(0, 4, 4)), PREFILL],
        ["target graph, profile decode: dimension B has min 0; it must be at least 1"],
    ),
    "nothing at all": (
        [changed(DECODE, Q=ranges(0, 0, 0)), PREFILL],
        ["target graph, profile decode: dimension Q has min 0; it must be at least 1"],
    ),
    "opt > max": (
        [DECODE, changed(PREFILL, Q=ranges(1, 257, 256))],
        ["target graph, profile prefill: dimension Q has min 1, opt 257, max 256; they must be in this order"],
    ),
    "min > opt": (
        [changed(DECODE, R=ranges(9, 8, 16)), PREFILL],
        ["target graph, profile decode: dimension R has min 9, opt 8, max 16; they must be in this order"],
    ),
    "a range of capacities": (
        [changed(DECODE, C=ranges(256, SLOTS, SLOTS)), PREFILL],
        [f"target graph, profile decode: dimension C is 256..{SLOTS}; a cache has one fixed capacity"],
    ),
    "several": (
        [changed(DECODE, B=ranges(-1, -1, -2)), changed(PREFILL, N=ranges(0, 1, 1))],
        [
            "target graph, profile decode: dimension B has min -1; it must be at least 1",
            "target graph, profile decode: dimension B has min -1, opt -1, max -2; they must be in this order",
            "target graph, profile prefill: dimension N has min 0; it must be at least 1",
        ],
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_named_and_refused(kind: str) -> None:
    given, told = FAULTS[kind]
    assert list(faults(GRAPHS["target"], given)) == told
    with pytest.raises(BackendError) as caught:
        check(GRAPHS["target"], given)
    assert all(line in str(caught.value) for line in told)
    assert caught.value.where == "target graph"
    assert "--max-batch-size" in caught.value.mend


@given(st.sampled_from(ROLES), st.integers(0, 1), st.data())
def test_a_range_that_is_out_of_order_is_found_wherever_it_is(role: Role, which: int, data: st.DataObject) -> None:
    given = list(profiles(role, D2SD))
    name = data.draw(st.sampled_from(sorted(given[which].dims)))
    low, best, high = (data.draw(st.integers(-1, 3)) for _ in range(3))
    given[which] = changed(given[which], **{name: ranges(low, best, high)})
    right = 1 <= low <= best <= high and (name != CAPACITY or low == high)
    assert (not list(faults(GRAPHS[role], given))) == right


def test_a_vp_drafter_without_branches_still_takes_its_block() -> None:
    """Nothing re-drafts then, but its numbers are compared."""
    limits = Limits(
        max_batch_size=2, max_seq_len=96, max_input_len=95, block_size=8, prefill_chunk=16, vp_block_size=10, branches=0
    )
    decode, _ = profiles("vp_drafter", limits)
    assert decode.dims["Q"].max == 10
