"""What a pass costs by the number of its new tokens, measured on the machine the bundle is built on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from dflash_trt.backends.base import Session
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.decode import chunk_inputs
from dflash_trt.runtime.drafter import Block
from dflash_trt.runtime.engine import Engine

_REPEATS = 7
_CONTEXT = 256  # cached tokens before the pass, within max_seq_len


def measure_costs(engine: Engine) -> PassCosts:
    """Times passes of each graph, one sequence at a time, from one token to as many as the bundle's steps have."""
    limits = engine.limits
    context = min(_CONTEXT, limits.max_seq_len - 1)
    capacity = engine.target.capacity_for(context + limits.step_slots, limits.capacity)

    def verify(size: int) -> None:
        inputs = chunk_inputs(np.zeros(size, np.int64), context)
        inputs["logit_rows"] = np.arange(size)[None]
        engine.target.run(inputs, ["token_ids", "context_features"], target_cache)

    def drafting(session: Session) -> Callable[[int], None]:
        cache = session.new_cache(1, capacity)

        def draft(size: int) -> None:
            block = Block.of([[0]], size, engine.mask_token_id)
            inputs = {
                "context_features": features,
                "feature_len": np.array([1]),
                "context_len": np.array([context]),
                "block_ids": block.ids[None],
                "block_position_ids": context + 1 + block.offsets[None],
                "visibility": block.visibility[None],
            }
            session.run(inputs, ["draft_ids", "confidence"], cache)

        return draft

    target_cache = engine.target.new_cache(1, capacity)
    chunk = chunk_inputs(np.zeros(1, np.int64), context)
    features = engine.target.run(chunk, ["context_features"], target_cache)["context_features"]
    redrafted = limits.redraft_rows * limits.vp_block_size
    vp_drafter = engine.vp_drafter
    return PassCosts(
        draft=tuple(_timed(drafting(engine.drafter), limits.block_size)),
        redraft=tuple(_timed(drafting(vp_drafter), redrafted)) if vp_drafter is not None and redrafted else (),
        verify=tuple(_timed(verify, limits.tree_size)),
    )


def _timed(run: Callable[[int], None], most: int) -> Iterator[tuple[int, float]]:
    """(tokens, seconds) for 1, 2, 3, 4, 6, 8, 12, ... and `most` tokens; the least of some, which others slow least."""
    sizes = {size for power in range(most.bit_length()) for size in (2**power, 3 * 2**power // 2)}
    run(most)  # the first pass allocates
    for size in sorted({size for size in sizes if 0 < size < most} | {most}):
        seconds = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            run(size)
            seconds.append(time.perf_counter() - started)
        yield size, min(seconds)
