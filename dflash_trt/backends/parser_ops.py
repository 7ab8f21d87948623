"""What the ONNX parsers of TensorRT and TensorRT-RTX take of the standard operators.

The table holds the operators that our graphs have and those that `passes/expand_operators.py` writes, in the forms they
have there. For TensorRT it is read from the operator lists of the parser's releases 10.0 to 11.1; for TensorRT-RTX it
was tried with the parser of 1.7. The two parsers have one origin: where that of 1.7 refuses what the lists allow, the
table does so for both. Later versions are taken to keep what earlier ones had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import onnx_ir as ir

from dflash_trt.backends.parser_version import Flavour, ParserVersion

Source = Literal["documents", "tried"]
Dtypes = frozenset[ir.DataType]



@dataclass(frozen=True)
class Support:
    """What a parser takes of one operator."""

    inputs: tuple[Dtypes, ...]
    """The dtypes each input may have; no input beyond these may be there."""
    outputs: tuple[Dtypes, ...]
    """The same of outputs."""
    variadic: bool = False
    """The last input and the last output stand for any number of them."""
    constant_inputs: tuple[int, ...] = ()
    """Indices of inputs that must be initialisers or outputs of Constant, where they are there."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    """The rank an input must have, by its index."""
    static_dimensions: tuple[tuple[int, int], ...] = ()
    """(input, axis) of dimensions that must be numbers."""
    attributes: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """The values an attribute may have; none: it must not be there. Absent attributes are allowed, and all others."""
    first: tuple[int, int] = (10, 0)
    """(major, minor) of the first version that is known to take it."""
    source: Source = "documents"


def support(op_type: str, parser: ParserVersion) -> Support | None:
    """What `parser` takes of a standard operator; None if the operator is not in the table, or not in this version."""
    known = _TABLES[parser.flavour].get(op_type)
    return None if known is None or parser.release < known.first else known


def first_version(op_type: str, flavour: Flavour) -> ParserVersion | None:
    """The first parser that is known to take an operator; None if the operator is not in the table."""
    known = _TABLES[flavour].get(op_type)
    return None if known is None else ParserVersion(flavour, *known.first)


_BOOL = frozenset({ir.DataType.BOOL})
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_INT64 = frozenset({ir.DataType.INT64})
_INTEGERS = _INT64 | {ir.DataType.INT32}
_NUMBERS = _FLOATS | _INTEGERS
_ALL = _NUMBERS | _BOOL


def _unary(dtypes: Dtypes) -> Support:
    return Support((dtypes,), (dtypes,))


def _binary(dtypes: Dtypes, result: Dtypes | None = None) -> Support:
    return Support((dtypes, dtypes), (result or dtypes,))


def _reduction(dtypes: Dtypes) -> Support:
    return Support((dtypes, _INT64), (dtypes,), constant_inputs=(1,))


_TENSORRT: dict[str, Support] = {
    "Abs": _unary(_NUMBERS),
    "Add": _binary(_NUMBERS),
    "And": _binary(_BOOL),
    "ArgMax": Support((_NUMBERS,), (_INT64,)),
    "Attention": Support(
        (_FLOATS, _FLOATS, _FLOATS, _FLOATS | _BOOL),
        (_FLOATS,),
        ranks={0: 4, 1: 4, 2: 4, 3: 4},
        attributes={"softcap": (0.0,), "qk_matmul_output_mode": (0,), "softmax_precision": (), "is_causal": (0,)},
        first=(10, 14),
    ),
    "Cast": Support((_ALL,), (_ALL,)),
    "CastLike": Support((_ALL, _ALL), (_ALL,)),
    # The lists leave integers out; the parser's published source takes them, and so does 1.7.
    "Clip": Support((_NUMBERS, _NUMBERS, _NUMBERS), (_NUMBERS,)),
    "Concat": Support((_ALL,), (_ALL,), variadic=True),
    "Constant": Support((), (_ALL,), attributes={"sparse_value": (), "value_string": (), "value_strings": ()}),
    "Div": _binary(_NUMBERS),
    "Exp": _unary(_FLOATS),
    "Expand": Support((_ALL, _INT64), (_ALL,)),
    "Gather": Support((_ALL, _INTEGERS), (_ALL,)),
    "GatherElements": Support((_ALL, _INTEGERS), (_ALL,)),
    "Gemm": Support((_FLOATS, _FLOATS), (_FLOATS,)),
    "Greater": _binary(_NUMBERS, _BOOL),
    "Identity": _unary(_ALL),
    "Less": _binary(_NUMBERS, _BOOL),
    "LessOrEqual": _binary(_NUMBERS, _BOOL),
    "MatMul": _binary(_FLOATS),
    "Mul": _binary(_NUMBERS),
    "Neg": _unary(_NUMBERS),
    "Or": _binary(_BOOL),
    "RMSNormalization": Support((_FLOATS, _FLOATS), (_FLOATS,), first=(10, 15)),
    "Range": Support((_INTEGERS, _INTEGERS, _INTEGERS), (_INTEGERS,)),
    "ReduceLogSumExp": _reduction(_FLOATS),
    "ReduceMax": _reduction(_NUMBERS),
    "ReduceMean": _reduction(_NUMBERS),
    "ReduceSum": _reduction(_NUMBERS),
    "Reshape": Support((_ALL, _INT64), (_ALL,)),
    "RotaryEmbedding": Support((_FLOATS, _FLOATS, _FLOATS, _INT64), (_FLOATS,), first=(10, 15)),
    "Shape": Support((_ALL,), (_INT64,)),
    "Sigmoid": _unary(_FLOATS),
    # Only the axes must be constant, and only before 10.3.
    "Slice": Support((_ALL, _INTEGERS, _INTEGERS, _INTEGERS, _INTEGERS), (_ALL,), constant_inputs=(3,)),
    "Softmax": _unary(_FLOATS),
    "Split": Support((_ALL, _INT64), (_ALL,), variadic=True),
    "Sqrt": _unary(_FLOATS),
    "Squeeze": Support((_ALL, _INT64), (_ALL,), constant_inputs=(1,)),
    "Sub": _binary(_NUMBERS),
    "Tanh": _unary(_FLOATS),
    "TensorScatter": Support(
        (_FLOATS, _FLOATS, _INT64),
        (_FLOATS,),
        ranks={0: 4, 1: 4},
        static_dimensions=((0, 2),),
        attributes={"axis": (2, -2), "mode": ("linear",)},
        first=(10, 15),
    ),
    "Transpose": _unary(_ALL),
    "Unsqueeze": Support((_ALL, _INT64), (_ALL,), constant_inputs=(1,)),
    "Where": Support((_BOOL, _ALL, _ALL), (_ALL,)),
}

_TABLES: dict[Flavour, dict[str, Support]] = {
    "tensorrt": _TENSORRT,
    "tensorrt-rtx": {name: replace(known, first=(1, 7), source="tried") for name, known in _TENSORRT.items()},
}
