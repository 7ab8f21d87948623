"""Opens an engine file of TensorRT or TensorRT-RTX as a session."""

from __future__ import annotations

import importlib.util
import logging
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflash_trt.backends.engine_contract import check_engine
from dflash_trt.backends.engine_precision import PrecisionCensus, census
from dflash_trt.backends.engine_session import EngineSession
from dflash_trt.backends.profiles import Profile
from dflash_trt.backends.tensorrt_api import Messages, TensorRT
from dflash_trt.errors import BackendError, BundleError
from dflash_trt.export.contract import GraphSpec
from dflash_trt.ops.cuda import register
from dflash_trt.plugins.kernels.tiling import MAX_QUERIES

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OpenedEngine:
    """An engine in memory, and what its execution contexts share.

    Attributes:
        kept: what must live as long as the engine: its runtime and its logger.
        scratch: uint8, the working memory of all contexts: no two of them are at work at the same time.
        streams_weights: whether passes bring weights from host memory.
    """

    api: TensorRT
    engine: Any
    kept: tuple[Any, ...]
    messages: Messages
    file: Path
    device: str
    scratch: torch.Tensor
    streams_weights: bool

    def failed(self, what: str) -> BackendError:
        """The error to raise when the engine refuses something."""
        return BackendError(f"{self.api} {what}: {self.messages.last_error()}", where=str(self.file))


class ContextExecution:
    """One execution context on one profile (see `engine_session.Execution`)."""

    def __init__(self, opened: OpenedEngine, index: int, profile: Profile) -> None:
        self.profile = profile
        self._opened, self._index = opened, index
        self._context = opened.api.context(opened.engine, few_shapes=profile.name == "decode")
        if self._context is None:
            raise opened.failed("cannot make an execution context")
        with _waited_for(opened.device) as stream:
            if not self._context.set_optimization_profile_async(index, stream):
                raise opened.failed(f"cannot set optimisation profile {index} ({profile.name})")
        self._context.set_device_memory(opened.scratch.data_ptr(), opened.scratch.numel())

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if not self._context.set_input_shape(name, shape):
            raise self._opened.failed(f"refuses shape {list(shape)} of {name}")

    def set_address(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            raise self._opened.failed(f"refuses address {address:#x} of {name}")

    def execute(self, stream: int) -> None:
        if not self._context.execute_async_v3(stream):
            raise self._opened.failed("cannot run a pass")

    def capturable(self, stream: int) -> bool:
        return not self._opened.streams_weights and self._opened.api.capturable(self._context, stream)

    def another(self) -> ContextExecution:
        return ContextExecution(self._opened, self._index, self.profile)

    def layer_information(self) -> str:
        """JSON about the engine's layers, once the shapes of all inputs are set."""
        return self._opened.api.layer_information(self._opened.engine, self._context)


def open_engine_session(
    api: TensorRT,
    file: Path,
    graph: GraphSpec,
    profiles: Sequence[Profile],
    capacity: int,
    plugin_library: Path | None,
    device: str = "cuda",
) -> EngineSession:
    """Reads an engine and checks it against its graph.

    Args:
        profiles: what it was built for, in its order.
        capacity: slots of every cache.
        plugin_library: what it takes its plugins from; None where it has none.

    Raises:
        BundleError: no such file, or an engine that is not this graph's.
        BackendError: TensorRT cannot run it here, and says why.
    """
    cuda = torch.device(device).type == "cuda"
    if cuda and not torch.cuda.is_available():
        mend = "Install a CUDA build of torch and a driver"
        raise BackendError(f"{api.name} engines run on a CUDA GPU, and torch sees none here", mend=mend)
    if plugin_library is not None:
        api.load_plugins(plugin_library)
    opened = read_engine(api, file, device)
    check_engine(api, opened.engine, file, graph, profiles, capacity, plugins=plugin_library is not None)
    executions = [ContextExecution(opened, index, profile) for index, profile in enumerate(profiles)]
    steps = whole_steps(graph, profiles, device)
    return EngineSession(graph, executions, capacity, device, steps, partial(_precision, opened, graph, profiles[0]))


def _precision(opened: OpenedEngine, graph: GraphSpec, first: Profile) -> PrecisionCensus:
    """Read in a context of its own, which has the shapes that the engine's first profile is best at."""
    execution = ContextExecution(opened, 0, first)
    for spec in (*graph.inputs, *graph.past()):
        execution.set_shape(spec.name, first.shapes(spec)[1])
    return census(execution.layer_information())


def whole_steps(graph: GraphSpec, profiles: Sequence[Profile], device: str) -> bool:
    """Whether greedy steps can run whole on a device, as far as their own operators go; makes those ready.

    They have kernels for CUDA, which need triton and take trees of so many nodes.
    """
    if torch.device(device).type != "cuda":
        return False
    if importlib.util.find_spec("triton") is None:
        log.warning("triton is not installed: greedy steps run pass by pass, which is slower. pip install triton")
        return False
    register()
    trees = [profile.dims["Q"].max for profile in profiles if graph.role == "target" and profile.name == "decode"]
    return all(nodes <= MAX_QUERIES for nodes in trees)


def read_engine(api: TensorRT, file: Path, device: str) -> OpenedEngine:
    """An engine as it lies in its file; its plugins are loaded already.

    Raises:
        BundleError: the file cannot be read. BackendError: TensorRT cannot run it here, and says why.
    """
    logger, messages = api.logger()
    runtime = api.trt.Runtime(logger)
    with mapped(file) as plan:
        why = api.why_invalid(runtime, plan)
        engine = runtime.deserialize_cuda_engine(plan) if why is None else None
    if engine is None:
        what = f"{api} cannot run this engine: {why or messages.last_error()}"
        mend = "Build the bundle again with this version, for this GPU"
        raise BackendError(what, where=str(file), mend=mend)
    streams_weights = False
    if engine.streamable_weights_size:  # to be settled before contexts are made
        engine.weight_streaming_budget_v2 = engine.get_weight_streaming_automatic_budget()
        streams_weights = engine.weight_streaming_budget_v2 < engine.streamable_weights_size
    return OpenedEngine(
        api=api,
        engine=engine,
        kept=(runtime, logger),
        messages=messages,
        file=file,
        device=device,
        scratch=scratch_for(engine, device),
        streams_weights=streams_weights,
    )


def scratch_for(engine: Any, device: str) -> torch.Tensor:
    """Working memory for the contexts of an engine: as much as its largest profile needs."""
    profiles = range(engine.num_optimization_profiles)
    size = max(engine.get_device_memory_size_for_profile_v2(index) for index in profiles)
    return torch.empty(max(size, 1), dtype=torch.uint8, device=device)


def mapped(file: Path) -> mmap.mmap:
    """A file's bytes, without a copy of them: engines are as large as their models."""
    try:
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise BundleError(f"cannot be read: {error}", where=str(file), mend="Build the bundle again") from error


@contextmanager
def _waited_for(device: str) -> Iterator[int]:
    """The handle of a stream whose work is waited for; 0 on a CPU."""
    if torch.device(device).type != "cuda":
        yield 0
        return
    stream = torch.cuda.Stream(device)
    yield stream.cuda_stream
    stream.synchronize()
