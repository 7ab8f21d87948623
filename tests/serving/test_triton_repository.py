"""What `dflash-trt triton` writes, and when it does not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from models_here import read_config, serving_here

from dflash_trt.errors import BundleError, ExportError, UsageError
from dflash_trt.serving import repository
from dflash_trt.serving.check import check_repository
from dflash_trt.serving.repository import Options, write_repository

TOP = {"README.md", "Dockerfile", "requirements.txt"}
ENSEMBLE = {
    "preprocessing/config.pbtxt",
    "preprocessing/1/model.py",
    "dflash_trt/config.pbtxt",
    "dflash_trt/1/model.py",
    "postprocessing/config.pbtxt",
    "postprocessing/1/model.py",
    "ensemble/config.pbtxt",
    "ensemble/1/README.md",
}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def written(bundle, tmp_path):
    """A repository of the layout "single", beside a copy of the bundle."""
    shutil.copytree(bundle, tmp_path / "bundle")
    write_repository(tmp_path / "bundle", tmp_path / "repository", Options(layout="single"))
    return tmp_path / "repository"


def test_ensemble_is_complete(bundle, tmp_path, run_cli):
    done = run_cli("triton", bundle, "--output", tmp_path / "repository")
    assert done.code == 0
    assert done.out.strip() == str(tmp_path / "repository")
    assert files(tmp_path / "repository") == ENSEMBLE | TOP
    assert os.listdir(tmp_path) == ["repository"]


def test_single_model_is_complete(bundle, tmp_path, run_cli):
    done = run_cli("triton", bundle, "--output", tmp_path / "r", "--layout", "single", "--json")
    result = json.loads(done.out)
    assert (result["models"], result["system"], result["backend"]) == (["dflash_trt"], "dflash", "onnxruntime")
    assert files(tmp_path / "r") == {"dflash_trt/config.pbtxt", "dflash_trt/1/model.py"} | TOP


def test_parameters_come_from_the_options(d2sd_bundle, tmp_path, run_cli):
    options = ("--speculation", "on", "--branches", 2, "--max-queue", 5, "--threads", 3)
    assert run_cli("triton", d2sd_bundle, "--output", tmp_path / "r", *options).code == 0
    engine = read_config(tmp_path / "r/dflash_trt/config.pbtxt").parameters
    assert {key: value.string_value for key, value in engine.items()} == {
        "bundle": os.path.relpath(d2sd_bundle, tmp_path / "r/dflash_trt"),
        "speculation": "on",
        "branches": "2",
        "max_queue": "5",
        "threads": "3",
        "device": "cpu",
        "exclude_input_in_output": "true",
    }
    text = read_config(tmp_path / "r/preprocessing/config.pbtxt").parameters
    assert (text["chat"].string_value, text["add_special_tokens"].string_value) == ("false", "true")


def test_nothing_is_left_to_fill_in(bundle, tmp_path):
    for layout in ("single", "ensemble"):
        write_repository(bundle, tmp_path / layout, Options(layout=layout))
        for file in (tmp_path / layout).rglob("*.*"):
            text = file.read_text(encoding="utf-8")
            assert "${" not in text
            assert str(tmp_path) not in text
            assert str(bundle) not in text


def test_repository_and_bundle_move_together(written, tmp_path):
    moved = tmp_path / "elsewhere" / "deep"
    moved.mkdir(parents=True)
    shutil.move(tmp_path / "repository", moved / "repository")
    with pytest.raises(BundleError, match="is not there"):
        check_repository(moved / "repository")
    shutil.move(tmp_path / "bundle", moved / "bundle")
    check_repository(moved / "repository")
    with serving_here(moved / "repository") as server:
        assert server.ask("dflash_trt", text_input="abc", max_tokens=3).joined()


def test_path_holds_behind_a_symbolic_link(written, tmp_path):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "models").symlink_to(written)
    with serving_here(tmp_path / "linked" / "models") as server:
        assert server.ask("dflash_trt", text_input="abc", max_tokens=3).joined()


@pytest.mark.parametrize("layout", ["single", "ensemble"])
def test_copy_holds_the_bundle(bundle, tmp_path, layout):
    shutil.copytree(bundle, tmp_path / "bundle")
    write_repository(tmp_path / "bundle", tmp_path / "r", Options(layout=layout, copy=True))
    shutil.rmtree(tmp_path / "bundle")
    (tmp_path / "other").mkdir()
    shutil.move(tmp_path / "r", tmp_path / "other" / "r")
    assert files(tmp_path / "other/r/dflash_trt/1/bundle") == files(bundle)
    check_repository(tmp_path / "other" / "r")
    with serving_here(tmp_path / "other" / "r") as server:
        asked = "dflash_trt" if layout == "single" else "ensemble"
        assert server.ask(asked, text_input="abc", max_tokens=3).joined()


def test_copies_where_there_are_no_hard_links(bundle, tmp_path, monkeypatch):
    def no_link(source: str, target: str) -> None:
        raise OSError("not here")

    monkeypatch.setattr(os, "link", no_link)
    write_repository(bundle, tmp_path / "r", Options(layout="single", copy=True))
    assert files(tmp_path / "r/dflash_trt/1/bundle") == files(bundle)


def test_existing_repository_is_replaced_only_when_asked(written, tmp_path, run_cli):
    before = (written / "dflash_trt/config.pbtxt").read_text()
    done = run_cli("triton", tmp_path / "bundle", "--output", written, "--max-queue", 3)
    assert (done.code, done.out) == (2, "")
    assert "exists already" in done.err
    assert (written / "dflash_trt/config.pbtxt").read_text() == before
    assert run_cli("triton", tmp_path / "bundle", "--output", written, "--max-queue", 3, "--force").code == 0
    assert read_config(written / "ensemble/config.pbtxt").name == "ensemble"


def test_the_wheel_for_the_image_stays(written, tmp_path):
    (written / "dflash_trt-1.0-py3-none-any.whl").write_bytes(b"PK")
    write_repository(tmp_path / "bundle", written, Options(), force=True)
    assert (written / "dflash_trt-1.0-py3-none-any.whl").read_bytes() == b"PK"


@pytest.mark.parametrize("what", ["another folder", "another model", "a config of somebody else's"])
def test_force_replaces_nothing_else(written, tmp_path, run_cli, what):
    if what == "another folder":
        shutil.rmtree(written)
        written.mkdir()
        (written / "thesis.txt").write_text("years of work")
    elif what == "another model":
        (written / "resnet").mkdir()
    else:
        (written / "dflash_trt/config.pbtxt").write_text('name: "dflash_trt"\n')
    before = files(written)
    done = run_cli("triton", tmp_path / "bundle", "--output", written, "--force")
    assert done.code == 2
    assert "is not a repository of dflash-trt alone" in done.err
    assert files(written) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--branches", 2), "needs a VP drafter"),
        (("--max-queue", -1), "--max-queue: -1 must be at least 0"),
        (("--layout", "flat"), "'flat' is not one of"),
        (("--speculation", "maybe"), "'maybe' is not one of"),
        (("--threads", -2), "-2 is not in the range"),
        (("--branches", "many"), "'many' is not a valid integer"),
        (("--device", "cuda"), "onnxruntime bundles run on the CPU, not on cuda"),
        (("--chat",), "the model has no chat template"),
    ],
)
def test_bad_options(bundle, tmp_path, run_cli, options, said):
    done = run_cli("triton", bundle, "--output", tmp_path / "r", *options)
    assert (done.code, done.out, os.listdir(tmp_path)) == (2, "", [])
    assert said in done.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"branches": 4}, "4 must be auto or 0 to 3"),
        ({"branches": "auto"}, "needs the cost table"),
        ({"branches": 1, "speculation": "off"}, "there are none in token-by-token"),
    ],
)
def test_branches_that_the_bundle_cannot_have(d2sd_bundle, tmp_path, options, said):
    with pytest.raises(UsageError, match=said):
        write_repository(d2sd_bundle, tmp_path / "r", Options(**options))
    assert os.listdir(tmp_path) == []


def test_output_is_needed(bundle, run_cli):
    assert "Missing option '--output'" in run_cli("triton", bundle).err


def test_not_into_the_bundle(damaged, run_cli):
    done = run_cli("triton", damaged, "--output", damaged / "r")
    assert done.code == 2
    assert "lies in the bundle" in done.err
    assert not (damaged / "r").exists()


def test_no_bundle(tmp_path, run_cli):
    done = run_cli("triton", tmp_path / "nowhere", "--output", tmp_path / "r")
    assert (done.code, os.listdir(tmp_path)) == (2, [])
    assert "there is no such folder" in done.err


@pytest.mark.parametrize("copy", [(), ("--copy",)])
def test_damaged_bundle(damaged, tmp_path, run_cli, copy):
    (damaged / "drafter" / "model.onnx").unlink()
    done = run_cli("triton", damaged, "--output", tmp_path / "r", *copy)
    assert done.code == 2
    assert f"{damaged / 'drafter' / 'model.onnx'}: is missing from the bundle" in done.err
    assert not (tmp_path / "r").exists()


def test_readme_says_how_to_start(written, tmp_path):
    text = (written / "README.md").read_text()
    assert '--volume "$PWD":/models/repository:ro ' in text
    assert '--volume "$(realpath ../bundle)":/models/bundle:ro ' in text
    assert "--ulimit stack=" in text
    assert "ulimit -s" in text
    assert "--model-repository=/models/repository" in text
    assert "/v2/models/dflash_trt/generate_stream" in text
    assert "`../bundle` from here" in text
    write_repository(tmp_path / "bundle", tmp_path / "copied", Options(copy=True))
    text = (tmp_path / "copied" / "README.md").read_text()
    assert "--volume" not in text
    assert "/v2/models/ensemble/generate_stream" in text
    assert "COPY . /models" in (tmp_path / "copied" / "Dockerfile").read_text()
    assert "COPY . /models" not in (written / "Dockerfile").read_text()


def test_names_are_quoted_and_need_be_no_placeholder(bundle, tmp_path):
    """A bundle may be called anything that config.pbtxt can hold."""
    named = shutil.copytree(bundle, tmp_path / "it's a ${bundle}")
    done = write_repository(named, tmp_path / "ä~folder", Options())
    check_repository(done.folder)
    command = (done.folder / "README.md").read_text().replace("\\\n", "").split("docker run")[1].splitlines()[0]
    script = f"docker() {{ printf '%s\\n' \"$@\"; }}; docker {command}"
    shell = subprocess.run(["sh", "-c", script], cwd=done.folder, check=True, capture_output=True, text=True)
    words = shell.stdout.splitlines()
    assert f"{done.folder}:/models/ä~folder:ro" in words
    assert f"{named}:/models/it's a ${{bundle}}:ro" in words
    assert "--model-repository=/models/ä~folder" in words
    with pytest.raises(UsageError, match="is not valid UTF-8"):
        write_repository(bundle, tmp_path / "bad\udcff", Options())


def test_the_folder_that_one_is_in(written, tmp_path, run_cli, monkeypatch):
    """"." is that folder, never the one above."""
    monkeypatch.chdir(written / "dflash_trt")
    before = files(tmp_path)
    for output in (".", "", "1/.."):
        done = run_cli("triton", tmp_path / "bundle", "--output", output, "--force")
        assert done.code == 2
        assert f"{written / 'dflash_trt'} lies in a repository" in done.err
    assert files(tmp_path) == before


def test_what_is_wrong_is_told_of_the_place_it_will_have(written, tmp_path, monkeypatch):
    monkeypatch.setitem(repository.MODULES, "preprocessing", "nothing")
    with pytest.raises(ExportError) as error:
        write_repository(tmp_path / "bundle", tmp_path / "other", Options())
    assert str(tmp_path / "other/preprocessing/1/model.py") in error.value.message()
    assert ".partial" not in error.value.message()


def test_requirements_are_those_of_the_package(written, torch_bundle, tmp_path):
    from importlib.metadata import requires

    def lines(folder: Path) -> set[str]:
        return {line for line in (folder / "requirements.txt").read_text().splitlines() if not line.startswith("#")}

    assert lines(written) <= set(requires("dflash-trt") or [])
    assert {line.split(">=")[0] for line in lines(written)} == {
        *("jinja2", "ml-dtypes", "numpy", "onnxruntime", "pydantic", "pyyaml", "tokenizers")
    }
    write_repository(torch_bundle, tmp_path / "torch", Options(layout="single"))
    names = {line.split(">=")[0] for line in lines(tmp_path / "torch")}
    assert "torch" in names
    assert "onnxruntime" not in names


def test_places_where_triton_would_not_serve_it(written, tmp_path, run_cli):
    """Paths that the server's shell would take apart, so that no model starts; and a folder in another repository."""
    rules = dict.fromkeys(("with space/models", "a'b", "c$d", "e;f", "g&h", "i(j)"), "to a shell as it is")
    for place, rule in {**rules, "repository/other": "lies in a repository"}.items():
        done = run_cli("triton", tmp_path / "bundle", "--output", tmp_path / place)
        assert done.code == 2
        assert rule in done.err.replace("\n", " ")
        assert not (tmp_path / place).exists()
