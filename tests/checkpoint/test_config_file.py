"""Typed reading of config.json: each error names file, field, value and rule."""

import json
from pathlib import Path

import pytest

from dflash_trt.checkpoint.config import ConfigFile
from dflash_trt.errors import CheckpointError


def config_of(folder: Path, values: object) -> ConfigFile:
    (folder / "config.json").write_text(json.dumps(values))
    return ConfigFile(folder / "config.json")


def test_getters_return_typed_values_and_none_for_absent_or_null(tmp_path: Path) -> None:
    values = {"i": 3, "f": 2.5, "b": False, "s": "x", "li": [1, 2], "ls": ["a"], "o": {"i": 4}, "null": None}
    config = config_of(tmp_path, values)
    assert (config.integer("i"), config.number("f"), config.number("i")) == (3, 2.5, 3.0)
    assert (config.boolean("b"), config.string("s")) == (False, "x")
    assert (config.integers("li"), config.strings("ls")) == ((1, 2), ("a",))
    assert config.section("o").integer("i") == 4
    for field in ("null", "absent"):
        assert field not in config
        getters = ("integer", "number", "boolean", "string", "integers", "strings")
        assert all(getattr(config, getter)(field) is None for getter in getters)
        assert config.section(field).values == {}


@pytest.mark.parametrize(
    ("getter", "value", "rule"),
    [
        ("integer", True, "must be a positive integer"),
        ("integer", 16.0, "must be a positive integer"),
        ("integer", "16", "must be a positive integer"),
        ("integer", 0, "must be a positive integer"),
        ("integer", [1], "must be a positive integer"),
        ("number", True, "must be a finite number"),
        ("number", "1e6", "must be a finite number"),
        ("number", float("nan"), "must be a finite number"),
        ("number", float("inf"), "must be a finite number"),
        ("number", 10**400, "must be a finite number"),
        ("boolean", 1, "must be true or false"),
        ("boolean", "true", "must be true or false"),
        ("string", 1, "must be a string"),
        ("integers", 3, "must be a list of integers"),
        ("integers", [1, True], "must be a list of integers"),
        ("integers", [1, 2.0], "must be a list of integers"),
        ("strings", "abc", "must be a list of strings"),
        ("strings", ["a", 1], "must be a list of strings"),
        ("section", [], "must be an object"),
    ],
)
def test_wrong_value(tmp_path: Path, getter: str, value: object, rule: str) -> None:
    config = config_of(tmp_path, {"field": value})
    with pytest.raises(CheckpointError, match=rule) as caught:
        getattr(config, getter)("field")
    assert str(tmp_path / "config.json") in str(caught.value)
    assert f"field is {json.dumps(value)}" in str(caught.value)


def test_bounds(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"i": 5, "f": 0.5})
    with pytest.raises(CheckpointError, match="i is 5, but must be an integer, at least 6"):
        config.integer("i", minimum=6)
    with pytest.raises(CheckpointError, match="at most 4"):
        config.integer("i", maximum=4)
    with pytest.raises(CheckpointError, match=r"f is 0.5, but must be greater than 0.5"):
        config.number("f", above=0.5)
    with pytest.raises(CheckpointError, match="must be at least 1"):
        config.number("f", minimum=1)


def test_required_fields_say_missing_or_null_with_their_section(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"null": None, "inner": {"x": "y"}})
    with pytest.raises(CheckpointError, match="absent is missing, but is required"):
        config.required_integer("absent")
    with pytest.raises(CheckpointError, match="null is null, but is required"):
        config.required_number("null")
    with pytest.raises(CheckpointError, match=r"inner\.x is \"y\", but must be a positive integer"):
        config.section("inner").integer("x")


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        ConfigFile(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"a": \xff}', "is not UTF-8 text: byte 6 is 0xff"),
        (b'{"a": 1,}', r"is not valid JSON \(line 1"),
        (b"", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not valid JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git-LFS pointer"),
        (b"[1]", "holds a list, but must hold a JSON object"),
    ],
)
def test_broken_config(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=what):
        ConfigFile(tmp_path / "config.json")


def test_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        ConfigFile(tmp_path / "config.json")
