"""What a graph computes before and after a pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from export.small_pair import Graph, Kind, run_passes

from dflash_trt.backends.onnxruntime import OrtSession
from dflash_trt.passes.simplify import Simplify

VOCAB = 320
KINDS = {"dflash": Kind(), "dflare": Kind(system="dflare", family="llama", tie=False, windows=False)}


def simplified(graph: Graph) -> ir.Model:
    """Its inner shapes are inferred, some of them with the variable capacity."""
    model = graph.inlined()
    Simplify()(model)
    return model


def run(model: ir.Model, graph: Graph, tmp_path: Path) -> list[dict[str, np.ndarray]]:
    """Outputs of a model whose weights lie in the graph's folder."""
    file = graph.folder / f"{tmp_path.name}.onnx"
    ir.save(model, file)
    try:
        return run_passes(OrtSession(file, graph.spec, threads=1), VOCAB)
    finally:
        file.unlink()
