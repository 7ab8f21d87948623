"""`dflash-trt inspect --preflight`: what TensorRT would make of a graph or of a bundle's graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.estimate import Estimate, estimate
from dflash_trt.backends.parser_version import Flavour, ParserVersion, parse_supported
from dflash_trt.backends.profiles import Profile, profiles
from dflash_trt.bundle import CONFIG, BundleInfo, is_bundle, read_info
from dflash_trt.errors import BundleError, UsageError
from dflash_trt.export.contract import GraphSpec
from dflash_trt.passes.preflight import PreflightTarget, preflight_faults
from dflash_trt.preflight.fault import Fault
from dflash_trt.preflight.plugins import is_custom
from dflash_trt.preflight.registry import RegistryAnswer, ask_registry, bundled_library, not_asked


@dataclass(frozen=True)
class GraphReport:
    """Of one graph: its faults, and what its engine would cost."""

    name: str
    faults: tuple[Fault, ...]
    estimate: Estimate


@dataclass(frozen=True)
class PreflightReport:
    """Of all graphs of a path.

    Attributes:
        target: whose parser, such as "TensorRT 10.16".
        registry: what custom nodes were compared with.
        interface: what inputs, outputs and profiles were compared with: "checked with ...", or "not run: " and why.
        faults: of a bundle's plugin library.
    """

    path: Path
    target: str
    registry: RegistryAnswer
    interface: str
    faults: tuple[Fault, ...]
    graphs: tuple[GraphReport, ...]

    @property
    def passed(self) -> bool:
        """Whether no fault was found; what was not asked, `summary` says."""
        return not self.faults and not any(graph.faults for graph in self.graphs)

    def summary(self) -> str:
        """In one line."""
        if not self.passed:
            found = {"the plugin library": self.faults, **{graph.name: graph.faults for graph in self.graphs}}
            counts = [f"{name}: {len(faults)}" for name, faults in found.items() if faults]
            return f"not ready for {self.target}: faults in {', '.join(counts)}"
        if not self.registry.missing:
            return f"ready for {self.target}"
        return (
            f"ready for {self.target}, but for the plugin registry, which was not asked: {self.registry.missing}; "
            "custom nodes were compared with what the library is known to register"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": "preflight",
            "path": str(self.path),
            "target": self.target,
            "passed": self.passed,
            "summary": self.summary(),
            "registry": self.registry.said,
            "interface": self.interface,
            "faults": [asdict(fault) for fault in self.faults],
            "graphs": [
                {
                    "name": graph.name,
                    "faults": [asdict(fault) for fault in graph.faults],
                    "estimate": graph.estimate.to_dict(),
                }
                for graph in self.graphs
            ],
        }


@dataclass(frozen=True)
class _Subject:
    """A graph to check; without a bundle it has no contract and no profiles."""

    name: str
    model: ir.Model
    spec: GraphSpec | None = None
    profiles: tuple[Profile, ...] | None = None


def run_preflight(path: Path, flavour: Flavour | None = None, version: str | None = None) -> PreflightReport:
    """Checks an .onnx file, or every graph of a bundle against the bundle's contract and profiles.

    Args:
        flavour: None for the bundle's, where it is one for TensorRT or TensorRT-RTX; else TensorRT.
        version: of TensorRT, such as "10.14"; None for the one that the bundle's graphs are for, else the installed.

    Raises:
        UsageError: neither a graph nor a bundle with graphs, or no version to check against.
        BundleError: a damaged bundle. BackendError: a TensorRT that is installed and cannot be used.
    """
    info = read_info(path) if is_bundle(path) else None
    if info is not None:
        _check_has_graphs(path, info)
    parser = _parser(path, info, flavour, version)
    subjects = [_Subject(path.name, _load(path))] if info is None else list(_bundled(path, info))
    answer = RegistryAnswer(None, "not run: no node is custom")
    faults: tuple[Fault, ...] = ()
    if any(is_custom(node) for subject in subjects for node in subject.model.graph.all_nodes()):
        answer, faults = _registry(path, info, parser)
    return PreflightReport(
        path=path,
        target=str(parser),
        registry=answer,
        interface="checked with the bundle's" if info is not None else "not run: a graph alone has none of its own",
        faults=faults,
        graphs=tuple(_check(subject, parser, answer) for subject in subjects),
    )


def _check(subject: _Subject, parser: ParserVersion, answer: RegistryAnswer) -> GraphReport:
    target = PreflightTarget(parser, subject.spec, subject.profiles, answer.registry)
    return GraphReport(
        name=subject.name,
        faults=tuple(preflight_faults(subject.model, target)),
        estimate=estimate(subject.model, subject.spec, subject.profiles or ()),
    )


def _parser(path: Path, info: BundleInfo | None, flavour: Flavour | None, version: str | None) -> ParserVersion:
    """The one asked for, else the one a bundle's graphs are for, else the installed."""
    recorded = None
    if info is not None and info.engines is not None:
        try:
            recorded = ParserVersion.named(info.engines.parser)
        except UsageError as error:
            raise BundleError(error.what, where=str(path / CONFIG), mend="Build the bundle again") from error
    if flavour is None:
        flavour = "tensorrt" if recorded is None else recorded.flavour
    if version is not None:
        return parse_supported(version, flavour)
    if recorded is not None and recorded.flavour == flavour:
        return recorded
    if not tensorrt_api.installed(flavour):
        what = f"{tensorrt_api.NAMES[flavour]} is not installed, so there is no version to check against"
        raise UsageError(what, where="--preflight", mend="Give one: --tensorrt-version")
    return tensorrt_api.load(flavour).parser


def _check_has_graphs(folder: Path, info: BundleInfo) -> None:
    mend = "Check one with graphs, as --stop-after lower writes"
    if info.engines is not None and info.engines.stage == "built":
        what = "has engines and no graphs; the preflight was done when they were built"
        raise UsageError(what, where=str(folder), mend=mend)
    for role, record in info.graphs.items():
        if record.model is None or not record.model.endswith(".onnx"):
            what = f"has no graph of the {role}, but {record.model or 'weights alone'}"
            raise UsageError(what, where=str(folder), mend=mend)


def _bundled(folder: Path, info: BundleInfo) -> Iterator[_Subject]:
    """The graphs of a bundle that has them, with the profiles they were lowered for, else those of its limits."""
    recorded = {} if info.engines is None else info.engines.profiles
    for role, record in info.graphs.items():
        assert record.model is not None
        given = recorded[role] if role in recorded else profiles(role, info.limits)
        yield _Subject(role, _load(folder / record.model), record.spec, given)


def _registry(path: Path, info: BundleInfo | None, parser: ParserVersion) -> tuple[RegistryAnswer, tuple[Fault, ...]]:
    """The registry with a bundle's own library, else with the one that builds use. A faulty library is not loaded."""
    library, faults = (None, ()) if info is None else bundled_library(path, info)
    if faults:
        return not_asked(f"{library} is not the library that was built"), faults
    return ask_registry(parser, library), ()


def _load(path: Path) -> ir.Model:
    if path.suffix != ".onnx" or not path.is_file():
        mend = "Give an .onnx file or a bundle with graphs"
        raise UsageError("is no graph that --preflight could check", where=str(path), mend=mend)
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf and onnx-ir raise different classes for a file that is no model
        raise UsageError(f"cannot be read as ONNX: {' '.join(str(error).split())}", where=str(path)) from error
    if not model.opset_imports:
        raise UsageError("is not an ONNX model: it imports no operator set", where=str(path))
    return model
