"""Reading DFlare drafters: published geometries, both dialects, and files that are DFlare in part."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from geometry import qwen3_drafter
from makers import REMOVED, edit_json, edit_tensors, make_drafter
from safetensors.numpy import load_file

from dflash_trt.checkpoint.drafter import expected_tensors, parameter_count, read_drafter
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.spec import AttentionPolicy, DecoderSpec, DrafterSpec, TargetSpec
from dflash_trt.checkpoint.target import read_target
from dflash_trt.description import describe
from dflash_trt.errors import CheckpointError
from dflash_trt.modeling.load import meta_drafter

LAYERS, TAPS = 2, [3, 0, 2]
FUSION = "layer_fusion_weights"
TARGET_KEYS = "layers.0.self_attn.k_proj_target.weight"


@pytest.fixture
def dflare_dir(made: Path, tmp_path: Path) -> Path:
    make_drafter(tmp_path / "dflare", made / "target", TAPS, block_size=8, layers=LAYERS, kind="dflare")
    return tmp_path / "dflare"


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_drafter(folder)
    for part in (*parts, str(folder)):
        assert part in str(caught.value)


def remove(folder: Path, *parts: str) -> None:
    """Take out the tensors with one of these parts in their name."""
    names = [name for name in load_file(folder / "model.safetensors") if not set(parts).isdisjoint(name.split("."))]
    assert names
    edit_tensors(folder, **dict.fromkeys(names, REMOVED))


def to_angelspec(folder: Path, **changes: Any) -> None:
    """AngelSpec's dialect: all fields at the top, `num_target_layers` the number of taps."""
    config = json.loads((folder / "config.json").read_text())
    fields = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "dflash",
        "model_arch": "dflare",
        "num_target_layers": len(TAPS),
        "target_hidden_size": config["hidden_size"],
        "target_num_hidden_layers": 4,
        "dflash_config": REMOVED,
        "layer_types": REMOVED,
    }
    edit_json(folder / "config.json", **(config["dflash_config"] | fields | changes))


def published(hidden: int, inner: int) -> DrafterSpec:
    """AngelSlim/Qwen3-4b-dflare and AngelSlim/Qwen3-8b-dflare."""
    taps = (1, 5, 9, 13, 17, 21, 25, 29, 33)
    return qwen3_drafter(hidden, inner, 7, architecture="QwenDFlareDraftModel", system="dflare", taps=taps)


@pytest.mark.parametrize(
    ("hidden", "inner", "parameters"), [(2560, 9728, 743_221_055), (4096, 12288, 1_409_353_535)], ids=["4B", "8B"]
)
def test_published_geometries(hidden: int, inner: int, parameters: int) -> None:
    """Both what is read and what is traced."""
    spec = published(hidden, inner)
    shapes = expected_tensors(spec)
    assert len(shapes) == 94
    assert shapes[FUSION] == (7, 9)
    assert parameter_count(spec) == parameters

    shared = {field.name for field in fields(DecoderSpec)}
    target = TargetSpec(
        **{name: getattr(spec, name) for name in shared}, family="qwen3", tie_word_embeddings=True, eos_token_ids=(0,)
    )
    module = meta_drafter(spec, target, 16, "bfloat16")
    own = {name: tuple(p.shape) for name, p in module.named_parameters() if not name.startswith("target.")}
    # the module has the softmax of the fusion weights in their place
    assert own | {FUSION: tuple(module.get_buffer("fusion_shares").shape)} == shapes


@pytest.mark.parametrize("dialect", ["angelslim", "angelspec"])
def test_reads_both_dialects(made: Path, tmp_path: Path, dialect: str) -> None:
    tensors = make_drafter(tmp_path, made / "target", TAPS, block_size=8, layers=3, kind="dflare")
    if dialect == "angelspec":
        to_angelspec(tmp_path)
    drafter = read_drafter(tmp_path)
    spec = drafter.spec
    names = {"angelslim": "QwenDFlareDraftModel", "angelspec": "DFlashDraftModel"}
    assert (spec.system, spec.architecture, spec.dtype) == ("dflare", names[dialect], "float32")
    assert (spec.block_size, spec.mask_token_id, spec.taps) == (8, 319, tuple(TAPS))
    assert (spec.num_target_layers, spec.target_hidden_size) == (4, 32)
    assert spec.policies == (AttentionPolicy(causal=False),) * 3
    assert len(tensors) == len(drafter.tensors) == 13 * 3 + 3
    assert expected_tensors(spec) == {name: value.shape for name, value in tensors.items()}
    assert parameter_count(spec) == sum(value.size for value in tensors.values())
    np.testing.assert_array_equal(drafter.tensors.read(FUSION), tensors[FUSION])
    assert check_pair(read_target(made / "target"), drafter, None) == 8


def test_angelspec_without_the_targets_depth(dflare_dir: Path) -> None:
    to_angelspec(dflare_dir, target_num_hidden_layers=REMOVED)
    assert read_drafter(dflare_dir).spec.num_target_layers is None


def test_attention_policies_are_read(dflare_dir: Path) -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24, "use_sliding_window": True}
    edit_json(dflare_dir / "config.json", **types)
    expected = (AttentionPolicy(causal=True, window=24), AttentionPolicy(causal=False))
    assert read_drafter(dflare_dir).spec.policies == expected


def test_config_names_do_not_tell_the_kind(dflare_dir: Path, drafter_dir: Path) -> None:
    edit_json(dflare_dir / "config.json", architectures=["DFlashDraftModel"])
    edit_json(drafter_dir / "config.json", architectures=["QwenDFlareDraftModel"])
    assert read_drafter(dflare_dir).spec.system == "dflare"
    assert read_drafter(drafter_dir).spec.system == "dflash"


# --- what the tensors show ---


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_fusion_weights_that_are_no_numbers(dflare_dir: Path, value: float) -> None:
    weights = np.zeros((LAYERS, len(TAPS)), np.float32)
    weights[1, 0] = value
    edit_tensors(dflare_dir, layer_fusion_weights=weights)
    refused(dflare_dir, FUSION, "NaN or infinity")


def test_without_fusion_weights(dflare_dir: Path) -> None:
    remove(dflare_dir, FUSION)
    refused(dflare_dir, "without its fusion weights", TARGET_KEYS, f"no {FUSION}", "again")


def test_without_projections_for_the_context(dflare_dir: Path) -> None:
    remove(dflare_dir, "k_proj_target", "v_proj_target")
    refused(dflare_dir, f"it has {FUSION}", "no tensor has k_proj_target or v_proj_target in its name", "again")


@pytest.mark.parametrize("missing", ["k_proj_target", "v_proj_target"])
def test_without_one_of_the_two_projections(dflare_dir: Path, missing: str) -> None:
    remove(dflare_dir, missing)
    names = ", ".join(f"layers.{layer}.self_attn.{missing}.weight" for layer in range(LAYERS))
    refused(dflare_dir, f"missing tensors: {names}")


def test_projections_in_one_layer_only(dflare_dir: Path) -> None:
    edit_tensors(dflare_dir, layers__1__self_attn__v_proj_target__weight=REMOVED)
    refused(dflare_dir, "missing tensors: layers.1.self_attn.v_proj_target.weight")


@pytest.mark.parametrize("removed", [(), (FUSION,), ("k_proj_target", "v_proj_target")], ids=["none", "fusion", "kv"])
def test_fc_beside_parts_of_dflare(dflare_dir: Path, removed: tuple[str, ...]) -> None:
    if removed:
        remove(dflare_dir, *removed)
    edit_tensors(dflare_dir, fc__weight=np.ones((32, 96), np.float32))
    shown = FUSION if FUSION not in removed else TARGET_KEYS
    refused(dflare_dir, f"fc.weight is DFlash's and {shown} DFlare's", "Supported: DFlash", "mixtures")


def test_target_projections_are_not_taken_for_the_blocks(dflare_dir: Path) -> None:
    """`.k_proj` is a part of `.k_proj_target` as text: only the exact name counts."""
    edit_tensors(dflare_dir, layers__1__self_attn__k_proj__weight=REMOVED)
    refused(dflare_dir, "missing tensors: layers.1.self_attn.k_proj.weight")


def test_misshapen_projection(dflare_dir: Path) -> None:
    edit_tensors(dflare_dir, layers__1__self_attn__k_proj_target__weight=np.ones((64, 32), np.float32))
    refused(dflare_dir, "layers.1.self_attn.k_proj_target.weight is [64, 32], but the config says [32, 32]")


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (3, 3), (6,)])
def test_fusion_weights_of_another_shape(dflare_dir: Path, shape: tuple[int, ...]) -> None:
    edit_tensors(dflare_dir, layer_fusion_weights=np.ones(shape, np.float32))
    needed = "2 layers (num_hidden_layers) and 3 taps (target_layer_ids) need [2, 3]"
    refused(dflare_dir, f"{FUSION} is {list(shape)}, but {needed}")


def test_other_kinds_with_dflares_parts(dflare_dir: Path) -> None:
    edit_tensors(dflare_dir, hidden_correction__down__weight=np.ones((2, 2), np.float32))
    refused(dflare_dir, "this is a DFly drafter (tensor hidden_correction.down.weight)")


def test_names_of_angelspecs_training(dflare_dir: Path) -> None:
    edit_tensors(dflare_dir, hidden_norm__weight=REMOVED, context_norm__weight=np.ones(32, np.float32))
    refused(dflare_dir, "the names AngelSpec trains under (tensor context_norm.weight)")


# --- what the config says ---


@pytest.mark.parametrize("stated", ["dflash", "dfly", "DFlare"])
def test_model_arch_that_contradicts_the_tensors(dflare_dir: Path, stated: str) -> None:
    edit_json(dflare_dir / "config.json", model_arch=stated)
    refused(dflare_dir, f'model_arch is "{stated}", but the tensors are those of a dflare drafter')


def test_model_arch_of_dflare_over_dflash_tensors(drafter_dir: Path) -> None:
    edit_json(drafter_dir / "config.json", model_arch="dflare")
    refused(drafter_dir, 'model_arch is "dflare", but the tensors are those of a dflash drafter')
    edit_json(drafter_dir / "config.json", model_arch="dflash")
    assert read_drafter(drafter_dir).spec.system == "dflash"


@pytest.mark.parametrize("place", ["top", "section"])
def test_target_of_another_hidden_size(dflare_dir: Path, place: str) -> None:
    section = json.loads((dflare_dir / "config.json").read_text())["dflash_config"] | {"target_hidden_size": 64}
    changes = {"target_hidden_size": 64} if place == "top" else {"dflash_config": section}
    edit_json(dflare_dir / "config.json", **changes)
    refused(dflare_dir, "target_hidden_size is 64, but hidden_size is 32", "no fc.weight", "must be equal")


def test_biases(dflare_dir: Path) -> None:
    edit_json(dflare_dir / "config.json", attention_bias=True)
    refused(dflare_dir, "attention_bias is true, but DFlare drafters with biases are not supported")


def test_inspect_recognises_it(dflare_dir: Path) -> None:
    described = describe(dflare_dir)
    assert (described["kind"], described["system"]) == ("drafter checkpoint", "dflare")
    assert described["tensors"] == 13 * LAYERS + 3
    remove(dflare_dir, "hidden_norm")
    with pytest.raises(CheckpointError, match=r"missing tensors: hidden_norm\.weight"):
        describe(dflare_dir)
