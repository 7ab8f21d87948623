"""Rotary embeddings: from the two configuration dialects to a `RopeSpec`, and from that to tables.

The formulas and fallbacks are those of transformers 5 (`modeling_rope_utils.py`), in the same float32 steps, so that
the tables agree with its to the last bit or nearly: powers and cosines are rounded correctly here, torch's may be one
unit in the last place off.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dflash_trt.checkpoint.config import ConfigFile, ConfigObject
from dflash_trt.checkpoint.spec import RopeSpec
from dflash_trt.errors import CheckpointError

KINDS = ("default", "linear", "llama3", "yarn")

# Keys of a rope section that some kind here uses (a kind ignores those of the others), and one that means nothing.
_KNOWN_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "finetuned",
}


def read_head_dim(config: ConfigFile) -> int:
    """`head_dim`, or hidden_size / num_attention_heads where it is absent.

    Raises:
        CheckpointError: absent, and the division leaves a rest.
    """
    head_dim = config.integer("head_dim")
    if head_dim is not None:
        return head_dim
    hidden, heads = config.required_integer("hidden_size"), config.required_integer("num_attention_heads")
    if hidden % heads:
        mend = "Without head_dim, the heads must divide the hidden size"
        raise config.error("hidden_size", f"must be a multiple of num_attention_heads, {heads}", mend)
    return hidden // heads


def read_rope(config: ConfigFile) -> RopeSpec:
    """The rotary embedding of a model.

    Reads `rope_theta` with `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5). Both may be given if
    they agree. `original_max_position_embeddings` is, as in transformers, the top-level field, else the section's, else
    `max_position_embeddings`.

    Raises:
        CheckpointError: no theta, an unsupported kind, styles that disagree, or a parameter that breaks its rule.
    """
    section = _scaling_section(config)
    kind = _kind(section) or "default"
    rotary_dim = _rotary_dim(config, section)
    theta = _agreeing_number(config, "rope_theta", above=1)
    if theta is None:
        raise config.missing("rope_theta", "Give rope_theta, or rope_parameters with rope_theta")
    if kind == "default":
        return RopeSpec(theta=theta, rotary_dim=rotary_dim)
    max_positions = config.required_integer("max_position_embeddings")
    original = config.integer("original_max_position_embeddings")
    original = original or section.integer("original_max_position_embeddings") or max_positions
    if "factor" not in section.values:
        raise section.missing("factor")
    factor = section.number("factor", above=0)
    if factor is None and kind == "yarn":
        factor = max_positions / original
    if factor is None:
        raise section.missing("factor")
    if kind == "linear":
        return RopeSpec(kind="linear", theta=theta, rotary_dim=rotary_dim, factor=factor)
    if kind == "llama3":
        low = section.required_number("low_freq_factor", above=0)
        return RopeSpec(
            kind="llama3",
            theta=theta,
            rotary_dim=rotary_dim,
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=section.required_number("high_freq_factor", above=low),
        )
    truncate = section.boolean("truncate")
    return RopeSpec(
        kind="yarn",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=section.number("beta_fast", minimum=0) or 32.0,
        beta_slow=section.number("beta_slow", minimum=0) or 1.0,
        attention_factor=section.number("attention_factor", above=0),
        mscale=section.number("mscale"),
        mscale_all_dim=section.number("mscale_all_dim"),
        truncate=True if truncate is None else truncate,
    )


def inv_freq(spec: RopeSpec) -> np.ndarray:
    """Angle per position of each pair of components: float32 [rotary_dim / 2]."""
    powers = _powers(spec)
    plain: np.ndarray = np.float32(1) / powers
    if spec.kind == "linear":
        return plain / np.float32(spec.factor)
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, powers)
    return plain


def attention_scaling(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by; 1.0 except for yarn."""
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    factor = _used(spec.factor)
    if spec.mscale and spec.mscale_all_dim:
        return _mscale(factor, spec.mscale) / _mscale(factor, spec.mscale_all_dim)
    return _mscale(factor, 1.0)


def rope_tables(spec: RopeSpec, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of positions 0 .. num_positions - 1, times the attention scaling.

    Both are float32 [num_positions, rotary_dim / 2]; the angles are float32 products, as in transformers.
    """
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inv_freq(spec)
    scaling = np.float32(attention_scaling(spec))
    # numpy's float32 cosine is off in the last place far more often than the float64 one rounded.
    cos = np.cos(angles, dtype=np.float64).astype(np.float32) * scaling
    sin = np.sin(angles, dtype=np.float64).astype(np.float32) * scaling
    return cos, sin


def _scaling_section(config: ConfigFile) -> ConfigObject:
    """`rope_scaling` or `rope_parameters`, whichever is given; an empty section when neither is."""
    given = [section for section in map(config.section, ("rope_scaling", "rope_parameters")) if section.values]
    for section in given:
        unknown = sorted(set(section.values) - _KNOWN_KEYS)
        if unknown:
            what = f"{section.prefix}{unknown[0]} is not supported"
            mend = f"Rope kinds supported: {', '.join(KINDS)}; one for all layers, without sections"
            raise CheckpointError(what, where=str(config.path), mend=mend)
    if len(given) == 2 and _comparable(given[0]) != _comparable(given[1]):
        what = "rope_scaling and rope_parameters are both given and disagree"
        raise CheckpointError(what, where=str(config.path), mend="Keep the one the model was trained with")
    return given[-1] if given else config.section("rope_parameters")


def _comparable(section: ConfigObject) -> dict[str, Any]:
    """What a section says, without spelling differences; theta and rotary share are compared on their own."""
    skipped = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"}
    said = {key: value for key, value in section.values.items() if key not in skipped and value is not None}
    return {"kind": _kind(section) or "default", **said}


def _kind(section: ConfigObject) -> str | None:
    new, old = section.string("rope_type"), section.string("type")
    if new is not None and old is not None and new != old:
        raise section.error("rope_type", f"{section.prefix}type is {old!r}: they must agree")
    kind = new or old
    if kind is not None and kind not in KINDS:
        raise section.error("rope_type" if new else "type", f"supported kinds are {', '.join(KINDS)}")
    return kind


def _agreeing_number(config: ConfigFile, field: str, above: float) -> float | None:
    """A number that may stand at the top level and in either section, everywhere the same."""
    places = (config, config.section("rope_scaling"), config.section("rope_parameters"))
    found = [(place, value) for place in places if (value := place.number(field, above=above)) is not None]
    for place, value in found[1:]:
        if value != found[0][1]:
            raise found[0][0].error(field, f"{place.prefix}{field} is {value:g}: they must agree")
    return found[0][1] if found else None


def _rotary_dim(config: ConfigFile, section: ConfigObject) -> int:
    head_dim = read_head_dim(config)
    share = _agreeing_number(config, "partial_rotary_factor", above=0)
    rotary_dim = int(head_dim * (1.0 if share is None else share))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        what = f"{rotary_dim} rotary dimensions of a head of {head_dim}, but must be even and within the head"
        raise CheckpointError(what, where=str(config.path), mend="See head_dim and partial_rotary_factor")
    return rotary_dim


def _powers(spec: RopeSpec) -> np.ndarray:
    """theta ** (2 i / rotary_dim): float32 [rotary_dim / 2].

    In float64, rounded once; torch computes the same in float32 and may be one unit in the last place off.
    """
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    powers: np.ndarray = np.power(np.float64(np.float32(spec.theta)), exponents.astype(np.float64)).astype(np.float32)
    return powers


def _llama3(spec: RopeSpec, plain: np.ndarray) -> np.ndarray:
    """Long wavelengths divided by the factor, short ones kept, those between interpolated."""
    one, factor, original = np.float32(1), np.float32(_used(spec.factor)), _used(spec.original_max_position_embeddings)
    low, high = _used(spec.low_freq_factor), _used(spec.high_freq_factor)
    longest, shortest = np.float32(original / low), np.float32(original / high)
    # torch divides a scalar by a tensor as reciprocal times scalar; the difference cancels into `smooth` below.
    wavelength = one / plain * np.float32(2 * math.pi)
    scaled = np.where(wavelength > longest, plain / factor, plain)
    smooth = (one / wavelength * np.float32(original) - np.float32(low)) / np.float32(high - low)
    between = (one - smooth) * scaled / factor + smooth * scaled
    return np.where((wavelength >= shortest) & (wavelength <= longest), between, scaled)


def _yarn(spec: RopeSpec, powers: np.ndarray) -> np.ndarray:
    """A ramp over the dimensions, from the plain frequencies (fast ones) to those divided by the factor."""
    low = _correction_dim(spec, _used(spec.beta_fast))
    high = _correction_dim(spec, _used(spec.beta_slow))
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    steps = np.arange(spec.rotary_dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = np.float32(1) - ramp
    interpolated = np.float32(1) / (np.float32(_used(spec.factor)) * powers)
    return interpolated * (np.float32(1) - kept) + np.float32(1) / powers * kept


def _correction_dim(spec: RopeSpec, rotations: float) -> float:
    """The dimension whose pair turns `rotations` times within the original length."""
    turns = _used(spec.original_max_position_embeddings) / (rotations * 2 * math.pi)
    return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.theta))


def _used(value: float | None) -> float:
    """A parameter that the spec's kind uses."""
    assert value is not None
    return value


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
