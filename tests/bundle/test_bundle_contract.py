"""The bundle's layout and config.json, spelled out here a second time; links; moving it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

import dflash_trt
from dflash_trt.documents import to_values

PROMPT = "for name in sorted(names):\n    "


@pytest.fixture(scope="module")
def config(bundle) -> dict:
    return json.loads((bundle / "config.json").read_text())


def test_files_have_the_names_of_the_contract(bundle):
    names = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    assert {"config.json", "target/model.onnx", "drafter/model.onnx", "tokenizer/tokenizer.json"} <= names
    assert {name.split("/")[0] for name in names} == {"config.json", "target", "drafter", "tokenizer"}


def test_config_has_tensorrt_llms_keys(config):
    assert set(config) == {"version", "pretrained_config", "build_config", "dflash_trt"}
    assert config["version"] == dflash_trt.__version__
    pretrained = {
        "architecture": "Qwen3ForCausalLM",
        "dtype": "float32",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": 16,
        "max_position_embeddings": 512,
        "rotary_base": 10000.0,
    }
    assert {name: config["pretrained_config"][name] for name in pretrained} == pretrained
    assert config["pretrained_config"]["mapping"]["world_size"] == 1
    sizes = {"max_batch_size": 2, "max_input_len": 95, "max_seq_len": 96, "max_draft_len": 7}
    assert {name: config["build_config"][name] for name in sizes} == sizes


def test_config_says_what_the_runtime_needs(config, pair):
    section = config["dflash_trt"]
    facts = {
        "system": "dflash",
        "roles": ["target", "drafter"],
        "taps": [0, 2, 3],
        "mask_token_id": 319,
        "block_size": 8,
        "trained_block_size": 8,
        "backend": "onnxruntime",
        "precision": "float32",
        "compute_capability": None,
    }
    assert {name: section[name] for name in facts} == facts
    for package in ("torch", "onnx", "onnxscript", "onnxruntime"):
        assert section["tool_versions"][package] == importlib.metadata.version(package)
    assert section["tool_versions"]["dflash_trt"] == dflash_trt.__version__
    causal, both_ways = {"causal": True, "window": 0}, {"causal": False, "window": 0}
    assert section["target"]["policies"] == [causal] * 4
    assert section["drafter"]["policies"] == [both_ways] * 2


def test_every_file_is_recorded_with_size_and_hash(bundle, config):
    contents = {str(path.relative_to(bundle)): path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    del contents["config.json"]
    assert config["dflash_trt"]["files"] == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()
    }


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_recorded_io_is_the_graphs(bundle, config, role):
    record = config["dflash_trt"]["graphs"][role]
    graph = onnx.load(bundle / record["model"], load_external_data=False).graph
    caches = [f"{kind}_{i}" for i in range(record["spec"]["num_layers"]) for kind in ("key", "value")]
    for values, specs, stem in (
        (graph.input, record["spec"]["inputs"], "past"),
        (graph.output, record["spec"]["outputs"], "present"),
    ):
        assert [value.name for value in values] == [spec["name"] for spec in specs] + [f"{stem}_{c}" for c in caches]
        for value, spec in zip(values, specs, strict=False):
            kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
            assert {"float": "float32"}.get(kind, kind) == spec["dtype"]
            dims = [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
            assert len(dims) == len(spec["shape"])
            assert all(d == s for d, s in zip(dims, spec["shape"], strict=True) if isinstance(s, int))


def test_the_build_result_is_what_was_written(pair, tmp_path):
    result = dflash_trt.build(**pair._asdict(), output=tmp_path / "b", backend="torch", verify=False, block_size=4)
    section = json.loads((tmp_path / "b" / "config.json").read_text())["dflash_trt"]
    assert to_values(result.info) == section
    assert (section["block_size"], section["trained_block_size"]) == (4, 8)  # a smaller block is recorded
    assert dflash_trt.load(tmp_path / "b").limits.block_size == 4


# -- weights exist once


def _inode(*parts: str | Path) -> int:
    return os.stat(Path(*parts)).st_ino


def test_weights_share_the_checkpoints_bytes_where_the_dtype_fits(bundle, pair):
    assert _inode(bundle, "target/model.safetensors") == _inode(pair.target, "model.safetensors")
    assert _inode(bundle, "drafter/model.safetensors") == _inode(pair.drafter, "model.safetensors")


def test_the_embedding_exists_once(bundle):
    assert _inode(bundle, "drafter/target.model.safetensors") == _inode(bundle, "target/model.safetensors")
    for file in bundle.glob("*/model.onnx"):
        inside = [t for t in onnx.load(file, load_external_data=False).graph.initializer if not t.external_data]
        assert all(math.prod(tensor.dims) < 16 for tensor in inside)  # no weights: not even a head's norm


@pytest.fixture(scope="module")
def converted(pair, tmp_path_factory) -> tuple[Path, Path]:
    """A bfloat16 copy of the pair, and its float32 bundle."""
    root = tmp_path_factory.mktemp("converted")
    for name, folder in pair._asdict().items():
        shutil.copytree(folder, root / name)
        file = root / name / "model.safetensors"
        tensors = {key: tensor.bfloat16() for key, tensor in load_torch(file).items()}
        save_torch(tensors, file, metadata={"format": "pt"})
    dflash_trt.build(
        target=root / "target", drafter=root / "drafter", output=root / "b", backend="torch", dtype="float32",
        verify=False, max_seq_len=96,
    )  # fmt: skip
    return root, root / "b"


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_bfloat16_becomes_float32_exactly(converted, role):
    root, folder = converted
    stored = load_torch(root / role / "model.safetensors")
    written: dict[str, np.ndarray] = {}
    for file in (folder / role).glob("*.safetensors"):
        if not file.name.startswith(("target.", "tables")):
            written |= load_file(file)
    assert set(written) == set(stored)
    for name, tensor in stored.items():
        assert tensor.dtype == torch.bfloat16
        # A float32 whose upper half is the bfloat16's bits and whose lower half is zero.
        bits = tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16
        assert np.array_equal(written[name].view(np.uint32), bits)


def test_a_converted_embedding_exists_once_too(converted):
    root, folder = converted
    shared = {path.stat().st_ino for path in folder.rglob("*shared.safetensors")}
    assert len(shared) == 1
    assert len(list(folder.rglob("*shared.safetensors"))) == 2
    assert _inode(root, "target/model.safetensors") not in {path.stat().st_ino for path in folder.rglob("*")}


def test_bfloat16_stays_linked_for_a_backend_that_runs_it(converted):
    root, _ = converted
    dflash_trt.build(
        target=root / "target",
        drafter=root / "drafter",
        output=root / "bf16",
        backend="torch",
        dtype="bfloat16",
        verify=False,
    )
    section = json.loads((root / "bf16" / "config.json").read_text())
    assert section["dflash_trt"]["precision"] == section["pretrained_config"]["dtype"] == "bfloat16"
    assert _inode(root, "bf16/target/model.safetensors") == _inode(root, "target/model.safetensors")
    assert load_file(root / "bf16/target/model.safetensors")["model.norm.weight"].dtype == ml_dtypes.bfloat16
    assert len(dflash_trt.load(root / "bf16").generate("abc", max_tokens=5).token_ids) == 5


def test_sharded_checkpoints_are_linked_shard_by_shard(pair, torch_bundle, tmp_path):
    from makers import make_target

    make_target(tmp_path / "target", max_shard_size="60KB")
    shards = sorted(path.name for path in (tmp_path / "target").glob("*.safetensors"))
    assert len(shards) > 1
    output = tmp_path / "b"
    dflash_trt.build(
        target=tmp_path / "target", drafter=pair.drafter, output=output, backend="torch", verify=False, max_seq_len=96
    )
    for shard in shards:
        assert _inode(output, "target", shard) == _inode(tmp_path, "target", shard)
    expected = dflash_trt.load(torch_bundle).generate(PROMPT, max_tokens=12)
    assert dflash_trt.load(output).generate(PROMPT, max_tokens=12).token_ids == expected.token_ids


# -- a bundle is a folder like any other


@pytest.mark.parametrize("how", ["copied", "moved", "renamed with odd characters"])
def test_a_bundle_works_in_another_place(bundle, tmp_path, how):
    first = Path(shutil.copytree(bundle, tmp_path / "first"))
    place = tmp_path / ("ünïcode [x] dir" if how.startswith("renamed") else "elsewhere")
    if how == "copied":
        shutil.copytree(first, place)
        assert _inode(place, "drafter/target.model.safetensors") != _inode(place, "target/model.safetensors")
    else:
        first.rename(place)
    expected = dflash_trt.load(bundle).generate(PROMPT, max_tokens=12)
    assert dflash_trt.load(place).generate(PROMPT, max_tokens=12).token_ids == expected.token_ids


def test_a_bundle_outlives_its_checkpoints(pair, tmp_path):
    for name, folder in pair._asdict().items():
        shutil.copytree(folder, tmp_path / name)
    output = tmp_path / "b"
    dflash_trt.build(
        target=tmp_path / "target", drafter=tmp_path / "drafter", output=output, backend="torch", verify=False
    )
    expected = dflash_trt.load(output).generate(PROMPT, max_tokens=6).token_ids
    for name in pair._fields:
        shutil.rmtree(tmp_path / name)
    assert dflash_trt.load(output).generate(PROMPT, max_tokens=6).token_ids == expected


def test_nothing_in_a_bundle_names_the_place_it_was_built_in(bundle, pair):
    for path in bundle.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for place in (bundle.parent, pair.target.parent, Path(dflash_trt.__file__).parent):
                assert str(place).encode() not in data, path
