"""Engines without a GPU: what a session tells its executions is recorded, and a torch module computes on that memory.

A `FakeExecution` reads and writes where it was told to, through nothing but the addresses: a wrong address, shape or
dtype gives wrong results. Its caches are written to where present_* points, from a copy of what past_* pointed to: one
that is not bound as both is not updated.

`FakeTensorRT` is a TensorRT module in the signatures of its Python bindings, whose engines hold such executions.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from dflash_trt.backends.base import numpy_dtype
from dflash_trt.backends.engine_session import EngineSession
from dflash_trt.backends.parser_version import Flavour, ParserVersion
from dflash_trt.backends.profiles import Profile, profiles
from dflash_trt.backends.tensorrt_api import TensorRT
from dflash_trt.backends.torch import TorchSession
from dflash_trt.errors import BackendError
from dflash_trt.export.contract import GraphSpec, TensorSpec
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.limits import Limits

TRT_DTYPES = {"int64": "INT64", "bool": "BOOL", "float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16"}


def at_address(address: int, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """The memory there, as a tensor."""
    size = math.prod(shape) * numpy_dtype(dtype).itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(getattr(torch, dtype)).view(*shape)


@dataclass(frozen=True)
class Pass:
    """What an execution knew when it ran."""

    shapes: dict[str, tuple[int, ...]]
    addresses: dict[str, int]
    stream: int


class FakeExecution:
    """See `engine_session.Execution`.

    Attributes:
        told: all it was told, in order.
        passes: what it knew at each execution.
        siblings: all that were made of one another.
    """

    def __init__(self, module: torch.nn.Module, graph: GraphSpec, profile: Profile) -> None:
        self.module, self.graph, self.profile = module, graph, profile
        self.inputs = {spec.name: spec for spec in (*graph.inputs, *graph.past())}
        self.outputs = {spec.name: spec for spec in (*graph.outputs, *graph.present())}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.told: list[tuple[str, Any]] = []
        self.passes: list[Pass] = []
        self.siblings = [self]
        self.can_be_captured, self.fails = True, False

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        low, _, high = self.profile.shapes(self.inputs[name])
        if len(shape) != len(low) or not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
            raise BackendError(f"{name} {shape} is not in {low}..{high}")
        self.shapes[name] = shape
        self.told.append((name, shape))

    def set_address(self, name: str, address: int) -> None:
        assert name in self.inputs or name in self.outputs
        assert address
        self.addresses[name] = address
        self.told.append((name, address))

    def execute(self, stream: int) -> None:
        if self.fails:
            raise BackendError("the engine failed")
        self.passes.append(Pass(dict(self.shapes), dict(self.addresses), stream))
        with _disable_current_modes(), torch.inference_mode():
            self._compute()

    def _compute(self) -> None:
        given = [at_address(self.addresses[n], self.shapes[n], spec.dtype) for n, spec in self.inputs.items()]
        caches = [tensor.clone() for tensor in given[len(self.graph.inputs) :]]
        results = self.module(*given[: len(self.graph.inputs)], *caches)[: len(self.graph.outputs)]
        for spec, result in zip(self.outputs.values(), (*results, *caches), strict=True):
            assert str(result.dtype) == f"torch.{spec.dtype}"
            at_address(self.addresses[spec.name], result.shape, spec.dtype).copy_(result)

    def capturable(self, stream: int) -> bool:
        assert self.shapes.keys() == self.inputs.keys()
        return self.can_be_captured

    def another(self) -> FakeExecution:
        new = FakeExecution(self.module, self.graph, self.profile)
        new.siblings = self.siblings
        self.siblings.append(new)
        return new


def executions(session: EngineSession) -> list[FakeExecution]:
    """All executions of a session over fakes, those for captures too."""
    return [sibling for told in session._told for sibling in told.execution.siblings]  # type: ignore[attr-defined]


def engine_session(session: TorchSession, role: Any, limits: Limits, whole_steps: bool = False) -> EngineSession:
    """A session over fakes that compute what a torch session does."""
    fakes = [FakeExecution(session.module, session.graph, profile) for profile in profiles(role, limits)]
    return EngineSession(session.graph, fakes, limits.capacity, "cpu", whole_steps)


def over_fakes(engine: Engine, whole_steps: bool = False) -> Engine:
    """The same engine with sessions over fakes."""
    sessions: dict[str, Any] = {
        role: engine_session(session, role, engine.limits, whole_steps)  # type: ignore[arg-type]
        for role, session in engine.sessions.items()
    }
    return Engine(
        sessions["target"], sessions["drafter"], engine.tokenizer, engine.limits, mask_token_id=engine.mask_token_id,
        eos_token_ids=engine.eos_token_ids, vocab_size=engine.vocab_size, system=engine.system,
        vp_drafter=sessions.get("vp_drafter"), costs=engine.costs,
    )  # fmt: skip


# --- a TensorRT module


class Enumeration:
    """An enumeration as pybind11 makes them, for what is asked of one here."""

    def __init__(self, **values: int) -> None:
        self.__members__ = {name: Value(name, value) for name, value in values.items()}

    def __getattr__(self, name: str) -> Value:
        return self.__members__[name]


@dataclass(frozen=True)
class Value:
    name: str
    value: int

    def __int__(self) -> int:
        return self.value

    def __le__(self, other: Value) -> bool:
        return self.value <= other.value


class FakeLogger:
    Severity = Enumeration(INTERNAL_ERROR=0, ERROR=1, WARNING=2, INFO=3, VERBOSE=4)

    def log(self, severity: Any, text: str) -> None:
        raise NotImplementedError


@dataclass
class Built:
    """What an engine file stands for; tests bend it.

    Attributes:
        profiles: as built.
        aliases: output -> input; None for a version that does not tell.
        invalid: bits of EngineInvalidityDiagnostics, for a runtime that tells before reading.
        refuses: methods of an execution context that return False (or None).
    """

    module: torch.nn.Module
    graph: GraphSpec
    profiles: list[Profile]
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    on_host: set[str] = field(default_factory=set)
    aliases: dict[str, str | None] | None = None
    invalid: int | None = None
    readable: bool = True
    refuses: set[str] = field(default_factory=set)
    streamable: int = 0
    budget: int = 0
    information: str = '{"Layers": []}'

    def __post_init__(self) -> None:
        inputs, outputs = (*self.graph.inputs, *self.graph.past()), (*self.graph.outputs, *self.graph.present())
        self.tensors = {spec.name: spec for spec in (*inputs, *outputs)}
        self.modes = {spec.name: "INPUT" for spec in inputs} | {spec.name: "OUTPUT" for spec in outputs}
        pairs = zip(self.graph.present(), self.graph.past(), strict=True)
        self.aliases = {present.name: past.name for present, past in pairs}


class FakeContext:
    """An IExecutionContext over a `FakeExecution`; profile and memory have to come first, in this order."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self._execution: FakeExecution | None = None
        self.memory: tuple[int, int] | None = None

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._execution = FakeExecution(self._built.module, self._built.graph, self._built.profiles[profile_index])
        return "set_optimization_profile_async" not in self._built.refuses

    def set_device_memory(self, memory: int, size: int) -> None:
        assert self._execution is not None
        self.memory = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._execution is not None
        if "set_input_shape" in self._built.refuses:
            return False
        self._execution.set_shape(name, shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert self._execution is not None
        if "set_tensor_address" in self._built.refuses:
            return False
        self._execution.set_address(name, memory)
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert self._execution is not None
        assert self.memory is not None
        if "execute_async_v3" in self._built.refuses:
            return False
        self._execution.execute(stream_handle)
        return True


class FakeRtxContext(FakeContext):
    def is_stream_capturable(self, stream: int) -> bool:
        return "is_stream_capturable" not in self._built.refuses


class FakeEngine:
    """An ICudaEngine."""

    memory_sizes = (512, 2048)

    def __init__(self, built: Built, rtx: bool) -> None:
        self._built, self._rtx = built, rtx
        self.contexts: list[FakeContext] = []
        if built.aliases is not None:
            self.get_aliased_input_tensor: Callable[[str], str | None] = built.aliases.get

    num_io_tensors = property(lambda self: len(self._built.tensors))
    num_optimization_profiles = property(lambda self: len(self._built.profiles))
    streamable_weights_size = property(lambda self: self._built.streamable)

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._built.budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        assert not self.contexts, "cannot be modified while there are contexts"
        self._built.budget = budget

    def get_weight_streaming_automatic_budget(self) -> int:
        return self._built.streamable // 2

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self.memory_sizes[profile_index]

    def get_tensor_name(self, index: int) -> str:
        return list(self._built.tensors)[index]

    def get_tensor_mode(self, name: str) -> Value:
        return Value(self._built.modes[name], 0)

    def get_tensor_dtype(self, name: str) -> Value:
        return Value(TRT_DTYPES[self._built.tensors[name].dtype], 0)

    def get_tensor_location(self, name: str) -> Value:
        return Value("HOST" if name in self._built.on_host else "DEVICE", 0)

    def get_tensor_shape(self, name: str) -> list[int]:
        capacity = self._built.profiles[0].dims["C"].max
        shape = [capacity if dim == "C" else dim for dim in self._built.tensors[name].shape]
        return [dim if isinstance(dim, int) else -1 for dim in shape]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        return [list(shape) for shape in self._built.profiles[profile_index].shapes(self._built.tensors[name])]

    def create_runtime_config(self) -> Any:
        assert self._rtx
        config = SimpleNamespace(strategy=None)
        config.set_execution_context_allocation_strategy = lambda strategy: setattr(config, "strategy", strategy)
        return config

    def create_execution_context(self, given: Any) -> FakeContext | None:
        strategy = given.strategy if self._rtx else given
        assert strategy.name == "USER_MANAGED"
        if "create_execution_context" in self._built.refuses:
            return None
        self.contexts.append((FakeRtxContext if self._rtx else FakeContext)(self._built))
        return self.contexts[-1]

    def create_engine_inspector(self) -> FakeInspector:
        return FakeInspector(self._built)


class FakeInspector:
    """An IEngineInspector: it tells formats only where its context has the shapes of all inputs."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self.execution_context: FakeContext | None = None

    def get_engine_information(self, format: Value) -> str:
        assert format.name == "JSON"
        execution = None if self.execution_context is None else self.execution_context._execution
        if execution is not None and execution.shapes.keys() == execution.inputs.keys():
            return self._built.information
        return re.sub(r'atype": "[^"]*"', 'atype": "N/A due to dynamic shapes"', self._built.information)


class FakeTensorRT:
    """A `tensorrt` or `tensorrt_rtx` module that reads `built` from whatever file it is given.

    `calls` has what was called that matters in order; `engines` what was read.
    """

    ILogger = FakeLogger
    ExecutionContextAllocationStrategy = Enumeration(STATIC=0, ON_PROFILE_CHANGE=1, USER_MANAGED=2)
    LayerInformationFormat = Enumeration(ONELINE=0, JSON=1)
    EngineValidity = Enumeration(VALID=0, SUBOPTIMAL=1, INVALID=2)
    EngineInvalidityDiagnostics = Enumeration(VERSION_MISMATCH=1, UNSUPPORTED_CC=2, OLD_CUDA_DRIVER=4)
    DynamicShapesKernelSpecializationStrategy = Enumeration(LAZY=0, EAGER=1, NONE=2)
    CudaGraphStrategy = Enumeration(DISABLED=0, WHOLE_GRAPH_CAPTURE=1)

    def __init__(self, built: Built, rtx: bool = False) -> None:
        self.built, self.rtx = built, rtx
        self.calls: list[str] = []
        self.engines: list[FakeEngine] = []
        self._registered = False
        self.Runtime = self._runtime

    def get_plugin_registry(self) -> Any:
        return SimpleNamespace(load_library=self._load_library)

    def _load_library(self, plugin_path: str) -> object | None:
        """As the real one: a second library with the same creators is refused, and so is the same one again."""
        self.calls.append("load_library")
        if self._registered or "bad" in plugin_path:
            return None
        self._registered = True
        return object()

    def _runtime(self, logger: Any) -> Any:
        def deserialize_cuda_engine(serialized_engine: Any) -> FakeEngine | None:
            self.calls.append("deserialize_cuda_engine")
            if not self.built.readable:
                logger.log(FakeLogger.Severity.WARNING, "never mind")
                logger.log(FakeLogger.Severity.ERROR, "Version tag\n does not match")
                return None
            self.engines.append(FakeEngine(self.built, self.rtx))
            return self.engines[-1]

        runtime = SimpleNamespace(deserialize_cuda_engine=deserialize_cuda_engine)
        if self.rtx:
            bits = self.built.invalid
            validity = self.EngineValidity.VALID if bits is None else self.EngineValidity.INVALID
            runtime.get_engine_validity = lambda buffer: (validity, bits or 0)
        return runtime


def api_of(built: Built, rtx: bool = False) -> TensorRT:
    """A TensorRT, or a TensorRT-RTX, over a `FakeTensorRT`."""
    flavour: Flavour = "tensorrt-rtx" if rtx else "tensorrt"
    version = "1.7.1.116" if rtx else "10.16.0.72"
    parser = ParserVersion.parse(version, flavour)
    return TensorRT(trt=FakeTensorRT(built, rtx), flavour=flavour, version=version, parser=parser)
