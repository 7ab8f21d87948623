"""D2SD with any number of branches, at the ends of its caches and in passes of any width: always the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from engines import torch_engine
from runtime.triples import BALANCED, COSTLY, SURE, SeenSteps, check, hint, prompts_of, small_triple
from test_lossless_random_pairs import SAMPLING

from dflash_trt.backends.torch import TorchSession
from dflash_trt.errors import UsageError
from dflash_trt.runtime.adaptive_drafting import AdaptiveDrafting
from dflash_trt.runtime.decode import DecodeBatch
from dflash_trt.runtime.drafter import Drafter
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.sequence import SequenceState

pytestmark = pytest.mark.usefixtures("fixed_rows")

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
    for ask in (engine.generate, lambda prompt, **kw: engine.generate([prompt], **kw)):
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
        self.injected: list[int] = []  # features of passes without outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def capacity_for(self, needed: int, limit: int) -> int:
        assert needed <= limit
        return needed

    def run(self, inputs: dict, outputs: Sequence[str], cache: Any) -> dict:
        written = inputs["visibility"].shape[1]
        if "context_features" in inputs:
            written += inputs["context_features"].shape[1]
            if not outputs:
                self.injected.append(int(inputs["feature_len"].max()))
            else:
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
        for output, expected in zip(engine.generate(prompts, max_tokens=1000), plain, strict=True):
            assert output.finish_reason == "length"
            assert output.token_ids == expected
        assert len(plain[0]) == room


@pytest.mark.parametrize("accuracy", [0.0, 0.8, 1.0])
def test_features_wait_for_a_vp_drafter_that_is_not_asked(tmp_path: Path, accuracy: float) -> None:
    """It is only run to inject them, where too many wait: seldom, and in passes without a block to fill."""
    engine = small_triple(tmp_path, 4, 6, branches=6, costs=COSTLY, prefill_chunk=16)
    watched = watch(engine)
    (prompt,) = prompts_of(engine, 5)
    plain = hint(engine, [prompt], (accuracy, 0.5), max_tokens=100)
    output = engine.generate(prompt, branches="auto", max_tokens=100)
    assert output.token_ids == plain[0]
    assert watched.passes == []
    longest = engine.limits.longest_pending
    assert len(watched.injected) >= 3
    assert all(size <= longest for size in watched.injected)
    assert output.statistics.redraft_passes == len(watched.injected)


def test_features_that_waited_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-drafts after steps without any are those of a VP drafter that was run in every step."""
    engine = small_triple(tmp_path, 5, 7, branches=3, costs=BALANCED)
    watched = watch(engine)
    monkeypatch.setattr(AdaptiveDrafting, "observe", lambda *args: None)  # the same decisions in both runs
    prompt = prompts_of(engine, 5)[0]
    hint(engine, [prompt], (0.6, 0.6), SURE, max_tokens=100)
    waited = engine.generate(prompt, branches="auto", trace=True, max_tokens=100)
    assert max(waiting for waiting, _ in watched.passes) > engine.limits.longest_path
    assert len(watched.passes) < waited.statistics.steps - 5
    monkeypatch.setattr(Drafter, "overdue", lambda self, row, size: self.pending(row) > 0)
    watched.injected.clear()
    engine._experience = None  # what it learnt, too
    prompt_run = engine.generate(prompt, branches="auto", trace=True, max_tokens=100)
    assert len(watched.injected) > 5
    assert waited.trace is not None
    assert prompt_run.trace is not None
    drafts = [
        [(step.draft, step.path, [(branch.kept, branch.tokens) for branch in step.branches]) for step in trace.steps]
        for trace in (waited.trace, prompt_run.trace)
    ]
    assert drafts[0] == drafts[1]


def test_a_prompt_alone_needs_no_pass_that_only_injects(tmp_path: Path) -> None:
    """The first draft takes it along; of several prompts each would be padded to the longest."""
    engine = small_triple(tmp_path, 4, 6, branches=2, prefill_chunk=16, max_batch_size=2)
    prompts = prompts_of(engine, 15, 14)
    watched = watch(engine)
    drafter = cast(Watched, engine.drafter)
    (alone,) = engine.generate(prompts[:1], max_tokens=20)
    assert drafter.injected == watched.injected == []
    assert drafter.passes[0][0] == watched.passes[0][0] == 15
    assert alone.statistics.draft_passes <= alone.statistics.steps
    engine.generate(prompts, max_tokens=20)
    assert drafter.injected == [14]  # the second prompt comes when the first drafts already


class Poisoned(DecodeBatch):
    """Ruins every slot behind those in use after each step."""

    def step(self) -> None:
        super().step()
        proposer = self._proposer
        assert proposer is not None
        for row, sequence in self.rows.items():
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
        sequences = [engine.sequence(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
        batch = kind(
            engine.target, engine.drafter, sequences, engine.limits, engine.mask_token_id, engine.vp_drafter,
            engine._policy(engine._drafting(True, branches)),
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
        outputs = engine.generate(prompts, max_tokens=20, **sampling)
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
        for prompt, row in zip(prompts, together.generate(prompts, **options), strict=True):
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
    batch = engine.generate(prompts, branches="auto", max_tokens=50)
    assert [row.token_ids for row in batch] == plain
    assert all(row.statistics.redraft_passes == 0 for row in batch)
