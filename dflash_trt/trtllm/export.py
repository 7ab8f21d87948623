"""Writing what TensorRT-LLM's PyTorch backend (1.3 and later) needs to serve a target with a drafter.

Written after the NVIDIA/TensorRT-LLM repository, at the commits its stored copy has of each file; nothing of it can be
run without its wheels and a GPU:

    0004396720054fd8e205cbf616f21f0b57c6b412  llmapi/llm_args.py: DFlashDecodingConfig, how a drafter's config is read
    00209af149e7774406881a37283dce303571eb11  commands/serve.py: --config, --custom_module_dirs
    12c8156278843093c8dfc0d1e3f4765189fc3a99  tools/importlib_utils.py: how a custom module folder is imported

and the published reference of DFlashDecodingConfig in 1.3.0rc27 and 1.4.0rc1. The draft model's commits are named in
`out_of_tree/dflash_trt_dflare/modeling.py`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.bundle import CONFIG, tool_versions
from dflash_trt.checkpoint.drafter import DrafterCheckpoint, read_drafter
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.target import TargetCheckpoint, read_target
from dflash_trt.errors import UsageError
from dflash_trt.output import atomic_output
from dflash_trt.trtllm import serving as texts
from dflash_trt.trtllm.drafter_folder import check_servable, write_drafter
from dflash_trt.trtllm.serving import Serving

SECTION = "dflash_trt_export"  # of config.json, by which an export is known
MAX_BATCH_SIZE, MAX_SEQ_LEN = 8, 4096
_PACKAGES = Path(__file__).with_name("out_of_tree")


@dataclass(frozen=True)
class Export:
    """What was written: the folder, what it serves, and its files relative to it."""

    folder: Path
    serving: Serving
    files: tuple[str, ...]


def export(
    target: Path,
    drafter: Path,
    output: Path,
    *,
    vp_drafter: Path | None = None,
    max_draft_len: int | None = None,
    max_batch_size: int = MAX_BATCH_SIZE,
    max_seq_len: int | None = None,
    force: bool = False,
) -> Export:
    """Writes the folder `output`: options, serve command, drafter, and for DFlare the draft model's package.

    Args:
        vp_drafter: refused; TensorRT-LLM has no D2SD.
        max_draft_len: drafts a step, 1 to the trained block size - 1; None for the most.
        max_seq_len: prompt and output in tokens; None for 4096, or what the pair was trained for if that is less.
        force: replace an earlier export at `output`.

    Raises:
        UsageError: a value that cannot be used, or D2SD.
        CheckpointError, PairError: a checkpoint that breaks a rule, or two that do not fit.
        ExportError: a drafter TensorRT-LLM would serve as something else.
        BundleError: `output` cannot be written or is in the way.
    """
    if vp_drafter is not None:
        what = "D2SD needs a second drafter pass over branches of the first one, and verifies a tree"
        what += "; TensorRT-LLM's DFlash worker drafts and verifies one chain"
        raise UsageError(what, where="--vp-drafter", mend="Leave it out, or build a bundle of all three")
    own, theirs = read_target(target), read_drafter(drafter)
    asked = None if max_draft_len is None else max_draft_len + 1
    block = check_pair(own, theirs, asked, "--max-draft-len and the anchor")
    check_servable(own, theirs)
    if max_batch_size < 1:
        raise UsageError(f"is {max_batch_size}, but must be at least 1", where="--max-batch-size")
    folder = Path(output).resolve()
    serving = Serving(
        system=theirs.spec.system,
        target=own.path.resolve(),
        drafter=folder / texts.DRAFTER,
        mask_token_id=theirs.spec.mask_token_id,
        taps=theirs.spec.taps,
        max_draft_len=block - 1,
        max_batch_size=max_batch_size,
        max_seq_len=(length := _settle_length(own, theirs, max_seq_len)),
        context_cache_bytes=_context_cache_bytes(theirs, max_batch_size, length + block),
    )
    with atomic_output(folder, force=force, kind="an export", is_one=is_export) as temporary:
        _write(serving, theirs, temporary)
        files = tuple(sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()))
    return Export(folder, serving, files)


def is_export(folder: Path) -> bool:
    """Whether a folder is what `export` writes."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and isinstance(config.get(SECTION), dict)


def _settle_length(target: TargetCheckpoint, drafter: DrafterCheckpoint, asked: int | None) -> int:
    trained = min(target.spec.max_position_embeddings, drafter.spec.max_position_embeddings)
    if asked is None:
        return min(MAX_SEQ_LEN, trained)
    if not 2 <= asked <= trained:
        what = f"is {asked}, but must be 2 to {trained}, the smaller max_position_embeddings of target and drafter"
        raise UsageError(what, where="--max-seq-len")
    return asked


def _context_cache_bytes(drafter: DrafterCheckpoint, batch: int, capacity: int) -> int:
    """Keys and values of float16 or bfloat16, with the one sequence more that TensorRT-LLM pads batches with."""
    spec = drafter.spec
    return 2 * (batch + 1) * spec.num_layers * capacity * spec.num_kv_heads * spec.head_dim * 2


def _write(serving: Serving, drafter: DrafterCheckpoint, folder: Path) -> None:
    write_drafter(drafter, folder / texts.DRAFTER)
    (folder / texts.OPTIONS).write_text(texts.options_text(serving), encoding="utf-8")
    (folder / texts.README).write_text(texts.readme_text(serving), encoding="utf-8")
    script = folder / texts.SCRIPT
    script.write_text(texts.script_text(serving), encoding="utf-8")
    script.chmod(script.stat().st_mode | 0o111)
    if serving.system == "dflare":
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(_PACKAGES / texts.PACKAGE, folder / texts.PACKAGE, ignore=ignored)
    section: dict[str, object] = {"system": serving.system, "tool_versions": tool_versions(())}
    section |= {"target": str(serving.target), "drafter": str(drafter.path.resolve())}
    (folder / CONFIG).write_text(json.dumps({SECTION: section}, indent=2) + "\n", encoding="utf-8")
