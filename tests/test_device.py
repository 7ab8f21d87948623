"""`device`: where a bundle runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dflash_trt
from dflash_trt.errors import BackendError, UsageError


def test_onnxruntime_bundles_stay_on_the_cpu(run_cli, bundle: Path) -> None:
    code, out, err = run_cli("run", str(bundle), "--prompt", "a", "--device", "cuda")
    assert (code, out) == (2, "")
    assert "--device" in err
    assert "--backend torch" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said(torch_bundle: Path) -> None:
    with pytest.raises(BackendError, match="no CUDA GPU"):
        dflash_trt.load(torch_bundle, device="cuda")


def test_an_unknown_device_is_refused(torch_bundle: Path) -> None:
    with pytest.raises(UsageError, match="must be cpu or cuda"):
        dflash_trt.load(torch_bundle, device="tpu")  # type: ignore[arg-type]
