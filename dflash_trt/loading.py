"""Opening a bundle: checks first, then sessions, then an `Engine`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from dflash_trt import __version__
from dflash_trt.backends.base import Session
from dflash_trt.backends.engine_record import EngineRecord, gpu_compute_capability, load_faults
from dflash_trt.bundle import BundleInfo, check_files, read_info, tool_versions
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.config import WeightKind
from dflash_trt.errors import BackendError, BundleError, UsageError
from dflash_trt.export.contract import Role
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.text import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import torch

Device = Literal["cpu", "cuda"]


def load_engine(folder: Path, *, threads: int = 0, device: Device = "cpu") -> Engine:
    """Opens the bundle in `folder`.

    Args:
        threads: of a CPU; 0 lets the backend choose.
        device: where to run; "cuda" is for bundles of the torch backend, engines of TensorRT run there anyway.

    Raises:
        BundleError: missing, damaged, or from another version. BackendError: its backend cannot run here.
        UsageError: a device its backend does not have.
    """
    return open_engine(folder, open_info(folder), threads=threads, device=device)


def open_engine(folder: Path, info: BundleInfo, *, threads: int = 0, device: Device = "cpu") -> Engine:
    """Opens a bundle whose files were checked, or just written."""
    most = max(64, 4 * (os.cpu_count() or 1))
    if not 0 <= threads <= most:
        raise UsageError(f"{threads} must be 0 (the backend chooses) to {most}", where="--threads", mend="Use fewer")
    if device not in get_args(Device):
        raise UsageError(f"{device} must be cpu or cuda", where="--device", mend="Choose one of them")
    sessions = {role: open_session(folder, info, role, threads=threads, device=device) for role in info.roles}
    return engine_of(folder, info, sessions)


def engine_of(folder: Path, info: BundleInfo, sessions: Mapping[Role, Session]) -> Engine:
    """A bundle's engine over sessions that are open, one for each of its graphs."""
    return Engine(
        sessions["target"],
        sessions["drafter"],
        Tokenizer(folder / "tokenizer"),
        info.limits,
        mask_token_id=info.mask_token_id,
        eos_token_ids=info.target.eos_token_ids,
        vocab_size=info.target.vocab_size,
        system=info.system,
        vp_drafter=sessions.get("vp_drafter"),
        costs=info.costs,
    )


def open_info(folder: Path) -> BundleInfo:
    """Reads and checks everything that can be checked before a backend is touched."""
    info = read_info(folder)
    _check_versions(folder, info)
    check_files(folder, info)
    return info


def _check_versions(folder: Path, info: BundleInfo) -> None:
    """A bundle from a newer dflash-trt, or for a newer ONNX Runtime than runs here, is refused in plain words.

    Engines of TensorRT belong to the very version that built them, and to the GPUs they were built for.
    """
    running = tool_versions()
    names = ("dflash_trt", "onnxruntime") if info.backend == "onnxruntime" else ("dflash_trt",)
    for name in names:
        built = info.tool_versions.get(name)
        if built is not None and name in running and _release(built, name) > _release(running[name], name):
            raise BundleError(
                f"built with {name} {built}, running {running[name]}",
                where=str(folder),
                mend=f"Upgrade {name}, or build the bundle again with dflash-trt {__version__}",
            )
    if info.engines is not None:
        _check_engines(folder, info, info.engines)


def _check_engines(folder: Path, info: BundleInfo, record: EngineRecord) -> None:
    from dflash_trt.backends import tensorrt_api

    assert info.backend in ("tensorrt", "tensorrt-rtx")
    running, missing = None, ""
    try:
        running = tensorrt_api.load(info.backend).version
    except BackendError as error:
        missing = f"and {error.what}"
    for what, mend in load_faults(record, running, gpu_compute_capability(), missing):
        raise BundleError(what, where=str(folder), mend=mend)
    plugins = record.plugins
    if plugins is not None and info.files[plugins.file].sha256 != plugins.sha256:
        found, built = info.files[plugins.file].sha256[:12], plugins.sha256[:12]
        what = f"is not the plugin library of the engines (sha256 {found}..., built with {built}...)"
        raise BundleError(what, where=str(folder / plugins.file), mend="Build the bundle again")


def _release(version: str, name: str) -> tuple[int, ...]:
    """What counts of a version: "1.32.0+cpu" -> (1, 32), and our own whole."""
    parts = version.split("+")[0].split(".")[: 3 if name == "dflash_trt" else 2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


def check_device(info: BundleInfo, device: Device) -> None:
    """Raises UsageError where a bundle's backend cannot run on a device, whatever machine it is."""
    if info.backend == "onnxruntime" and device != "cpu":
        mend = "Leave it out, or build with --backend torch"
        raise UsageError(f"onnxruntime bundles run on the CPU, not on {device}", where="--device", mend=mend)


def open_session(folder: Path, info: BundleInfo, role: Role, *, threads: int = 0, device: Device = "cpu") -> Session:
    """Opens one graph of a bundle with the backend it was built for."""
    record = info.graphs[role]
    check_device(info, device)
    if info.backend == "onnxruntime":
        from dflash_trt.backends.onnxruntime import OrtSession

        assert record.model is not None
        return OrtSession(folder / record.model, record.spec, threads=threads)
    if info.backend == "torch":
        return reference_session(folder, info, role, threads=threads, device=device)
    assert info.engines is not None
    assert record.model is not None
    from dflash_trt.backends import tensorrt_api
    from dflash_trt.backends.tensorrt_session import open_engine_session

    plugins = info.engines.plugins
    return open_engine_session(
        tensorrt_api.load(info.backend),
        folder / record.model,
        record.spec,
        info.engines.profiles[role],
        info.limits.capacity,
        None if plugins is None else folder / plugins.file,
    )


def reference_session(
    folder: Path,
    info: BundleInfo,
    role: Role,
    *,
    threads: int = 0,
    device: Device = "cpu",
    weights: WeightKind | None = None,
) -> Session:
    """The same graph in the torch reference, from the bundle's own weights.

    Args:
        weights: "float" for those of the checkpoint; by default what the graph computes with, which of a bundle of
            quantised weights is what those stand for.
    """
    import torch

    from dflash_trt.backends.torch import TorchSession
    from dflash_trt.modeling.load import load_drafter, load_target, replace_weights

    if device == "cuda" and not torch.cuda.is_available():
        mend = "Leave it out, or install a CUDA build of torch and a driver"
        raise BackendError("torch sees no CUDA GPU here", where="--device cuda", mend=mend)
    if threads:
        torch.set_num_threads(threads)
    positions, dtype = info.limits.capacity, info.precision
    target = float_weights(folder, info, "target")
    if role == "target":
        module: torch.nn.Module = load_target(info.target, info.taps, target, positions, dtype)
    else:
        own = float_weights(folder, info, role)
        module = load_drafter(info.drafter_of(role), own, info.target, target, positions, dtype)
    if (weights or info.weights) != "float":
        replace_weights(module, _dequantized(folder, role, module))
    return TorchSession(module, info.graphs[role].spec, device)


def float_weights(folder: Path, info: BundleInfo, role: Role) -> TensorFolder:
    """A graph's own tensors, of the checkpoint or converted to the bundle's precision."""
    files = [folder / name for name in info.graphs[role].weights]
    return TensorFolder.from_files(files, later_wins=True)


def _dequantized(folder: Path, role: Role, module: torch.nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    """What the quantised weights of a graph stand for, by the names of the module's parameters."""
    from dflash_trt.checkpoint.target import LM_HEAD
    from dflash_trt.export.quantization import QUANTIZED, dequantized, quantized_names, read_quantized

    shared: list[tuple[Role, str]] = [] if role == "target" else [("target", "target.")]
    for owner, prefix in [(role, ""), *shared]:
        tensors = read_quantized(folder / owner / QUANTIZED)
        for name in [LM_HEAD] if prefix else quantized_names(tensors):
            columns = module.get_parameter(prefix + name).shape[1]
            yield prefix + name, dequantized(tensors, name, columns)
