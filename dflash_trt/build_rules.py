"""What a build settles before it writes anything: whether its options make sense together, and every size."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoint.drafter import DrafterCheckpoint
from dflash_trt.checkpoint.pair import check_pair, check_vp_drafter
from dflash_trt.checkpoint.target import TargetCheckpoint
from dflash_trt.config import BuildConfig
from dflash_trt.errors import UsageError
from dflash_trt.runtime.limits import Limits

DEFAULT_SEQ_LEN = 2048
DEFAULT_PREFILL_CHUNK = 256
DEFAULT_BRANCHES = 4  # what the D2SD paper runs with
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def refuse_contradictions(config: BuildConfig) -> None:
    """Raises UsageError for options that do not go together."""
    config.check_backend()
    if config.vp_drafter is None:
        for name in ("branches", "vp_block_size"):
            if getattr(config, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UsageError("needs a VP drafter (D2SD)", where=option, mend="Give --vp-drafter, or leave it out")
    output = config.output.absolute()
    if config.dump_ir is not None and output in (config.dump_ir.absolute(), *config.dump_ir.absolute().parents):
        raise UsageError(f"{config.dump_ir} lies in the bundle", where="--dump-ir", mend="Choose another place")


def settle_limits(
    config: BuildConfig, target: TargetCheckpoint, drafter: DrafterCheckpoint, vp_drafter: DrafterCheckpoint | None
) -> Limits:
    """Checks that the models belong together, and settles every size."""
    block_size = check_pair(target, drafter, config.block_size)
    named = [("target", target.spec), ("drafter", drafter.spec)]
    vp_block_size = branches = 0
    if vp_drafter is not None:
        named.append(("VP drafter", vp_drafter.spec))
        asked = config.vp_block_size or config.block_size
        vp_block_size = check_vp_drafter(target, drafter, vp_drafter, block_size, asked)
        branches = DEFAULT_BRANCHES if config.branches is None else config.branches
    trained = {role: spec.max_position_embeddings for role, spec in named}
    max_seq_len = config.max_seq_len or min(DEFAULT_SEQ_LEN, *trained.values())
    for role, longest in trained.items():
        if max_seq_len > longest:
            raise UsageError(
                f"{max_seq_len} exceeds the {role}'s max_position_embeddings {longest}",
                where="--max-seq-len",
                mend=f"Use at most {longest}",
            )
    max_input_len = config.max_input_len or max_seq_len - 1
    if max_input_len >= max_seq_len:
        raise UsageError(
            f"{max_input_len} must be below max_seq_len {max_seq_len}: a prompt needs room for a token",
            where="--max-input-len",
        )
    return Limits(
        max_batch_size=config.max_batch_size,
        max_seq_len=max_seq_len,
        max_input_len=max_input_len,
        block_size=block_size,
        prefill_chunk=min(config.prefill_chunk or DEFAULT_PREFILL_CHUNK, max_input_len),
        vp_block_size=vp_block_size,
        branches=branches,
    )


def tokenizer_files(source: Path) -> list[Path]:
    """The tokenizer's files in a checkpoint; raises UsageError where there is none."""
    if not (source / "tokenizer.json").is_file():
        raise UsageError(
            "has no tokenizer.json",
            where=str(source),
            mend="Save it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    return [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
