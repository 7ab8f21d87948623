"""Reading a drafter: DFlash as z-lab publishes it, DFlare as AngelSlim and AngelSpec publish it.

What only a drafter has may stand at the top level of `config.json` or inside `dflash_config`; nothing of it is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from dflash_trt.checkpoint.config import ConfigFile, ConfigObject
from dflash_trt.checkpoint.decoder import (
    SLIDING,
    Shapes,
    check_tensors,
    count_parameters,
    layer_tensors,
    main_dtype,
    read_decoder_fields,
    read_layer_types,
    read_windows,
    rotary_buffers,
)
from dflash_trt.checkpoint.drafter_kinds import FC, FUSION_WEIGHTS, TARGET_PROJECTIONS, drafter_kind
from dflash_trt.checkpoint.spec import AttentionPolicy, DrafterSpec, Dtype
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DrafterCheckpoint:
    """A drafter on disk: what it is, its tensors, its folder."""

    spec: DrafterSpec
    tensors: TensorFolder
    path: Path


def read_drafter(folder: Path | str) -> DrafterCheckpoint:
    """Read and validate a DFlash or DFlare drafter; weights stay on disk.

    Raises:
        CheckpointError: another kind of drafter, a config field that is missing or breaks its rule, or tensors that do
            not fit it.
    """
    path = Path(folder)
    config = ConfigFile(path / "config.json")
    tensors = TensorFolder.open(path)
    spec = drafter_spec(config, drafter_kind(tensors.names(), path), main_dtype(tensors))
    _check_fusion(spec, tensors)
    check_tensors(tensors, expected_tensors(spec), rotary_buffers(spec.num_layers, ""))
    return DrafterCheckpoint(spec, tensors, path)


def drafter_spec(config: ConfigFile, system: Literal["dflash", "dflare"], dtype: Dtype) -> DrafterSpec:
    """The drafter that a `config.json` describes.

    Args:
        system, dtype: which the tensors alone tell.

    Raises:
        CheckpointError: a field that is missing or breaks its rule, or that is of another system.
    """
    _check_dialect(config)
    arch = _in_either(config, "model_arch", ConfigObject.string)  # AngelSpec's word for what the tensors show
    if arch not in (None, system):
        what = f'model_arch is "{arch}", but the tensors are those of a {system} drafter'
        raise CheckpointError(what, where=str(config.path), mend="Config and weights may be of two different drafters")
    fields = read_decoder_fields(config)
    taps = _read_taps(config)
    block_size = _required_in_either(config, "block_size", lambda place, field: place.integer(field, minimum=2))
    mask_token_id = _required_in_either(config, "mask_token_id", lambda place, field: place.integer(field, minimum=0))
    architectures = config.strings("architectures")
    scale = _in_either(config, "input_embedding_scale", lambda place, field: place.number(field, above=0))
    multiplier = _in_either(config, "output_multiplier", lambda place, field: place.number(field, above=0))
    softcap = _in_either(config, "final_logit_softcapping", lambda place, field: place.number(field, minimum=0))
    spec = DrafterSpec(
        **fields,
        architecture=architectures[0] if architectures else "DFlashDraftModel",
        system=system,
        policies=_read_policies(config, fields["num_layers"]),
        qk_norm=True,
        dtype=dtype,
        block_size=block_size,
        mask_token_id=mask_token_id,
        taps=taps,
        num_target_layers=_read_num_target_layers(config, taps),
        target_hidden_size=_in_either(config, "target_hidden_size", ConfigObject.integer) or fields["hidden_size"],
        input_embedding_scale=1.0 if scale is None else scale,
        output_multiplier=1.0 if multiplier is None else multiplier,
        final_logit_softcapping=0.0 if softcap is None else softcap,
    )
    if system == "dflare":
        _check_dflare(spec, config)
    return spec


def expected_tensors(spec: DrafterSpec) -> Shapes:
    """Name and shape of every tensor of the drafter; embedding and LM head are the target's."""
    hidden = spec.hidden_size
    shapes: Shapes = {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(spec.num_layers):
        shapes |= layer_tensors(spec, f"layers.{layer}.")
    if spec.system == "dflash":
        return {FC: (hidden, len(spec.taps) * spec.target_hidden_size)} | shapes
    shapes[FUSION_WEIGHTS] = (spec.num_layers, len(spec.taps))
    for layer in range(spec.num_layers):
        for name in TARGET_PROJECTIONS:
            shapes[f"layers.{layer}.self_attn.{name}.weight"] = (spec.num_kv_heads * spec.head_dim, hidden)
    return shapes


def parameter_count(spec: DrafterSpec) -> int:
    """The number of the drafter's own weights."""
    return count_parameters(expected_tensors(spec))


def _in_either(config: ConfigFile, field: str, get: Callable[[ConfigObject, str], T | None]) -> T | None:
    """A field of the top level or of `dflash_config`; where both have it, they must agree."""
    section = config.section("dflash_config")
    outer, inner = get(config, field), get(section, field)
    if outer is not None and inner is not None and outer != inner:
        raise config.error(field, f"dflash_config.{field} is {section.values[field]}: they must agree")
    return inner if outer is None else outer


def _required_in_either(config: ConfigFile, field: str, get: Callable[[ConfigObject, str], T | None]) -> T:
    value = _in_either(config, field, get)
    if value is None:
        what = f"{field} is missing, both at the top level and in dflash_config"
        mend = "It is never guessed: take it from the drafter's training configuration"
        raise CheckpointError(what, where=str(config.path), mend=mend)
    return value


def _check_dialect(config: ConfigFile) -> None:
    """Refuse what would load with the same tensors and mean something else."""
    if "speculators_version" in config or "transformer_layer_config" in config:
        mend = "Use the z-lab checkpoint it was converted from; its tap ids count one less"
        raise CheckpointError("is in the format of vLLM's speculators", where=str(config.path), mend=mend)
    section = config.section("dflash_config")
    for place in (config, section):
        for field in ("sample_from_anchor", "shift_label", "draft_shift"):
            if place.boolean(field):
                raise place.error(field, "a drafter whose position k predicts token k + 1 is not supported")
        if place.boolean("is_neox_style") is False:
            raise place.error("is_neox_style", "interleaved rotary embeddings are not supported")


def _read_taps(config: ConfigFile) -> tuple[int, ...]:
    """`target_layer_ids`, in the checkpoint's order: fc's columns follow it."""
    field = "target_layer_ids"
    taps = _required_in_either(config, field, ConfigObject.integers)
    place = config if field in config else config.section("dflash_config")
    if not taps:
        raise place.error(field, "must name at least one layer of the target")
    if min(taps) < 0:
        raise place.error(field, "must not be negative: ids count the target's layers from 0")
    if len(set(taps)) < len(taps):
        raise place.error(field, "must not name a layer twice")
    return taps


def _read_num_target_layers(config: ConfigFile, taps: tuple[int, ...]) -> int | None:
    """The target's depth, where the config states it.

    AngelSpec (model_type "dflash") writes the number of taps under this name and the depth as
    `target_num_hidden_layers`; z-lab and AngelSlim (model_type "qwen3") the depth.
    """
    count = _in_either(config, "num_target_layers", ConfigObject.integer)
    if config.string("model_type") == "dflash" and count == len(taps):
        return _in_either(config, "target_num_hidden_layers", ConfigObject.integer)
    return count


def _read_policies(config: ConfigFile, num_layers: int) -> tuple[AttentionPolicy, ...]:
    """How each layer attends: `is_causal`, else `causal` or `causal_head`, else a sliding layer is causal."""
    windows = _read_drafter_windows(config, num_layers)
    causal = _in_either(config, "is_causal", ConfigObject.boolean)
    if causal is None:
        section = config.section("dflash_config")
        causal, head = section.boolean("causal"), section.boolean("causal_head")
        if causal is not None and head is not None and causal != head:
            raise section.error("causal", f"dflash_config.causal_head is {str(head).lower()}: they must agree")
        causal = head if causal is None else causal
    return tuple(AttentionPolicy(causal=window > 0 if causal is None else causal, window=window) for window in windows)


def _read_drafter_windows(config: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """The window of each layer: `dflash_config.use_swa` with `swa_window_size`, else Qwen3's own fields.

    use_swa concerns the sliding layers of `layer_types`, and all layers where that is absent.
    """
    section = config.section("dflash_config")
    if not section.boolean("use_swa"):
        return read_windows(config, num_layers)
    window, own = section.required_integer("swa_window_size"), config.integer("sliding_window")
    if own is not None and own != window:
        raise section.error("swa_window_size", f"sliding_window is {own}: they must agree")
    types = read_layer_types(config, num_layers) or (SLIDING,) * num_layers
    if SLIDING not in types:
        raise section.error("use_swa", f"layer_types lists no {SLIDING}: they must agree")
    return tuple(window if kind == SLIDING else 0 for kind in types)


def _check_dflare(spec: DrafterSpec, config: ConfigFile) -> None:
    """DFlare fuses states of its own size, without biases."""
    if spec.target_hidden_size != spec.hidden_size:
        what = f"target_hidden_size is {spec.target_hidden_size}, but hidden_size is {spec.hidden_size}"
        mend = f"A DFlare drafter has no {FC} between the two: they must be equal"
        raise CheckpointError(what, where=str(config.path), mend=mend)
    if spec.qkv_bias:
        # AngelSlim's model would have biases in the context's projections too, AngelSpec's none anywhere; no published
        # checkpoint shows which
        raise config.error("attention_bias", "DFlare drafters with biases are not supported")


def _check_fusion(spec: DrafterSpec, tensors: TensorFolder) -> None:
    """What fuses the taps takes exactly these taps: fc a hidden size of each, DFlare a share of each for each layer."""
    name = FC if spec.system == "dflash" else FUSION_WEIGHTS
    shape, wanted = list(tensors[name].shape), list(expected_tensors(spec)[name])
    if shape != wanted:
        needing = {
            "dflash": f"{len(spec.taps)} taps of hidden size {spec.target_hidden_size}",
            "dflare": f"{spec.num_layers} layers (num_hidden_layers) and {len(spec.taps)} taps (target_layer_ids)",
        }[spec.system]
        what = f"{name} is {shape}, but {needing} need {wanted}"
        raise CheckpointError(what, where=str(tensors.where), mend="Compare target_layer_ids with the training config")
    if spec.system == "dflare" and not np.isfinite(tensors.read_float32(name)).all():
        what = f"{name} holds NaN or infinity, so there are no shares to mix the taps by"
        raise CheckpointError(what, where=str(tensors.where), mend="Download or export the checkpoint again")
