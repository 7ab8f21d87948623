"""The texts of a repository: how to start the server, what it needs, how to use it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from dflash_trt import __version__
from dflash_trt.bundle import BundleInfo
from dflash_trt.config import BackendName
from dflash_trt.errors import BackendError

PACKAGE = "dflash-trt"
IMAGE = "nvcr.io/nvidia/tritonserver:26.06-py3"

# Distributions that serving imports: all bundles, and those of a backend. The package asks for more, for builds.
SERVING = ("jinja2", "numpy", "pydantic", "pyyaml", "tokenizers")
BACKENDS: dict[BackendName, tuple[str, ...]] = {
    "onnxruntime": ("ml-dtypes", "onnxruntime"),  # the first one for caches in bfloat16
    "torch": ("torch",),
    "tensorrt": ("tensorrt-cu13", "torch"),
    "tensorrt-rtx": ("tensorrt-rtx-cu13", "torch"),
}
_SYSTEMS = {"dflash": "DFlash", "dflare": "DFlare", "d2sd": "D2SD"}
_USAGE = Path(__file__).with_name("usage.md")


@dataclass(frozen=True)
class Described:
    """A repository; paths as it will have them. `model`: what clients ask."""

    info: BundleInfo
    models: tuple[str, ...]
    model: str
    copied: bool
    bundle: Path
    folder: Path


def requirements_text(backend: BackendName) -> str:
    """What serving a bundle of this backend needs besides the package, in the versions that the package asks for.

    Raises:
        BackendError: the package is not installed, so that nobody knows what it asks for.
    """
    try:
        asked = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendError(f"{PACKAGE} is not installed", mend="Install it: pip install --editable .") from error
    versions = {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower(): line.partition(";")[0].strip() for line in asked}
    lines = [
        f"# What serving a bundle of {backend} needs. {PACKAGE} {__version__} goes on top with pip install --no-deps,",
        "# since it asks for what builds need, too.",
        *(versions[name] for name in sorted({*SERVING, *BACKENDS[backend]})),
    ]
    return "\n".join([*lines, ""])


def dockerfile_text(described: Described) -> str:
    """NVIDIA's image with the package and, where the bundle was copied, the repository."""
    return "\n".join(
        [
            f"# Triton Inference Server with {PACKAGE}. Not run where it was written, where there is no Docker.",
            "#",
            f"# Put the wheel of {PACKAGE} beside this file: pip wheel --no-deps --wheel-dir . SOURCES",
            "# (the folder with its pyproject.toml). Then: docker build --tag dflash-trt-server .",
            f"FROM {IMAGE}",
            "# The server's Python is the system's, which pip must be allowed to change.",
            "ENV PIP_BREAK_SYSTEM_PACKAGES=1",
            "COPY requirements.txt *.whl /opt/dflash-trt/",
            "RUN pip install --no-cache-dir --requirement /opt/dflash-trt/requirements.txt \\",
            " && pip install --no-cache-dir --no-deps /opt/dflash-trt/*.whl",
            *(["COPY . /models"] if described.copied else []),
            "EXPOSE 8000 8001 8002",
            'CMD ["tritonserver", "--model-repository=/models"]',
            "",
        ]
    )


def readme_text(described: Described) -> str:
    """README.md of the repository."""
    usage = _USAGE.read_text(encoding="utf-8")
    return "\n".join([_about(described), _start(described), usage, _moving(described), _untried()])


def _about(described: Described) -> str:
    info, limits = described.info, described.info.limits
    models = ", ".join(f"`{name}`" for name in described.models)
    return f"""\
# {_SYSTEMS[info.system]} on Triton Inference Server

Written by {PACKAGE} {__version__}: {info.target.architecture} for {info.backend}.

- models: {models}; clients ask `{described.model}`
- sequences at once: {limits.max_batch_size}
- tokens: {limits.max_input_len} of a prompt, {limits.max_seq_len} of prompt and output
"""


def _start(described: Described) -> str:
    folder, bundle = described.folder, described.bundle
    volumes, repository = "", "/models"
    if not described.copied:
        common = os.path.commonpath([folder, bundle])
        repository = _inside(folder, common)
        path = shlex.quote(Path(os.path.relpath(bundle, folder)).as_posix())
        volumes = (
            f'--volume "$PWD":{shlex.quote(repository)}:ro \\\n        '
            f'--volume "$(realpath {path})":{shlex.quote(_inside(bundle, common))}:ro '
        )
    gpus = "" if described.info.backend == "onnxruntime" else "--gpus all "
    why = (
        "The image holds this folder, and with it the bundle."
        if described.copied
        else "This folder and the bundle are mounted where the relative path from one to the other is the same."
    )
    return f"""\
## Start

With NVIDIA's image, in this folder, after putting the package's wheel into it (see `Dockerfile`):

    docker build --tag dflash-trt-server .
    docker run --rm {gpus}--shm-size 1g --ulimit stack=67108864 \\
        --publish 8000-8002:8000-8002 {volumes}\\
        dflash-trt-server tritonserver --model-repository={shlex.quote(repository)}

{why}
The Python backend hands tensors over in shared memory, for which Docker's 64 MB are little. The larger stack is for
requests of several megabytes over HTTP, on which a server (2.51 was seen to) otherwise crashes before it asks a model.

Without a container, with a tritonserver and its Python backend at hand, whose Python is 3.11 or later (a backend that
is older than NumPy 2, as that of 2.51, dies of it at the first request: `pip install 'numpy<2'` there):

    pip install --requirement requirements.txt
    pip install --no-deps dflash_trt-*.whl     # the wheel, see `Dockerfile`; or the folder of the package's sources
    ulimit -s 65536
    tritonserver --model-repository="$PWD"

Then:

    curl localhost:8000/v2/models/{described.model}/generate \\
        --data '{{"text_input": "Once upon a time", "max_tokens": 32}}'
    curl --no-buffer localhost:8000/v2/models/{described.model}/generate_stream \\
        --data '{{"text_input": "Once upon a time", "max_tokens": 32, "stream": true}}'
"""


def _inside(path: Path, common: str) -> str:
    """Where a folder is in the container."""
    return Path("/models", os.path.relpath(path, common)).as_posix()


def _moving(described: Described) -> str:
    path = Path(os.path.relpath(described.bundle, described.folder)).as_posix()
    where = (
        "The bundle is in `dflash_trt/1/bundle`, where Triton takes it for neither a model nor a version.\n"
        "This folder can be moved as it is."
        if described.copied
        else f"The bundle is found by its relative path, `{path}` from here: move both together.\n"
        "Written with `--copy`, a repository holds its bundle."
    )
    return f"""\
## Moving

{where}

No folder on the way here may have a space, a quote or the like in its name: tritonserver (2.51) hands the path to a
shell as it is, does not start the models, and waits.
Files may lie beside the models. A folder may not: Triton takes each for a model, `.git` among them, and does not start.
"""


def _untried() -> str:
    return f"""\
## What was run

Tests of {PACKAGE} load such repositories in a real tritonserver (2.51, on a CPU) and compare what clients get. Not
tried were NVIDIA's image and its tag, the Dockerfile, and repositories in object storage: there the server fetches
each model by itself, so that the preprocessing of an ensemble would not find the bundle.
"""
