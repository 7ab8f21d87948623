"""`dflash-trt inspect --preflight`: what TensorRT would make of a graph or of a bundle's graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.estimate import Estimate, estimate
from dflash_trt.backends.parser_version import Flavour, ParserVersion
from dflash_trt.backends.profiles import Profile, profiles
from dflash_trt.bundle import is_bundle, read_info
from dflash_trt.errors import BackendError, UsageError
from dflash_trt.export.contract import GraphSpec
from dflash_trt.native import library_path
from dflash_trt.passes.preflight import PreflightTarget, preflight_faults
from dflash_trt.preflight.fault import Fault
from dflash_trt.preflight.plugins import Registry, is_custom


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
        registry: what custom nodes were compared with: "checked with ...", or "not run: " and why.
        interface: the same of inputs, outputs and profiles.
    """

    path: Path
    target: str
    registry: str
    interface: str
    graphs: tuple[GraphReport, ...]

    @property
    def passed(self) -> bool:
        return not any(graph.faults for graph in self.graphs)

    def summary(self) -> str:
        """In a few words."""
        if self.passed:
            return f"ready for {self.target}"
        counts = [f"{graph.name}: {len(graph.faults)}" for graph in self.graphs if graph.faults]
        return f"not ready for {self.target}: faults in {', '.join(counts)}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": "preflight",
            "path": str(self.path),
            "target": self.target,
            "passed": self.passed,
            "registry": self.registry,
            "interface": self.interface,
            "graphs": [
                {
                    "name": graph.name,
                    "faults": [asdict(fault) for fault in graph.faults],
                    "estimate": graph.estimate.to_dict(),
                }
                for graph in self.graphs
            ],
        }


def run_preflight(path: Path, flavour: Flavour, version: str | None = None) -> PreflightReport:
    """Checks an .onnx file, or every graph of a bundle against the bundle's contract and limits.

    Args:
        version: of TensorRT, such as "10.14"; None for the installed one.

    Raises:
        UsageError: neither a graph nor a bundle with graphs, or no version to check against.
        BundleError: a damaged bundle. BackendError: a TensorRT that is installed and cannot be used.
    """
    parser = _parser(flavour, version)
    bundle = is_bundle(path)
    graphs = list(_bundle_graphs(path)) if bundle else [(path.name, _load(path), None, None)]
    custom = any(is_custom(node) for _, model, _, _ in graphs for node in model.graph.all_nodes())
    registry, checked = _registry(parser) if custom else (None, "not run: no node is custom")
    return PreflightReport(
        path=path,
        target=str(parser),
        registry=checked,
        interface="checked with the bundle's" if bundle else "not run: a graph alone has no contract and no profiles",
        graphs=tuple(
            GraphReport(
                name=name,
                faults=tuple(preflight_faults(model, PreflightTarget(parser, spec, given, registry))),
                estimate=estimate(model, spec, given or ()),
            )
            for name, model, spec, given in graphs
        ),
    )


def _parser(flavour: Flavour, version: str | None) -> ParserVersion:
    if version is not None:
        return ParserVersion.parse(version, flavour)
    if not tensorrt_api.installed(flavour):
        what = f"{tensorrt_api.NAMES[flavour]} is not installed, so there is no version to check against"
        raise UsageError(what, where="--preflight", mend="Give one: --tensorrt-version")
    return tensorrt_api.load(flavour).parser


def _bundle_graphs(folder: Path) -> Iterator[tuple[str, ir.Model, GraphSpec, tuple[Profile, ...]]]:
    info = read_info(folder)
    for role, record in info.graphs.items():
        if record.model is None or not record.model.endswith(".onnx"):
            what = f"has no graph of the {role}, but {record.model or 'weights alone'}"
            mend = "Check one with graphs, as --stop-after lower writes"
            raise UsageError(what, where=str(folder), mend=mend)
        yield role, _load(folder / record.model), record.spec, profiles(role, info.limits)


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


def _registry(parser: ParserVersion) -> tuple[Registry | None, str]:
    """The registry of the installed TensorRT with the plugin library loaded, or why there is none to ask."""
    if parser.flavour == "tensorrt-rtx":
        return None, f"not run: {parser.product} takes no plugins"
    try:
        api = tensorrt_api.load(parser.flavour)
        if api.parser != parser:
            return None, f"not run: {api} is installed, not {parser.release[0]}.{parser.release[1]}"
        library = library_path()
        api.load_plugins(library)
    except BackendError as error:
        return None, f"not run: {error.message()}"
    return api, f"checked with {api} and {library}"
