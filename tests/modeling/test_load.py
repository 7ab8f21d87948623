"""Modules with and without weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from makers import make_drafter, make_target
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.target import read_target
from dflash_trt.modeling.load import load_drafter, load_target, meta_drafter, meta_target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_meta_modules_hold_no_memory(tmp_path: Path, dtype: str) -> None:
    make_target(tmp_path / "t")
    make_drafter(tmp_path / "d", tmp_path / "t", [0, 2])
    target, drafter = read_target(tmp_path / "t").spec, read_drafter(tmp_path / "d").spec
    for module in (meta_target(target, (0, 2), 32, dtype), meta_drafter(drafter, target, 32, dtype)):
        assert {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} == {"meta"}
        assert {str(parameter.dtype) for parameter in module.parameters()} == {f"torch.{dtype}"}
        assert {str(buffer.dtype) for buffer in module.buffers()} == {"torch.float32"}


def test_loaded_modules_are_for_inference(tmp_path: Path) -> None:
    make_target(tmp_path / "t", tie=False)
    make_drafter(tmp_path / "d", tmp_path / "t", [0, 2])
    target, drafter = read_target(tmp_path / "t"), read_drafter(tmp_path / "d")
    modules = (
        load_target(target.spec, (0, 2), target.tensors, 32, "float32"),
        load_drafter(drafter.spec, drafter.tensors, target.spec, target.tensors, 32, "float32"),
    )
    for module in modules:
        assert not module.training
        assert all(tensor.device.type == "cpu" for tensor in (*module.parameters(), *module.buffers()))
    assert not torch.equal(modules[0].lm_head.weight, modules[0].model.embed_tokens.weight)
    assert torch.equal(modules[0].lm_head.weight, modules[1].target.lm_head.weight)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_stored_rotary_frequencies_are_passed_over(tmp_path: Path, role: str) -> None:
    """Old checkpoints carry them; readers accept them, and they follow from the config."""
    make_target(tmp_path / "target")
    make_drafter(tmp_path / "drafter", tmp_path / "target", [0, 2])
    file = tmp_path / role / "model.safetensors"
    prefix = "model." if role == "target" else ""
    extra = {f"{prefix}layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    target, drafter = read_target(tmp_path / "target"), read_drafter(tmp_path / "drafter")
    load_target(target.spec, (0, 2), target.tensors, 32, "float32")
    load_drafter(drafter.spec, drafter.tensors, target.spec, target.tensors, 32, "float32")
