"""Writing a model repository for Triton Inference Server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_trt.bundle import BundleInfo
from dflash_trt.errors import DflashError, UsageError
from dflash_trt.loading import Device, check_device, open_info
from dflash_trt.output import atomic_output
from dflash_trt.runtime.branching import chosen_branches
from dflash_trt.runtime.scheduler import DEFAULT_QUEUE
from dflash_trt.runtime.speculation import Speculation
from dflash_trt.runtime.text import Tokenizer
from dflash_trt.runtime.trace import Branches
from dflash_trt.serving import configs
from dflash_trt.serving.check import CONFIG, check_repository
from dflash_trt.serving.pbtxt import dump
from dflash_trt.serving.texts import Described, dockerfile_text, readme_text, requirements_text

Layout = Literal["ensemble", "single"]

HEAD = "# Written by dflash-trt for Triton Inference Server: see README.md in the folder above.\n"
MODULES = {
    configs.PREPROCESSING: "preprocessing",
    configs.POSTPROCESSING: "postprocessing",
    configs.ENGINE: "token_model",
}
_SHELL = frozenset("'\"\\$`;&|<>()*?[]{}")  # what a shell reads as more than a character of a name
TOP_FILES = ("README.md", "Dockerfile", "requirements.txt")
WHEELS = "dflash_trt-*.whl"
_ENSEMBLE_NOTE = """\
An ensemble has no code of its own, but Triton wants a version folder. This file keeps it there: git and archives lose
empty folders.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the bundle is served.

    Attributes:
        copy: the bundle is put into the repository, else found by a relative path.
        branches: of D2SD; None for as many as the bundle was built for.
        max_queue: requests that may wait for a slot.
        threads: of a CPU; 0 lets the backend choose.
        chat: each text is a user's message, put into the chat template.
    """

    layout: Layout = "ensemble"
    copy: bool = False
    speculation: Speculation = "auto"
    branches: Branches | None = None
    max_queue: int = DEFAULT_QUEUE
    threads: int = 0
    device: Device = "cpu"
    chat: bool = False


@dataclass(frozen=True)
class Repository:
    """What was written: the folder, its models, and the bundle they serve."""

    folder: Path
    models: tuple[str, ...]
    bundle: Path
    info: BundleInfo


def write_repository(bundle: Path, output: Path, options: Options, *, force: bool = False) -> Repository:
    """Writes the repository of a bundle to `output`, checked, or not at all.

    Args:
        force: replace an earlier repository at `output`.

    Raises:
        BundleError: the bundle is missing or damaged, or `output` is in the way.
        UsageError: an option that the bundle cannot have.
    """
    _check_encodes(bundle, output)
    bundle, parent = bundle.resolve(), output.absolute().parent.resolve()
    folder = output.resolve() if output.name in ("", "..") else parent / output.name
    info = open_info(bundle)
    _check_options(bundle, info, options)
    if folder.is_relative_to(bundle):
        what = "lies in the bundle, which must stay as it was built"
        raise UsageError(what, where=f"--output {output}", mend="Choose another place")
    _check_place(output, folder)
    with atomic_output(folder, force=force, kind="a repository of dflash-trt alone", is_one=is_repository) as temporary:
        models = _models(bundle, folder, options)
        for config in models:
            _write_model(temporary / config["name"], config, options.layout)
        if options.copy:
            _link_tree(bundle, temporary / configs.ENGINE / "1" / "bundle")
        names = tuple(config["name"] for config in models)
        described = Described(info, names, names[-1], options.copy, bundle, folder)
        (temporary / "README.md").write_text(readme_text(described), encoding="utf-8")
        (temporary / "Dockerfile").write_text(dockerfile_text(described), encoding="utf-8")
        (temporary / "requirements.txt").write_text(requirements_text(info.backend), encoding="utf-8")
        for wheel in folder.glob(WHEELS):  # put there for the Dockerfile
            shutil.copy2(wheel, temporary)
        _check(temporary, folder)
    return Repository(folder, names, bundle, info)


def is_repository(folder: Path) -> bool:
    """Whether a folder is what `write_repository` writes, and nothing else."""
    ours = {configs.PREPROCESSING, configs.ENGINE, configs.POSTPROCESSING, configs.ENSEMBLE, *TOP_FILES}
    try:
        names = {path.name for path in folder.iterdir() if not path.match(WHEELS)}
        return names <= ours and (folder / configs.ENGINE / CONFIG).read_text(encoding="utf-8").startswith(HEAD)
    except (OSError, ValueError):
        return False


def _check_place(output: Path, folder: Path) -> None:
    """Places where Triton would never serve it, or not another repository any more."""
    bad = sorted({character for character in str(folder) if character.isspace() or character in _SHELL})
    if bad:
        what = f"{folder} has {bad[0]!r}, and Triton hands that path to a shell as it is: models there never start"
        raise UsageError(what, where=f"--output {output}", mend="Choose a path without spaces, quotes and the like")
    if is_repository(folder.parent):
        what = f"{folder} lies in a repository, where Triton takes every folder for a model"
        raise UsageError(what, where=f"--output {output}", mend="Choose another place")


def _check_encodes(*paths: Path) -> None:
    """config.pbtxt is UTF-8, and so are the paths in it."""
    for path in paths:
        try:
            str(path.absolute()).encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError("is not valid UTF-8", where=repr(str(path)), mend="Choose another name") from error


def _check(temporary: Path, folder: Path) -> None:
    """`check_repository` of a folder that is not in its place yet, but is spoken of as if it were."""
    try:
        check_repository(temporary)
    except DflashError as error:
        texts = [text.replace(str(temporary), str(folder)) for text in (error.what, error.where, error.mend)]
        raise type(error)(texts[0], where=texts[1], mend=texts[2]) from error


def _check_options(bundle: Path, info: BundleInfo, options: Options) -> None:
    check_device(info, options.device)
    if options.chat and not Tokenizer(bundle / "tokenizer").has_chat_template:
        mend = "Leave it out, or add chat_template.jinja to the target and build again"
        raise UsageError("the model has no chat template", where="--chat", mend=mend)
    if options.max_queue < 0:
        raise UsageError(f"{options.max_queue} must be at least 0", where="--max-queue", mend="Use more")
    chosen_branches(
        options.branches,
        info.limits.branches,
        speculation=options.speculation != "off",
        vp_drafter=info.vp_drafter is not None,
        costs=info.costs,
    )


def _models(bundle: Path, folder: Path, options: Options) -> list[configs.Config]:
    engine = {
        "bundle": _bundle_path(bundle, folder, configs.ENGINE, options.copy),
        "speculation": options.speculation,
        "branches": "built" if options.branches is None else str(options.branches),
        "max_queue": str(options.max_queue),
        "threads": str(options.threads),
        "device": options.device,
        "exclude_input_in_output": "true",
    }
    text = {"chat": "true" if options.chat else "false", "add_special_tokens": "true"}
    if options.layout == "single":
        return [configs.text_model(engine | text)]
    text = {"bundle": _bundle_path(bundle, folder, configs.PREPROCESSING, options.copy)} | text
    return [
        configs.preprocessing(text),
        configs.token_model(engine),
        configs.postprocessing(),
        configs.ensemble(),
    ]


def _bundle_path(bundle: Path, folder: Path, model: str, copy: bool) -> str:
    """Relative to the model's folder.

    A copy lies in the version folder of `dflash_trt`: elsewhere Triton would take it for a model, or for a version.
    """
    target = folder / configs.ENGINE / "1" / "bundle" if copy else bundle
    return Path(os.path.relpath(target, folder / model)).as_posix()


def _write_model(folder: Path, config: Mapping[str, object], layout: Layout) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / CONFIG).write_text(HEAD + dump(config), encoding="utf-8")
    name = folder.name
    if name == configs.ENSEMBLE:
        (version / "README.md").write_text(_ENSEMBLE_NOTE, encoding="utf-8")
        return
    module = "text_model" if layout == "single" else MODULES[name]
    code = f"from dflash_trt.serving.{module} import TritonPythonModel\n\n__all__ = [\"TritonPythonModel\"]\n"
    (version / "model.py").write_text(code, encoding="utf-8")


def _link_tree(source: Path, target: Path) -> None:
    """The files of a folder as hard links, which take no room; as copies where the filesystem has none."""

    def link(file: str, to: str) -> None:
        try:
            os.link(file, to)
        except OSError:
            shutil.copy2(file, to)

    shutil.copytree(source, target, copy_function=link)
