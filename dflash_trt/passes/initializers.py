"""Small constants as initialisers, each once in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir


def initializer(graph: ir.Graph, name: str, value: np.ndarray | np.generic) -> ir.Value:
    """The initialiser of this name, made where there is none yet."""
    if name not in graph.initializers:
        tensor = ir.tensor(value, name=name)
        kind, shape = ir.TensorType(tensor.dtype), ir.Shape(value.shape)
        graph.register_initializer(ir.Value(name=name, type=kind, shape=shape, const_value=tensor))
    return graph.initializers[name]


def integers(graph: ir.Graph, numbers: Sequence[int]) -> ir.Value:
    """A list of integers (a shape, axes, pads), int64 [n], one for all that ask for the same."""
    return initializer(graph, "_".join(("numbers", *map(str, numbers))), np.array(numbers, np.int64))
