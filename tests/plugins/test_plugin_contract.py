"""What the plugins answer TensorRT while it builds, against tables written here independently of the sources."""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from typing import Any

import native
import pytest

# nvinfer1::DataType
FP32, FP16, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64, INT4, FP4 = range(11)
LINEAR = 0
KINDS = {"T": None, "f": FP32, "l": INT64, "b": BOOL}

# One letter per tensor, inputs and outputs: the element type T, float32, int64, bool.
TYPES = {
    ("KVInjection", 9): "TTTlfflTTTT",
    ("KVInjection", 8): "TTlfflTTTT",
    ("StaircaseAttention", 7): "TTTlbTlT",
    ("StaircaseAttention", 6): "TTTlblT",
}
ELEMENTS = {"KVInjection": {FP16, BF16, FP32}, "StaircaseAttention": {FP16, BF16}}


@pytest.fixture(scope="module")
def answers(built: native.Built) -> dict[str, list[dict[str, Any]]]:
    """What contract_test prints, by event."""
    by_event = defaultdict(list)
    tests = built.folder / "tests"
    for line in built.run([tests / "contract_test", *(tests / f"libfake_runtime_{major}.so" for major in (10, 11))]):
        by_event[line["event"]].append(line)
    return by_event


def test_every_format_combination_is_accepted_or_refused_as_the_table_says(answers):
    for (plugin, inputs), letters in TYPES.items():
        lines = [a for a in answers["formats"] if (a["plugin"], a["inputs"]) == (plugin, inputs)]
        seen = {(line["position"], line["element"]): line["accepted"] for line in lines}
        expected = {}
        for position, letter in enumerate(letters):
            for element in range(11) if position else (-1,):
                types = ELEMENTS[plugin] if position == 0 else {element if KINDS[letter] is None else KINDS[letter]}
                expected[position, element] = [[t, LINEAR] for t in sorted(types)]
        assert seen == expected
    assert sum(line["count"] for line in answers["formats_asked"]) == sum(
        (1 + (len(letters) - 1) * 11) * 11 * 13 for letters in TYPES.values()
    )


def test_outputs_have_the_shapes_and_types_of_the_operators(answers):
    found = {(a["plugin"], a["inputs"]): a for a in answers["outputs"]}
    assert set(found) == set(TYPES)
    for (plugin, _), answer in found.items():
        cache = ["B", "8", "C", "128"]
        shapes = [cache, cache] if plugin == "KVInjection" else [["B", "Q", "32*128"]]
        assert answer["shapes"] == shapes
        assert answer["types"] == [BF16] * len(shapes)
        assert answer["count"] == len(shapes)
        assert answer["shapes_status"] == answer["types_status"] == 0


def test_only_the_caches_are_aliased(answers):
    aliases = {(a["plugin"], a["inputs"]): (a["aliases"], a["alias_of_clone"]) for a in answers["outputs"]}
    assert aliases == {
        ("KVInjection", 9): ([7, 8], 7),
        ("KVInjection", 8): ([6, 7], 6),
        ("StaircaseAttention", 7): ([-1], -1),
        ("StaircaseAttention", 6): ([-1], -1),
    }


def test_asked_for_aliases_before_it_knows_its_inputs_a_plugin_says_so(answers):
    assert [a["input"] for a in answers["alias_too_early"]] == [-1, -1]
    messages = [line["message"] for line in answers["log"]]
    assert "dflash_trt KVInjection::getAliasedInput: the number of inputs is not known yet" in messages


def test_impossible_shapes_are_refused_with_the_reason(answers):
    assert len(answers["refused_shapes"]) == 10
    assert all(a["status"] != 0 for a in answers["refused_shapes"])
    reasons = [m["message"].split(": ", 1)[1] for m in answers["log"] if "getOutputShapes" in m["message"]]
    assert reasons == [
        "key has 3 dimensions; it must be [B N Hkv D]",
        "value: dimension 3 (D) is 64, but 128 in key",
        "head_dim is 80; it must be 64, 96, 128 or 256",
        "expected 9 inputs, or 8 without key_norm_weight, not 2",
        "expected 2 outputs, not 3",
        "query has 3 dimensions; it must be [B Hq Q D]",
        "key_cache: dimension 3 (D) is 64, but 128 in query",
        "head_dim is 80; it must be 64, 96, 128 or 256",
        "expected 7 inputs, or 6 without sinks, not 2",
        "expected 1 outputs, not 2",
    ]


def test_clones_and_loaded_plugins_equal_the_original(answers):
    float32, int32 = 1, 5  # PluginFieldType
    kv, staircase = answers["identity"]
    for answer in (kv, staircase):
        assert (answer["version"], answer["namespace"]) == ("1", "dflash_trt")
        assert answer["serialized"] == answer["loaded"] == answer["clone"] == answer["attached"]
        assert answer["metadata"] == answer["metadata_of_clone"]
    assert (kv["name"], staircase["name"]) == ("KVInjection", "StaircaseAttention")
    assert kv["serialized"] == [{"name": "eps", "type": float32, "length": 1, "value": pytest.approx(1e-6)}]
    assert staircase["serialized"] == [
        {"name": "scale", "type": float32, "length": 1, "value": 0.125},
        {"name": "sliding_window", "type": int32, "length": 1, "value": 1024},
        {"name": "causal", "type": int32, "length": 1, "value": 1},  # given as int64
        {"name": "softcap", "type": float32, "length": 1, "value": 30.0},
    ]
    # The timing cache must tell plugins with different attributes apart.
    assert staircase["timing_cache_id"] == "scale=0.125 sliding_window=1024 causal=1 softcap=30"


def test_messages_reach_the_logger_of_a_runtime_older_or_newer_than_the_headers(answers):
    """Of the engine that calls, or outside of engines of the process; their vtables differ between 10 and 11."""
    message = "dflash_trt KVInjection::createPlugin: field eps is missing"
    assert [line | {"event": ""} for line in answers["runtime_log"]] == [
        {"event": "", "major": major, "logger": logger, "severity": 1, "message": message}
        for major in (10, 11)
        for logger in ("engine", "global")
    ]


STAIRCASE = "create StaircaseAttention scale:f32={} sliding_window:{} causal:{} softcap:f32={}"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("create KVInjection", "field eps is missing"),
        ("create KVInjection eps:f64=1e-6", "field eps must be float32, not float64"),
        ("create KVInjection eps:char=1", "field eps must be float32, not char"),
        ("create KVInjection eps:char=12", "field eps must be a single value, not 2"),
        ("create KVInjection eps:f32=", "field eps has no value"),
        ("create KVInjection eps:f32=0", "eps is 0; it must be greater than 0"),
        ("create KVInjection eps:f32=nan", "eps is nan; it must be greater than 0"),
        ("create KVInjection eps:f32=1e-6 eps:f32=1e-6", "field eps is given twice"),
        ("create KVInjection eps:f32=1e-6 epsilon:f32=1e-6", "unknown field epsilon"),
        (STAIRCASE.format(0, "i32=0", "i32=1", 0), "scale is 0; it must be greater than 0"),
        (STAIRCASE.format(1, "i32=-1", "i32=1", 0), "sliding_window is -1; it must be 0 (none) or greater"),
        (
            STAIRCASE.format(1, "i64=2147483648", "i32=1", 0),
            "field sliding_window is 2147483648, more than 32 bits hold",
        ),
        (STAIRCASE.format(1, "f32=1", "i32=1", 0), "field sliding_window must be int32 or int64, not float32"),
        (STAIRCASE.format(1, "i32=0", "i32=2", 0), "causal is 2; it must be 0 or 1"),
        (STAIRCASE.format(1, "i32=0", "i32=1", -1), "softcap is -1; it must be 0 (none) or greater"),
        (STAIRCASE.format(1, "i32=0", "i32=1", "inf"), "softcap is inf; it must be 0 (none) or greater"),
    ],
)
def test_wrong_fields_make_no_plugin(built, command, reason):
    lines = built.drive([command])
    assert lines[0]["message"] == f"dflash_trt {command.split()[1]}::createPlugin: {reason}"
    assert lines[-1] == {"event": "create", "made": 0}


def test_fields_as_the_onnx_parser_gives_them(built):
    """INT attributes as int32 or int64, and the node's plugin_version and plugin_namespace beside them."""
    extra = " plugin_version:char=1 plugin_namespace:char=dflash_trt"
    lines = built.drive([STAIRCASE.format(1, a, b, 0) + extra for a in ("i32=4", "i64=4") for b in ("i32=0", "i64=1")])
    assert lines == [{"event": "create", "made": 1}] * 4


def test_the_library_needs_the_cuda_runtime_and_nothing_of_tensorrt(built):
    symbols = subprocess.run(["nm", "-uD", built.library], capture_output=True, text=True, check=True).stdout
    assert not any(name in symbols for name in ("nvinfer", "getInferLib", "getPluginRegistry"))
    assert "cudaLaunchKernel" in symbols
    needed = subprocess.run(["readelf", "-d", built.library], capture_output=True, text=True, check=True).stdout
    libraries = {line.split("[")[1].split(".so")[0] for line in needed.splitlines() if "(NEEDED)" in line}
    assert libraries <= {"libcudart", "libstdc++", "libgcc_s", "libc", "libm", "libdl", "ld-linux-x86-64"}
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=just-symbols", built.library],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert set(exported.split()) == {
        "getCreators",
        "setLoggerFinder",
        "dflash_trt_accept_path",
        "dflash_trt_move_rows",
        "dflash_trt_gather_features",
        "dflash_trt_last_error",
        "dflash_trt_version",
    }


def test_nvcc_compiles_the_sources(built, tmp_path):
    """As CUDA sources, all in one unit; g++ compiled each for the other tests."""
    sources = sorted((native.ROOT / "plugins" / "tensorrt").rglob("*.cpp"))
    unit = tmp_path / "all.cu"
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    headers = native.tensorrt_headers()
    includes = [
        native.ROOT / "plugins" / "tensorrt",
        headers / "include" if (headers / "include").is_dir() else headers,
    ]
    command = [native.nvcc(), "-std=c++17", "-c", "-o", str(tmp_path / "all.o"), '-DDFLASH_TRT_VERSION="1"']
    command += ["-Xcompiler", "-Wall,-Wextra,-Werror", "-Xcudafe", "--display_error_number"]
    command += [f"-I{includes[0]}", "-isystem", str(includes[1]), str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr


def test_without_headers_cmake_says_what_to_set(tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    command = ["cmake", "-S", str(native.ROOT / "plugins"), "-B", str(tmp_path), f"-DTENSORRT_ROOT={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "There is no NvInferRuntime.h in TENSORRT_ROOT" in " ".join(done.stderr.split())
