"""Opening engines, on a stand-in for TensorRT's modules; what the real ones say here is asked where they are there."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backends.fake_engine import Built, FakeContext, FakeEngine, FakeRtxContext, FakeTensorRT, api_of
from export.small_pair import random_inputs, small_pair
from rtx import tensorrt_rtx

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.engine_contract import engine_io_faults, row_faults
from dflash_trt.backends.profiles import DimRange, profiles
from dflash_trt.backends.tensorrt_session import open_engine_session
from dflash_trt.errors import BackendError, BundleError
from dflash_trt.export.contract import Role
from dflash_trt.runtime.limits import Limits

LIMITS = Limits(max_batch_size=2, max_seq_len=20, max_input_len=19, block_size=4, prefill_chunk=12)
ROLES: tuple[Role, ...] = ("target", "drafter")
VOCAB = 320


@pytest.fixture(params=[False, True], ids=["tensorrt", "rtx"])
def rtx(request: pytest.FixtureRequest) -> bool:
    return request.param


def built_of(role: Role) -> Built:
    graph = small_pair().graph(role)
    return Built(graph.module, graph.spec, list(profiles(role, LIMITS)))


def opened(built: Built, folder: Path, rtx: bool = False, plugins: Path | None = None) -> tuple[Any, FakeTensorRT]:
    """The session of the contract's profiles, and the module it was opened with."""
    (folder / "rank0.engine").write_bytes(b"engine")
    api, role = api_of(built, rtx), built.graph.role
    wanted = profiles(role, LIMITS)
    file = folder / "rank0.engine"
    return open_engine_session(api, file, built.graph, wanted, LIMITS.capacity, plugins, device="cpu"), api.trt


def faults(built: Built, plugins: bool = False) -> list[str]:
    api = api_of(built)
    wanted = profiles(built.graph.role, LIMITS)
    return list(engine_io_faults(api, FakeEngine(built, False), built.graph, wanted, plugins=plugins))


# -- sessions


@pytest.mark.parametrize("role", ROLES)
def test_a_session_computes_what_its_engine_does(tmp_path: Path, role: Role, rtx: bool) -> None:
    session, trt = opened(built_of(role), tmp_path, rtx)
    reference = small_pair().graph(role).reference()
    inputs = random_inputs(session.graph, 0, 0, VOCAB, 2, 3)
    names = [spec.name for spec in session.graph.outputs]
    caches = session.new_cache(2, LIMITS.capacity), reference.new_cache(2, LIMITS.capacity)
    found, expected = session.run(inputs, names, caches[0]), reference.run(inputs, names, caches[1])
    for name in names:
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected[name]))
    for ours, theirs in zip(caches[0].buffers, caches[1].buffers, strict=True):
        assert torch.equal(ours, theirs)
    assert session.whole_steps is False  # on a CPU
    assert trt.calls == ["deserialize_cuda_engine"]


def test_contexts_have_a_profile_each_and_share_their_memory(tmp_path: Path, rtx: bool) -> None:
    session, trt = opened(built_of("target"), tmp_path, rtx)
    (engine,) = trt.engines
    another = session._told[1].execution.another()
    assert [context._execution.profile.name for context in engine.contexts] == ["decode", "prefill", "prefill"]  # type: ignore[union-attr]
    assert another.profile == session._told[1].execution.profile
    memories = {context.memory for context in engine.contexts}
    assert len(memories) == 1
    assert memories.pop()[1] == max(FakeEngine.memory_sizes)  # type: ignore[index]


@pytest.mark.parametrize(("streamable", "capturable"), [(0, True), (1000, False)])
def test_weights_that_are_streamed(tmp_path: Path, rtx: bool, streamable: int, capturable: bool) -> None:
    """The budget is settled before contexts are made; passes that bring weights cannot be captured."""
    built = built_of("target")
    built.streamable = streamable
    session, _ = opened(built, tmp_path, rtx)
    assert built.budget == streamable // 2
    assert session._told[0].execution.capturable(0) is capturable


def test_rtx_says_whether_it_can_be_captured(tmp_path: Path) -> None:
    built = built_of("target")
    built.refuses.add("is_stream_capturable")
    assert not opened(built, tmp_path, rtx=True)[0]._told[0].execution.capturable(0)
    assert opened(built, tmp_path, rtx=False)[0]._told[0].execution.capturable(0)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("create_execution_context", "cannot make an execution context"),
        ("set_optimization_profile_async", r"cannot set optimisation profile 0 \(decode\)"),
        ("set_tensor_address", "refuses address 0x[0-9a-f]+ of input_ids"),
        ("set_input_shape", r"refuses shape \[2, 3\] of input_ids"),
        ("execute_async_v3", "cannot run a pass"),
    ],
)
def test_what_tensorrt_refuses(tmp_path: Path, rtx: bool, method: str, message: str) -> None:
    built = built_of("target")
    built.refuses.add(method)
    name = "TensorRT-RTX 1.7.1.116" if rtx else "TensorRT 10.16.0.72"
    with pytest.raises(BackendError, match=f"rank0.engine: {name} {message}: no reason was given"):
        run_once(opened(built, tmp_path, rtx)[0])


def run_once(session: Any) -> None:
    session.run(random_inputs(session.graph, 0, 0, VOCAB, 2, 3), [], session.new_cache(2, LIMITS.capacity))


# -- files


def test_an_engine_of_another_version(tmp_path: Path) -> None:
    built = built_of("target")
    built.readable = False
    with pytest.raises(BackendError, match=r"TensorRT 10\S+ cannot run this engine: Version tag does not match\. B"):
        opened(built, tmp_path)


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (1, "it was built with another version"),
        (6, "it was not compiled for this GPU's compute capability, the GPU driver is too old"),
        (0, "no reason was given"),
    ],
)
def test_rtx_says_why_before_it_reads(tmp_path: Path, bits: int, message: str) -> None:
    built = built_of("target")
    built.invalid = bits
    api = api_of(built, rtx=True)
    file = tmp_path / "rank0.engine"
    file.write_bytes(b"engine")
    with pytest.raises(BackendError, match=f"TensorRT-RTX 1.7.1.116 cannot run this engine: {message}"):
        open_engine_session(api, file, built.graph, built.profiles, LIMITS.capacity, None, device="cpu")
    assert api.trt.calls == []


@pytest.mark.parametrize("content", [None, b""], ids=["missing", "empty"])
def test_no_engine_at_all(tmp_path: Path, content: bytes | None) -> None:
    built, file = built_of("target"), tmp_path / "rank0.engine"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BundleError, match=r"rank0\.engine: cannot be read: .*\. Build the bundle again"):
        open_engine_session(api_of(built), file, built.graph, built.profiles, LIMITS.capacity, None, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    built = built_of("target")
    with pytest.raises(BackendError, match="TensorRT engines run on a CUDA GPU, and torch sees none here"):
        open_engine_session(api_of(built), tmp_path / "x", built.graph, built.profiles, LIMITS.capacity, None)


def test_all_faults_of_an_engine_at_once(tmp_path: Path) -> None:
    built = built_of("target")
    built.tensors["logits"] = replace(built.tensors["logits"], dtype="float16")
    built.profiles = built.profiles[:1]
    with pytest.raises(BundleError, match="is not the engine of this bundle's target graph") as error:
        opened(built, tmp_path)
    assert "logits is float16 instead of float32" in str(error.value)
    assert "has 1 optimisation profiles instead of 2" in str(error.value)


# -- plugins


def plugin(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def test_plugins_are_loaded_first_and_once(tmp_path: Path) -> None:
    """A registry refuses a second library with the same creators; each graph of a bundle brings it, and each bundle."""
    library, copy = plugin(tmp_path, "a.so", b"1"), plugin(tmp_path, "b.so", b"1")
    other = plugin(tmp_path, "c.so", b"2")
    built = built_of("target")
    api = api_of(built)
    file = tmp_path / "rank0.engine"
    file.write_bytes(b"engine")
    for name in (library, library, copy):
        open_engine_session(api, file, built.graph, built.profiles, LIMITS.capacity, name, device="cpu")
    assert api.trt.calls == ["load_library", *["deserialize_cuda_engine"] * 3]
    with pytest.raises(BackendError, match=r"c\.so: this process has another plugin library loaded"):
        api.load_plugins(other)


def test_plugins_that_cannot_be_loaded(tmp_path: Path) -> None:
    built, bad = built_of("target"), plugin(tmp_path, "bad.so", b"1")
    for api, message in (
        (api_of(built), "cannot load the plugin library"), (api_of(built, rtx=True), "takes no plugins"),
    ):  # fmt: skip
        with pytest.raises(BackendError, match=message):
            api.load_plugins(bad)
    with pytest.raises(BackendError, match=r"none\.so: cannot be read"):
        api_of(built).load_plugins(tmp_path / "none.so")


# -- the contract


@pytest.mark.parametrize("role", ROLES)
def test_an_engine_of_the_contract_has_no_faults(role: Role) -> None:
    built = built_of(role)
    assert faults(built) == []
    for plugins in (False, True):
        built.aliases = None  # a version that does not tell
        assert faults(built, plugins) == []


def bend(built: Built, name: str, **changes: Any) -> None:
    built.tensors[name] = replace(built.tensors[name], **changes)


def rename(built: Built, old: str, new: str) -> None:
    built.tensors[new], built.modes[new] = built.tensors.pop(old), built.modes.pop(old)


def narrow(built: Built, index: int, dim: str, **changes: int) -> None:
    profile = built.profiles[index]
    changed = {**profile.dims, dim: replace(profile.dims[dim], **changes)}
    built.profiles[index] = replace(profile, dims=changed)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: bend(b, "context_len", dtype="float32"), ["context_len is float32 instead of int64"]),
        (lambda b: bend(b, "past_key_1", dtype="float16"), ["past_key_1 is float16 instead of float32"]),
        (
            lambda b: bend(b, "logits", shape=("B", "R", 7)),
            ["logits has shape [-1, -1, 7] instead of [B, R, 320]"],
        ),
        (lambda b: bend(b, "context_len", shape=(3,)), ["context_len has shape [3] instead of [B]"]),
        (
            lambda b: bend(b, "token_ids", shape=("B", "R", "R")),
            ["token_ids has shape [-1, -1, -1] instead of [B, R]"],
        ),
        (
            lambda b: rename(b, "visibility", "mask"),
            ["has input mask, which the graph does not have", "has no input visibility"],
        ),
        (lambda b: b.modes.update(token_ids="INPUT"), ["has no output token_ids"]),
        (
            lambda b: b.on_host.add("context_len"),
            ["context_len is read from or written to host memory instead of the GPU's"],
        ),
        (
            lambda b: narrow(b, 1, "Q", opt=3),
            [
                "profile prefill: input_ids has opt [1, 3] instead of [1, 12]",
                "profile prefill: position_ids has opt [1, 3] instead of [1, 12]",
                "profile prefill: visibility has opt [1, 3, 3] instead of [1, 12, 12]",
            ],
        ),
        (
            lambda b: narrow(b, 0, "R", max=2),
            ["profile decode: logit_rows has max [2, 2] instead of [2, 4]"],
        ),
        (
            lambda b: b.aliases.update(present_value_0="past_key_0"),
            ["present_value_0 is past_key_0 instead of past_value_0: the cache would not be updated in place"],
        ),
    ],
)
def test_faults_of_an_engine(change: Any, expected: list[str]) -> None:
    built = built_of("target")
    change(built)
    assert faults(built) == expected


def test_a_cache_that_is_not_in_place() -> None:
    """Where TensorRT can tell, and its own layers update the caches; of plugins' outputs it may say nothing."""
    built = built_of("target")
    assert built.aliases is not None
    del built.aliases["present_key_0"]
    (fault,) = faults(built)
    assert fault == "present_key_0 is memory of its own instead of past_key_0: the cache would not be updated in place"
    assert faults(built, plugins=True) == []


def test_a_dimension_with_one_size_may_be_fixed() -> None:
    """With a batch of one at most, and only then."""
    built = built_of("target")
    for index in (0, 1):
        narrow(built, index, "B", opt=1, max=1)
    bend(built, "context_len", shape=(1,))
    graph = built.graph
    check = list(engine_io_faults(api_of(built), FakeEngine(built, False), graph, built.profiles, plugins=False))
    assert check == []
    assert "context_len has shape [1] instead of [B]" in faults(built)


@pytest.mark.parametrize(
    ("heads", "head_dim", "capacity", "batch", "multiple"),
    [(1, 32, 41, 2, 4), (1, 32, 44, 2, None), (1, 32, 41, 1, None), (8, 128, 41, 4, None), (1, 2, 64, 2, 64)],
)
def test_rows_begin_where_addresses_may(
    heads: int, head_dim: int, capacity: int, batch: int, multiple: int | None
) -> None:
    """In float16: rows of 64 bytes a slot are 256 bytes apart only every 4 slots."""
    graph = replace(built_of("target").graph, dtype="float16", num_kv_heads=heads, head_dim=head_dim)
    one = DimRange(min=1, opt=1, max=batch)
    given = [replace(profile, dims={**profile.dims, "B": one}) for profile in profiles("target", LIMITS)]
    found = list(row_faults(graph, given, capacity))
    rows = [row * heads * capacity * head_dim * 2 for row in range(batch)]
    assert bool(found) == any(address % 256 for address in rows)
    if multiple is not None and found:
        assert found[0].endswith(f"must be a multiple of {multiple}")
        assert heads * head_dim * 2 * multiple % 256 == 0


# -- the real module


METHOD = re.compile(r"(\w+)\(self: [\w.]+(?:, )?(.*)\) -> ")


@pytest.mark.parametrize("kind", [FakeContext, FakeRtxContext, FakeEngine])
def test_the_stand_in_has_the_signatures_of_rtx(kind: type) -> None:
    """Names and parameters of every method that the real class has overloads of, by its docstring."""
    trt = tensorrt_rtx()
    real = trt.ICudaEngine if kind is FakeEngine else trt.IExecutionContext
    checked = 0
    for name, own in inspect.getmembers(kind):
        if name.startswith("_") or name == "memory_sizes":
            continue
        assert hasattr(real, name), name
        if not callable(own):
            continue
        overloads = [m.group(2) for m in METHOD.finditer(getattr(real, name).__doc__) if m.group(1) == name]
        counts = [len(re.findall(r"(\w+): ", text)) for text in overloads]
        assert len(inspect.signature(own).parameters) - 1 in counts, (name, overloads)
        checked += 1
    assert checked >= 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_real_rtx_refuses_in_plain_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no engine, and any engine where there is no GPU."""
    trt = tensorrt_rtx()
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", trt)
    api = tensorrt_api.load("tensorrt-rtx")
    built, file = built_of("target"), tmp_path / "rank0.engine"
    file.write_bytes(b"no engine" * 100)
    with pytest.raises(BackendError, match=r"TensorRT-RTX [\d.]+ cannot run this engine: .*CUDA driver|damaged"):
        open_engine_session(api, file, built.graph, built.profiles, LIMITS.capacity, None, device="cpu")
