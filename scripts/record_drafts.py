#!/usr/bin/env python
"""Records what both drafters of a D2SD bundle say at every place of what the target writes.

    python scripts/record_drafts.py BUNDLE drafts.npz [--prompts code --prompts math] [--limit 6] [--max-tokens 120]

With it, policies for drafts and branches can be tried without a model: any step may begin anywhere, and what it would
have drafted is known (tests/runtime/replay.py). Decoding is greedy. The bundle is one whose `--branches` is its block
size less one, so that every prefix is re-drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

import dflash_trt
from dflash_trt.errors import DflashError
from dflash_trt.evaluation.bench_prompts import encode, prompt_sets
from dflash_trt.progress import RichProgress
from dflash_trt.runtime.branching import Branch
from dflash_trt.runtime.decode import DecodeBatch
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.sampling_params import SamplingParams
from dflash_trt.runtime.staircase import Staircase


class Recorder:
    """A policy that re-drafts behind every prefix and verifies the anchor alone: each step yields one token."""

    def __init__(self, drafts: int) -> None:
        self._drafts = drafts
        self.steps: list[tuple[np.ndarray, ...]] = []

    def choose(self, confidence: Sequence[float], size: int) -> list[int]:
        return list(range(len(confidence)))

    def prune(self, staircase: Staircase, confidence: Sequence[float], branches: Sequence[Branch]) -> Sequence[int]:
        count, most = len(confidence), self._drafts
        ids, sure = np.zeros((most + 1, most), np.int32), np.zeros((most + 1, most), np.float16)
        ids[0, :count], sure[0, :count] = staircase.tokens[1 : 1 + count], confidence
        for branch in branches:
            tail = len(branch.tokens)
            ids[1 + branch.kept, :tail], sure[1 + branch.kept, :tail] = branch.tokens, branch.confidence
        self.steps.append((np.array(count), ids, sure))
        return [0]


@click.command(help=__doc__)
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--prompts", multiple=True, help="As of dflash-trt bench.")
@click.option("--limit", type=click.IntRange(min=1), default=6, show_default=True, help="Prompts of each set.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=120, show_default=True)
@click.option("--threads", type=click.IntRange(min=0), default=0, show_default=True)
def main(bundle: Path, output: Path, prompts: Sequence[str], limit: int, max_tokens: int, threads: int) -> None:
    try:
        np.savez_compressed(output, **recorded(dflash_trt.load(bundle, threads=threads), prompts, limit, max_tokens))
    except DflashError as error:
        raise click.UsageError(str(error)) from error


def recorded(engine: Engine, prompts: Sequence[str], limit: int, max_tokens: int) -> dict[str, np.ndarray]:
    """Of all prompts: set, length and tokens of the output, and of each token but the last what was drafted behind it.

    `ids` and `confidence` [steps, 1 + n, n] have the trunk first, then the tail behind each kept prefix.
    """
    drafts = engine.limits.block_size - 1
    if engine.limits.branches < drafts:
        raise click.UsageError(f"the bundle was built for {engine.limits.branches} branches; build it with {drafts}")
    sets = prompt_sets(prompts, limit)
    names, lengths, tokens, steps = [], [], [], []
    with RichProgress().stage("recording", sum(len(one.prompts) for one in sets)) as advance:
        for one in sets:
            for prompt in one.prompts:
                generated, seen = record(engine, encode(prompt, one.name, [engine], None), max_tokens)
                names.append(one.name)
                lengths.append(len(generated))
                tokens += generated
                steps += seen
                advance(1)
    counts, ids, confidence = map(np.stack, zip(*steps, strict=True))
    outputs = {"sets": np.array(names), "lengths": np.array(lengths), "tokens": np.array(tokens, np.int32)}
    return outputs | {"counts": counts, "ids": ids, "confidence": confidence}


def record(engine: Engine, prompt: list[int], max_tokens: int) -> tuple[list[int], list[tuple[np.ndarray, ...]]]:
    """The tokens after a prompt, and of each but the last what was drafted behind it."""
    recorder = Recorder(engine.limits.block_size - 1)
    sequence = engine.sequence(prompt, SamplingParams(max_tokens=max_tokens))
    sessions = (engine.target, engine.drafter)
    batch = DecodeBatch(*sessions, [sequence], engine.limits, engine.mask_token_id, engine.vp_drafter, policy=recorder)
    batch.run()
    return sequence.generated, recorder.steps


if __name__ == "__main__":
    main()
