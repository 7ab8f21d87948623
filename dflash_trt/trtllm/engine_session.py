"""A bundle's engines in `tensorrt_llm.runtime.Session`: TensorRT-LLM's engine flow, 1.2.1 and earlier.

TensorRT-LLM reads an engine and runs its passes; profiles, shapes and addresses are told the engine's contexts as those
of the tensorrt backend are, and all buffers are an `EngineSession`'s.

Written after tensorrt_llm/runtime/session.py at commit 46d548bfa861186d863bfac38a50ba029de5ee58 of the
NVIDIA/TensorRT-LLM repository and a later version of the 1.x engine flow, whose signatures are the same; UNRUN with the
wheels of 1.2.1, which need a GPU. Tested with a `Session` that is written after that file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.engine_contract import check_engine
from dflash_trt.backends.engine_session import EngineSession
from dflash_trt.backends.profiles import Profile
from dflash_trt.backends.tensorrt_api import Messages, TensorRT
from dflash_trt.backends.tensorrt_session import ContextExecution, OpenedEngine, mapped, scratch_for, whole_steps
from dflash_trt.bundle import BundleInfo
from dflash_trt.errors import BackendError
from dflash_trt.export.contract import Role
from dflash_trt.loading import engine_of, open_info
from dflash_trt.runtime.engine import Engine

_LOG = "TensorRT-LLM's log says why"


class SessionExecution(ContextExecution):
    """One execution context of a session's engine (see `backends.engine_session.Execution`).

    The session's own context is left alone: it has memory of its own, and contexts made here share theirs.

    Args:
        session: a `tensorrt_llm.runtime.Session` of the opened engine.
    """

    def __init__(self, opened: OpenedEngine, index: int, profile: Profile, session: Any) -> None:
        super().__init__(opened, index, profile)
        self._session = session

    def execute(self, stream: int) -> None:
        # without addresses: the context has them, and `run` would not notice that it refuses one
        if not self._session.run({}, {}, stream, self._context):
            raise self._opened.failed("cannot run a pass")

    def another(self) -> SessionExecution:
        return SessionExecution(self._opened, self._index, self.profile, self._session)


def load_engine(folder: Path | str, device: str = "cuda") -> Engine:
    """Opens a bundle of the tensorrt backend, all graphs in sessions of TensorRT-LLM.

    Raises:
        BundleError: missing, damaged, or built with another TensorRT or for another GPU.
        BackendError: as `open_session`.
    """
    folder = Path(folder)
    info = open_info(folder)
    return engine_of(folder, info, {role: open_session(folder, info, role, device) for role in info.roles})


def open_session(folder: Path, info: BundleInfo, role: Role, device: str = "cuda") -> EngineSession:
    """The engine of one graph of a bundle, `<role>/rank0.engine`, in a session of TensorRT-LLM.

    Args:
        info: as `loading.open_info` gives it, which has checked the files.
        device: where the buffers are.

    Raises:
        BackendError: the bundle is another backend's, there is no TensorRT-LLM with an engine runtime, its TensorRT
            does not take the plugin library or the engine, or the engine streams its weights.
        BundleError: the engine is not this graph's.
    """
    if info.backend != "tensorrt":
        what = f"was built for backend {info.backend}, and TensorRT-LLM runs engines of TensorRT"
        raise BackendError(what, where=str(folder), mend="Build it with --backend tensorrt")
    record = info.graphs[role]
    assert info.engines is not None
    assert record.model is not None
    session_class, api, file = _session_class(), tensorrt_api.load("tensorrt"), folder / record.model
    plugins, profiles = info.engines.plugins, info.engines.profiles[role]
    if plugins is not None:
        api.load_plugins(folder / plugins.file)
    session = _read(session_class, api, file)
    capacity = info.limits.capacity
    check_engine(api, session.engine, file, record.spec, profiles, capacity, plugins=plugins is not None)
    opened = OpenedEngine(
        api=api,
        engine=session.engine,
        kept=(session,),
        messages=Messages(errors=[_LOG]),
        file=file,
        device=device,
        scratch=scratch_for(session.engine, device),
        streams_weights=False,
    )
    executions = [SessionExecution(opened, index, profile, session) for index, profile in enumerate(profiles)]
    return EngineSession(record.spec, executions, capacity, device, whole_steps(record.spec, profiles, device))


def _read(session_class: Any, api: TensorRT, file: Path) -> Any:
    """A `tensorrt_llm.runtime.Session` of an engine file."""
    try:
        with mapped(file) as plan:
            session = session_class.from_serialized_engine(plan)
    except AttributeError as error:  # its runtime answers None for an engine it cannot read, and the session goes on
        if "NoneType" not in str(error):
            raise
        mend = "Build the bundle again with this version, for this GPU"
        raise BackendError(f"{api} cannot run this engine: {_LOG}", where=str(file), mend=mend) from error
    if session.context is None:  # it is made when the session is told how many of the weights to keep
        what = "streams its weights, and TensorRT-LLM's session has no execution context for such an engine"
        raise BackendError(what, where=str(file), mend="Build the bundle without --weight-streaming")
    return session


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
