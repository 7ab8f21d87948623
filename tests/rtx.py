"""TensorRT-RTX, whose ONNX parser and builder work on a machine without a GPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@functools.cache
def tensorrt_rtx() -> Any:
    """The module: in the folder TENSORRT_RTX, which must then have it, or installed, or where `make test` puts it.

    Else the test is skipped.
    """
    named = os.environ.get("TENSORRT_RTX")
    if named is not None or importlib.util.find_spec("tensorrt_rtx") is None:
        folder = Path(named) if named else next(iter(sorted(ROOT.glob("build/tensorrt-rtx-*"))), None)
        if folder is None:
            pytest.skip("TensorRT-RTX is not installed: make test puts it into build/")
        sys.path.append(str(folder))
        importlib.invalidate_caches()
    return importlib.import_module("tensorrt_rtx")


class Parser:
    """The ONNX parser over a network of its own."""

    def __init__(self) -> None:
        trt = tensorrt_rtx()
        self.logger = _quiet_logger()
        self.builder = trt.Builder(self.logger)
        self.network = self.builder.create_network(0)
        self.parser = trt.OnnxParser(self.network, self.logger)

    def supports(self, op_type: str) -> bool:
        return self.parser.supports_operator(op_type)

    def errors(self, model: bytes | Path) -> list[str]:
        """What is wrong with a model, serialised or in a file beside its weights; nothing once it is parsed."""
        in_file = isinstance(model, Path)
        parsed = self.parser.parse_from_file(str(model)) if in_file else self.parser.parse(model)
        errors = [self.parser.get_error(index) for index in range(self.parser.num_errors)]
        texts = [f"{error.node_operator()} {error.node_name()}: {error.desc()}" for error in errors]
        assert parsed == (not texts), texts
        return texts


@functools.cache
def _quiet_logger() -> Any:
    """Every fault comes back from the parser; without a GPU, much else is logged as an error."""
    trt = tensorrt_rtx()

    class Quiet(trt.ILogger):
        def log(self, severity: Any, message: str) -> None:
            pass

    return Quiet()
