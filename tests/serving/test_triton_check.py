"""The offline check finds what is wrong with a repository, and names the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_trt.errors import BundleError, DflashError, ExportError
from dflash_trt.serving.check import check_repository
from dflash_trt.serving.repository import Options, write_repository


@pytest.fixture(scope="module")
def sound(bundle, tmp_path_factory) -> Path:
    """An ensemble with its bundle inside, which is linked: damage copies of it."""
    folder = tmp_path_factory.mktemp("sound") / "repository"
    write_repository(bundle, folder, Options(copy=True))
    return folder


@pytest.fixture
def repository(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "repository"))


def rewrite(file: str, old: str, new: str, count: int = -1) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, count))

    return change


def remove(path: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        target = folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return change


def mapped(step_key: str, tensor: str) -> str:
    return f'    input_map {{\n      key: "{step_key}"\n      value: "{tensor}"\n    }}\n'


def port(name: str, data_type: str, dims: str) -> str:
    return f'"{name}"\n  data_type: TYPE_{data_type}\n  dims: [{dims}]\n'


def needed(file: str, name: str) -> Callable[[Path], None]:
    return rewrite(file, port(name, "STRING", "1") + "  optional: true\n", port(name, "STRING", "1"))


def both(first: Callable[[Path], None], second: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        first(folder)
        second(folder)

    return change


ENSEMBLE, ENGINE = "ensemble/config.pbtxt", "dflash_trt/config.pbtxt"
PRE, POST = "preprocessing/config.pbtxt", "postprocessing/config.pbtxt"

FAULTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a model without a configuration": (remove(PRE), PRE, "no such file"),
    "a stray folder": (lambda folder: (folder / "notes").mkdir(), "notes/config.pbtxt", "no such file"),
    "a model without code": (remove("postprocessing/1/model.py"), "postprocessing/1/model.py", "no such file"),
    "no version": (remove("ensemble/1"), "ensemble", "has the folders []"),
    "a stray folder in a model": (lambda folder: (folder / "ensemble/old").mkdir(), "ensemble", "['1', 'old']"),
    "an empty version": (remove("ensemble/1/README.md"), "ensemble/1", "is empty"),
    "another name": (rewrite(PRE, '"preprocessing"', '"pre"'), PRE, "its name is ['pre']"),
    "not the format": (rewrite(PRE, "input {", "input {{", 1), PRE, "{ where a field's name should be"),
    "a placeholder": (rewrite(ENGINE, '"auto"', '"${speculation}"'), ENGINE, "placeholder"),
    "a parameter without a value": (
        rewrite(ENGINE, '    string_value: "256"\n', ""),
        ENGINE,
        "parameter ['max_queue'] has no value",
    ),
    "a null parameter": (
        rewrite(ENGINE, 'string_value: "256"', "string_value: null"),
        ENGINE,
        "parameter ['max_queue'] has no value",
    ),
    "another backend": (rewrite(ENGINE, '"python"', '"pytorch"'), ENGINE, "backend is ['pytorch']"),
    "an input twice": (
        rewrite(PRE, '"BAD_WORDS_DICT"', '"QUERY"'),
        PRE,
        "names an input twice",
    ),
    "code that is no Python": (rewrite("dflash_trt/1/model.py", "from", "form"), "dflash_trt/1/model.py", "no Python"),
    "a module that is not there": (
        rewrite("dflash_trt/1/model.py", "token_model", "tokens_model"),
        "dflash_trt/1/model.py",
        "imports TritonPythonModel of dflash_trt.serving.tokens_model, which has none",
    ),
    "a package that is not there": (
        rewrite("dflash_trt/1/model.py", "dflash_trt.serving", "dflash_rtt.serving"),
        "dflash_trt/1/model.py",
        "imports TritonPythonModel of dflash_rtt.serving.token_model",
    ),
    "a class of another name": (
        rewrite("dflash_trt/1/model.py", "TritonPythonModel", "EngineModel"),
        "dflash_trt/1/model.py",
        "imports EngineModel of dflash_trt.serving.token_model",
    ),
    "no model class": (
        rewrite("postprocessing/1/model.py", "postprocessing import TritonPythonModel", "errors import error_response"),
        "postprocessing/1/model.py",
        "does not import a TritonPythonModel",
    ),
    "a step without a model": (remove("postprocessing"), ENSEMBLE, "needs the model postprocessing"),
    "an input that is not mapped": (
        both(needed(POST, "TEXT"), rewrite(ENSEMBLE, mapped("TEXT", "_TEXT"), "")),
        ENSEMBLE,
        "postprocessing needs the input TEXT",
    ),
    "a needed input that may be missing": (
        needed(PRE, "QUERY"),
        ENSEMBLE,
        "preprocessing needs the input QUERY, but text_input may be missing",
    ),
    "an input that the model does not have": (
        rewrite(ENSEMBLE, 'key: "runtime_top_k"', 'key: "top_k"'),
        ENSEMBLE,
        "dflash_trt has no input top_k",
    ),
    "an output that the model does not have": (
        rewrite(ENSEMBLE, 'key: "INPUT_ID"', 'key: "INPUT_IDS"'),
        ENSEMBLE,
        "preprocessing has no output INPUT_IDS",
    ),
    "a tensor that nothing gives": (
        rewrite(ENSEMBLE, mapped("input_ids", "_INPUT_ID"), mapped("input_ids", "_TOKENS")),
        ENSEMBLE,
        "reads the tensor _TOKENS, which neither a request nor an earlier step gives",
    ),
    "a tensor of two sources": (
        rewrite(ENSEMBLE, 'value: "used_seed"', 'value: "seed"'),
        ENSEMBLE,
        "the tensor seed has two sources",
    ),
    "another type": (
        rewrite(ENGINE, port("input_ids", "INT32", "-1"), port("input_ids", "INT64", "-1")),
        ENSEMBLE,
        "the input input_ids of dflash_trt is TYPE_INT64 [-1], but _INPUT_ID is TYPE_INT32 [-1]",
    ),
    "another shape": (
        rewrite(ENGINE, port("bad_words_list", "INT32", "2, -1"), port("bad_words_list", "INT32", "3, -1")),
        ENSEMBLE,
        "the input bad_words_list of dflash_trt is TYPE_INT32 [3, -1], but _BAD_WORDS_IDS is TYPE_INT32 [2, -1]",
    ),
    "an output of another type": (
        rewrite(ENSEMBLE, port("finish_reason", "STRING", "1"), port("finish_reason", "INT32", "1")),
        ENSEMBLE,
        "the output finish_reason is TYPE_INT32 [1], but its step gives TYPE_STRING [1]",
    ),
    "an output that no step gives": (
        rewrite(ENSEMBLE, 'value: "text_output"', 'value: "text"'),
        ENSEMBLE,
        "no step gives the output text_output",
    ),
    "an input that no step reads": (
        rewrite(ENSEMBLE, mapped("min_p", "min_p"), ""),
        ENSEMBLE,
        "no step reads the input min_p",
    ),
    "a stream that meets what is there once": (
        rewrite(ENSEMBLE, mapped("ECHO", "_ECHO"), mapped("ECHO", "text_input")),
        ENSEMBLE,
        "postprocessing comes after a decoupled model, so it cannot read text_input",
    ),
    "an absolute path": (rewrite(ENGINE, '"1/bundle"', '"/models/bundle"'), ENGINE, "/models/bundle is absolute"),
    "no bundle named": (
        both(*(rewrite(file, 'key: "bundle"', 'key: "engine"') for file in (PRE, ENGINE))),
        "",
        "no model names a bundle",
    ),
    "no bundle there": (remove("dflash_trt/1/bundle"), "dflash_trt/1/bundle", "is not there"),
    "a bundle without a file": (
        remove("dflash_trt/1/bundle/target/model.onnx"),
        "dflash_trt/1/bundle/target/model.onnx",
        "is missing from the bundle",
    ),
    "a bundle without its configuration": (
        remove("dflash_trt/1/bundle/config.json"),
        "dflash_trt/1/bundle",
        "has no config.json",
    ),
}


def test_a_sound_repository_passes(repository):
    check_repository(repository)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_named_with_its_file(repository, fault):
    damage, file, said = FAULTS[fault]
    damage(repository)
    with pytest.raises(DflashError) as raised:
        check_repository(repository)
    assert raised.value.where == str(repository / file)
    assert said in raised.value.what
    assert isinstance(raised.value, BundleError if "bundle" in file else ExportError)


def test_an_empty_folder_is_no_repository(tmp_path):
    with pytest.raises(ExportError, match="holds no model"):
        check_repository(tmp_path)


def test_nothing_stays_of_a_repository_that_fails(bundle, tmp_path, monkeypatch):
    def fail(folder: Path) -> None:
        raise ExportError("made to fail", where=str(folder))

    monkeypatch.setattr("dflash_trt.serving.repository.check_repository", fail)
    with pytest.raises(ExportError, match="made to fail"):
        write_repository(bundle, tmp_path / "r", Options())
    assert list(tmp_path.iterdir()) == []
