"""Reading targets saved by transformers, and one test for each rule."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from makers import REMOVED, edit_json, edit_tensors, make_target
from safetensors.numpy import load_file

from dflash_trt.checkpoint.config import ConfigFile
from dflash_trt.checkpoint.spec import AttentionPolicy
from dflash_trt.checkpoint.target import expected_tensors, parameter_count, read_target, target_spec
from dflash_trt.documents import parse, to_json
from dflash_trt.errors import CheckpointError


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_target(folder)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_reads_what_transformers_saves(tmp_path: Path, family: str, tie: bool, bias: bool) -> None:
    extra = {"mlp_bias": bias} if family == "llama" else {}
    model = make_target(tmp_path, family, tie, attention_bias=bias, **extra)
    target = read_target(tmp_path)
    spec = target.spec
    assert (spec.family, spec.architecture) == (family, type(model).__name__)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 2, 16)
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (32, 64, 320)
    assert (spec.qk_norm, spec.qkv_bias, spec.output_bias) == (family == "qwen3", bias, bias)
    assert spec.mlp_bias == (bias and family == "llama")
    assert spec.tie_word_embeddings == tie
    assert spec.policies == (AttentionPolicy(causal=True),) * 4
    assert (spec.eos_token_ids, spec.bos_token_id, spec.dtype) == ((), None, "float32")
    assert parameter_count(spec) == sum(parameter.numel() for parameter in model.parameters())
    state = {name: value for name, value in model.state_dict().items() if not (tie and name == "lm_head.weight")}
    assert expected_tensors(spec) == {name: tuple(value.shape) for name, value in state.items()}
    for name, value in state.items():
        np.testing.assert_array_equal(target.tensors.read(name), value.numpy())


def test_reads_a_sharded_save(tmp_path: Path) -> None:
    model = make_target(tmp_path, max_shard_size="20KB")
    target = read_target(tmp_path)
    assert len(target.tensors.files()) > 3
    name = "model.layers.3.mlp.down_proj.weight"
    np.testing.assert_array_equal(target.tensors.read(name), model.state_dict()[name].numpy())


def test_reads_a_transformers_4_config(target_dir: Path) -> None:
    new = read_target(target_dir).spec
    edit_json(
        target_dir / "config.json", rope_parameters=REMOVED, layer_types=REMOVED, rope_theta=10000, rope_scaling=None
    )
    edit_json(target_dir / "config.json", dtype=REMOVED, torch_dtype="float32", transformers_version="4.51.0")
    assert read_target(target_dir).spec == new


def test_a_config_alone_tells_all_but_the_dtype(untied_dir: Path) -> None:
    spec = read_target(untied_dir).spec
    for file in untied_dir.glob("*.safetensors"):
        file.unlink()
    for dtype in ("float32", "bfloat16"):
        assert target_spec(ConfigFile(untied_dir / "config.json"), dtype) == replace(spec, dtype=dtype)


def test_dtype_is_that_of_most_bytes(tmp_path: Path) -> None:
    model = make_target(tmp_path, dtype="bfloat16").to(torch.bfloat16)
    model.model.norm.to(torch.float32)
    model.save_pretrained(tmp_path)
    target = read_target(tmp_path)
    assert target.tensors["model.norm.weight"].dtype == "F32"
    assert target.spec.dtype == "bfloat16"


@pytest.mark.parametrize("architectures", [["MistralForCausalLM"], ["Qwen3MoeForCausalLM"], [], None, ["Qwen3Model"]])
def test_unsupported_architecture(target_dir: Path, architectures: Any) -> None:
    edit_json(target_dir / "config.json", architectures=architectures)
    refused(target_dir, "architectures", "Qwen3ForCausalLM, LlamaForCausalLM")


def test_drafter_given_as_target(drafter_dir: Path) -> None:
    refused(drafter_dir, "DFlashDraftModel", "This looks like a drafter")


def test_head_dim_is_derived_where_absent(tmp_path: Path) -> None:
    make_target(tmp_path, head_dim=8)
    edit_json(tmp_path / "config.json", head_dim=REMOVED)
    assert read_target(tmp_path).spec.head_dim == 8


def test_one_kv_head_per_head_where_the_config_states_none(tmp_path: Path) -> None:
    make_target(tmp_path, family="llama", num_key_value_heads=4)
    edit_json(tmp_path / "config.json", num_key_value_heads=REMOVED)
    assert read_target(tmp_path).spec.num_kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, but must divide num_attention_heads, 4"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", but only silu is supported'),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is present (awq)"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"rms_norm_eps": REMOVED}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"vocab_size": "320"}, "vocab_size"),
        ({"attention_bias": 1}, "attention_bias is 1, but must be true or false"),
        ({"partial_rotary_factor": 0.5}, "rotates 8 of 16 head dimensions"),
        ({"rope_parameters": REMOVED}, "rope_theta is missing"),
        ({"layer_types": ["full_attention"]}, "one entry for each of the 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "full_attention or sliding_attention"),
        ({"bos_token_id": 320}, "bos_token_id is 320"),
    ],
)
def test_config_rules(target_dir: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(target_dir / "config.json", **changes)
    refused(target_dir, "config.json", message)


def test_missing_config(target_dir: Path) -> None:
    (target_dir / "config.json").unlink()
    refused(target_dir, "there is no config.json")


def windows(folder: Path) -> list[int]:
    policies = read_target(folder).spec.policies
    assert all(policy.causal for policy in policies)
    return [policy.window for policy in policies]


def test_sliding_window_from_max_window_layers(tmp_path: Path) -> None:
    make_target(tmp_path, use_sliding_window=True, sliding_window=24, max_window_layers=1)
    assert windows(tmp_path) == [0, 24, 24, 24]
    edit_json(tmp_path / "config.json", layer_types=REMOVED)
    assert windows(tmp_path) == [0, 24, 24, 24]


def test_sliding_window_from_layer_types(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    make_target(tmp_path, use_sliding_window=True, sliding_window=24, layer_types=types)
    assert windows(tmp_path) == [24, 0, 24, 0]


def test_window_that_is_not_in_use(target_dir: Path) -> None:
    edit_json(target_dir / "config.json", layer_types=REMOVED, use_sliding_window=False, sliding_window=24)
    assert windows(target_dir) == [0] * 4


def test_contradicting_or_incomplete_window(target_dir: Path) -> None:
    edit_json(target_dir / "config.json", layer_types=["sliding_attention"] * 4, sliding_window=24)
    refused(target_dir, "use_sliding_window is false", "must agree")
    edit_json(target_dir / "config.json", use_sliding_window=True, sliding_window=None)
    refused(target_dir, "sliding_window is null, but is required")


def test_llama_has_no_window(llama_dir: Path) -> None:
    edit_json(llama_dir / "config.json", sliding_window=24)
    refused(llama_dir, "sliding_window is 24", "LlamaForCausalLM")


def test_eos_from_generation_config_before_config(target_dir: Path) -> None:
    edit_json(target_dir / "config.json", eos_token_id=7)
    assert read_target(target_dir).spec.eos_token_ids == (7,)
    edit_json(target_dir / "generation_config.json", eos_token_id=[5, 6])
    assert read_target(target_dir).spec.eos_token_ids == (5, 6)
    edit_json(target_dir / "generation_config.json", eos_token_id=0)
    assert read_target(target_dir).spec.eos_token_ids == (0,)
    (target_dir / "generation_config.json").unlink()
    assert read_target(target_dir).spec.eos_token_ids == (7,)


@pytest.mark.parametrize("eos", [320, -1, [5, 320], True, "5", [5, "6"]])
def test_eos_outside_the_vocabulary_or_no_id(target_dir: Path, eos: Any) -> None:
    edit_json(target_dir / "generation_config.json", eos_token_id=eos)
    refused(target_dir, "generation_config.json", "eos_token_id")


def test_tied_head_may_be_stored_if_identical(target_dir: Path) -> None:
    embedding = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    plain = read_target(target_dir)
    edit_tensors(target_dir, lm_head__weight=embedding)
    stored = read_target(target_dir)
    assert stored.spec == plain.spec
    assert parameter_count(stored.spec) == parameter_count(plain.spec)
    changed = embedding.copy()
    changed[-1, -1] = np.nextafter(changed[-1, -1], 9)
    edit_tensors(target_dir, lm_head__weight=changed)
    refused(target_dir, "lm_head.weight differs from model.embed_tokens.weight")
    edit_tensors(target_dir, lm_head__weight=embedding.astype(np.float16))
    refused(target_dir, "lm_head.weight differs")


def test_untied_head_must_be_stored(untied_dir: Path) -> None:
    edit_tensors(untied_dir, lm_head__weight=REMOVED)
    refused(untied_dir, "lm_head.weight is missing, but tie_word_embeddings is not true")


def test_missing_tensor(target_dir: Path) -> None:
    edit_tensors(target_dir, model__layers__1__self_attn__q_norm__weight=REMOVED)
    refused(target_dir, "missing tensors: model.layers.1.self_attn.q_norm.weight")


def test_misshapen_tensor(target_dir: Path) -> None:
    edit_json(target_dir / "config.json", intermediate_size=48)
    refused(target_dir, "model.layers.0.mlp.gate_proj.weight is [64, 32], but the config says [48, 32]")


def test_unclaimed_tensor(target_dir: Path) -> None:
    edit_tensors(target_dir, model__layers__0__self_attn__q_proj__bias=np.ones(64, np.float32))
    refused(target_dir, "that belong to no part of the model: model.layers.0.self_attn.q_proj.bias")


def test_layers_beyond_the_config_are_unclaimed(target_dir: Path) -> None:
    edit_json(target_dir / "config.json", num_hidden_layers=3, layer_types=REMOVED)
    refused(target_dir, "belong to no part of the model: model.layers.3.", "model.layers.3.self_attn.v_proj.weight")


def test_rotary_buffers_of_old_checkpoints_are_ignored(llama_dir: Path) -> None:
    buffer = np.ones(8, np.float32)
    edit_tensors(llama_dir, model__layers__2__self_attn__rotary_emb__inv_freq=buffer)
    read_target(llama_dir)
    edit_tensors(llama_dir, model__layers__4__self_attn__rotary_emb__inv_freq=buffer)
    refused(llama_dir, "model.layers.4.self_attn.rotary_emb.inv_freq")


def test_spec_survives_json(target_dir: Path) -> None:
    spec = read_target(target_dir).spec
    assert parse(type(spec), json.loads(to_json(spec)), "spec") == spec
