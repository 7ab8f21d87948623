"""Rotary embeddings against transformers, and one test for each rule of their configuration (fault 5)."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_trt.checkpoint import rope
from dflash_trt.checkpoint.config import ConfigFile
from dflash_trt.checkpoint.rope import attention_scaling, inv_freq, read_rope, rope_tables
from dflash_trt.checkpoint.spec import RopeSpec
from dflash_trt.errors import CheckpointError

ORACLES: list[tuple[Any, Any]] = [(Qwen3Config, Qwen3RotaryEmbedding), (LlamaConfig, LlamaRotaryEmbedding)]
GEOMETRY = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 4096}


def read(folder: Path, **fields: Any) -> RopeSpec:
    (folder / "config.json").write_text(json.dumps(GEOMETRY | fields))
    return read_rope(ConfigFile(folder / "config.json"))


@st.composite
def rope_parameters(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from([1e4, 5e5, 1e6, 1e7, 12345.678]))}
    if kind != "default":
        found["factor"] = draw(st.sampled_from([1.0, 2.0, 3.7, 8.0, 32.0]))
    if kind == "llama3":
        found |= {"low_freq_factor": draw(st.sampled_from([1.0, 1.3])), "high_freq_factor": draw(st.floats(2, 8))}
    optional = {
        "original_max_position_embeddings": st.sampled_from([2048, 8192, 32768]),
        "beta_fast": st.sampled_from([16.0, 32.0]),
        "beta_slow": st.sampled_from([1.0, 2.0]),
        "attention_factor": st.floats(0.5, 2),
        "mscale": st.floats(0.5, 2),
        "mscale_all_dim": st.floats(0.5, 2),
        "truncate": st.booleans(),
    }
    usable = {"yarn": list(optional), "llama3": ["original_max_position_embeddings"]}.get(kind, [])
    return found | {name: draw(optional[name]) for name in usable if draw(st.booleans())}


@settings(deadline=None)
@given(
    parameters=rope_parameters(),
    head_dim=st.sampled_from([8, 16, 64, 80, 128]),
    max_positions=st.sampled_from([2048, 40960, 131072]),
    oracle=st.sampled_from(ORACLES),
    old_style=st.booleans(),
)
def test_equals_transformers(
    parameters: dict[str, Any],
    head_dim: int,
    max_positions: int,
    oracle: tuple[Any, Any],
    old_style: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    fields = {"head_dim": head_dim, "max_position_embeddings": max_positions}
    config = oracle[0](**(GEOMETRY | fields), num_hidden_layers=1, vocab_size=8, rope_parameters=dict(parameters))
    theirs = oracle[1](config)
    written: dict[str, Any] = {"rope_parameters": parameters}
    if old_style:
        scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
        written = {"rope_theta": parameters["rope_theta"], "rope_scaling": scaling}
    spec = read(tmp_path_factory.mktemp("rope"), **fields, **written)

    assert attention_scaling(spec) == theirs.attention_scaling
    # torch's powers are not correctly rounded, which the powers' own test bounds; every step after them is the same.
    their_powers = spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "_powers", lambda _: their_powers.numpy())
        frequencies = inv_freq(spec)
        cos, sin = rope_tables(spec, 300)
    assert frequencies.dtype == np.float32
    np.testing.assert_array_equal(frequencies, theirs.inv_freq.numpy())
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (300, head_dim // 2)
    their_tables = theirs(torch.zeros(1), torch.arange(300)[None])
    for mine, other in zip((cos, sin), their_tables, strict=True):
        largest = np.float32(attention_scaling(spec))
        np.testing.assert_allclose(mine, other[0, :, : head_dim // 2].numpy(), rtol=0, atol=2 * np.spacing(largest))


@settings(deadline=None)
@given(theta=st.floats(2, 1e8), head_dim=st.sampled_from([8, 64, 80, 128, 256]))
def test_powers_are_within_one_unit_of_torch(theta: float, head_dim: int) -> None:
    theirs = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)
    np.testing.assert_array_max_ulp(rope._powers(RopeSpec(theta=theta, rotary_dim=head_dim)), theirs.numpy(), maxulp=1)


def test_equal_frequencies_give_equal_tables(tmp_path: Path) -> None:
    """With theta 10000 and 8 dimensions torch's powers are exact too: what is left is the cosine's last place."""
    spec = read(tmp_path, head_dim=8, rope_theta=10000.0)
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**(GEOMETRY | {"head_dim": 8})))
    np.testing.assert_array_equal(inv_freq(spec), theirs.inv_freq.numpy())
    cos, _ = rope_tables(spec, 4096)
    their_cos, _ = theirs(torch.zeros(1), torch.arange(4096)[None])
    np.testing.assert_allclose(cos, their_cos[0, :, :4].numpy(), rtol=0, atol=1.2e-7)


def test_dialects_of_transformers_4_and_5_read_the_same(tmp_path: Path) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 1024}
    new = read(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **yarn})
    assert new == read(tmp_path, rope_theta=1000000, rope_scaling={"type": "yarn", **yarn})
    assert new == read(tmp_path, rope_theta=1e6, rope_scaling={"rope_type": "yarn", "type": "yarn", **yarn})
    both = {"rope_type": "yarn", **yarn}
    assert new == read(tmp_path, rope_theta=1e6, rope_scaling=both, rope_parameters={**both, "rope_theta": 1e6})
    plain = RopeSpec(theta=1e6, rotary_dim=16)
    assert plain == read(tmp_path, rope_theta=1e6, rope_scaling=None)
    assert plain == read(tmp_path, rope_theta=1e6)
    assert plain == read(tmp_path, rope_scaling={"rope_type": "default", "rope_theta": 1e6})


def test_original_length_falls_back_as_in_transformers(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    assert read(tmp_path, rope_parameters=yarn).original_max_position_embeddings == 4096
    stated = yarn | {"original_max_position_embeddings": 512}
    assert read(tmp_path, rope_parameters=stated).original_max_position_embeddings == 512
    outer = read(tmp_path, rope_parameters=stated, original_max_position_embeddings=256)
    assert outer.original_max_position_embeddings == 256


def test_null_yarn_factor_is_the_ratio_of_lengths(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 512}
    assert read(tmp_path, rope_parameters=yarn).factor == 8


def test_partial_rotary_factor(tmp_path: Path) -> None:
    spec = read(tmp_path, rope_theta=1e4, partial_rotary_factor=0.5)
    assert spec.rotary_dim == 8
    assert rope_tables(spec, 3)[0].shape == (3, 4)


def test_head_dim_is_derived_where_absent(tmp_path: Path) -> None:
    assert read(tmp_path, head_dim=None, rope_theta=1e4).rotary_dim == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_theta": 0}, "must be greater than 1"),
        ({"rope_theta": "1e6"}, "must be a finite number"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 10000.0, but rope_parameters"),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"type": "default"},
            },
            "both given and disagree",
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"type": "linear", "factor": 4},
            },
            "both given and disagree",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "must agree"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2}}, "default, linear, llama3, yarn"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}, "default, linear"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention is not supported"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": None}}, "rope_scaling.factor is null"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": -1}}, "must be greater than 0"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "llama3", "factor": 8, "high_freq_factor": 4}},
            "low_freq_factor is missing",
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            },
            "high_freq_factor is 4, but must be greater than 4",
        ),
        ({"rope_theta": 1e4, "partial_rotary_factor": 1.5}, "24 rotary dimensions of a head of 16"),
        ({"rope_theta": 1e4, "head_dim": 15}, "must be even"),
        ({"rope_theta": 1e4, "head_dim": None, "hidden_size": 66}, "must be a multiple of num_attention_heads"),
    ],
)
def test_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **fields)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)
