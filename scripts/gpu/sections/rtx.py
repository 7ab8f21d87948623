"""TensorRT-RTX, where it is installed: whether an engine that was built for compute capability 8.0 runs here.

Its wheels compile ahead of time for some capabilities only; what happens on another is what this reports.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from gpu.context import Context, NotRunError
from gpu.results import Result

_SIZE = 64


def run(context: Context, result: Result) -> None:
    """Only an engine that runs and answers wrongly is a failed check: that it does not load is a finding."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        raise NotRunError("tensorrt_rtx is not installed")
    trt: Any = importlib.import_module("tensorrt_rtx")
    result.facts["tensorrt_rtx"] = trt.__version__
    logger = _logger(trt)
    given = context.options.engine
    plan = Path(given).read_bytes() if given else build(trt, logger)
    result.facts["engine"] = f"{len(plan)} bytes, {given or 'built here for compute capability 8.0'}"
    context.need_gpu()
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        result.facts["outcome"] = f"the engine was refused: {'; '.join(logger.said[-2:])}"
        return
    outputs = execute(trt, engine)
    if outputs is None:
        result.facts["outcome"] = f"the engine loads, but its execution fails: {'; '.join(logger.said[-2:])}"
        return
    result.facts["outcome"] = "the engine loads and runs"
    if not given:
        x, y = outputs["x"].double(), outputs["y"].double()
        wanted = (x @ torch.ones(_SIZE, _SIZE, dtype=torch.float64, device="cuda") / _SIZE).relu()
        error = float((y - wanted).abs().max())
        result.check("engine for 8.0 answers right", error < 1e-3, f"largest error {error:.2e}")


def _logger(trt: Any) -> Any:
    """One that keeps warnings and errors in `said`."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.said: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING:
                self.said.append(message)

    return Logger()


def build(trt: Any, logger: Any) -> bytes:
    """relu(x @ ones / 64) on float32 [64, 64]."""
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input("x", trt.float32, (_SIZE, _SIZE))
    ones = torch.full((_SIZE, _SIZE), 1 / _SIZE).numpy()
    weights = network.add_constant((_SIZE, _SIZE), trt.Weights(ones)).get_output(0)
    none = trt.MatrixOperation.NONE
    product = network.add_matrix_multiply(x, none, weights, none).get_output(0)
    y = network.add_activation(product, trt.ActivationType.RELU).get_output(0)
    y.name = "y"
    network.mark_output(y)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("building the engine failed")
    return bytes(plan)


def execute(trt: Any, engine: Any) -> dict[str, torch.Tensor] | None:
    """One execution on random inputs: every tensor by name; None where it fails."""
    execution = engine.create_execution_context()
    if execution is None:
        return None
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    tensors = {}
    for name in names:
        shape = tuple(max(1, size) for size in engine.get_tensor_shape(name))
        dtype = {trt.float16: torch.float16, trt.int64: torch.int64}.get(engine.get_tensor_dtype(name), torch.float32)
        tensor = torch.zeros(shape, dtype=dtype, device="cuda")
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            if dtype.is_floating_point:
                tensor.normal_()
            execution.set_input_shape(name, shape)
        tensors[name] = tensor
        execution.set_tensor_address(name, tensor.data_ptr())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    done = execution.execute_async_v3(stream.cuda_stream)
    stream.synchronize()
    return tensors if done else None
