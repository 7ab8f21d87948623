"""Triton's interpreter, in which the kernels run on a CPU: asked for, and mended where it is not like a device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch

if "triton" not in sys.modules:  # it reads this when it is imported; tests/conftest.py sees to that in a whole run
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

if not isinstance(tl.cdiv, interpreter.InterpretedFunction):
    raise RuntimeError("triton was imported before TRITON_INTERPRET was set, so its kernels do not run on a CPU")

_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot


def _convert(data: np.ndarray, source: Any, destination: Any, rounding: Any) -> np.ndarray:
    """float32 -> bfloat16 rounds to the nearest, as devices do; the interpreter cuts off."""
    if (source, destination) == (tl.float32, tl.bfloat16):
        return data.astype(ml_dtypes.bfloat16).view(np.uint16)
    return _convert_float(data, source, destination, rounding)


def _dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Products of bfloat16 are those of their values; the interpreter multiplies the integers it keeps them in."""
    a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(builder, a, b, *rest)


_patched: set[str] = set()


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call between device functions: patching the language once is enough, and at every call takes half the time."""
    if function.fn.__module__ not in _patched:
        interpreter._patch_lang(function.fn)
        _patched.add(function.fn.__module__)
    return function.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = _call
interpreter._convert_float = _convert
interpreter.InterpreterBuilder.create_dot = _dot

_GUARD = 64  # elements before and behind


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """What launchers allocate is full of poison, and has poison around it that must still be there at the end."""
    guards: list[torch.Tensor] = []
    original = torch.Tensor.new_empty

    def new_empty(like: torch.Tensor, size: Any, *, dtype: torch.dtype | None = None, **other: Any) -> torch.Tensor:
        if other:  # the interpreter's own
            return original(like, size, dtype=dtype, **other)
        shape = (size,) if isinstance(size, int) else tuple(size)
        count = int(np.prod(shape))
        memory = torch.full((count + 2 * _GUARD,), 0, dtype=dtype or like.dtype)
        memory.fill_(poison(memory.dtype))
        guards.extend((memory[:_GUARD], memory[_GUARD + count :]))
        return memory[_GUARD : _GUARD + count].view(shape)

    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        yield
    for guard in guards:
        expected = torch.full_like(guard, poison(guard.dtype))
        assert torch.equal(bits(guard), bits(expected)), "written outside of what was allocated"


def poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, for comparing NaN too."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
