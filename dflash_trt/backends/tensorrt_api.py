"""TensorRT 10, TensorRT 11 and TensorRT-RTX behind one face: no other module knows how their interfaces differ.

What differs, as of TensorRT 10.16, 11.4 and TensorRT-RTX 1.7:

- Networks are strongly typed here. 10 and RTX must be asked for it; in 11 they always are, and the flag does nothing.
- RTX compiles ahead of time for compute capabilities that are named, on a machine without a GPU too. The others compile
  for the GPU at hand, which they time kernels on: timing caches are theirs alone.
- RTX cannot be given plugins: its parser aborts the process where a plugin library is loaded.
- A plugin that writes into its inputs needs a preview feature of 10.3 and later.
- RTX captures its CUDA graphs itself, and says whether somebody else may; the others leave that to the caller.
- RTX says of a serialised engine why it cannot run it before reading it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from dflash_trt.backends.parser_version import OLDEST, Flavour, ParserVersion
from dflash_trt.errors import BackendError

MODULES: dict[Flavour, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
NAMES: dict[Flavour, str] = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
INSTALL: dict[Flavour, str] = {
    "tensorrt": "pip install 'dflash-trt[tensorrt]'",
    "tensorrt-rtx": "pip install 'dflash-trt[rtx]'",
}
# what trtexec and trtllm-build call it -> BuilderFlag
FLAGS = {"refit": "REFIT", "weight_streaming": "WEIGHT_STREAMING"}
_REASONS = {
    "VERSION_MISMATCH": "it was built with another version",
    "UNSUPPORTED_CC": "it was not compiled for this GPU's compute capability",
    "OLD_CUDA_DRIVER": "the GPU driver is too old",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little memory",
    "MALFORMED_ENGINE": "it is not an engine, or it is damaged",
    "CUDA_ERROR": "the CUDA driver or runtime does not work",
}
# TensorRT -> the SHA-256 of the plugin library that is loaded: creators are registered once per process
_PLUGINS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "BOOL": "bool",
}


def installed(flavour: Flavour) -> bool:
    """Whether its Python package can be found; whether it works, `load` finds out."""
    return importlib.util.find_spec(MODULES[flavour]) is not None


def load(flavour: Flavour) -> TensorRT:
    """Imports a TensorRT.

    Raises:
        BackendError: it is not installed, cannot be imported, or is older than what the backends are written for.
    """
    name, module = NAMES[flavour], MODULES[flavour]
    if not installed(flavour):
        raise BackendError(f"{name} is not installed", where=f"--backend {flavour}", mend=INSTALL[flavour])
    try:
        trt = importlib.import_module(module)
        version = str(trt.__version__)
    except Exception as error:  # stubs and bindings raise whatever they like
        what = f"{name} is installed but cannot be imported: {' '.join(str(error).split())}"
        raise BackendError(what, where=f"--backend {flavour}", mend=INSTALL[flavour]) from error
    parser = ParserVersion.parse(version, flavour)
    if parser.release < OLDEST[flavour]:
        oldest = ".".join(map(str, OLDEST[flavour]))
        what = f"{name} {version} is too old: {oldest} is the first with the layers these graphs need"
        raise BackendError(what, where=f"--backend {flavour}", mend=f"Upgrade it: {INSTALL[flavour]}")
    return TensorRT(trt=trt, flavour=flavour, version=version, parser=parser)


@dataclass
class Messages:
    """The errors of a TensorRT, in order."""

    errors: list[str] = field(default_factory=list)

    def last_error(self) -> str:
        """In one line."""
        return " ".join(self.errors[-1].split()) if self.errors else "no reason was given"


@dataclass(frozen=True)
class TensorRT:
    """One TensorRT: its module, which it is, its version ("10.14.1.48") and what its ONNX parser is."""

    trt: Any
    flavour: Flavour
    version: str
    parser: ParserVersion

    @property
    def name(self) -> str:
        return NAMES[self.flavour]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    # --- what it can do ---

    @property
    def takes_plugins(self) -> bool:
        return self.flavour == "tensorrt"

    @property
    def compiles_ahead(self) -> bool:
        """Whether it compiles for named compute capabilities, without a GPU."""
        return self.flavour == "tensorrt-rtx"

    @property
    def compute_capabilities(self) -> tuple[int, ...]:
        """Those it compiles for ahead of time, as 86 for 8.6."""
        members = self.trt.ComputeCapability.__members__ if self.compiles_ahead else ()
        return tuple(int(name.removeprefix("SM")) for name in members if name.startswith("SM"))

    def dtype(self, of: Any) -> str:
        """The contract's name of a DataType; its own where the contract has none."""
        return _DTYPES.get(of.name, of.name.lower())

    # --- messages ---

    def logger(self) -> tuple[Any, Messages]:
        """A logger, and where it keeps what it is told."""
        messages, severity = Messages(), self.trt.ILogger.Severity

        class Logger(self.trt.ILogger):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()

            def log(self, level: Any, text: str) -> None:
                if level <= severity.ERROR:
                    messages.errors.append(text)

        return Logger(), messages

    # --- building ---

    def network(self, builder: Any) -> Any:
        """A strongly typed network."""
        flag = getattr(self.trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        return builder.create_network(0 if flag is None else 1 << int(flag))

    def check_flags(self, names: Sequence[str]) -> None:
        """Raises BackendError for a builder flag, by its name in `FLAGS`, that this version does not have."""
        for name in names:
            if FLAGS[name] not in self.trt.BuilderFlag.__members__:
                mend = "Leave it out"
                raise BackendError(f"{self} has no such builder flag", where=f"--{name.replace('_', '-')}", mend=mend)

    def set_flags(self, config: Any, names: Sequence[str], *, plugins: bool) -> None:
        """Sets builder flags by their names in `FLAGS`, and those that plugins and capturing need."""
        self.check_flags(names)
        for name in names:
            config.set_flag(self.trt.BuilderFlag.__members__[FLAGS[name]])
        # RTX: a stream can be captured only where no pass allocates, and one that streams weights cannot be
        if self.compiles_ahead and "weight_streaming" not in names:
            config.set_flag(self.trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        aliased = self.trt.PreviewFeature.__members__.get("ALIASED_PLUGIN_IO_10_03")
        if plugins and aliased is not None:
            config.set_preview_feature(aliased, True)

    def set_compute_capabilities(self, config: Any, capabilities: Sequence[int]) -> None:
        """Names what to compile ahead of time for, such as 86; raises BackendError for those it cannot."""
        unknown = [cc for cc in capabilities if cc not in self.compute_capabilities]
        if unknown:
            there = ", ".join(map(str, self.compute_capabilities)) or "only the GPU at hand"
            raise BackendError(
                f"{self} cannot compile ahead of time for {', '.join(map(str, unknown))}",
                where="--compute-capability",
                mend=f"There are: {there}",
            )
        config.num_compute_capabilities = len(capabilities)
        for index, cc in enumerate(capabilities):
            config.set_compute_capability(self.trt.ComputeCapability.__members__[f"SM{cc}"], index)

    def layers(self, network: Any, kind: str | None = None) -> Iterator[Any]:
        """The layers of a network, or those of a LayerType by its name; none where this version has no such type."""
        wanted = None if kind is None else self.trt.LayerType.__members__.get(kind)
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            if kind is None or (wanted is not None and layer.type == wanted):
                yield layer

    def attentions(self, network: Any) -> Iterator[Any]:
        """Every IAttention of a network. Its layers come back as ILayer, which only a cast makes what they are."""
        for layer in self.layers(network, "ATTENTION_INPUT"):
            layer.__class__ = self.trt.IAttentionInputLayer
            yield layer.attention

    # --- plugins ---

    def load_plugins(self, library: Path) -> None:
        """Loads a plugin library into the registry; once, however many copies of it are named.

        Raises:
            BackendError: this TensorRT takes none, or the library cannot be loaded, or this process has another.
        """
        if not self.takes_plugins:
            raise BackendError(f"{self.name} takes no plugins", where=str(library), mend="Build with --plugins off")
        try:
            with library.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise BackendError(f"cannot be read: {error.strerror}", where=str(library)) from error
        loaded = _PLUGINS.get(self.trt)
        if loaded == digest:
            return
        if loaded is not None:
            mend = "Use the bundles in processes of their own"
            raise BackendError("this process has another plugin library loaded", where=str(library), mend=mend)
        if self.registry().load_library(str(library)) is None:
            mend = "Build it again: dflash-trt plugins build"
            raise BackendError(f"{self} cannot load the plugin library", where=str(library), mend=mend)
        _PLUGINS[self.trt] = digest

    def registry(self) -> Any:
        """Its plugin registry."""
        return self.trt.get_plugin_registry()

    def creator_fields(self, name: str, version: str, namespace: str) -> Mapping[str, str] | None:
        """The fields (name -> type, such as FLOAT32) of a registered plugin creator; None where there is none."""
        creator = self.registry().get_creator(name, version, namespace)
        if creator is None:
            return None
        return {f.name: str(f.type).rsplit(".", 1)[-1] for f in creator.field_names}

    # --- running ---

    def aliased_input(self, engine: Any, output: str) -> str | None:
        """The input that shares its memory with an output, None where the engine's version cannot tell."""
        tell = getattr(engine, "get_aliased_input_tensor", None)
        return None if tell is None else tell(output)

    def tells_aliases(self, engine: Any) -> bool:
        """Whether `aliased_input` means anything."""
        return hasattr(engine, "get_aliased_input_tensor")

    def why_invalid(self, runtime: Any, plan: Any) -> str | None:
        """Why a serialised engine (bytes, or a mapped file) cannot run here, where that can be told before reading it.

        Empty where it cannot run and no reason is given.
        """
        tell = getattr(runtime, "get_engine_validity", None)
        if tell is None:
            return None
        validity, bits = tell(plan)
        if validity != self.trt.EngineValidity.INVALID:
            return None
        reasons = self.trt.EngineInvalidityDiagnostics.__members__.items()
        named = [name for name, value in reasons if int(value) & int(bits)]
        return ", ".join(_REASONS.get(name, name) for name in named)

    def context(self, engine: Any, *, few_shapes: bool) -> Any:
        """An execution context without memory: the caller gives it some (`set_device_memory`), which others may share.

        RTX compiles kernels for each shape. Where a context sees few shapes, when one first occurs, which a capture
        needs. Else in the background, and general kernels serve until then. Its own capturing stays off.
        """
        by_caller = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self.flavour == "tensorrt":
            return engine.create_execution_context(by_caller)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(by_caller)
        strategy = self.trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategy.EAGER if few_shapes else strategy.LAZY
        config.cuda_graph_strategy = self.trt.CudaGraphStrategy.DISABLED
        return engine.create_execution_context(config)

    def capturable(self, context: Any, stream: int) -> bool:
        """Whether an execution may be captured in a CUDA graph; where nobody can tell, it may."""
        tell = getattr(context, "is_stream_capturable", None)
        return True if tell is None else bool(tell(stream))

    def layer_information(self, engine: Any, context: Any) -> str:
        """JSON about an engine's layers; detailed where the build asked for detailed profiling verbosity.

        Args:
            context: of this engine, with the shapes of all inputs set: without them no formats are told.
        """
        inspector = engine.create_engine_inspector()
        inspector.execution_context = context
        return inspector.get_engine_information(self.trt.LayerInformationFormat.JSON)
