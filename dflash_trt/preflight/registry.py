"""The plugins that custom nodes are compared with: those of a bundle's library in the registry of a TensorRT."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.bundle import BundleInfo, FileRecord
from dflash_trt.errors import BackendError
from dflash_trt.native import file_sha256, library_path
from dflash_trt.preflight.fault import Fault
from dflash_trt.preflight.plugins import Registry


@dataclass(frozen=True)
class RegistryAnswer:
    """What custom nodes are compared with.

    Attributes:
        registry: None: what the library is known to register.
        said: "checked with ...", or "not run: " and why.
        missing: why the registry was not asked where it ought to have been; else empty.
    """

    registry: Registry | None
    said: str
    missing: str = ""


def ask_registry(parser: ParserVersion, library: Path | None) -> RegistryAnswer:
    """The registry of the installed TensorRT with a plugin library loaded: `library`, else the one that builds use."""
    if parser.flavour == "tensorrt-rtx":
        return RegistryAnswer(None, f"not run: {parser.product} takes no plugins")
    try:
        api = tensorrt_api.load(parser.flavour)
        if api.parser != parser:
            return not_asked(f"{api} is installed, not {parser}")
        library = library_path() if library is None else library
        api.load_plugins(library)
    except BackendError as error:
        return not_asked(error.message())
    return RegistryAnswer(api, f"checked with {api} and {library}")


def not_asked(why: str) -> RegistryAnswer:
    """For custom nodes whose registry there is no way to ask."""
    why = " ".join(why.split())
    return RegistryAnswer(None, f"not run: {why}", why)


def bundled_library(folder: Path, info: BundleInfo) -> tuple[Path | None, tuple[Fault, ...]]:
    """The plugin library that a bundle carries, and what is wrong with it: it is not there, or not what was built."""
    plugins = None if info.engines is None else info.engines.plugins
    if plugins is None:
        return None, ()
    library = folder / plugins.file
    wrong = _against_record(library, info.files.get(plugins.file))
    if wrong is None:
        return library, ()
    return library, (Fault(str(library), "plugin library", f"{wrong}. Build the bundle again"),)


def _against_record(library: Path, built: FileRecord | None) -> str | None:
    if built is None:
        return "is not among the files that were built"
    expected = f"built was sha256 {built.sha256} of {built.size} bytes"
    if not library.is_file():
        return f"is missing; {expected}"
    size, found = library.stat().st_size, file_sha256(library)
    same = (size, found) == (built.size, built.sha256)
    return None if same else f"was changed to sha256 {found} of {size} bytes; {expected}"
