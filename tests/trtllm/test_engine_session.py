"""The runner over TensorRT-LLM's Session: what the engine is given at each call, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import stand_ins
import torch
from stand_ins import Engine, Session, install_engine_flow

from dflash_trt.errors import BackendError
from dflash_trt.trtllm import engine_session
from dflash_trt.trtllm.engine_session import EngineTensor, open_role, open_runner

CACHE = (-1, 2, -1, 16)
TENSORS = {
    "input_ids": ("INT64", "INPUT", (-1, -1)),
    "visibility": ("BOOL", "INPUT", (-1, -1, -1)),
    "past_key_0": ("BF16", "INPUT", CACHE),
    "logits": ("FLOAT", "OUTPUT", (-1, -1, 320)),
    "present_key_0": ("BF16", "OUTPUT", CACHE),
}
PAIRS = [("past_key_0", "present_key_0")]


@pytest.fixture
def registry(monkeypatch):
    engine_session.register_plugins.cache_clear()
    monkeypatch.setattr(Session, "ENGINES", {b"engine": Engine(TENSORS), b"foreign": None})
    yield install_engine_flow(monkeypatch)
    engine_session.register_plugins.cache_clear()


def bound(runner) -> dict[str, torch.Tensor]:
    cache = torch.zeros(2, 2, 8, 16, dtype=torch.bfloat16)
    tensors = {
        "input_ids": torch.zeros(2, 4, dtype=torch.int64),
        "visibility": torch.zeros(2, 4, 4, dtype=torch.bool),
        "past_key_0": cache,
        "logits": torch.zeros(2, 4, 320),
        "present_key_0": cache,
    }
    for name, tensor in tensors.items():
        runner.bind(name, tensor)
    return tensors


def test_io_is_the_engines_in_the_contracts_words(registry):
    assert open_runner(b"engine").io() == (
        EngineTensor("input_ids", "int64", (-1, -1), True),
        EngineTensor("visibility", "bool", (-1, -1, -1), True),
        EngineTensor("past_key_0", "bfloat16", CACHE, True),
        EngineTensor("logits", "float32", (-1, -1, 320), False),
        EngineTensor("present_key_0", "bfloat16", CACHE, False),
    )


def test_steps_keep_addresses_and_set_only_shapes_that_change(registry):
    runner = open_runner(b"engine")
    tensors, context = bound(runner), runner._context
    runner.check_in_place(PAIRS)
    for width in (4, 4, 2):
        runner.set_shape("input_ids", [2, width])
        runner.set_shape("visibility", (2, width, width))
        runner.set_shape("past_key_0", tensors["past_key_0"].shape)
        assert runner.execute(stream=11)
    assert context.shape_calls == 5  # three of the first step, two of the third
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert [call[2] for call in context.calls] == [addresses] * 3
    assert addresses["past_key_0"] == addresses["present_key_0"]
    assert [call[0] for call in context.calls] == [11] * 3
    assert [call[1]["input_ids"] for call in context.calls] == [(2, 4), (2, 4), (2, 2)]
    assert runner.shape("input_ids") == (2, 2)


def test_another_profile_is_another_context(registry):
    runner = open_runner(b"engine")
    wide = runner.with_profile(1, stream=3)
    bound(runner), bound(wide)
    wide.set_shape("input_ids", (2, 16))
    assert wide.execute(5)
    assert (runner.profile, wide.profile, wide._context.profile) == (0, 1, 1)
    assert not runner._context.calls
    with pytest.raises(BackendError, match=r"input_ids: shape \(2, 16\) is not in profile 0, which takes \(1, 1\) to"):
        runner.set_shape("input_ids", (2, 16))
    with pytest.raises(BackendError, match=r"profile 2 .* the engine has 2"):
        runner.with_profile(2, 3)


def test_a_copied_cache_is_refused(registry):
    runner = open_runner(b"engine")
    with pytest.raises(BackendError, match="past_key_0: no tensor is bound"):
        runner.check_in_place(PAIRS)
    tensors = bound(runner)
    runner.bind("present_key_0", tensors["past_key_0"].clone())
    with pytest.raises(BackendError, match="present_key_0: is not bound to the memory of past_key_0"):
        runner.check_in_place(PAIRS)
    runner.bind("present_key_0", tensors["past_key_0"][:1])
    with pytest.raises(BackendError, match="present_key_0"):
        runner.check_in_place(PAIRS)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("output_ids", torch.zeros(1), "output_ids: the engine has no such tensor; it has input_ids, visibility"),
        ("input_ids", torch.zeros(1, 1, dtype=torch.int32), "input_ids: a tensor of int32 was bound, .* has int64"),
        ("logits", torch.zeros(320, 2, 1).transpose(0, 2), "logits: .*not contiguous"),
    ],
)
def test_what_does_not_fit_is_not_bound(registry, name, tensor, words):
    with pytest.raises(BackendError, match=words):
        open_runner(b"engine").bind(name, tensor)


def test_nothing_runs_unbound_and_outputs_have_no_shape_to_set(registry):
    runner = open_runner(b"engine")
    runner.bind("input_ids", torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(BackendError, match="visibility, past_key_0, logits, present_key_0: no tensor is bound"):
        runner.execute(0)
    with pytest.raises(BackendError, match="logits: is an output"):
        runner.set_shape("logits", (1, 1, 320))


def test_the_plugin_library_comes_before_the_engine_and_once(registry, monkeypatch, tmp_path):
    library = tmp_path / "libplugins.so"
    seen = []
    read = Session.from_serialized_engine
    monkeypatch.setattr(
        Session, "from_serialized_engine", staticmethod(lambda data: seen.append(list(registry.loaded)) or read(data))
    )
    open_runner(b"engine", library)
    open_runner(b"engine", library)
    assert registry.loaded == [str(library)]
    assert seen == [[str(library)]] * 2
    for _ in range(2):  # a failure is not remembered as done
        with pytest.raises(BackendError, match=r"broken\.so: TensorRT does not load the plugin library"):
            open_runner(b"engine", tmp_path / "broken.so")


def test_an_engine_tensorrt_does_not_read(registry):
    with pytest.raises(BackendError, match="does not read the engine"):
        open_runner(b"foreign")


def test_an_engine_with_streamed_weights_or_strange_elements(registry, monkeypatch):
    Session.ENGINES[b"streamed"] = Engine(TENSORS, streamable_weights_size=1)
    Session.ENGINES[b"strange"] = Engine({"logits": ("FP8", "OUTPUT", (1,))})
    with pytest.raises(BackendError, match="streams its weights"):
        open_runner(b"streamed")
    with pytest.raises(BackendError, match="logits: has elements of FP8"):
        open_runner(b"strange")


def test_a_bundles_engine_is_found_by_its_role(registry, tmp_path: Path):
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "rank0.engine").write_bytes(b"engine")
    assert len(open_role(tmp_path, "drafter").io()) == len(TENSORS)
    with pytest.raises(BackendError, match=r"target/rank0\.engine: there is no such engine"):
        open_role(tmp_path, "target")


def test_without_an_engine_runtime(monkeypatch):
    stand_ins.install_engine_flow(monkeypatch, version="1.3.0")
    with pytest.raises(BackendError, match=r"tensorrt_llm 1\.3\.0 has no engine runtime .*trtllm export"):
        open_runner(b"engine")
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(BackendError, match=r"tensorrt_llm cannot be imported.*1\.2\.1"):
        open_runner(b"engine")
