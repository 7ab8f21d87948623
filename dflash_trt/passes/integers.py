"""Lists of integers as initialisers: shapes, axes, pads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir


def integers(graph: ir.Graph, numbers: Sequence[int]) -> ir.Value:
    """An initialiser int64 [n], one for all that ask for the same."""
    name = "_".join(("numbers", *map(str, numbers)))
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(numbers, np.int64), name=name)
        kind, shape = ir.TensorType(tensor.dtype), ir.Shape((len(numbers),))
        graph.register_initializer(ir.Value(name=name, type=kind, shape=shape, const_value=tensor))
    return graph.initializers[name]
