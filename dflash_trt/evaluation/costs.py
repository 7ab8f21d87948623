"""What a pass costs by the number of its new tokens, measured on the machine the bundle is built on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from dflash_trt.backends.base import Array, Session
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.decode import chunk_inputs
from dflash_trt.runtime.drafter import Block, block_inputs
from dflash_trt.runtime.engine import Engine

_REPEATS = 7
_CONTEXT = 256


def measure_costs(engine: Engine, context: int = _CONTEXT) -> PassCosts:
    """Times passes of each graph, one sequence at a time, from one token to as many as the bundle's steps have.

    Each is timed behind the pass that it follows in a step, whose weights have taken the processor's caches (a pass is
    5 to 15 % faster behind one of its own graph); a target pass of one token, behind another: that is token by token.

    Args:
        context: cached tokens before the pass, within max_seq_len.
    """
    limits = engine.limits
    context = min(context, limits.max_seq_len - 1)
    capacity = engine.target.capacity_for(context + limits.step_slots, limits.capacity)
    target_cache = engine.target.new_cache(1, capacity)

    def verify(size: int) -> dict[str, Array]:
        inputs = chunk_inputs(np.zeros(size, np.int64), context)
        inputs["logit_rows"] = np.arange(size)[None]
        return engine.target.run(inputs, ["token_ids", "context_features"], target_cache)

    features = verify(1)["context_features"]

    def drafting(session: Session) -> Callable[[int], object]:
        cache = session.new_cache(1, capacity)

        def draft(size: int) -> object:
            block = Block.of([[0]], size, engine.mask_token_id)
            return session.run(block_inputs(block, features, 1, context), ["draft_ids", "confidence"], cache)

        return draft

    draft = drafting(engine.drafter)
    redraft = drafting(engine.vp_drafter) if engine.vp_drafter is not None else None
    redrafted = limits.redraft_rows * limits.vp_block_size
    last = redraft or draft
    return PassCosts(
        draft=_timed(draft, limits.block_size, lambda size: verify(1)),
        redraft=_timed(redraft, redrafted, lambda size: draft(1)) if redraft is not None else (),
        verify=_timed(verify, limits.tree_size, lambda size: verify(1) if size == 1 else last(1)),
    )


def _timed(run: Callable[[int], object], most: int, before: Callable[[int], object]) -> tuple[tuple[int, float], ...]:
    """(tokens, seconds) for 1, 2, 3, 4, 6, 8, 12, ... and `most` tokens, each behind what `before` runs.

    Each is the least of some, taken in turns with the other sizes so that a busy moment slows all of them; and no
    larger pass is cheaper than a smaller one.
    """
    sizes = {size for power in range(most.bit_length()) for size in (2**power, 3 * 2**power // 2)}
    sizes = {size for size in sizes if size < most} | {most}
    seconds = dict.fromkeys(sorted(sizes), math.inf)
    run(most)  # the first pass allocates
    for _ in range(_REPEATS):
        for size, least in seconds.items():
            before(size)
            started = time.perf_counter()
            run(size)
            seconds[size] = min(least, time.perf_counter() - started)
    return tuple(zip(seconds, np.maximum.accumulate(list(seconds.values())).tolist(), strict=True))
