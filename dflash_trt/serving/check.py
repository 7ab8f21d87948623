"""Checks a model repository before it is there: what Triton would refuse, and what only a request would find."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dflash_trt.bundle import check_files, read_info
from dflash_trt.errors import BundleError, ExportError
from dflash_trt.serving.pbtxt import PbtxtError, Word, parse

CONFIG = "config.pbtxt"
_MEND = "Write the repository again"


@dataclass(frozen=True)
class _Port:
    """An input or output of a model, or a tensor of an ensemble."""

    kind: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class _Model:
    """A model's config.pbtxt, read."""

    file: Path
    config: dict[str, list[Any]]
    inputs: dict[str, _Port]
    outputs: dict[str, _Port]

    @property
    def is_ensemble(self) -> bool:
        return self.config.get("platform") == ["ensemble"]

    @property
    def is_decoupled(self) -> bool:
        policies = self.config.get("model_transaction_policy", [])
        return any(policy.get("decoupled") == ["true"] for policy in policies)

    def fail(self, what: str) -> NoReturn:
        raise ExportError(what, where=str(self.file), mend=_MEND)


def check_repository(folder: Path) -> None:
    """Checks every model of a repository, and that they fit together.

    Raises:
        ExportError: naming the file that is missing or wrong. BundleError: the bundle is, or one of its files.
    """
    models = {path.name: _read(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    if not models:
        raise ExportError("holds no model", where=str(folder), mend=_MEND)
    bundles: set[Path] = set()
    for name, model in models.items():
        _check_folder(name, model)
        bundles |= set(_bundle(model))
        if model.is_ensemble:
            _check_ensemble(model, models)
    if not bundles:
        raise ExportError("no model names a bundle", where=str(folder), mend=_MEND)
    for bundle in sorted(bundles):
        check_files(bundle, read_info(bundle))


def _read(folder: Path) -> _Model:
    file = folder / CONFIG
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ExportError("no such file", where=str(file), mend=_MEND) from error
    try:
        config = parse(text)
    except PbtxtError as error:
        raise ExportError(str(error), where=str(file), mend=_MEND) from error
    model = _Model(file, config, _ports(config, "input"), _ports(config, "output"))
    for kind in ("input", "output"):
        if len(config.get(kind, [])) != len(_ports(config, kind)):
            model.fail(f"names an {kind} twice")
    if "${" in _without_bundle(text, config):
        model.fail("holds a placeholder ${...} that nothing fills")
    return model


def _without_bundle(text: str, config: Mapping[str, list[Any]]) -> str:
    """A path may hold what looks like a placeholder."""
    for parameter in config.get("parameters", []):
        if parameter.get("key") == ["bundle"]:
            for value in parameter.get("value", []):
                for path in value.get("string_value", []):
                    text = text.replace(str(path), "")
    return text


def _ports(config: Mapping[str, list[Any]], kind: str) -> dict[str, _Port]:
    return {
        port["name"][0]: _Port(port["data_type"][0], tuple(port["dims"]), port.get("optional") == ["true"])
        for port in config.get(kind, [])
    }


def _check_folder(name: str, model: _Model) -> None:
    folder = model.file.parent
    if model.config.get("name") != [name]:
        model.fail(f"its name is {model.config.get('name')}, but the folder's is {name}")
    versions = [path for path in folder.iterdir() if path.is_dir()]
    if [path.name for path in versions] != ["1"]:
        names = sorted(path.name for path in versions)
        raise ExportError(f"has the folders {names}; a model has versions, here 1 alone", where=str(folder), mend=_MEND)
    if model.is_ensemble and not any(versions[0].iterdir()):
        what = "is empty, which git and archives lose"
        raise ExportError(what, where=str(versions[0]), mend=_MEND)
    for parameter in model.config.get("parameters", []):
        values = [value for each in parameter.get("value", []) for value in each.get("string_value", [])]
        if len(values) != 1 or not isinstance(values[0], str) or isinstance(values[0], Word):
            model.fail(f"the parameter {parameter.get('key')} has no value")
    if not model.is_ensemble:
        _check_code(model, versions[0] / "model.py")


def _check_code(model: _Model, file: Path) -> None:
    """The model is imported from the installed package, which must have it."""
    if model.config.get("backend") != ["python"]:
        model.fail(f"its backend is {model.config.get('backend')}, but must be python")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, SyntaxError) as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else f"is no Python: {error}"
        raise ExportError(what, where=str(file), mend=_MEND) from error
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    for node in imports:
        found = _names(str(node.module))
        missing = [alias.name for alias in node.names if alias.name not in found]
        if missing:
            raise ExportError(f"imports {missing[0]} of {node.module}, which has none", where=str(file), mend=_MEND)
    if not any(alias.name == "TritonPythonModel" for node in imports for alias in node.names):
        raise ExportError("does not import a TritonPythonModel", where=str(file), mend=_MEND)


def _names(module: str) -> set[str]:
    """The classes and functions of a module, which is not run: it may need to be in the server."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return set()
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def _bundle(model: _Model) -> Iterator[Path]:
    for parameter in model.config.get("parameters", []):
        if parameter["key"] == ["bundle"]:
            value = parameter["value"][0]["string_value"][0]
            path = Path(value)
            if path.is_absolute():
                model.fail(f"the bundle's path {value} is absolute: repository and bundle could not be moved")
            resolved = (model.file.parent / path).resolve()
            if not resolved.is_dir():
                raise BundleError(
                    f"is not there; {model.file} refers to it", where=str(resolved), mend="Put it there, or copy it in"
                )
            yield resolved


def _check_ensemble(ensemble: _Model, models: Mapping[str, _Model]) -> None:
    """Every step's model, input and tensor is there and fits; every output comes from somewhere."""
    tensors = dict(ensemble.inputs)
    streamed: set[str] = set()  # what a decoupled model gives, and what is made of it
    used: set[str] = set()
    for step in ensemble.config["ensemble_scheduling"][0]["step"]:
        name = step["model_name"][0]
        if name not in models:
            ensemble.fail(f"a step needs the model {name}, which is not in the repository")
        model = models[name]
        taken = _check_inputs(ensemble, name, model, _pairs(step, "input_map"), tensors)
        if streamed & taken and taken - streamed:
            other = sorted(taken - streamed)[0]
            ensemble.fail(f"{name} comes after a decoupled model, so it cannot read {other}, which is there once")
        for key, tensor in _pairs(step, "output_map").items():
            if key not in model.outputs:
                ensemble.fail(f"{name} has no output {key}")
            if tensor in tensors:
                ensemble.fail(f"the tensor {tensor} has two sources")
            tensors[tensor] = model.outputs[key]
            if model.is_decoupled or streamed & taken:
                streamed.add(tensor)
        used |= taken
    for name, port in ensemble.outputs.items():
        if name not in tensors or name in ensemble.inputs:
            ensemble.fail(f"no step gives the output {name}")
        if tensors[name].kind != port.kind or not _fit(tensors[name].dims, port.dims):
            ensemble.fail(f"the output {name} is {_shown(port)}, but its step gives {_shown(tensors[name])}")
    for name in ensemble.inputs:
        if name not in used:
            ensemble.fail(f"no step reads the input {name}")


def _check_inputs(
    ensemble: _Model, name: str, model: _Model, mapping: Mapping[str, str], tensors: Mapping[str, _Port]
) -> set[str]:
    """Checks what a step reads; returns it."""
    for key, port in model.inputs.items():
        if key not in mapping and not port.optional:
            ensemble.fail(f"{name} needs the input {key}, which is not mapped")
    for key, tensor in mapping.items():
        if key not in model.inputs:
            ensemble.fail(f"{name} has no input {key}")
        if tensor not in tensors:
            ensemble.fail(f"{name} reads the tensor {tensor}, which neither a request nor an earlier step gives")
        given, port = tensors[tensor], model.inputs[key]
        if given.kind != port.kind or not _fit(given.dims, port.dims):
            ensemble.fail(f"the input {key} of {name} is {_shown(port)}, but {tensor} is {_shown(given)}")
        if given.optional and not port.optional:
            ensemble.fail(f"{name} needs the input {key}, but {tensor} may be missing")
    return set(mapping.values())


def _pairs(step: Mapping[str, list[Any]], name: str) -> dict[str, str]:
    return {pair["key"][0]: pair["value"][0] for pair in step.get(name, [])}


def _fit(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return len(first) == len(second) and all(a == b or -1 in (a, b) for a, b in zip(first, second, strict=True))


def _shown(port: _Port) -> str:
    return f"{port.kind} {list(port.dims)}"
