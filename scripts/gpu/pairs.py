"""Models to decode with: the repository's trained ones, and random ones in the shape of Qwen3-8B and its drafters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from dflash_trt.backends.torch import TorchSession
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.spec import AttentionPolicy, DrafterSpec, Dtype, RopeSpec, TargetSpec
from dflash_trt.checkpoint.target import EMBEDDING, LM_HEAD, read_target
from dflash_trt.export.contract import Role, drafter_graph, target_graph
from dflash_trt.modeling.load import drafter_tables, load_drafter, load_target, meta_drafter, meta_target, target_tables
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.text import Tokenizer

SYSTEMS = ("dflash", "dflare", "d2sd")
_STD = 0.02  # of random matrices
_LAYERS = 36
_SHARED: dict[str, Any] = dict(
    hidden_size=4096, intermediate_size=12288, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=151936,
    rms_norm_eps=1e-6, max_position_embeddings=40960, rope=RopeSpec(theta=1e6, rotary_dim=128), qk_norm=True,
    dtype="bfloat16",
)  # fmt: skip
QWEN3_8B = TargetSpec(
    **_SHARED, architecture="Qwen3ForCausalLM", family="qwen3", num_layers=_LAYERS,
    policies=(AttentionPolicy(causal=True),) * _LAYERS, tie_word_embeddings=False, eos_token_ids=(151645,),
)  # fmt: skip
QWEN3_8B_DFLASH = DrafterSpec(
    **_SHARED, architecture="DFlashDraftModel", system="dflash", num_layers=5,
    policies=(AttentionPolicy(causal=False),) * 5, block_size=16, mask_token_id=151669, taps=(1, 9, 17, 25, 33),
    num_target_layers=_LAYERS, target_hidden_size=4096,
)  # fmt: skip


@dataclass(frozen=True)
class Models:
    """Sessions on one device, and the sizes they were made for; a VP drafter for D2SD."""

    target: TorchSession
    drafter: TorchSession
    vp_drafter: TorchSession | None
    limits: Limits
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int


def limits_of(max_seq_len: int, block: int, d2sd: bool, vp_block: int | None = None) -> Limits:
    return Limits(
        max_batch_size=1,
        max_seq_len=max_seq_len,
        max_input_len=max_seq_len - 1,
        block_size=block,
        prefill_chunk=64,
        vp_block_size=(vp_block or block) if d2sd else 0,
        branches=4 if d2sd else 0,
    )


def tiny(folder: Path, system: str, dtype: Dtype, device: str, max_seq_len: int) -> Models:
    """The trained models in `folder` (examples/tiny), for one of SYSTEMS."""
    target = read_target(folder / "target")
    names: dict[Role, str] = {"drafter": "dflare" if system == "dflare" else "dflash"}
    if system == "d2sd":
        names["vp_drafter"] = "vp_drafter"
    drafters = {role: read_drafter(folder / name) for role, name in names.items()}
    spec = drafters["drafter"].spec
    vp = drafters.get("vp_drafter")
    limits = limits_of(max_seq_len, spec.block_size, system == "d2sd", vp.spec.block_size if vp else None)
    positions = limits.capacity
    module = load_target(target.spec, spec.taps, target.tensors, positions, dtype)
    sessions = {
        role: TorchSession(
            load_drafter(own.spec, own.tensors, target.spec, target.tensors, positions, dtype),
            drafter_graph(own.spec, dtype, role),
            device,
        )
        for role, own in drafters.items()
    }
    return Models(
        TorchSession(module, target_graph(target.spec, len(spec.taps), dtype), device),
        sessions["drafter"],
        sessions.get("vp_drafter"),
        limits,
        spec.mask_token_id,
        target.spec.eos_token_ids,
        target.spec.vocab_size,
    )


def engine(models: Models, tokenizer: Path, system: Any) -> Engine:
    return Engine(
        models.target, models.drafter, Tokenizer(tokenizer), models.limits, mask_token_id=models.mask_token_id,
        eos_token_ids=models.eos_token_ids, vocab_size=models.vocab_size, system=system, vp_drafter=models.vp_drafter,
    )  # fmt: skip


def bytes_of(target: TargetSpec, drafter: DrafterSpec) -> int:
    """Of the weights of a target and two such drafters in bfloat16, which share embedding and head."""
    second = meta_drafter(drafter, target, 1, "bfloat16")
    named = [*meta_target(target, drafter.taps, 1, "bfloat16").named_parameters(), *2 * list(second.named_parameters())]
    return 2 * sum(parameter.numel() for name, parameter in named if not name.startswith("target."))


def random_pair(target: TargetSpec, drafter: DrafterSpec, device: str, max_seq_len: int) -> Models:
    """Random weights in bfloat16, made on the device; the two drafters of D2SD differ in their values only."""
    limits = limits_of(max_seq_len, drafter.block_size, d2sd=True)
    positions = limits.capacity
    module = meta_target(target, drafter.taps, positions, "bfloat16")
    _fill(module, {}, target_tables(target, positions), device)
    shared = {f"target.{EMBEDDING}": module.model.embed_tokens.weight, f"target.{LM_HEAD}": module.lm_head.weight}
    sessions: dict[Role, TorchSession] = {}
    for role in ("drafter", "vp_drafter"):
        own = meta_drafter(drafter, target, positions, "bfloat16")
        # DFlash's tables come from its spec alone, so there are no tensors to give
        _fill(own, shared, drafter_tables(drafter, cast(Any, None), positions), device)
        sessions[role] = TorchSession(own, drafter_graph(drafter, "bfloat16", role), device)
    return Models(
        TorchSession(module, target_graph(target, len(drafter.taps), "bfloat16"), device),
        sessions["drafter"],
        sessions["vp_drafter"],
        limits,
        drafter.mask_token_id,
        target.eos_token_ids,
        target.vocab_size,
    )


def without_branches(models: Models) -> Models:
    """The same for DFlash."""
    limits = replace(models.limits, vp_block_size=0, branches=0)
    return replace(models, vp_drafter=None, limits=limits)


def _fill(module: torch.nn.Module, shared: dict[str, torch.Tensor], tables: dict[str, Any], device: str) -> None:
    """Puts tensors where there were none: norms of 1, normal matrices, the shared ones and the tables as given."""
    state: dict[str, torch.Tensor] = {name: torch.from_numpy(table).to(device) for name, table in tables.items()}
    for name, parameter in module.named_parameters():
        if name in shared:
            state[name] = shared[name].detach()
            continue
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        state[name] = tensor.fill_(1.0) if tensor.dim() == 1 else tensor.normal_(0.0, _STD)
    module.load_state_dict(state, strict=True, assign=True)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
