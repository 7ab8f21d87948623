"""D2SD's output equals token-by-token output, and every step is what it says it is.

On random pairs of varied shape; drafts of both drafters are hinted (see `hints`), so that the first draft breaks
anywhere and branches win with tails of every length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from engines import torch_engine
from hints import Hinted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from makers import make_drafter, make_target
from test_lossless_random_pairs import SAMPLING, Seen, pairs, write_pair

import dflash_trt
from dflash_trt.backends.torch import TorchSession
from dflash_trt.errors import UsageError
from dflash_trt.evaluation.losslessness import compare_outputs
from dflash_trt.runtime.acceptance import walk
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.decode import DecodeBatch
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.sequence import SequenceState
from dflash_trt.runtime.trace import StepTrace
from dflash_trt.runtime.tree import CandidateTree

STOPS = (*SAMPLING, {"temperature": 0.0, "stop_token_ids": [0, 1]})
SURE = (0.0, 0.2, 0.5, 0.9, 1.0)  # confidences with exact ends, and equal ones often


@st.composite
def triples(draw: st.DrawFn) -> dict:
    """Shapes of a target and two drafters, the second for blocks up to 4 tokens longer."""
    shape, other = draw(pairs()), draw(pairs())
    more = draw(st.sampled_from([0, 0, 1, 4]))
    redrafter = {"block_size": shape["block_size"] + more, "layers": other["drafter_layers"], **other["drafter"]}
    return shape | {"redrafter": redrafter}


def write_triple(shape: dict, folder: Path) -> None:
    write_pair(shape, folder)
    make_drafter(folder / "v", folder / "t", taps=shape["taps"], seed=shape["seed"] + 2, **shape["redrafter"])


def small_triple(
    folder: Path, block_size: int = 5, vp_block_size: int = 5, kind: Any = "dflash", **options: Any
) -> Engine:
    """An engine over the same small random checkpoints each time it is asked."""
    if not (folder / "t").exists():
        make_target(folder / "t", vocab_size=9, num_hidden_layers=2, seed=5)
        for name, size, seed, own in (("d", block_size, 6, kind), ("v", vp_block_size, 7, "dflash")):
            make_drafter(folder / name, folder / "t", taps=[0, 1], block_size=size, seed=seed, kind=own, layers=1)
    return torch_engine(folder / "t", folder / "d", folder / "v", **options)


def prompts_of(engine: Engine, *sizes: int) -> list[list[int]]:
    random = np.random.default_rng(len(sizes))
    return [random.integers(0, engine.vocab_size, size).tolist() for size in sizes]


def hint(
    engine: Engine, prompts: Sequence[list[int]], accuracy: Sequence[float], confidences: Sequence[float] = (),
    **sampling: Any,
) -> list[list[int]]:  # fmt: skip
    """Hints both drafters, one prompt a row of the batch; returns the token-by-token output of each."""
    plain = [engine.generate(prompt, speculation=False, **sampling).token_ids for prompt in prompts]
    rights = [[*prompt, *tokens] for prompt, tokens in zip(prompts, plain, strict=True)]
    for name, share in zip(("drafter", "vp_drafter"), accuracy, strict=True):
        session = getattr(engine, name)
        if session is not None:
            session = session._session if isinstance(session, Hinted) else session
            setattr(engine, name, Hinted(session, rights, share, name, confidences))
    return plain


@dataclass
class SeenSteps(Seen):
    """Besides: tokens gained where a branch won, numbers of branches, and how often two rows began a tail alike."""

    gained: Counter[int] = field(default_factory=Counter)
    branches: Counter[int] = field(default_factory=Counter)
    merged: int = 0
    extended: int = 0
    pruned: int = 0


def check_step(step: StepTrace, limits: Limits, asked: int | None, seen: SeenSteps) -> None:
    """What holds of every step.

    Args:
        asked: branches of `FixedBranches`; None for `AdaptiveBranches`, which also prunes the tree.
    """
    draft, drafts = list(step.draft), len(step.draft)
    tree = CandidateTree(np.array(step.tokens), np.array(step.parents), np.array(step.depths))
    assert len(tree) <= limits.tree_size
    assert drafts < limits.block_size
    accepted = [step.tokens[node] for node in step.path[1:]]
    assert [step.parents[node] for node in step.path] == [-1, *step.path[:-1]]
    assert 1 <= len(step.emitted) <= len(step.path)
    assert list(step.emitted[: len(accepted)]) == accepted[: len(step.emitted)]
    choices = accepted + list(step.emitted[len(accepted) :])

    kept = [branch.kept for branch in step.branches]
    sizes = {branch.kept + len(branch.tokens) for branch in step.branches}
    assert kept == sorted(set(kept))
    assert len(kept) <= limits.redraft_rows
    assert len(sizes) <= 1
    extension = sizes and max(sizes) > drafts
    if asked is not None:
        assert len(kept) == min(asked, drafts) + bool(extension)
        assert (kept[-1:] == [drafts]) == bool(extension)
    breaks = np.cumprod([1.0, *step.confidence]) * [*(1 - np.array(step.confidence)), 1]
    np.testing.assert_allclose([branch.probability for branch in step.branches], breaks[kept], rtol=1e-12)

    rows = [draft, *(draft[: branch.kept] + list(branch.tokens) for branch in step.branches)]
    whole = {tuple(row[:size]) for row in rows for size in range(len(row) + 1)}
    spelled: list[tuple[int, ...]] = []
    for token, parent in zip(step.tokens, step.parents, strict=True):
        spelled.append((*spelled[parent], token) if parent >= 0 else ())
    assert set(spelled) <= whole
    chain = walk(CandidateTree.chain([step.tokens[0], *draft]), lambda node, path: [*choices, -1][len(path)])
    if asked is not None:
        assert set(spelled) == whole
        assert len(step.path) >= len(chain.path)
        assert list(step.path[: len(chain.path)]) == chain.path  # the trunk's nodes come first
    elif len(spelled) < len(whole):
        seen.pruned += 1

    seen.branches[len(kept) - bool(extension)] += 1
    seen.extended += bool(extension)
    firsts = Counter((*draft[: branch.kept], branch.tokens[0]) for branch in step.branches)
    seen.merged += any(first in {tuple(draft[:size]) for size in range(drafts + 1)} for first in firsts)
    if len(step.path) > len(chain.path):
        seen.gained[len(step.path) - len(chain.path)] += 1


def check(
    engine: Engine, prompts: list[list[int]], sampling: Mapping[str, Any], seen: SeenSteps, accuracy: Sequence[float],
    branches: Any, confidences: Sequence[float] = (), tokens: int = 24,
) -> None:  # fmt: skip
    """All prompts as one batch, and the first one alone with its steps."""
    plain = hint(engine, prompts, accuracy, confidences, max_tokens=tokens, **sampling)
    batch = engine.generate_batch(prompts, branches=branches, max_tokens=tokens, **sampling)
    alone = engine.generate(prompts[0], branches=branches, trace=True, max_tokens=tokens, **sampling)
    for prompt, expected, drafted in zip([*prompts, prompts[0]], [*plain, plain[0]], [*batch, alone], strict=True):
        comparison = compare_outputs(engine, prompt, expected, drafted.token_ids, **sampling)
        seen.verdicts[comparison.verdict] += 1
        assert comparison.verdict != "different", comparison
        lengths = drafted.statistics.acceptance_lengths
        assert sum(lengths) == len(drafted.token_ids) - 1
        seen.accepted.update(lengths)
    assert alone.trace is not None
    position = len(prompts[0])
    for step in alone.trace.steps:
        check_step(step, engine.limits, None if branches == "auto" else branches, seen)
        assert step.anchor_position == position
        position += len(step.emitted)
    assert [len(step.emitted) for step in alone.trace.steps] == alone.statistics.acceptance_lengths
    assert alone.statistics.proposed_drafts == sum(len(step.tokens) - 1 for step in alone.trace.steps)


# -- the property


def test_d2sd_equals_token_by_token() -> None:
    """With every number of branches; and what it saw is worth something: branches win, siblings merge, trunks grow."""
    seen = SeenSteps()

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=triples(),
        sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
        sampling=st.sampled_from(STOPS),
        chunk=st.integers(1, 20),
        branches=st.integers(0, 6),
        accuracy=st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.6, 1.0])),
        confidences=st.sampled_from([(), SURE]),
    )
    def holds(shape, sizes, sampling, chunk, branches, accuracy, confidences):
        with TemporaryDirectory() as name:
            folder = Path(name)
            write_triple(shape, folder)
            engine = torch_engine(
                folder / "t", folder / "d", folder / "v", branches=max(branches, 1), prefill_chunk=chunk,
                max_batch_size=len(sizes),
            )  # fmt: skip
            check(engine, prompts_of(engine, *sizes), sampling, seen, accuracy, branches, confidences)

    holds()
    assert seen.verdicts["tie"] <= 0.01 * sum(seen.verdicts.values())
    assert len(seen.accepted) >= 5, seen
    assert len(seen.gained) >= 3, seen
    assert min(sum(seen.gained.values()), seen.merged) >= 10, seen
    assert seen.extended >= 1, seen
    assert len(seen.branches) >= 4, seen


PRICES, LOW_PRICES = st.tuples(st.floats(0.2, 3), st.floats(0, 0.1)), st.tuples(st.floats(0, 0.5), st.floats(0, 0.01))


def per_token(fixed: float, token: float) -> tuple[tuple[int, float], ...]:
    return ((1, fixed + token), (200, fixed + 200 * token))


def test_d2sd_that_weighs_costs_equals_token_by_token() -> None:
    """Whatever passes cost: the number of branches changes from step to step, and trees are pruned."""
    seen = SeenSteps()

    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(
        shape=triples(),
        sizes=st.lists(st.integers(1, 20), min_size=1, max_size=2),
        sampling=st.sampled_from(STOPS),
        built=st.integers(1, 6),
        accuracy=st.tuples(st.sampled_from([0.5, 0.9]), st.sampled_from([0.6, 1.0])),
        confidences=st.sampled_from([(), SURE]),
        prices=st.tuples(PRICES, LOW_PRICES, PRICES),
    )
    def holds(shape, sizes, sampling, built, accuracy, confidences, prices):
        with TemporaryDirectory() as name:
            folder = Path(name)
            write_triple(shape, folder)
            draft, redraft, verify = (per_token(*price) for price in prices)
            engine = torch_engine(
                folder / "t", folder / "d", folder / "v", branches=built, max_batch_size=len(sizes),
                costs=PassCosts(draft=draft, redraft=redraft, verify=verify),
            )  # fmt: skip
            check(engine, prompts_of(engine, *sizes), sampling, seen, accuracy, "auto", confidences)

    holds()
    assert seen.verdicts["tie"] <= 0.01 * sum(seen.verdicts.values())
    assert len(seen.branches) >= 3, seen
    assert seen.pruned >= 10, seen
    assert sum(seen.gained.values()) >= 3, seen


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "vp_block_size", "branches"), [("dflash", 5, 4), ("dflash", 8, 2), ("dflare", 6, 3)])
def test_an_onnxruntime_bundle(tmp_path: Path, kind: str, vp_block_size: int, branches: int) -> None:
    """The same on built bundles, where a branch's tokens move in the cache from one slot to another in place."""
    small_triple(tmp_path, 5, vp_block_size, kind)
    dflash_trt.build(
        target=tmp_path / "t", drafter=tmp_path / "d", vp_drafter=tmp_path / "v", output=tmp_path / "b",
        branches=branches, verify=False, max_seq_len=100, max_batch_size=2, prefill_chunk=7,
    )  # fmt: skip
    engine, seen = dflash_trt.load(tmp_path / "b", threads=1), SeenSteps()
    assert engine.limits.branches == branches
    for sampling in STOPS:
        check(engine, prompts_of(engine, 3, 30), sampling, seen, (0.5, 0.6), branches, tokens=50)
    assert seen.verdicts["tie"] <= 1
    assert len(seen.gained) >= 3, seen


@pytest.mark.parametrize("vp_block_size", [5, 7])
def test_a_dflare_drafter_with_a_vp_drafter(tmp_path: Path, vp_block_size: int) -> None:
    engine = small_triple(tmp_path, vp_block_size=vp_block_size, kind="dflare", branches=3, max_batch_size=2)
    seen = SeenSteps()
    for sampling in STOPS[:3]:
        check(engine, prompts_of(engine, 3, 11), sampling, seen, (0.5, 0.6), 3)
    assert seen.verdicts["equal"] == sum(seen.verdicts.values())
    assert seen.gained, seen


# -- the number of branches at run time


def test_fewer_branches_than_built_for(tmp_path: Path) -> None:
    engine = small_triple(tmp_path, 8, 8, branches=6)
    (prompt,) = prompts_of(engine, 4)
    proposed = []
    for branches in range(7):
        seen = SeenSteps()
        check(engine, [prompt], {}, seen, (0.5, 0.6), branches)
        assert set(seen.branches) <= {*range(branches + 1)}
        proposed.append(engine.generate(prompt, branches=branches, max_tokens=3).statistics.proposed_drafts)
    assert proposed == sorted(proposed)
    assert proposed[-1] > proposed[0]
    assert engine.generate(prompt, max_tokens=3).statistics.proposed_drafts == proposed[-1]  # unasked: all


def test_no_branches_are_the_steps_of_dflash(tmp_path: Path) -> None:
    engine = small_triple(tmp_path, 6, 8, branches=3)
    dflash = torch_engine(tmp_path / "t", tmp_path / "d")
    for prompt in prompts_of(engine, 1, 9, 20):
        for sampling in SAMPLING[:3]:
            outputs = []
            for one, branches in ((engine, 0), (dflash, None)):
                hint(one, [prompt], (0.7, 0.7), max_tokens=30, **sampling)
                outputs.append(one.generate(prompt, branches=branches, max_tokens=30, **sampling))
            assert outputs[0].token_ids == outputs[1].token_ids
            assert outputs[0].statistics.acceptance_lengths == outputs[1].statistics.acceptance_lengths
            assert outputs[0].statistics.redraft_passes == 0


@pytest.mark.parametrize("branches", [4, -1, True, False, 2.0, 2.5, "many", "3"], ids=repr)
def test_branches_out_of_range(tmp_path: Path, branches: Any) -> None:
    engine = small_triple(tmp_path, branches=3)
    for ask in (engine.generate, lambda prompt, **kw: engine.generate_batch([prompt], **kw)):
        with pytest.raises(UsageError, match=r"^--branches: .* must be auto or 0 to 3"):
            ask([1, 2], branches=branches, max_tokens=2)


def test_auto_needs_costs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cost table"):
        small_triple(tmp_path).generate([1, 2], branches="auto")


@pytest.mark.parametrize("branches", [0, 2, "auto"])
def test_branches_need_a_vp_drafter(tmp_path: Path, branches: Any) -> None:
    small_triple(tmp_path)
    with pytest.raises(UsageError, match="VP drafter"):
        torch_engine(tmp_path / "t", tmp_path / "d").generate([1, 2], branches=branches)


# -- caches


class Watched:
    """A session that looks at the bounds of every pass; it gives a cache the fewest slots that may do."""

    def __init__(self, session: TorchSession, limits: Limits) -> None:
        self._session, self._limits = session, limits
        self.passes: list[tuple[int, int]] = []  # (features injected, tokens of the block) of decode passes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def capacity_for(self, needed: int, limit: int) -> int:
        assert needed <= limit
        return needed

    def run(self, inputs: dict, outputs: Sequence[str], cache: Any) -> dict:
        written = inputs["visibility"].shape[1]
        if "context_features" in inputs:
            written += inputs["context_features"].shape[1]
            if outputs:
                self.passes.append((int(inputs["feature_len"].max()), inputs["block_ids"].shape[1]))
        assert int(inputs["context_len"].max()) + written <= cache.capacity <= self._limits.capacity
        positions = inputs["position_ids" if "position_ids" in inputs else "block_position_ids"]
        assert positions.max() < self._limits.capacity  # rows of the rotary tables
        return self._session.run(inputs, outputs, cache)


def watch(engine: Engine) -> Watched:
    """Watches all sessions; returns the VP drafter's."""
    engine.target, engine.drafter, engine.vp_drafter = (
        Watched(session, engine.limits) for session in (engine.target, engine.drafter, engine.vp_drafter)
    )
    return engine.vp_drafter


@pytest.mark.parametrize("vp_block_size", [4, 7])
def test_the_end_of_the_capacity(tmp_path: Path, vp_block_size: int) -> None:
    """prompt + output reach max_seq_len and go no further, in mid-block too; nor does any pass write too far."""
    engine = small_triple(tmp_path, 4, vp_block_size, branches=6, max_seq_len=20, max_batch_size=2)
    watch(engine)
    for room in range(1, 10):
        prompts = prompts_of(engine, 20 - room, 20 - room // 2 - 1)
        plain = hint(engine, prompts, (0.5, 0.9), max_tokens=1000)
        for output, expected in zip(engine.generate_batch(prompts, max_tokens=1000), plain, strict=True):
            assert output.finish_reason == "length"
            assert output.token_ids == expected
        assert len(plain[0]) == room


BALANCED = PassCosts(draft=per_token(1.0, 0.0), redraft=per_token(1.0, 0.0), verify=per_token(1.0, 0.1))
COSTLY = PassCosts(draft=per_token(1.0, 0.0), redraft=per_token(1000.0, 0.0), verify=per_token(1.0, 0.0))


@pytest.mark.parametrize("accuracy", [0.0, 0.8, 1.0])
def test_features_wait_for_a_vp_drafter_that_is_not_asked(tmp_path: Path, accuracy: float) -> None:
    """It is only run to inject them, where too many wait: seldom, and before its pass could outgrow its cache."""
    engine = small_triple(tmp_path, 4, 6, branches=6, costs=COSTLY)
    watched = watch(engine)
    (prompt,) = prompts_of(engine, 5)
    plain = hint(engine, [prompt], (accuracy, 0.5), max_tokens=100)
    output = engine.generate(prompt, branches="auto", max_tokens=100)
    assert output.token_ids == plain[0]
    injecting = [waiting for waiting, tokens in watched.passes if tokens == 1]
    assert injecting == [waiting for waiting, _ in watched.passes]
    assert len(injecting) >= 3
    longest = engine.limits.longest_pending
    assert all(longest - engine.limits.longest_path < waiting <= longest for waiting in injecting)


def test_features_that_waited_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-drafts after steps without any are those of a VP drafter that was run in every step."""
    engine = small_triple(tmp_path, 5, 7, branches=3, costs=BALANCED)
    watched = watch(engine)
    prompt = prompts_of(engine, 5)[0]
    hint(engine, [prompt], (0.6, 0.6), SURE, max_tokens=100)
    waited = engine.generate(prompt, branches="auto", trace=True, max_tokens=100)
    late = {tokens > 1 for waiting, tokens in watched.passes if waiting > engine.limits.longest_path}
    assert late == {True, False}, watched.passes  # re-drafts, and passes that only injected
    monkeypatch.setattr(Limits, "longest_pending", 0)
    monkeypatch.setattr(Limits, "step_slots", 200)
    watched.passes.clear()
    prompt_run = engine.generate(prompt, branches="auto", trace=True, max_tokens=100)
    assert len(watched.passes) >= waited.statistics.steps - 1
    assert waited.trace is not None
    assert prompt_run.trace is not None
    drafts = [
        [(step.draft, step.path, [(branch.kept, branch.tokens) for branch in step.branches]) for step in trace.steps]
        for trace in (waited.trace, prompt_run.trace)
    ]
    assert drafts[0] == drafts[1]


class Poisoned(DecodeBatch):
    """Ruins every slot behind those in use after each step."""

    def step(self) -> None:
        super().step()
        proposer = self._proposer
        assert proposer is not None
        for row, sequence in enumerate(self.sequences):
            valid = [(self._target_cache, sequence.committed)]
            valid += [(drafter.cache, int(drafter._injected[row])) for drafter in proposer._drafters]
            for cache, size in valid:
                for buffer in cache.buffers:
                    buffer[row, :, size:] = 1e4


@pytest.mark.parametrize("branches", [3, "auto"])
def test_what_rejected_rows_leave_in_the_caches_never_matters(tmp_path: Path, branches: Any) -> None:
    engine = small_triple(tmp_path, 5, 7, branches=3, costs=BALANCED, max_batch_size=2)
    prompts = prompts_of(engine, 3, 12)
    hint(engine, prompts, (0.6, 0.6), SURE, max_tokens=40)
    outcomes = []
    for kind in (DecodeBatch, Poisoned):
        sequences = [engine._sequence(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
        batch = kind(
            engine.target, engine.drafter, sequences, engine.limits, engine.mask_token_id, engine.vp_drafter,
            engine._policy(branches),
        )  # fmt: skip
        batch.run()
        outcomes.append([outcome(sequence) for sequence in sequences])
    assert outcomes[0] == outcomes[1]


def outcome(sequence: SequenceState) -> tuple[list[int], list[int]]:
    return sequence.generated, sequence.statistics.acceptance_lengths


# -- shapes


class FixedShapes(TorchSession):
    """Asks for padded passes, as compiled engines do, and notes how wide the decode passes were."""

    fixed_shapes = True

    def __init__(self, session: TorchSession) -> None:
        super().__init__(session.module, session.graph)
        self.widths: set[int] = set()

    def capacity_for(self, needed: int, limit: int) -> int:
        return limit

    def run(self, inputs: Any, outputs: Sequence[str], cache: Any) -> dict:
        prefills = inputs["logit_rows"].shape[1] == 1 if "logit_rows" in inputs else not outputs
        if not prefills:
            self.widths.add(inputs["visibility"].shape[1])
        return super().run(inputs, outputs, cache)


@pytest.mark.parametrize(("block_size", "vp_block_size"), [(5, 5), (3, 6)])
@pytest.mark.parametrize("sampling", SAMPLING[:2], ids=["greedy", "sampled"])
def test_padded_passes_do_the_same(tmp_path: Path, block_size: int, vp_block_size: int, sampling: dict) -> None:
    """Tokens and steps, in a batch of rows of different lengths."""
    outcomes, sessions = [], []
    for fixed in (False, True):
        engine = small_triple(tmp_path, block_size, vp_block_size, branches=3, max_batch_size=3)
        if fixed:
            sessions = [FixedShapes(session) for session in (engine.target, engine.drafter, engine.vp_drafter)]
            engine.target, engine.drafter, engine.vp_drafter = sessions
        prompts = prompts_of(engine, 2, 9, 17)
        hint(engine, prompts, (0.5, 0.7), max_tokens=20, **sampling)
        for session in sessions:
            session.widths.clear()
        outputs = engine.generate_batch(prompts, max_tokens=20, **sampling)
        outcomes.append([(output.token_ids, output.statistics.acceptance_lengths) for output in outputs])
    assert outcomes[0] == outcomes[1]
    limits = engine.limits
    widths = [limits.tree_size, limits.block_size, limits.redraft_rows * limits.vp_block_size]
    assert [session.widths for session in sessions] == [{width} for width in widths]


def test_a_row_alone_equals_the_row_in_a_batch(tmp_path: Path) -> None:
    """Tokens and steps; rows end one after the other."""
    together, alone = (small_triple(tmp_path, 5, 6, branches=2, max_batch_size=size) for size in (3, 1))
    prompts = prompts_of(together, 1, 7, 25)
    for sampling in SAMPLING[:3]:
        options = {"max_tokens": 20, **sampling}
        hint(together, prompts, (0.5, 0.7), **options)
        for prompt, row in zip(prompts, together.generate_batch(prompts, **options), strict=True):
            hint(alone, [prompt], (0.5, 0.7), **options)
            single = alone.generate(prompt, **options)
            assert single.token_ids == row.token_ids
            assert single.statistics.acceptance_lengths == row.statistics.acceptance_lengths


def test_a_stream_and_its_trace_are_those_of_one_piece(tmp_path: Path) -> None:
    engine = small_triple(tmp_path, 5, 6, branches=2)
    prompt = prompts_of(engine, 6)[0]
    hint(engine, [prompt], (0.5, 0.7), max_tokens=20)
    whole = engine.generate(prompt, trace=True, max_tokens=20, seed=1)
    events = list(engine.generate(prompt, stream=True, trace=True, max_tokens=20, seed=1))
    assert whole.trace is not None
    assert [tuple(event.token_ids) for event in events[1:]] == [step.emitted for step in whole.trace.steps]
    last = events[-1].generation
    assert last is not None
    assert last.trace == whole.trace


def test_auto_on_a_bundle_for_no_branches_is_dflash(tmp_path: Path) -> None:
    """It has no room for features that wait for a VP drafter: rows of different length must not overrun the cache."""
    engine = small_triple(tmp_path, 6, 6, branches=0, max_seq_len=60, max_batch_size=2, costs=COSTLY)
    prompts = prompts_of(engine, 57, 3)
    plain = hint(engine, prompts, (1.0, 1.0), max_tokens=50)
    batch = engine.generate_batch(prompts, branches="auto", max_tokens=50)
    assert [row.token_ids for row in batch] == plain
    assert all(row.statistics.redraft_passes == 0 for row in batch)
