"""Options of TensorRT and TensorRT-RTX: in a configuration and on the line, and refused where another backend is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.config import BuildConfig
from dflash_trt.errors import UsageError

# option -> a value for the line, the field's value; None for a flag
OPTIONS: dict[str, tuple[str | None, Any]] = {
    "stop-after": ("lower", "lower"),
    "compute-capability": ("86,8.9", (86, 89)),
    "plugins": ("off", "off"),
    "tensorrt-version": ("10.14", "10.14"),
    "builder-optimization-level": ("0", 0),
    "workspace": ("512", 512),
    "weight-streaming": (None, True),
    "refit": (None, True),
    "input-timing-cache": ("in.cache", Path("in.cache")),
    "output-timing-cache": ("out.cache", Path("out.cache")),
}
REQUIRED = {"target": "t", "drafter": "d", "output": "o"}


def config(**options: Any) -> BuildConfig:
    return BuildConfig.from_options(**REQUIRED, **options)


def from_yaml(tmp_path: Path, text: str) -> BuildConfig:
    file = tmp_path / "build.yaml"
    file.write_text(f"target: t\ndrafter: d\noutput: o\n{text}\n")
    return BuildConfig.from_options(file)


# --- compute capabilities


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("86", (86,)),
        ("8.6", (86,)),
        ("86,8.9", (86, 89)),
        (" 86 , 12.0 ", (86, 120)),
        ("120,86,121", (120, 86, 121)),
        (86, (86,)),
        (120, (120,)),
        (8.9, (89,)),
        ([86, "12.0", 8.9], (86, 120, 89)),
        ((86, 120), (86, 120)),
    ],
)
def test_compute_capabilities(given: Any, found: tuple[int, ...]) -> None:
    assert config(compute_capability=given).compute_capability == found


@pytest.mark.parametrize("text", ["86,8.9", "8.6,8.9", "[86, 8.9]", "['8.6', 89]", '"86, 89"'])
def test_compute_capabilities_in_yaml(tmp_path: Path, text: str) -> None:
    assert from_yaml(tmp_path, f"compute_capability: {text}").compute_capability == (86, 89)


def test_one_compute_capability_in_yaml(tmp_path: Path) -> None:
    for text in ("120", "12.0", '"12.0"', "[12.0]"):
        assert from_yaml(tmp_path, f"compute_capability: {text}").compute_capability == (120,)
    for text in ("", "null", "~"):
        assert from_yaml(tmp_path, f"compute_capability: {text}").compute_capability is None


@pytest.mark.parametrize(
    "given",
    ["", " ", "8", "sm_86", "86;89", "86,", ",86", "86,,89", "1.20", "8.6.0", "1200", "-86", "native", [], [[86]], True,
     0, 8.65, {}],
)  # fmt: skip
def test_what_is_no_compute_capability(given: Any) -> None:
    with pytest.raises(UsageError, match=r"--compute-capability: .* must be compute capabilities such as 86,89,120"):
        config(compute_capability=given)


# --- other values


def test_nothing_is_asked_for_unasked() -> None:
    given = config()
    nothing = {name.replace("-", "_"): None for name in OPTIONS}
    nothing |= {"plugins": "auto", "weight_streaming": False, "refit": False}
    assert {name: getattr(given, name) for name in nothing} == nothing
    given.check_backend()


@pytest.mark.parametrize(
    ("text", "shown"), [("10.14", "10.14"), ("10.10", "10.1"), ("11.0", "11.0"), ("1.7", "1.7")]
)
def test_a_version_that_yaml_reads_as_a_number(tmp_path: Path, text: str, shown: str) -> None:
    with pytest.raises(UsageError) as caught:
        from_yaml(tmp_path, f"tensorrt_version: {text}")
    assert caught.value.where == f"{tmp_path / 'build.yaml'}, tensorrt_version"
    assert caught.value.what == f'{shown} must be text: "{shown}" in quotes'
    assert from_yaml(tmp_path, f"tensorrt_version: '{text}'").tensorrt_version == text
    assert from_yaml(tmp_path, f"tensorrt_version: {text}.1").tensorrt_version == f"{text}.1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_after", "build"),
        ("plugins", "yes"),
        ("tensorrt_version", 11),
        ("builder_optimization_level", -1),
        ("builder_optimization_level", 6),
        ("workspace", 0),
        ("workspace", "much"),
        ("weight_streaming", "perhaps"),
        ("refit", 2),
    ],
)
def test_values_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}: {value!r} must be "):
        config(**{name: value})


@pytest.mark.parametrize("given", ["on", "off", "auto"])
def test_plugins_in_yaml_which_reads_on_as_true(tmp_path: Path, given: str) -> None:
    for text in (given, f"'{given}'"):
        assert from_yaml(tmp_path, f"plugins: {text}").plugins == given


def test_timing_caches_lie_beside_the_configuration(tmp_path: Path) -> None:
    given = from_yaml(tmp_path, "input_timing_cache: a.cache\noutput_timing_cache: /elsewhere/b.cache")
    assert given.input_timing_cache == tmp_path / "a.cache"
    assert given.output_timing_cache == Path("/elsewhere/b.cache")


# --- another backend


@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
@pytest.mark.parametrize("name", OPTIONS)
def test_they_are_not_for_other_backends(name: str, backend: str) -> None:
    given = config(backend=backend, **{name.replace("-", "_"): OPTIONS[name][1]})
    with pytest.raises(UsageError) as caught:
        given.check_backend()
    assert caught.value.where == f"--{name}"
    assert caught.value.what == f"is for --backend tensorrt and tensorrt-rtx, not for {backend}"
    assert caught.value.mend


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_they_are_for_these(backend: str) -> None:
    config(backend=backend, **{name.replace("-", "_"): value for name, (_, value) in OPTIONS.items()}).check_backend()


# --- the command line


def line(name: str) -> list[str]:
    value = OPTIONS[name][0]
    return [f"--{name}", *([] if value is None else [value])]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_line_refuses_them_before_anything_is_read(run_cli, tmp_path: Path, name: str) -> None:
    paths = [part for path in REQUIRED for part in (f"--{path}", str(tmp_path / path))]
    code, out, err = run_cli("build", *paths, *line(name))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert f"--{name}: is for --backend tensorrt and tensorrt-rtx, not for onnxruntime" in err
    assert list(tmp_path.iterdir()) == []


def test_the_line_gives_what_a_configuration_gives(run_cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[BuildConfig] = []

    def build(settings: BuildConfig, progress: object) -> None:
        seen.append(settings)
        raise UsageError("enough")

    monkeypatch.setattr("dflash_trt.pipeline.build", build)
    paths = [part for path, value in REQUIRED.items() for part in (f"--{path}", value)]
    run_cli("build", *paths, "--backend", "tensorrt", *(part for name in OPTIONS for part in line(name)))
    expected = config(backend="tensorrt", **{name.replace("-", "_"): value for name, (_, value) in OPTIONS.items()})
    assert seen == [expected]
    file = tmp_path / "build.yaml"
    file.write_text("backend: tensorrt-rtx\nplugins: off\nrefit: true\nworkspace: 7\ncompute_capability: 120\n")
    run_cli("build", *paths, "--config", file, "--workspace", "9", "--compute-capability", "8.6")
    found = seen[1]
    assert (found.plugins, found.refit, found.workspace, found.compute_capability) == ("off", True, 9, (86,))


@pytest.mark.parametrize("given", [["--compute-capability", "8"], ["--plugins", "yes"], ["--workspace", "much"]])
def test_the_line_names_what_is_wrong(run_cli, given: list[str]) -> None:
    paths = [part for path, value in REQUIRED.items() for part in (f"--{path}", value)]
    code, out, err = run_cli("build", *paths, "--backend", "tensorrt", *given)
    assert (code, out) == (2, "")
    assert given[0] in err
    assert given[1] in err.splitlines()[-1]


def test_help_says_whose_they_are(run_cli) -> None:
    text = re.sub(r"\s+", " ", run_cli("build", "--help").out)
    parts = dict(re.findall(r" --([a-z-]+) (.*?)(?= --[a-z]| -h,)", text))
    marked = {name for name, part in parts.items() if re.match(r"(\S+ )?(Engines|TensorRT|TensorRT-RTX): ", part)}
    assert marked | {"tensorrt-version"} == set(OPTIONS)
    assert "With --stop-after: whose parser" in text
    assert "86,89" in parts["compute-capability"]
    assert "[on|off|auto]" in parts["plugins"]
    assert "[lower]" in parts["stop-after"]
