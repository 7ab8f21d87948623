"""Engines in TensorRT-LLM's Session: they decode as torch does, and what is not as it must be is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_ins
from backends.fake_engine import Built, FakeEngine
from engine_records import LIBRARY, built_record, library_record
from stand_ins import VERSION, Session, TensorRT, install_engine_flow

import dflash_trt
from dflash_trt import loading
from dflash_trt.backends.profiles import profiles
from dflash_trt.bundle import BundleInfo, read_info, write_config
from dflash_trt.errors import BackendError, BundleError
from dflash_trt.runtime import device_step
from dflash_trt.runtime.engine import Engine, Generation
from dflash_trt.trtllm.engine_session import load_engine

EXAMPLES = Path(__file__).parents[2] / "examples" / "tiny"
KERNELS = b"kernels"
OPTIONS: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The torch bundle of a trained system of three graphs (D2SD): its drafts are right often."""
    output = tmp_path_factory.mktemp("reference") / "bundle"
    dflash_trt.build(
        target=EXAMPLES / "target", drafter=EXAMPLES / "dflash", vp_drafter=EXAMPLES / "vp_drafter", branches=2,
        output=output, backend="torch", max_seq_len=96, max_batch_size=2, prefill_chunk=40, verify=False,
    )  # fmt: skip
    return output


@pytest.fixture(scope="module")
def template(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a bundle of the tensorrt backend: a role's name is its engine."""
    folder = Path(shutil.copytree(reference, tmp_path_factory.mktemp("engines") / "bundle"))
    info = read_info(folder)
    (folder / "plugins").mkdir()
    (folder / LIBRARY).write_bytes(KERNELS)
    for role in info.roles:
        (folder / role / "rank0.engine").write_bytes(role.encode())
    graphs = {role: replace(info.graphs[role], model=f"{role}/rank0.engine") for role in info.roles}
    record = built_record(info.limits, info.roles, library_record(KERNELS), version=VERSION)
    write_config(folder, replace(info, backend="tensorrt", graphs=graphs, engines=record, compute_capability="9.0"))
    return folder


@pytest.fixture
def bundle(template: Path, tmp_path: Path) -> Path:
    """A copy, to change."""
    return Path(shutil.copytree(template, tmp_path / "bundle"))


@pytest.fixture
def trt(reference: Path, monkeypatch: pytest.MonkeyPatch) -> TensorRT:
    """TensorRT-LLM 1.2.1 on an H100, over engines that compute what the torch bundle does."""
    found = TensorRT({role.encode(): built for role, built in engines(dflash_trt.load(reference)).items()})
    install_engine_flow(monkeypatch, found)
    monkeypatch.setattr(loading, "gpu_compute_capability", lambda: 90)
    return found


def engines(engine: Engine) -> dict[str, Built]:
    return {
        role: Built(session.module, session.graph, list(profiles(role, engine.limits)))  # type: ignore[attr-defined]
        for role, session in engine.sessions.items()
    }


def prompts(engine: Engine) -> list[list[int]]:
    """Two, of which one takes several passes."""
    lines = (EXAMPLES / "heldout.jsonl").read_text().splitlines()
    encoded = [engine.tokenizer.encode(json.loads(line)["prompt"]) for line in lines[:2]]
    return [ids[:size] for ids, size in zip(encoded, (48, 7), strict=True)]


def outcomes(outputs: list[Generation]) -> list[tuple[list[int], list[int]]]:
    return [(o.token_ids, o.statistics.acceptance_lengths) for o in outputs]


def rewrite(folder: Path, change: Callable[[BundleInfo], Any]) -> None:
    """Records other values, and seals the bundle again."""
    info = read_info(folder)
    write_config(folder, replace(info, **change(info)))


# -- decoding


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 7, "top_p": 0.95}], ids=["greedy", "sampled"])
def test_decodes_are_those_of_torch(
    reference: Path, template: Path, trt: TensorRT, sampling: dict[str, Any]
) -> None:
    """Token for token and step for step, with and without speculation."""
    torch_engine, engine = dflash_trt.load(reference), load_engine(template, device="cpu")
    expected = outcomes(torch_engine.generate(prompts(torch_engine), **OPTIONS, **sampling))
    assert outcomes(engine.generate(prompts(engine), **OPTIONS, **sampling)) == expected
    assert len({length for _, lengths in expected for length in lengths}) > 1
    plain = engine.generate(prompts(engine)[0], speculation=False, **OPTIONS, **sampling)
    assert plain.token_ids == expected[0][0]


def test_whole_steps_are_those_of_torch(
    reference: Path, template: Path, trt: TensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their passes have executions of their own, which are the session's, too."""
    monkeypatch.setattr(
        device_step, "captured", lambda step, device, pool: SimpleNamespace(replay=step, pool=lambda: None)
    )
    engine = load_engine(template, device="cpu")
    engine.device_step = True
    for session in engine.sessions.values():
        session.whole_steps = True
    expected = outcomes(dflash_trt.load(reference).generate(prompts(engine), **OPTIONS))
    assert outcomes(engine.generate(prompts(engine), **OPTIONS)) == expected
    for llm_engine in trt.engines:
        _decode, _prefill, captured = llm_engine.contexts
        assert Session.runs.count(captured) > 5


def test_every_pass_is_the_sessions_with_caches_in_place(template: Path, trt: TensorRT) -> None:
    engine = load_engine(template, device="cpu")
    engine.generate(prompts(engine), **OPTIONS)
    assert len(trt.engines) == 3
    for llm_engine, graph in zip(trt.engines, (s.graph for s in engine.sessions.values()), strict=True):
        ran = [context._execution for context in llm_engine.contexts]
        passes = [own for execution in ran for own in execution.passes]  # type: ignore[union-attr]
        assert len(passes) == sum(context in llm_engine.contexts for context in Session.runs) > 5
        for own in passes:
            addresses = [[own.addresses[spec.name] for spec in specs] for specs in (graph.past(), graph.present())]
            assert addresses[0] == addresses[1]
            assert len(set(addresses[0])) == len(addresses[0])


def test_contexts_have_a_profile_each_and_share_their_memory(template: Path, trt: TensorRT) -> None:
    engine = load_engine(template, device="cpu")
    assert engine.target.whole_steps is False  # on a CPU
    engine.target._told[1].execution.another()  # type: ignore[attr-defined]
    contexts = trt.engines[0].contexts
    assert [context._execution.profile.name for context in contexts] == ["decode", "prefill", "prefill"]  # type: ignore[union-attr]
    assert {context.memory for context in contexts} == {(contexts[0].memory[0], max(FakeEngine.memory_sizes))}  # type: ignore[index]
    (own,) = trt.engines[0].own_contexts  # type: ignore[attr-defined]
    assert own.memory is None


def test_the_plugin_library_comes_before_the_engines_and_once(template: Path, trt: TensorRT) -> None:
    for _ in range(2):
        load_engine(template, device="cpu")
    assert trt.calls == ["load_library", *["deserialize_cuda_engine"] * 6]


def test_an_engine_without_plugins(bundle: Path, trt: TensorRT) -> None:
    """TensorRT tells then whether its own layers update the caches where they are."""
    shutil.rmtree(bundle / "plugins")
    rewrite(bundle, lambda info: {"engines": replace(info.engines, plugins=None, bound=False)})
    load_engine(bundle, device="cpu")
    assert "load_library" not in trt.calls
    aliases = trt.files[b"drafter"].aliases
    assert aliases is not None
    del aliases["present_key_0"]
    with pytest.raises(BundleError, match="present_key_0 is memory of its own instead of past_key_0"):
        load_engine(bundle, device="cpu")


# -- what is refused


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("set_tensor_address", "refuses address 0x[0-9a-f]+ of input_ids"),
        ("set_input_shape", r"refuses shape \[1, \d+\] of input_ids"),
        ("execute_async_v3", "cannot run a pass"),
    ],
)
def test_what_tensorrt_refuses(template: Path, trt: TensorRT, method: str, message: str) -> None:
    trt.files[b"target"].refuses.add(method)
    expected = f"target/rank0.engine: TensorRT {VERSION} {message}: TensorRT-LLM's log says why"
    with pytest.raises(BackendError, match=expected):
        load_engine(template, device="cpu").generate([1, 2, 3], max_tokens=2)


def test_an_engine_tensorrt_does_not_read(template: Path, trt: TensorRT) -> None:
    trt.files[b"drafter"].readable = False
    with pytest.raises(BackendError, match=r"drafter/rank0\.engine: TensorRT \S+ cannot run this engine: TensorRT-LLM"):
        load_engine(template, device="cpu")


def test_another_fault_while_it_reads(template: Path, trt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """An AttributeError that says something else is not taken for an engine that is not read."""
    monkeypatch.delattr(stand_ins.Engine, "create_execution_context")
    monkeypatch.delattr(FakeEngine, "create_execution_context")
    with pytest.raises(AttributeError, match="create_execution_context"):
        load_engine(template, device="cpu")


def test_an_engine_that_streams_its_weights(template: Path, trt: TensorRT) -> None:
    trt.files[b"target"].streamable = 1000
    message = r"target/rank0\.engine: streams its weights, and .* without --weight-streaming"
    with pytest.raises(BackendError, match=message):
        load_engine(template, device="cpu")


def test_an_engine_of_another_graph(template: Path, trt: TensorRT) -> None:
    """All faults at once."""
    built = trt.files[b"target"]
    built.tensors["logits"] = replace(built.tensors["logits"], dtype="float16")
    built.profiles = built.profiles[:1]
    with pytest.raises(BundleError, match="is not the engine of this bundle's target graph") as error:
        load_engine(template, device="cpu")
    assert "logits is float16 instead of float32" in str(error.value)
    assert "has 1 optimisation profiles instead of 2" in str(error.value)


def test_a_cache_row_that_begins_where_no_address_may(bundle: Path, trt: TensorRT) -> None:
    def smallest(info: BundleInfo) -> dict[str, Any]:
        target = info.graphs["target"]
        spec = replace(target.spec, num_kv_heads=1, head_dim=1, dtype="float16")
        return {"graphs": {**info.graphs, "target": replace(target, spec=spec)}}

    rewrite(bundle, smallest)
    with pytest.raises(BundleError, match="a cache row of 192 slots has 384 bytes, and an address must be"):
        load_engine(bundle, device="cpu")


def test_another_version_another_gpu_or_changed_files(
    bundle: Path, trt: TensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of every bundle of engines, before TensorRT-LLM is asked."""
    (bundle / LIBRARY).write_bytes(KERNELS[::-1])
    with pytest.raises(BundleError, match="was changed after the build"):
        load_engine(bundle)
    monkeypatch.setattr(TensorRT, "__version__", "10.15.0.1")
    with pytest.raises(BundleError, match=rf"built with TensorRT {VERSION}, running 10\.15\.0\.1"):
        load_engine(bundle)
    monkeypatch.setattr(TensorRT, "__version__", VERSION)
    monkeypatch.setattr(loading, "gpu_compute_capability", lambda: 80)
    with pytest.raises(BundleError, match=r"built for compute capability 9\.0, this GPU has 8\.0"):
        load_engine(bundle)
    assert trt.calls == []


def test_a_bundle_of_another_backend(reference: Path, trt: TensorRT) -> None:
    with pytest.raises(BackendError, match=r"was built for backend torch, .*--backend tensorrt"):
        load_engine(reference)


def test_without_an_engine_runtime(template: Path, trt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    install_engine_flow(monkeypatch, trt, version="1.3.0")
    with pytest.raises(BackendError, match=r"tensorrt_llm 1\.3\.0 has no engine runtime .*trtllm export"):
        load_engine(template)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(BackendError, match=r"tensorrt_llm cannot be imported.*1\.2\.1"):
        load_engine(template)
