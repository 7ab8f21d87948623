"""Engines over checkpoint folders for the tests, without a bundle in between."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.backends.torch import TorchSession
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.pair import check_pair, check_vp_drafter
from dflash_trt.checkpoint.target import read_target
from dflash_trt.export.contract import drafter_graph, target_graph
from dflash_trt.modeling.load import load_drafter, load_target
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.text import Tokenizer


def torch_engine(
    target_dir: Path,
    drafter_dir: Path,
    vp_drafter_dir: Path | None = None,
    *,
    max_seq_len: int = 128,
    max_batch_size: int = 1,
    prefill_chunk: int = 16,
    block_size: int | None = None,
    vp_block_size: int | None = None,
    branches: int = 4,
    costs: PassCosts | None = None,
) -> Engine:
    """The reference backend in float32 on a pair of checkpoints, or on a triple (D2SD)."""
    target, drafter = read_target(target_dir), read_drafter(drafter_dir)
    block = check_pair(target, drafter, block_size)
    vp_drafter = None if vp_drafter_dir is None else read_drafter(vp_drafter_dir)
    vp_block = check_vp_drafter(target, drafter, vp_drafter, block, vp_block_size) if vp_drafter else 0
    limits = Limits(
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_input_len=max_seq_len - 1,
        block_size=block,
        prefill_chunk=prefill_chunk,
        vp_block_size=vp_block,
        branches=branches if vp_drafter else 0,
    )
    taps, positions = drafter.spec.taps, limits.capacity
    target_module = load_target(target.spec, taps, target.tensors, positions, "float32")
    sessions = [
        TorchSession(
            load_drafter(own.spec, own.tensors, target.spec, target.tensors, positions, "float32"),
            drafter_graph(own.spec, "float32"),
        )
        for own in (drafter, vp_drafter)
        if own
    ]
    return Engine(
        TorchSession(target_module, target_graph(target.spec, len(taps), "float32")),
        sessions[0],
        Tokenizer(target_dir),
        limits,
        mask_token_id=drafter.spec.mask_token_id,
        eos_token_ids=target.spec.eos_token_ids,
        vocab_size=target.spec.vocab_size,
        system="d2sd" if vp_drafter else drafter.spec.system,
        vp_drafter=sessions[1] if vp_drafter else None,
        costs=costs,
    )
