"""Reading DFlash drafters: published geometries, and one test for each rule (faults 1, 3-5, 8-12)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from geometry import qwen3_drafter
from makers import REMOVED, edit_json, edit_tensors, make_drafter

from dflash_trt.checkpoint.config import ConfigFile
from dflash_trt.checkpoint.drafter import drafter_spec, expected_tensors, parameter_count, read_drafter
from dflash_trt.checkpoint.spec import AttentionPolicy
from dflash_trt.errors import CheckpointError

SWA = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 24}


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_drafter(folder)
    for part in parts:
        assert part in str(caught.value)


def edit_section(folder: Path, **changes: Any) -> None:
    """Change `dflash_config`."""
    section = json.loads((folder / "config.json").read_text())["dflash_config"] | changes
    edit_json(folder / "config.json", dflash_config={k: v for k, v in section.items() if v is not REMOVED})


@pytest.mark.parametrize(
    ("hidden", "inner", "parameters"), [(2560, 9728, 537_427_200), (4096, 12288, 1_048_626_432)], ids=["4B", "8B"]
)
def test_published_geometries(hidden: int, inner: int, parameters: int) -> None:
    """z-lab/Qwen3-4B-DFlash-b16 and z-lab/Qwen3-8B-DFlash-b16."""
    taps = (1, 9, 17, 25, 33)
    spec = qwen3_drafter(hidden, inner, 5, architecture="DFlashDraftModel", system="dflash", taps=taps)
    assert len(expected_tensors(spec)) == 58
    assert parameter_count(spec) == parameters


def test_reads_the_published_dialect(made: Path, tmp_path: Path) -> None:
    tensors = make_drafter(tmp_path, made / "target", taps=[3, 0, 2], block_size=8, layers=3)
    drafter = read_drafter(tmp_path)
    spec = drafter.spec
    assert (spec.system, spec.architecture, spec.dtype) == ("dflash", "DFlashDraftModel", "float32")
    assert (spec.block_size, spec.mask_token_id) == (8, 319)
    assert spec.taps == (3, 0, 2)  # the checkpoint's order, which fc's columns follow
    assert (spec.num_target_layers, spec.target_hidden_size) == (4, 32)
    assert (spec.input_embedding_scale, spec.output_multiplier, spec.final_logit_softcapping) == (1, 1, 0)
    assert spec.policies == (AttentionPolicy(causal=False),) * 3
    assert spec.qk_norm
    assert len(tensors) == len(drafter.tensors) == 11 * 3 + 3
    assert expected_tensors(spec) == {name: value.shape for name, value in tensors.items()}
    assert parameter_count(spec) == sum(value.size for value in tensors.values())
    np.testing.assert_array_equal(drafter.tensors.read("fc.weight"), tensors["fc.weight"])


def test_reads_biases(made: Path, tmp_path: Path) -> None:
    tensors = make_drafter(tmp_path, made / "target", taps=[1], attention_bias=True)
    assert set(read_drafter(tmp_path).tensors) == set(tensors)


def test_own_rope_is_read(drafter_dir: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    edit_json(drafter_dir / "config.json", rope_theta=150000.0, rope_scaling=yarn)
    rope = read_drafter(drafter_dir).spec.rope
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 150000, 8)
    edit_json(drafter_dir / "config.json", rope_theta=REMOVED)
    refused(drafter_dir, "rope_theta is missing")


FIELDS = [
    ("block_size", 6),
    ("mask_token_id", 17),
    ("target_layer_ids", [3, 1, 0]),
    ("input_embedding_scale", 2.5),
    ("output_multiplier", 0.5),
    ("final_logit_softcapping", 30.0),
]


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_field_at_either_place(drafter_dir: Path, field: str, value: Any) -> None:
    attribute = "taps" if field == "target_layer_ids" else field
    wanted = tuple(value) if isinstance(value, list) else value
    edit_section(drafter_dir, **{field: REMOVED})
    edit_json(drafter_dir / "config.json", **{field: value})
    assert getattr(read_drafter(drafter_dir).spec, attribute) == wanted
    edit_section(drafter_dir, **{field: value})
    assert getattr(read_drafter(drafter_dir).spec, attribute) == wanted
    edit_json(drafter_dir / "config.json", **{field: REMOVED})
    assert getattr(read_drafter(drafter_dir).spec, attribute) == wanted


@pytest.mark.parametrize(("field", "value"), FIELDS)
def test_field_at_both_places_must_agree(drafter_dir: Path, field: str, value: Any) -> None:
    edit_json(drafter_dir / "config.json", **{field: value})
    edit_section(drafter_dir, **{field: value[:2] if isinstance(value, list) else value + 1})
    refused(drafter_dir, f"{field} is {json.dumps(value)}, but dflash_config.{field}", "must agree")


@pytest.mark.parametrize("field", ["block_size", "mask_token_id", "target_layer_ids"])
def test_never_guessed(drafter_dir: Path, field: str) -> None:
    edit_json(drafter_dir / "config.json", **{field: REMOVED})
    edit_section(drafter_dir, **{field: REMOVED})
    refused(drafter_dir, f"{field} is missing, both at the top level and in dflash_config", "never guessed")


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([], "must name at least one layer"),
        ([0, -1, 2], "must not be negative"),
        ([0, 2, 2], "must not name a layer twice"),
        ([0, 1.0, 2], "must be a list of integers"),
        ([0, True, 2], "must be a list of integers"),
        (3, "must be a list of integers"),
        ([0, 2], "fc.weight is [32, 96], but 2 taps of hidden size 32 need [32, 64]"),
    ],
)
def test_taps(drafter_dir: Path, taps: Any, message: str) -> None:
    edit_section(drafter_dir, target_layer_ids=taps)
    refused(drafter_dir, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": 8.0}, "block_size is 8.0"),
        ({"mask_token_id": -1}, "mask_token_id is -1"),
        ({"input_embedding_scale": 0}, "input_embedding_scale is 0"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping is -1"),
        ({"num_target_layers": 0}, "num_target_layers is 0"),
        ({"dflash_config": [1]}, "dflash_config is [1], but must be an object"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised checkpoints are not supported"),
        ({"is_causal": "no"}, "must be true or false"),
        ({"sample_from_anchor": True}, "predicts token k + 1"),
        ({"is_neox_style": False}, "interleaved rotary"),
        ({"transformer_layer_config": {}, "speculators_version": "0.3"}, "vLLM's speculators"),
    ],
)
def test_config_rules(drafter_dir: Path, changes: dict[str, Any], message: str) -> None:
    edit_section(drafter_dir, **dict.fromkeys(set(changes) & {"mask_token_id"}, REMOVED))
    edit_json(drafter_dir / "config.json", **changes)
    refused(drafter_dir, "config.json", message)


def policies(folder: Path) -> list[tuple[bool, int]]:
    return [(policy.causal, policy.window) for policy in read_drafter(folder).spec.policies]


@pytest.mark.parametrize(
    ("outer", "section", "expected"),
    [
        ({}, {}, [(False, 0), (False, 0)]),
        (SWA, {}, [(True, 24), (False, 0)]),
        (SWA | {"use_sliding_window": REMOVED}, {}, [(True, 24), (False, 0)]),
        (SWA | {"is_causal": False}, {}, [(False, 24), (False, 0)]),
        (SWA, {"is_causal": False}, [(False, 24), (False, 0)]),
        (SWA | {"is_causal": True}, {"causal": False}, [(True, 24), (True, 0)]),
        (SWA, {"causal": False}, [(False, 24), (False, 0)]),
        (SWA, {"causal_head": True}, [(True, 24), (True, 0)]),
        ({}, {"causal": True, "causal_head": True}, [(True, 0), (True, 0)]),
        ({"layer_types": REMOVED}, {"use_swa": True, "swa_window_size": 16}, [(True, 16), (True, 16)]),
        (SWA | {"sliding_window": None}, {"use_swa": True, "swa_window_size": 16}, [(True, 16), (False, 0)]),
        (SWA, {"use_swa": False}, [(True, 24), (False, 0)]),
        (
            {"layer_types": REMOVED, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
            {},
            [(False, 0), (True, 24)],
        ),
    ],
)
def test_attention_policy(drafter_dir: Path, outer: dict, section: dict, expected: list[tuple[bool, int]]) -> None:
    edit_json(drafter_dir / "config.json", **outer)
    edit_section(drafter_dir, **section)
    assert policies(drafter_dir) == expected


@pytest.mark.parametrize(
    ("outer", "section", "message"),
    [
        ({"is_causal": True}, {"is_causal": False}, "must agree"),
        ({}, {"causal": True, "causal_head": False}, "causal_head is false: they must agree"),
        (SWA | {"sliding_window": None}, {}, "sliding_window is null, but is required"),
        (SWA | {"use_sliding_window": False}, {}, "use_sliding_window is false"),
        ({}, {"use_swa": True, "swa_window_size": 16}, "layer_types lists no sliding_attention"),
        (SWA, {"use_swa": True, "swa_window_size": 16}, "sliding_window is 24: they must agree"),
        (SWA, {"use_swa": True}, "swa_window_size is missing"),
    ],
)
def test_contradicting_policy(drafter_dir: Path, outer: dict, section: dict, message: str) -> None:
    edit_json(drafter_dir / "config.json", **outer)
    edit_section(drafter_dir, **section)
    refused(drafter_dir, message)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        ("layers.0.attention_conv.base_kernel", "a DFlash2 drafter"),
        ("candidate_selector.hidden_projection.weight", "a DFlash2 drafter"),
        ("markov_head.markov_w1.weight", "a DSpark drafter"),
        ("prefix_gru.weight_ih_l0", "a Domino drafter"),
        ("hidden_correction.down.weight", "a DFly drafter"),
        ("context_proj.weight", "a drafter with the names AngelSpec trains under"),
        ("mask_embedding", "a drafter with a mask embedding of its own"),
        ("embed_tokens.weight", "a drafter with an embedding or LM head of its own"),
        ("lm_head.weight", "a drafter with an embedding or LM head of its own"),
    ],
)
def test_other_kinds_are_named(drafter_dir: Path, tensor: str, kind: str) -> None:
    edit_tensors(drafter_dir, **{tensor: np.ones((2, 2), np.float32)})
    refused(drafter_dir, f"this is {kind} (tensor {tensor}), which this version does not support")


def test_dfly_is_not_taken_for_dflare(drafter_dir: Path) -> None:
    one = np.ones(1, np.float32)
    edit_tensors(drafter_dir, layer_fusion_weights=one, hidden_correction__up__weight=one)
    refused(drafter_dir, "a DFly drafter")


def test_drafter_without_fc(drafter_dir: Path) -> None:
    edit_tensors(drafter_dir, fc__weight=REMOVED)
    refused(drafter_dir, "this is no drafter: it has neither fc.weight (DFlash) nor layer_fusion_weights (DFlare)")


def test_target_given_as_drafter(target_dir: Path) -> None:
    refused(target_dir, "a whole language model, not a drafter")


@pytest.mark.parametrize("name", ["fc.bias", "layers.0.self_attn.q_proj.bias", "layers.0.self_attn.k_proj.weight_2"])
def test_unclaimed_tensor(drafter_dir: Path, name: str) -> None:
    edit_tensors(drafter_dir, **{name: np.ones(3, np.float32)})
    refused(drafter_dir, f"tensors that belong to no part of the model: {name}")


def test_missing_tensor(drafter_dir: Path) -> None:
    edit_tensors(drafter_dir, hidden_norm__weight=REMOVED)
    refused(drafter_dir, "missing tensors: hidden_norm.weight")


def test_num_target_layers_of_angelspec_is_the_number_of_taps(drafter_dir: Path) -> None:
    edit_json(drafter_dir / "config.json", model_type="dflash", num_target_layers=3)
    assert read_drafter(drafter_dir).spec.num_target_layers is None
    edit_json(drafter_dir / "config.json", model_type="qwen3")
    assert read_drafter(drafter_dir).spec.num_target_layers == 3
    edit_json(drafter_dir / "config.json", num_target_layers=REMOVED)
    assert read_drafter(drafter_dir).spec.num_target_layers is None


def test_a_config_alone_tells_all_but_system_and_dtype(drafter_dir: Path) -> None:
    spec = read_drafter(drafter_dir).spec
    config = ConfigFile(drafter_dir / "config.json")
    assert drafter_spec(config, "dflash", "float16") == replace(spec, dtype="float16")
    assert drafter_spec(config, "dflare", "float32") == replace(spec, system="dflare")
    edit_json(drafter_dir / "config.json", model_arch="dflare")
    with pytest.raises(CheckpointError, match='model_arch is "dflare"'):
        drafter_spec(ConfigFile(drafter_dir / "config.json"), "dflash", "float32")
