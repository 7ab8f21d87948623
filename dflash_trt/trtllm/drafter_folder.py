"""The drafter as TensorRT-LLM reads it: a config.json in its dialect, weights hard-linked.

What TensorRT-LLM would read as something else is refused: a drafter served wrongly is lossless and slow, so it hides.
Read of its sources (see `export.py` for the versions): `block_size` is taken from the top level alone; taps and mask id
from `dflash_config` alone, the mask id otherwise being guessed; captured taps are sorted; full layers look both ways,
sliding ones are causal; embedding scale, output multiplier and softcap are not applied.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.config import read_json_object
from dflash_trt.checkpoint.decoder import FULL, SLIDING
from dflash_trt.checkpoint.drafter import DrafterCheckpoint
from dflash_trt.checkpoint.spec import DrafterSpec, TargetSpec
from dflash_trt.checkpoint.target import TargetCheckpoint
from dflash_trt.checkpoint.tensors import INDEX
from dflash_trt.errors import ExportError
from dflash_trt.export.weights import link

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflare": "DFlareDraftModel"}

# Where trainers put what TensorRT-LLM reads elsewhere, and names of files that do not come along.
_MOVED = ("auto_map", "causal", "dtype", "is_causal", "mask_token_id", "model_arch", "target_layer_ids")


def check_servable(target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    """Refuse a drafter that TensorRT-LLM would serve as another one than it is.

    Raises:
        ExportError: the first thing that TensorRT-LLM does differently or not at all.
    """
    for what in _differences(target.spec, drafter.spec):
        mend = "Serve it with dflash-trt's own backends, or convert it"
        raise ExportError(what, where=str(drafter.path / "config.json"), mend=mend)


def _differences(target: TargetSpec, spec: DrafterSpec) -> Iterator[str]:
    if list(spec.taps) != sorted(spec.taps):
        yield f"target_layer_ids is {list(spec.taps)}, but TensorRT-LLM sorts the states it captures"
    if any(policy.causal != (policy.window > 0) for policy in spec.policies):
        yield "a full layer is causal or a sliding one is not, but TensorRT-LLM takes them the other way round"
    if (spec.input_embedding_scale, spec.output_multiplier, spec.final_logit_softcapping) != (1.0, 1.0, 0.0):
        yield "input_embedding_scale, output_multiplier or final_logit_softcapping is set, which TensorRT-LLM ignores"
    if spec.qkv_bias or spec.output_bias or spec.mlp_bias:
        yield "its layers have biases, and whether TensorRT-LLM applies them all is not known"
    if spec.dtype == "float32":
        yield "its weights are float32, but TensorRT-LLM's drafter attention takes float16 and bfloat16"
    if spec.dtype != target.dtype:
        yield f"its weights are {spec.dtype}, but the target's, whose embeddings it is fed, are {target.dtype}"


def served_config(values: dict[str, Any], spec: DrafterSpec) -> dict[str, Any]:
    """A drafter's config.json, said in the words TensorRT-LLM reads.

    Args:
        values: config.json of the checkpoint. Fields that mean the same everywhere (sizes, RoPE) are kept.
    """
    windows = [policy.window for policy in spec.policies]
    return {name: value for name, value in values.items() if name not in _MOVED} | {
        "architectures": [ARCHITECTURES[spec.system]],
        "model_type": "qwen3",
        "torch_dtype": spec.dtype,
        "block_size": spec.block_size,
        "dflash_config": {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.taps)},
        "layer_types": [SLIDING if window else FULL for window in windows],
        "use_sliding_window": any(windows),
        "sliding_window": max(windows) or None,
        "head_dim": spec.head_dim,
    }


def write_drafter(drafter: DrafterCheckpoint, folder: Path) -> None:
    """Writes the drafter to `folder`, which must not exist."""
    folder.mkdir()
    config = served_config(read_json_object(drafter.path / "config.json"), drafter.spec)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    index = [drafter.path / INDEX] if (drafter.path / INDEX).exists() else []
    for file in (*drafter.tensors.files(), *index):
        link(file, folder / file.name)
