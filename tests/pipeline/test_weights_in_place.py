"""A pair shaped like a published one, in files that are holes: a bundle takes its weights as they lie."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import onnx
import pytest

import dflash_trt
from dflash_trt.checkpoint.tensors import TensorFolder

pytestmark = pytest.mark.slow  # four builds

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = 5
# Qwen3-8B but for the numbers of heads and layers, and the sizes beside the heads
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
BACKENDS = {
    "onnxruntime": ("float32", {}),
    "tensorrt": ("bfloat16", {"stop_after": "lower", "plugins": "off"}),
}

Built = tuple[Path, Path, Path]


@pytest.fixture(scope="module", params=["dflash", "dflare"])
def system(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=list(BACKENDS))
def built(request: pytest.FixtureRequest, system: str, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A target, a drafter, and their bundle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        from make_shape import make_shape
        from published_shapes import SHAPES

    folder = tmp_path_factory.mktemp("shapes")
    dtype, options = BACKENDS[request.param]
    published = SHAPES[f"qwen3-8b-{system}-b16"].config
    taps = [0, 2, 3] if system == "dflash" else [0, 1, 2, 3]
    shapes = {
        "target": SHAPES["qwen3-8b"].config | SMALL | {"num_hidden_layers": 4},
        "drafter": published | SMALL | {
            "num_hidden_layers": 2, "num_target_layers": 4, "layer_types": ["full_attention"] * 2,
            "dflash_config": published["dflash_config"] | {"target_layer_ids": taps},
        },
    }  # fmt: skip
    for role, config in shapes.items():
        (folder / f"{role}.json").write_text(json.dumps(config))
        make_shape(folder / f"{role}.json", folder / role, dtype=dtype, shards=FILES if role == "target" else 1)
    target, drafter, bundle = (folder / name for name in ("target", "drafter", "bundle"))
    options = options | {"backend": request.param, "dtype": dtype, "max_seq_len": 512, "verify": False}
    dflash_trt.build(target=target, drafter=drafter, output=bundle, **options)
    return target, drafter, bundle


def inode(path: Path) -> tuple[int, int]:
    return path.stat().st_dev, path.stat().st_ino


def test_the_weight_files_are_the_checkpoints_own(built: Built) -> None:
    target, drafter, bundle = built
    theirs = {inode(file): file for file in (*target.glob("*.safetensors"), *drafter.glob("*.safetensors"))}
    assert len(theirs) == FILES + 1
    linked = {inode(file) for file in bundle.glob("*/*.safetensors") if file.name != "tables.safetensors"}
    assert linked == theirs.keys()
    own = [file for file in bundle.rglob("*") if file.is_file() and inode(file) not in theirs]
    assert sum(file.stat().st_size for file in own) < 3_000_000
    assert sum(file.stat().st_size for file in theirs.values()) > 150_000_000
    assert sum(512 * file.stat().st_blocks for file in theirs.values()) < 200_000  # still holes: nobody wrote to them


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_the_graphs_name_the_tensors_where_they_lie(built: Built, role: str) -> None:
    """Every weight is external data at the very bytes that the checkpoint's header names."""
    *checkpoints, bundle = built
    entries = {
        (inode(entry.file), entry.offset): entry
        for folder in checkpoints
        for entry in TensorFolder.open(folder).values()
    }
    graph = onnx.load(bundle / role / "model.onnx", load_external_data=False).graph
    found = set()
    for tensor in graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            assert len(tensor.SerializeToString()) < 10_000
            continue
        where = {entry.key: entry.value for entry in tensor.external_data}
        if where["location"] == "tables.safetensors":
            assert tensor.name.startswith(("rope_", "fusion_shares"))
            continue
        entry = entries[inode(bundle / role / where["location"]), int(where["offset"])]
        assert (entry.nbytes, entry.shape) == (int(where["length"]), tuple(tensor.dims))
        assert tensor.name in (entry.name, f"target.{entry.name}")
        found.add(entry.name)
    own = TensorFolder.open(checkpoints[role == "drafter"])
    assert found >= {name for name in own if name != "layer_fusion_weights"}


def test_the_recorded_hashes_are_those_of_zeros_and_headers(built: Built) -> None:
    """Holes are hashed as what they read as, so a bundle moved to a filesystem without them is the same."""
    bundle = built[2]
    config = json.loads((bundle / "config.json").read_text())["dflash_trt"]
    for name, record in config["files"].items():
        data = (bundle / name).read_bytes()
        assert record == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize("built", ["onnxruntime"], indirect=True)
def test_what_was_built_runs(built: Built) -> None:
    """All weights are zero, so all logits are, and token 0 is the first of the largest."""
    generation = dflash_trt.load(built[2], threads=1).generate([5, 6, 7], max_tokens=20)
    assert generation.token_ids == [0] * 20
    assert generation.statistics.mean_acceptance_length > 9  # the drafter's logits are zero, too
