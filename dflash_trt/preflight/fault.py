"""One thing that is wrong with a graph."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Fault:
    """Where: a node, an input, an output, a function. `rule` is one word for what kind it is, such as "dtype"; the text
    says what is wrong and how to mend it."""

    where: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def place(node: ir.Node) -> str:
    """A node in messages, by what it writes where it has no name."""
    name = node.name or "of " + ", ".join(str(value.name) for value in node.outputs)
    return f"node {name} ({node.op_type})"
