"""One thing that is wrong with a graph, and the same thing in many places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from dflash_trt.backends.parser_version import ParserVersion

_NODE = "node "


@dataclass(frozen=True)
class Fault:
    """Where: a node, an input, an output, a function, a file. `rule` is one word or two for what kind it is, such as
    "dtype"; the text says what is wrong and how to mend it."""

    where: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@dataclass(frozen=True)
class FaultGroup:
    """One rule broken in the same way in one place or more, in the order of the graph."""

    rule: str
    text: str
    places: tuple[str, ...]

    @property
    def where(self) -> str:
        """The place, or how many there are and the first."""
        first, *others = self.places
        if not others:
            return first
        if all(where.startswith(_NODE) for where in self.places):
            return f"{len(self.places)} nodes, the first is {first.removeprefix(_NODE)}"
        return f"{len(self.places)} places, the first is {first}"

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def grouped(faults: Iterable[Fault]) -> list[FaultGroup]:
    """One group per rule and text, in the order of their first faults."""
    places: dict[tuple[str, str], list[str]] = {}
    for fault in faults:
        places.setdefault((fault.rule, fault.text), []).append(fault.where)
    return [FaultGroup(rule, text, tuple(where)) for (rule, text), where in places.items()]


def place(node: ir.Node) -> str:
    """A node in messages, by what it writes where it has no name."""
    name = node.name or f"<{', '.join(str(value.name) for value in node.outputs)}>"
    return f"{_NODE}{name} ({node.op_type})"


def lowering(parser: ParserVersion, options: str = "") -> str:
    """How to mend a graph that was not lowered for `parser`: with a build, and its further options."""
    command = f"build --backend {parser.flavour} --stop-after lower"
    release = f"--tensorrt-version {parser.major}.{parser.minor}"
    return f"Lower it for {parser}: " + " ".join(filter(None, (command, release, options)))
