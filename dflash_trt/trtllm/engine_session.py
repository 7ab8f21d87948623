"""One engine of a bundle behind `tensorrt_llm.runtime.Session`: TensorRT-LLM's engine flow, 1.2.1 and earlier.

`EngineRunner` is the small interface that keeping buffers needs: the I/O of the engine, a tensor for each name, shapes,
execute. It allocates nothing, and a step is `set_shape` where a shape has changed and one `Session.run`.

Written after tensorrt_llm/runtime/session.py at commit 46d548bfa861186d863bfac38a50ba029de5ee58 of the
NVIDIA/TensorRT-LLM repository and a later version of the 1.x engine flow, whose signatures are the same; UNRUN with the
wheels of 1.2.1, which need a GPU. Tested with a `Session` that is written after that file.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.errors import BackendError
from dflash_trt.export.contract import Role

if TYPE_CHECKING:
    import torch

ENGINE = "rank0.engine"  # as TensorRT-LLM names it in an engine directory

# TensorRT's names of element types -> those of the contract (and of torch)
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class EngineTensor:
    """One input or output of an engine; -1 for dimensions that the shapes of a call decide."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_input: bool


class EngineRunner:
    """One execution context of an engine, with tensors bound by name.

    Args:
        session: a `tensorrt_llm.runtime.Session`.
        context: of the session's engine; the session's own by default, which has profile 0.
        profile: the optimisation profile `context` has, for messages.
    """

    def __init__(self, session: Any, context: Any = None, profile: int = 0) -> None:
        self._session = session
        self._context = session.context if context is None else context
        self.profile = profile
        if self._context is None:
            # a session over streamable weights makes its context when it is told how many of them to keep
            mend = "Build the engine without weight streaming"
            raise BackendError("the engine streams its weights: TensorRT-LLM's session has no context yet", mend=mend)
        self._tensors = {tensor.name: tensor for tensor in _read_io(session.engine)}
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def io(self) -> tuple[EngineTensor, ...]:
        """Inputs and outputs, in the engine's order."""
        return tuple(self._tensors.values())

    def with_profile(self, profile: int, stream: int) -> EngineRunner:
        """Another context of the same engine, with a profile of its own: shapes and tensors are bound anew.

        Args:
            stream: handle of a CUDA stream (`torch.cuda.Stream.cuda_stream`), on which the profile is set.

        Raises:
            BackendError: no such profile, or no memory for another context.
        """
        count = self._session.engine.num_optimization_profiles
        if not 0 <= profile < count:
            raise BackendError(f"profile {profile} was asked for, but the engine has {count}", mend="Build it again")
        context = self._session.engine.create_execution_context()
        if context is None or not context.set_optimization_profile_async(profile, stream):
            raise BackendError(f"TensorRT makes no execution context for profile {profile}", mend="See TensorRT's log")
        return EngineRunner(self._session, context, profile)

    def bind(self, name: str, tensor: torch.Tensor) -> None:
        """The tensor an input is read from or an output written to, from the next `execute` on; its shape is not set.

        A cache is bound twice, as past_* and as present_*.

        Raises:
            BackendError: no such tensor, another dtype, or memory that is not contiguous.
        """
        spec = self._spec(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != spec.dtype:
            raise BackendError(f"a tensor of {dtype} was bound, but the engine has {spec.dtype}", where=name)
        if not tensor.is_contiguous():
            raise BackendError("a tensor that is not contiguous was bound", where=name, mend="Bind a whole buffer")
        (self._inputs if spec.is_input else self._outputs)[name] = tensor

    def set_shape(self, name: str, shape: Iterable[int]) -> None:
        """The shape of an input, for this call and the following ones.

        Raises:
            BackendError: no such input, or a shape outside the profile.
        """
        spec, shape = self._spec(name), tuple(shape)
        if not spec.is_input:
            raise BackendError("is an output, whose shape follows from the inputs'", where=name)
        if self._shapes.get(name) == shape:
            return
        if not self._context.set_input_shape(name, shape):
            ranges = [tuple(limit) for limit in self._session.engine.get_tensor_profile_shape(name, self.profile)]
            what = f"shape {shape} is not in profile {self.profile}, which takes {ranges[0]} to {ranges[-1]}"
            raise BackendError(what, where=name, mend="Build the engine for it")
        self._shapes[name] = shape

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an input or output at the shapes set so far; -1 where one that decides it is not set."""
        return tuple(self._context.get_tensor_shape(self._spec(name).name))

    def check_in_place(self, pairs: Iterable[tuple[str, str]]) -> None:
        """That each (past, present) pair is bound to the same memory: a cache that was copied is no cache.

        Raises:
            BackendError: a pair that is not.
        """
        for past, present in pairs:
            read, written = self._inputs.get(past), self._outputs.get(present)
            if read is None or written is None:
                raise BackendError("no tensor is bound", where=past if read is None else present)
            if read.data_ptr() != written.data_ptr() or read.shape != written.shape:
                raise BackendError(f"is not bound to the memory of {past}", where=present)

    def execute(self, stream: int) -> bool:
        """Enqueues a call on a CUDA stream (its handle); whether TensorRT took it. It returns before the call is done.

        Raises:
            BackendError: a tensor nobody bound.
        """
        if len(self._inputs) + len(self._outputs) < len(self._tensors):
            unbound = [name for name in self._tensors if name not in self._inputs and name not in self._outputs]
            raise BackendError("no tensor is bound", where=", ".join(unbound))
        return self._session.run(self._inputs, self._outputs, stream, self._context)

    def _spec(self, name: str) -> EngineTensor:
        if name not in self._tensors:
            raise BackendError(f"the engine has no such tensor; it has {', '.join(self._tensors)}", where=name)
        return self._tensors[name]


def open_runner(engine: bytes, plugin_library: Path | None = None) -> EngineRunner:
    """A serialised engine in a session of TensorRT-LLM.

    Args:
        plugin_library: registered before the engine is read, which needs its plugins; None for an engine without.

    Raises:
        BackendError: no TensorRT-LLM with an engine runtime, a library that cannot be registered, or an engine that
            TensorRT does not read (another version, or another GPU).
    """
    session_class = _session_class()
    if plugin_library is not None:
        register_plugins(plugin_library.resolve())
    try:
        session = session_class.from_serialized_engine(engine)
    except AttributeError as error:  # its runtime answers None for an engine it cannot read, and the session goes on
        if "NoneType" not in str(error):
            raise
        what = "TensorRT does not read the engine (its log says why): built with another version, or for another GPU"
        raise BackendError(what, mend="Build the bundle on this machine") from error
    return EngineRunner(session)


def open_role(bundle: Path, role: Role, plugin_library: Path | None = None) -> EngineRunner:
    """The engine of one graph of a bundle, `<role>/rank0.engine`.

    Raises:
        BackendError: as `open_runner`, or there is no such engine.
    """
    path = bundle / role / ENGINE
    if not path.is_file():
        raise BackendError("there is no such engine", where=str(path), mend="Build the bundle with --backend tensorrt")
    return open_runner(path.read_bytes(), plugin_library)


@functools.cache
def register_plugins(library: Path) -> Any:
    """Loads a plugin library into TensorRT's registry; once, however often it is asked for. Returns its handle.

    TensorRT-LLM loads its own plugins with ctypes and a function they export; this library has none, and TensorRT's
    registry asks it for its creators.

    Raises:
        BackendError: TensorRT does not take it.
    """
    import tensorrt

    handle = tensorrt.get_plugin_registry().load_library(str(library))
    if handle is None:
        mend = "Build it with the headers of this TensorRT: dflash-trt plugins build --tensorrt-root"
        raise BackendError("TensorRT does not load the plugin library", where=str(library), mend=mend)
    return handle


def _session_class() -> Any:
    mend = 'Install tensorrt-llm 1.2.1, or use "dflash-trt trtllm export" with a later one'
    try:
        import tensorrt_llm
    except ImportError as error:
        raise BackendError(f"tensorrt_llm cannot be imported: {error}", mend=mend) from error
    try:
        from tensorrt_llm.runtime import Session
    except ImportError as error:
        version = getattr(tensorrt_llm, "__version__", "of an unknown version")
        raise BackendError(f"tensorrt_llm {version} has no engine runtime (runtime.Session)", mend=mend) from error
    return Session


def _read_io(engine: Any) -> list[EngineTensor]:
    tensors = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        dtype = engine.get_tensor_dtype(name).name
        if dtype not in _DTYPES:
            raise BackendError(f"has elements of {dtype}, which no graph of a bundle has", where=name)
        is_input = engine.get_tensor_mode(name).name == "INPUT"
        tensors.append(EngineTensor(name, _DTYPES[dtype], tuple(engine.get_tensor_shape(name)), is_input))
    return tensors
