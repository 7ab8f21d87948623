"""The quantiser, and the file of quantised weights: streamed, read back, placed once where it is shared."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from export.small_pair import POSITIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import make_drafter, make_target
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoint.rope import rope_tables
from dflash_trt.checkpoint.spec import RopeSpec
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.errors import CheckpointError, ExportError
from dflash_trt.export import quantization
from dflash_trt.export.quantization import (
    dequantize,
    dequantized,
    quantize,
    quantized_names,
    read_quantized,
    write_quantized,
)
from dflash_trt.export.weights import PlacedWeights, bytes_to_quantize, place_drafter, place_quantized, place_target

TABLES = dict(zip(("rope_cos", "rope_sin"), rope_tables(RopeSpec(theta=1e4, rotary_dim=16), POSITIONS), strict=True))


def nearest(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Round to nearest, symmetric, by the definition: integers [N, blocks, 32] from 0, scales [N, blocks]."""
    rows, columns = weight.shape
    blocks = np.pad(weight, ((0, 0), (0, -columns % 32))).reshape(rows, -1, 32)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    scales = extreme / -(2.0 ** (bits - 1))
    steps = np.divide(blocks, scales[..., None], out=np.zeros_like(blocks), where=scales[..., None] != 0)
    return np.clip(np.rint(steps) + 2 ** (bits - 1), 0, 2**bits - 1), scales


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 40), columns=st.integers(1, 130), bits=st.sampled_from([4, 8]), seed=st.integers(0, 2**31)
)
def test_numbers_are_rounded_to_the_nearest(rows: int, columns: int, bits: int, seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    packed, scales = quantize(weight, bits)
    numbers, wanted = nearest(weight, bits)
    np.testing.assert_allclose(np.abs(scales), np.abs(wanted), rtol=1e-6)
    found = dequantize(packed, scales, columns)
    meant = ((numbers - 2 ** (bits - 1)) * wanted[..., None]).reshape(rows, -1)[:, :columns]
    steps = np.repeat(np.abs(scales), 32, axis=1)[:, :columns]
    # a number in the middle of two steps, or two extremes of opposite sign, can go either way
    either = np.abs(np.abs(found - weight) - np.abs(meant - weight)) <= 1e-4 * steps
    same = np.abs(found - meant) <= 1e-4 * steps
    two_extremes = np.repeat(np.sign(scales) != np.sign(wanted), 32, axis=1)[:, :columns]
    assert (same | either | two_extremes).all()
    assert (np.abs(found - weight) <= steps * 1.001).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_are_zeros(bits: int) -> None:
    packed, scales = quantize(np.zeros((3, 40), np.float32), bits)
    np.testing.assert_array_equal(dequantize(packed, scales, 40), np.zeros((3, 40)))


@pytest.mark.parametrize("bits", [4, 8])
def test_files_are_written_some_rows_at_a_time(tmp_path: Path, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    shapes = {"a": (50, 33), "b": (7, 64)}
    weights = {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "w.safetensors")
    tensors = TensorFolder.from_files([tmp_path / "w.safetensors"])
    read: list[int] = []
    write_quantized(tmp_path / "whole.safetensors", tensors, bits, read.append)
    assert sum(read) == sum(weight.nbytes for weight in weights.values())
    taken = []
    monkeypatch.setattr(quantization, "_ITEMS", 200)
    monkeypatch.setattr(quantization, "quantize", lambda w, bits: (taken.append(w.size), quantize(w, bits))[1])
    write_quantized(tmp_path / "streamed.safetensors", tensors, bits, read.append)
    assert max(taken) <= 200
    assert (tmp_path / "streamed.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    found = read_quantized(tmp_path / "streamed.safetensors")
    assert quantized_names(found) == ["a", "b"]
    assert load_file(tmp_path / "streamed.safetensors").keys() == {"a.quantized", "a.scales", "b.quantized", "b.scales"}
    for name, weight in weights.items():
        wanted = dequantize(*quantize(weight.astype(np.float32), bits), weight.shape[1])
        np.testing.assert_array_equal(dequantized(found, name, weight.shape[1]), wanted)


def test_quantised_files_are_no_checkpoints(tmp_path: Path) -> None:
    save_file({"a": np.ones((4, 32), np.float32)}, tmp_path / "w.safetensors")
    write_quantized(
        tmp_path / "q.safetensors", TensorFolder.from_files([tmp_path / "w.safetensors"]), 8, lambda count: None
    )
    with pytest.raises(CheckpointError, match=r"unsupported dtype: a\.quantized"):
        TensorFolder.from_files([tmp_path / "q.safetensors"])


def placed_pair(root: Path, tie: bool, bits: int) -> dict[str, PlacedWeights]:
    make_target(root / "ck_target", num_hidden_layers=2, tie=tie)
    make_drafter(root / "ck_drafter", root / "ck_target", [0, 1])
    for role in ("target", "drafter"):
        (root / role).mkdir()
    silent = lambda count: None  # noqa: E731
    target = place_target(TensorFolder.open(root / "ck_target"), TABLES, "float32", root / "target", silent)
    drafter = place_drafter(
        TensorFolder.open(root / "ck_drafter"), TABLES, target, "float32", root / "drafter", silent
    )
    for placed, shared in ((target, None), (drafter, target)):
        read: list[int] = []
        total = bytes_to_quantize(placed)
        place_quantized(placed, bits, read.append, shared)
        assert sum(read) == total
    return {"target": target, "drafter": drafter}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tie", [True, False])
def test_the_head_is_quantised_once(tmp_path: Path, tie: bool, bits: int) -> None:
    placed = placed_pair(tmp_path, tie, bits)
    target, drafter = placed["target"], placed["drafter"]
    linked = tmp_path / "drafter" / "target.quantized.safetensors"
    assert os.stat(linked).st_ino == os.stat(tmp_path / "target" / "quantized.safetensors").st_ino
    for part in (".quantized", ".scales"):
        own, shared = target.entries[f"lm_head.weight{part}"], drafter.entries[f"target.lm_head.weight{part}"]
        assert (shared.file, shared.offset, shared.nbytes, shared.shape) == (linked, own.offset, own.nbytes, own.shape)
        assert f"lm_head.weight{part}" not in load_file(tmp_path / "drafter" / "quantized.safetensors")
    names = {name for name in target.entries if name.endswith(".scales")}
    assert "model.embed_tokens.weight.scales" not in names
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert {name.split(".")[-3] for name in names} == {*layers, "lm_head"}
    assert "fc.weight.scales" in drafter.entries
    # the floats stay: they are the reference's
    assert {name for name in target.entries if not name.endswith((".quantized", ".scales"))} >= {
        name.removesuffix(".scales") for name in names
    }


def test_the_name_of_its_file_is_reserved(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": np.ones((4, 2), np.float32)}, tmp_path / "quantized.safetensors")
    (tmp_path / "bundle").mkdir()
    tensors = TensorFolder.from_files([tmp_path / "quantized.safetensors"])
    with pytest.raises(ExportError, match=r"quantized\.safetensors"):
        place_target(tensors, TABLES, "float32", tmp_path / "bundle", lambda count: None)
