"""What a bundle says of its TensorRT engines, and why they cannot run somewhere else: an engine belongs to the version
that built it, to a compute capability, and to its plugin library."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dflash_trt.backends.profiles import Profile
from dflash_trt.checkpoint.spec import Frozen
from dflash_trt.export.contract import Role

PLUGIN_FOLDER = "plugins"


@dataclass(frozen=True, kw_only=True)
class BuilderOptions(Frozen):
    """What the builder is asked for; None leaves it to TensorRT.

    Attributes:
        compute_capabilities: to compile ahead of time for, such as 86; empty where it compiles for the GPU at hand.
        optimization_level: 0..5, as trtexec's --builderOptimizationLevel.
        workspace: MiB, as trtexec's --memPoolSize=workspace.
        refit: weights can be replaced later, as trtexec's --refit.
        weight_streaming: weights may stay in host memory, as trtllm-build's --weight_streaming.
    """

    compute_capabilities: tuple[int, ...] = ()
    optimization_level: int | None = None
    workspace: int | None = None
    refit: bool = False
    weight_streaming: bool = False

    def flags(self) -> list[str]:
        """Builder flags by their names in `tensorrt_api.FLAGS`."""
        return [name for name in ("refit", "weight_streaming") if getattr(self, name)]


@dataclass(frozen=True, kw_only=True)
class EngineFacts(Frozen):
    """What came of a build.

    Attributes:
        bytes: of the engine.
        seconds: for parsing and compiling.
        layers: of the parsed network, by the dtype they compute in.
        float32_products: matrix products that the graph itself has in float32 (the fusion of taps).
    """

    bytes: int
    seconds: float
    layers: dict[str, int]
    float32_products: int


@dataclass(frozen=True, kw_only=True)
class PluginRecord(Frozen):
    """The plugin library of a bundle.

    Attributes:
        file: in the bundle.
        version: of dflash-trt.
        tensorrt: of the headers it was compiled with.
        compute_capabilities: it has kernels for, such as 90.
    """

    file: str
    version: str
    tensorrt: str
    compute_capabilities: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class EngineRecord(Frozen):
    """The engines of a bundle.

    Attributes:
        name: "TensorRT" or "TensorRT-RTX".
        stage: "lowered" stops before the engines.
        parser: whose ONNX parser the graphs are for, such as "TensorRT 10.15".
        version: what built the engines, such as "10.14.1.48".
        compute_capabilities: what they run on, such as 86; empty where none was named or none is needed yet.
        bound: whether the graphs call plugins; else attention and cache updates are TensorRT's own layers.
            `plugins_reason` says why.
        plugins: the library with them, where the graphs call them and the engines are built.
        profiles: of each graph, in the order of the engine.
        facts: of each built engine.
    """

    name: str
    stage: Literal["lowered", "built"]
    parser: str
    version: str | None
    compute_capabilities: tuple[int, ...]
    bound: bool
    plugins: PluginRecord | None
    plugins_reason: str
    profiles: dict[Role, tuple[Profile, ...]]
    options: BuilderOptions
    facts: dict[Role, EngineFacts]


def dotted(compute_capability: int) -> str:
    """86 -> "8.6"."""
    return f"{compute_capability // 10}.{compute_capability % 10}"


def gpu_compute_capability() -> int | None:
    """Of the GPU at hand, such as 86; None where torch sees none."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def load_faults(
    record: EngineRecord, running: str | None, gpu: int | None, missing: str = ""
) -> Iterator[tuple[str, str]]:
    """Why the engines cannot run here, and how to mend it.

    Args:
        running: the version of the installed TensorRT of the engines' kind, None where there is none.
        missing: why there is none, where that is known.
        gpu: the compute capability of the GPU at hand, None where there is none.
    """
    if record.stage == "lowered":
        yield "was lowered only and has no engines", "Build it without --stop-after lower, where a GPU is"
        return
    if running is None:
        why = missing or "which is not installed"
        yield f"built with {record.name} {record.version}, {why}", f"Install {record.name} {record.version}"
    elif running != record.version:
        mend = f"Build the bundle again, or install {record.name} {record.version}"
        yield f"built with {record.name} {record.version}, running {running}", mend
    built_for = ", ".join(map(dotted, record.compute_capabilities))
    if gpu is None:
        yield f"built for compute capability {built_for}, and there is no CUDA GPU here", "Run it where one is"
    elif gpu not in record.compute_capabilities:
        mend = "Build the bundle again for this GPU"
        yield f"built for compute capability {built_for}, this GPU has {dotted(gpu)}", mend
