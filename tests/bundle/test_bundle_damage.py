"""A bundle that was changed, cut, or built by something newer is refused, and the file is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import dflash_trt
from dflash_trt.bundle import read_info
from dflash_trt.errors import BundleError
from dflash_trt.loading import open_info

KINDS = {
    "graph": "target/model.onnx",
    "drafter graph": "drafter/model.onnx",
    "weights": "target/model.safetensors",
    "drafter weights": "drafter/model.safetensors",
    "shared weights": "drafter/target.model.safetensors",
    "tables": "target/tables.safetensors",
    "tokenizer": "tokenizer/tokenizer.json",
    "tokenizer configuration": "tokenizer/tokenizer_config.json",
}


def _refused(folder: Path, *words: str) -> None:
    with pytest.raises(BundleError) as caught:
        dflash_trt.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def _change(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_the_kinds_are_all_there_is(damaged):
    names = {str(path.relative_to(damaged)) for path in damaged.rglob("*") if path.is_file()}
    assert names - {*KINDS.values()} == {
        "config.json",
        "drafter/tables.safetensors",
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_one_changed_byte_is_noticed(damaged, kind, place):
    file = damaged / KINDS[kind]
    _change(file, {"first": 0, "middle": file.stat().st_size // 2, "last": -1}[place])
    _refused(damaged, str(file), "changed after the build")


def test_one_changed_byte_of_the_configuration_is_noticed(damaged):
    file = damaged / "config.json"
    original = file.read_bytes()
    for position in [*range(0, len(original), 101), len(original) - 1]:
        for value in (original[position] ^ 1, 0xFF, ord(" ")):
            if value != original[position]:
                file.write_bytes(original[:position] + bytes([value]) + original[position + 1 :])
                with pytest.raises(BundleError, match=r"config\.json"):
                    open_info(damaged)
    file.write_bytes(original)
    open_info(damaged)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data + b"\n",
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.replace(b"\n", b"\r", 1),
        lambda data: data.replace(b"  ", b"\t", 1),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: json.dumps(json.loads(data)).encode(),
    ],
)
def test_changed_white_space_of_the_configuration_is_noticed(damaged, change):
    file = damaged / "config.json"
    file.write_bytes(change(file.read_bytes()))
    _refused(damaged, str(file))


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_named(damaged, kind):
    (damaged / KINDS[kind]).unlink()
    _refused(damaged, str(damaged / KINDS[kind]), "missing")


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_named_with_both_sizes(damaged, kind):
    file = damaged / KINDS[kind]
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size // 2])
    _refused(damaged, str(file), str(size), str(size // 2))


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[]", b"{}", b'{"dflash_trt": []}', b"[" * 100_000])
def test_a_folder_without_a_readable_configuration_is_no_bundle(damaged, content):
    file = damaged / "config.json"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    _refused(damaged, str(damaged))


def test_a_checkpoint_edited_in_place_is_noticed_through_the_link(pair, tmp_path):
    import shutil

    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    output = tmp_path / "b"
    dflash_trt.build(target=target, drafter=pair.drafter, output=output, backend="torch", verify=False)
    with open(target / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    _refused(output, "model.safetensors", "hard links")


# -- versions: the configuration is rewritten, with a right digest


def _reseal(folder: Path, change: Callable[[dict], None]) -> None:
    """Changes config.json and gives it the digest of its text with the digest blanked, by hand."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config["dflash_trt"])
    config["dflash_trt"]["digest"] = "0" * 64
    text = json.dumps(config, indent=2) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(text.replace("0" * 64, digest, 1))


def test_resealing_gives_what_the_build_wrote(damaged):
    before = (damaged / "config.json").read_bytes()
    _reseal(damaged, lambda section: None)
    assert (damaged / "config.json").read_bytes() == before


def _bumped(version: str, place: int) -> str:
    parts = [int(part) for part in version.split("+")[0].split(".")]
    parts[place] += 1
    return ".".join(map(str, parts))


@pytest.mark.parametrize("name", ["dflash_trt", "onnxruntime"])
@pytest.mark.parametrize("place", [0, 1], ids=["major", "minor"])
def test_a_bundle_of_a_newer_version_is_refused_in_plain_words(damaged, name, place):
    running = read_info(damaged).tool_versions[name]
    built = _bumped(running, place)
    _reseal(damaged, lambda section: section["tool_versions"].update({name: built}))
    _refused(damaged, f"built with {name} {built}, running {running}", "Upgrade")


@pytest.mark.parametrize(
    "versions",
    [{"onnxruntime": "1.0.0"}, {"dflash_trt": "0.0.1"}, {"torch": "99.0"}, {"onnx": "99.0"}],
)
def test_other_versions_do_not_matter(damaged, versions):
    _reseal(damaged, lambda section: section["tool_versions"].update(versions))
    assert dflash_trt.load(damaged).generate("a", max_tokens=2).token_ids


def test_a_torch_bundle_does_not_care_about_onnxruntime(torch_bundle, tmp_path):
    import shutil

    folder = Path(shutil.copytree(torch_bundle, tmp_path / "b"))
    _reseal(folder, lambda section: section["tool_versions"].update(onnxruntime="99.0"))
    assert dflash_trt.load(folder).generate("a", max_tokens=2).token_ids


@pytest.mark.parametrize("number", [0, 1, 3, 5, "4", None])
def test_another_format_is_refused_with_both_versions(damaged, number):
    def change(section: dict) -> None:
        section["format"] = number
        section["tool_versions"]["dflash_trt"] = "7.1.0"

    _reseal(damaged, change)
    _refused(damaged, f"bundle format {number}", "7.1.0", f"running {dflash_trt.__version__}")


def test_a_field_of_another_version_is_named(damaged):
    _reseal(damaged, lambda section: section["limits"].update(max_beams=4))
    _refused(damaged, "limits.max_beams", f"built with dflash-trt {dflash_trt.__version__}")


@pytest.mark.parametrize("name", ["tokenizer/chat_template.jinja", "target/extra.safetensors"])
def test_an_added_file_is_named(damaged: Path, name: str) -> None:
    (damaged / name).write_text("x")
    with pytest.raises(BundleError, match=f"{Path(name).name}.*added"):
        open_info(damaged)
