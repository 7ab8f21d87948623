"""One greedy decode step as pure tensor operations over static buffers, so that a CUDA graph can hold it.

    pending features, anchor -> drafter -> [D2SD: prefixes -> VP drafter -> staircase] -> target -> accepted path
    -> its K/V rows moved into place, its features gathered, lengths and anchors advanced

Nothing in it waits for the host or has a shape that depends on data, so on a CUDA device it is captured once and then
replayed; on a CPU the same code runs eagerly with the operators' references. The host reads one small tensor a step.
What a session's pass gives may be overwritten by its next: each session has one pass a step.

Shapes are always the full ones. Sizes of blocks, branches and trees are those of the host loop, near the end of a
sequence too, as lengths in tensors: steps are the same, token for token.

What a step writes stays in `Limits.capacity` slots a row: a drafter its padded pending features and then its blocks,
from at most max_seq_len on; the target a tree, likewise (`Limits.step_slots`). That holds also for rows that are not
active: they keep their lengths, inject what they have pending once more, and write behind their committed tokens, where
nothing is of meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from dflash_trt.backends.base import Cache, DeviceSession
from dflash_trt.export.contract import Role
from dflash_trt.ops.accepted_path import accept_path, addresses, gather_features, move_rows_
from dflash_trt.runtime.device_staircase import (
    DeviceBlock,
    DeviceTree,
    blocks,
    chain,
    choose_branches,
    first_block,
    staircase,
)
from dflash_trt.runtime.limits import Limits

_WARM_UPS = 3  # eager runs before a capture: kernels are compiled and libraries set up in them


class StepOutcome(NamedTuple):
    """What the host reads of one row after a step.

    Attributes:
        tokens: the accepted drafts and the bonus token, which is -1 where the target's logits were not finite.
        nodes: of the verified tree, the root included; equal siblings count each.
        not_finite: roles of the drafters with a confidence that is not finite.
    """

    tokens: list[int]
    nodes: int
    not_finite: list[Role]


@dataclass
class StepState:
    """What a step reads and advances: static buffers on the device.

    Invariant between steps, of active rows: the target's cache holds `context_len` rows, and a drafter's cache and the
    pending features together cover them.

    Attributes:
        context_len, anchor: int64 [B]: committed tokens, and the token behind them.
        remaining: int64 [B]: tokens that may still be generated.
        active: bool [B]: rows that go on, while tokens remain; others neither advance nor lose anything.
        features, feature_len: [B, P, T*H] of the drafters' dtype and int64 [B]: features of the last accepted path.
        outcome: int64 [B, 3 + P]: path length, nodes, a bit for each drafter that was not finite, then the tokens.
    """

    context_len: torch.Tensor
    anchor: torch.Tensor
    remaining: torch.Tensor
    active: torch.Tensor
    features: torch.Tensor
    feature_len: torch.Tensor
    outcome: torch.Tensor

    @classmethod
    def new(cls, batch: int, path: int, width: int, dtype: torch.dtype, device: str) -> StepState:
        """No row is active. `path`: P; `width`: T*H."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            context_len=zeros(batch),
            anchor=zeros(batch),
            remaining=zeros(batch),
            active=zeros(batch, dtype=torch.bool),
            features=zeros(batch, path, width, dtype=dtype),
            feature_len=zeros(batch),
            outcome=zeros(batch, 3 + path),
        )


class DeviceStep:
    """The step of some rows, and all memory it works on.

    Load the rows with `load` (their caches hold the prompt by then), then `run` as long as some are active. With
    `capture` before, `run` replays a CUDA graph.

    Args:
        target, drafter, vp_drafter: sessions on one device; a VP drafter where there are branches.
        branches: how many of the likeliest prefixes are re-drafted; 0 for a chain (DFlash, DFlare).
        caches: of the sessions in this order, with `batch` rows and `limits.capacity` slots; None makes new ones. It is
            the whole capacity at once, since a graph holds the addresses of its buffers: growing would capture anew.
    """

    def __init__(
        self,
        target: DeviceSession,
        drafter: DeviceSession,
        limits: Limits,
        mask_token_id: int,
        batch: int,
        *,
        vp_drafter: DeviceSession | None = None,
        branches: int = 0,
        caches: Sequence[Cache] | None = None,
    ) -> None:
        if (vp_drafter is None) != (branches == 0) or not 0 <= branches <= limits.branches:
            raise ValueError(f"{branches} branches of at most {limits.branches}, with VP drafter {vp_drafter}")
        self.limits = replace(limits, branches=branches)
        self.mask_token_id = mask_token_id
        self._sessions = [session for session in (target, drafter, vp_drafter) if session is not None]
        self.target, self.drafters = target, self._sessions[1:]
        self.caches = [s.new_cache(batch, limits.capacity) for s in self._sessions] if caches is None else list(caches)
        dtype = getattr(torch, target.graph.dtype)
        width = next(int(spec.shape[-1]) for spec in target.graph.outputs if spec.name == "context_features")
        self.state = StepState.new(batch, self.limits.longest_path, width, dtype, target.device)
        self._pointers = addresses(self.caches[0].buffers)
        nodes = torch.arange(self.limits.tree_size, device=target.device)
        self._logit_rows = nodes.repeat(batch, 1)
        self._read = torch.empty_like(self.state.outcome, device="cpu", pin_memory=nodes.is_cuda)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def load(
        self, context_len: Sequence[int], anchor: Sequence[int], remaining: Sequence[int], active: Sequence[bool]
    ) -> None:
        """Puts every row where its prefill left it: `context_len` tokens in every cache, no features pending.

        `context_len` and `remaining` of a row are together less than `limits.max_seq_len`.
        """
        state = self.state
        given = (context_len, anchor, remaining, active)
        for buffer, values in zip((state.context_len, state.anchor, state.remaining, state.active), given, strict=True):
            buffer.copy_(torch.tensor(values))
        state.feature_len.zero_()

    @torch.inference_mode()
    def stop(self, rows: Sequence[int]) -> None:
        """Makes rows inactive."""
        for row in rows:
            self.state.active[row].fill_(False)

    def capture(self, pool: Any = None) -> Any:
        """Captures the step in a CUDA graph. To be done before rows are loaded: it leaves none active.

        Args:
            pool: memory to share with other graphs, none of which runs at the same time: what `capture` of another step
                returned. Nothing in it outlives a step.

        Returns:
            The pool in use.
        """
        self.state.active.zero_()
        self._graph = captured(self.step, self.target.device, pool)
        return self._graph.pool()

    def run(self) -> list[StepOutcome]:
        """One step of all active rows, and what came of it, by row; of rows not active, no tokens."""
        self.advance()
        return self.read()

    def advance(self) -> None:
        """One step, and nothing is waited for: replayed where it was captured."""
        if self._graph is None:
            self.step()
        else:
            self._graph.replay()

    @torch.inference_mode()
    def read(self) -> list[StepOutcome]:
        """What came of the last step: one copy, which waits for it."""
        outcome = self.state.outcome
        self._read.copy_(outcome, non_blocking=True)
        if outcome.is_cuda:
            torch.cuda.current_stream(outcome.device).synchronize()
        roles = [drafter.graph.role for drafter in self.drafters]
        return [
            StepOutcome(tokens[:length], nodes, [role for bit, role in enumerate(roles) if bits >> bit & 1])
            for length, nodes, bits, *tokens in self._read.tolist()
        ]

    @torch.inference_mode()
    def step(self) -> None:
        """What is captured: `advance`, eagerly."""
        state, limits = self.state, self.limits
        room = torch.where(state.remaining == 1, 1, state.remaining + 1)  # as `Proposer` has it: none for the last
        room = torch.where(state.active, room, 1)
        tree, not_finite = self._propose(room.clamp(max=limits.block_size), room.clamp(max=limits.longest_path))
        inputs = {
            "input_ids": tree.tokens,
            "position_ids": state.context_len[:, None] + tree.depths,
            "visibility": tree.visibility,
            "context_len": state.context_len,
            "logit_rows": self._logit_rows,
        }
        results = self.target.forward(inputs, self.caches[0])
        choices, features = results["token_ids"], results["context_features"]
        path, path_len, bonus = accept_path(tree.tokens, choices, tree.visibility, tree.parents, limits.longest_path)
        path_len = torch.where(state.active, path_len, 0)
        if limits.branches:  # the path of a chain is in place
            move_rows_(self.caches[0].buffers, self._pointers, path, path_len, state.context_len)
        self._advance(path_len, bonus, gather_features(features, path, path_len, limits.longest_path))
        # the choice at each node of the path is the next one's token, at the last the bonus
        emitted = choices.gather(1, path)
        state.outcome.copy_(torch.cat((torch.stack((path_len, tree.total, not_finite), dim=1), emitted), dim=1))

    def _advance(self, path_len: torch.Tensor, bonus: torch.Tensor, features: torch.Tensor) -> None:
        """Commits the path. Its length is 0 where a row is not active."""
        state = self.state
        state.context_len.add_(path_len)
        state.remaining.sub_(path_len)
        state.anchor.copy_(torch.where(state.active, bonus, state.anchor))
        state.features.copy_(torch.where(state.active[:, None, None], features, state.features))
        state.feature_len.copy_(torch.where(state.active, path_len, state.feature_len))
        state.active.logical_and_(state.remaining > 0)

    def _propose(self, size: torch.Tensor, redraft_size: torch.Tensor) -> tuple[DeviceTree, torch.Tensor]:
        """The candidates, and int64 [B]: a bit for each drafter that was not finite.

        Args:
            size, redraft_size: int64 [B], tokens of a first block and of a branch, their anchor included.
        """
        limits, state, mask = self.limits, self.state, self.mask_token_id
        block = first_block(state.anchor, size, limits.block_size, mask)
        ids, confidence = self._draft(0, block)
        not_finite = _not_finite(confidence, block.own & (size > 1)[:, None])  # one token: nothing was drafted
        trunk = torch.cat((state.anchor[:, None], ids[:, 1:]), dim=1)
        if not limits.branches:
            return chain(trunk, size), not_finite
        count, width = min(limits.branches, limits.block_size - 1), limits.vp_block_size
        extend = width > limits.block_size
        branches = choose_branches(confidence[:, 1:], size, redraft_size, count, extend)
        block = blocks(trunk, branches, redraft_size, width, mask)
        ids, confidence = self._draft(1, block)
        tree = staircase(trunk, size, branches, ids.unflatten(1, (-1, width)), redraft_size, limits.tree_size)
        return tree, not_finite + 2 * _not_finite(confidence, block.own)

    def _draft(self, number: int, block: DeviceBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """Injects the pending features into a drafter's cache and fills blocks: (ids, confidence), each [B, Q]."""
        state = self.state
        inputs = {
            "context_features": state.features,
            "feature_len": state.feature_len,
            "context_len": state.context_len - state.feature_len,
            "block_ids": block.ids,
            "block_position_ids": state.context_len[:, None] + block.offsets,
            "visibility": block.visibility,
        }
        results = self.drafters[number].forward(inputs, self.caches[1 + number])
        return results["draft_ids"], results["confidence"]


def _not_finite(confidence: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """int64 [B]: 1 where a confidence [B, Q] that counts is NaN or infinite, else 0."""
    return (own & ~confidence.isfinite()).any(-1).long()


def captured(step: Callable[[], None], device: str, pool: Any = None) -> torch.cuda.CUDAGraph:
    """`step` as one CUDA graph. Runs it a few times on a stream of its own first, as capturing asks."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # others may use the GPU
            step()
    return graph
