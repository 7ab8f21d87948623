"""Checkpoints whose tensors have several dtypes: some stay in place, others are converted beside them."""

from __future__ import annotations

import numpy as np
import pytest
from makers import make_drafter, make_target
from oracles import greedy
from safetensors.torch import load_file, save_file

import dflash_trt
from dflash_trt.evaluation.verify import verify_folder


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_float32_norms_in_a_float16_target(tmp_path, backend):
    model = make_target(tmp_path / "t", tie=False, seed=2)
    file = tmp_path / "t" / "model.safetensors"
    halved = {name: t.half() if t.dim() > 1 else t for name, t in load_file(file).items()}
    save_file(halved, file, metadata={"format": "pt"})
    make_drafter(tmp_path / "d", tmp_path / "t", taps=[0, 2], block_size=4, seed=3)
    result = dflash_trt.build(
        target=tmp_path / "t",
        drafter=tmp_path / "d",
        output=tmp_path / "b",
        dtype="float32",
        backend=backend,
        verify=False,
    )
    assert result.graphs[0].parameters == sum(t.numel() for t in halved.values())
    model.load_state_dict({name: t.float() for name, t in halved.items()})
    prompt = np.random.default_rng(0).integers(0, 320, 20).tolist()
    assert dflash_trt.load(tmp_path / "b").generate(prompt, max_tokens=24).token_ids == greedy(model, prompt, 24)
    checks = verify_folder(tmp_path / "b").checks
    assert all(check.status != "failed" for check in checks if check.name.startswith("numbers"))
