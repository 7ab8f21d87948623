"""Engines and sessions over fakes, and the torch ones that they must equal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.fake_engine import engine_session
from engines import torch_engine
from export.small_pair import small_pair

from dflash_trt.backends.engine_session import EngineSession
from dflash_trt.backends.torch import TorchSession
from dflash_trt.export.contract import Role
from dflash_trt.runtime.engine import Engine, Generation
from dflash_trt.runtime.limits import Limits

EXAMPLES = Path(__file__).parents[2] / "examples" / "tiny"
SYSTEMS = {"dflash": ("dflash",), "dflare": ("dflare",), "d2sd": ("dflash", "vp_drafter")}
VOCAB = 320
LIMITS = Limits(
    max_batch_size=3, max_seq_len=20, max_input_len=19, block_size=4, prefill_chunk=12, vp_block_size=4, branches=2
)
ROLES: tuple[Role, ...] = ("target", "drafter")


def trained(system: str, **options: Any) -> Engine:
    """The torch engine of a trained system: its drafts are right often."""
    folders = (EXAMPLES / name for name in SYSTEMS[system])
    options = {"max_seq_len": 96, "max_batch_size": 3, "prefill_chunk": 40, "branches": 2, **options}
    return torch_engine(EXAMPLES / "target", *folders, **options)


def prompts_for(engine: Engine, *sizes: int) -> list[list[int]]:
    """Cut to these sizes; the longer ones take several chunks."""
    lines = (EXAMPLES / "heldout.jsonl").read_text().splitlines()
    encoded = [engine.tokenizer.encode(json.loads(line)["prompt"]) for line in lines[: len(sizes)]]
    return [ids[:size] for ids, size in zip(encoded, sizes, strict=True)]


def sessions_of(engine: Engine) -> list[EngineSession]:
    return list(engine.sessions.values())  # type: ignore[arg-type]


def small(role: Role) -> tuple[EngineSession, TorchSession]:
    """A session over fakes, and what they compute."""
    reference = small_pair().graph(role).reference()
    return engine_session(reference, role, LIMITS), reference


def outcomes(outputs: Sequence[Generation]) -> list[tuple[list[int], list[int], str]]:
    return [(o.token_ids, o.statistics.acceptance_lengths, o.finish_reason) for o in outputs]
