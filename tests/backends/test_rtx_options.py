"""Builder options that the real TensorRT-RTX builds with, on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from export.small_pair import Kind, small_pair
from rtx import tensorrt_rtx

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.engine_builder import build_engine
from dflash_trt.backends.engine_record import BuilderOptions
from dflash_trt.backends.lowering import lower_tensorrt
from dflash_trt.backends.profiles import profiles
from dflash_trt.errors import BackendError
from dflash_trt.runtime.limits import Limits

LIMITS = Limits(max_batch_size=2, max_seq_len=40, max_input_len=39, block_size=8, prefill_chunk=16)


def build(tmp_path: Path, **options: Any) -> int:
    """Bytes of the small drafter's engine."""
    tensorrt_rtx()
    api = tensorrt_api.load("tensorrt-rtx")
    graph = small_pair(Kind(dtype="bfloat16")).drafter
    model = lower_tensorrt(graph.portable(), LIMITS.capacity, api.parser, plugins=False)
    file = graph.folder / f"{tmp_path.name}.onnx"  # beside its weights
    ir.save(model, file)
    try:
        asked = BuilderOptions(compute_capabilities=(86,), **options)
        facts = build_engine(api, file, graph.spec, profiles("drafter", LIMITS), asked, tmp_path / "rank0.engine")
    finally:
        file.unlink()
    assert (tmp_path / "rank0.engine").stat().st_size == facts.bytes
    return facts.bytes


@pytest.mark.parametrize(
    "options",
    [{}, {"optimization_level": 0}, {"optimization_level": 5}, {"workspace": 64}, {"weight_streaming": True}],
    ids=lambda options: "_".join(options) or "none",
)
def test_it_builds(tmp_path: Path, options: dict[str, Any]) -> None:
    assert build(tmp_path, **options) > 100_000


def test_a_workspace_too_small_is_said(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"cannot build the engine: .*workspace"):
        build(tmp_path, workspace=1)
