"""Real engines: TensorRT-RTX compiles the trained tiny models of all three systems ahead of time, without a GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rtx import tensorrt_rtx

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.engine_builder import optimization_profile
from dflash_trt.bundle import BundleInfo, read_info
from dflash_trt.config import BuildConfig
from dflash_trt.pipeline import BuildResult, build

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[2] / "examples" / "tiny"
CAPABILITIES = (86, 120)
BATCH, SEQ_LEN, CHUNK = 2, 256, 64
VOCABULARY, HIDDEN, TAPS, HEADS, HEAD_DIM, BLOCK = 4096, 192, 4, 2, 32, 8
TREE = 30  # 8 trunk tokens, and 7 + 6 + 5 + 4 behind the four shortest prefixes, less what they share
TREES = {"d2sd": TREE, "dflare": BLOCK}
LAYERS = {"target": 6, "drafter": 2, "vp_drafter": 2, "dflare": 3}


@dataclass(frozen=True)
class Built:
    """One build: its result, and the folder of its stages' graphs."""

    system: str
    dtype: str
    result: BuildResult
    stages: Path

    @property
    def info(self) -> BundleInfo:
        return self.result.info


@pytest.fixture(scope="module", params=[(s, d) for s in ("d2sd", "dflare") for d in ("bfloat16", "float16")])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    tensorrt_rtx()
    system, dtype = request.param
    folder = tmp_path_factory.mktemp(f"{system}-{dtype}")
    config = BuildConfig(
        output=folder / "bundle",
        target=TINY / "target",
        drafter=TINY / ("dflash" if system == "d2sd" else "dflare"),
        vp_drafter=TINY / "vp_drafter" if system == "d2sd" else None,
        backend="tensorrt-rtx",
        dtype=dtype,
        max_batch_size=BATCH,
        max_seq_len=SEQ_LEN,
        prefill_chunk=CHUNK,
        compute_capability=CAPABILITIES,
        dump_ir=folder / "stages",
    )
    return Built(system, dtype, build(config), folder / "stages")


def test_the_bundle_says_what_was_built(built: Built) -> None:
    info = read_info(built.result.output)
    assert info.engines is not None
    assert (info.backend, info.precision, info.compute_capability) == ("tensorrt-rtx", built.dtype, "8.6,12.0")
    assert info.engines.version == tensorrt_rtx().__version__
    assert (info.engines.name, info.engines.stage, info.engines.bound) == ("TensorRT-RTX", "built", False)
    for role in info.roles:
        engine = built.result.output / role / "rank0.engine"
        assert info.graphs[role].model == f"{role}/rank0.engine"
        assert engine.stat().st_size == info.engines.facts[role].bytes > 2 * info.graphs[role].parameters
        assert not (built.result.output / role / "model.onnx").exists()


def test_the_report_says_what_was_not_run_and_why(built: Built) -> None:
    report = json.loads((built.result.output / "report.json").read_text())
    status = {check["name"]: check["status"] for check in report["checks"]}
    roles = built.info.roles
    passed = {f"{kind}: {role}" for kind in ("preflight", "network") for role in roles}
    assert {name for name, found in status.items() if found == "passed"} == passed
    not_run = {f"{kind}: {role}" for kind in ("engine", "numbers") for role in roles} | {"losslessness", "acceptance"}
    assert {name for name, found in status.items() if found == "not run"} == not_run
    assert all("no CUDA GPU" in check["reason"] for check in report["checks"] if check["status"] == "not run")
    assert report["counts"] == {"passed": len(passed), "failed": 0, "not run": len(not_run)}
    layers = next(check["measured"] for check in report["checks"] if check["name"] == "network: target")
    assert layers[built.dtype] > layers["float32"] > 0


def expected(role: str, system: str, dtype: str) -> tuple[list[tuple], list[tuple]]:
    """Inputs and outputs as (name, dtype, shape): what users of the engines build on, written out."""
    capacity = built_capacity(system)
    cache = (-1, HEADS, capacity, HEAD_DIM)
    layers = range(LAYERS["dflare" if (role, system) == ("drafter", "dflare") else role])
    past = [(f"past_{kind}_{i}", dtype, cache) for i in layers for kind in ("key", "value")]
    present = [(name.replace("past", "present"), dtype, cache) for name, _, _ in past]
    if role == "target":
        inputs = [
            ("input_ids", "int64", (-1, -1)),
            ("position_ids", "int64", (-1, -1)),
            ("visibility", "bool", (-1, -1, -1)),
            ("context_len", "int64", (-1,)),
            ("logit_rows", "int64", (-1, -1)),
        ]
        outputs = [
            ("logits", "float32", (-1, -1, VOCABULARY)),
            ("token_ids", "int64", (-1, -1)),
            ("context_features", dtype, (-1, -1, taps(system) * HIDDEN)),
        ]
    else:
        inputs = [
            ("context_features", dtype, (-1, -1, taps(system) * HIDDEN)),
            ("feature_len", "int64", (-1,)),
            ("context_len", "int64", (-1,)),
            ("block_ids", "int64", (-1, -1)),
            ("block_position_ids", "int64", (-1, -1)),
            ("visibility", "bool", (-1, -1, -1)),
        ]
        outputs = [
            ("draft_ids", "int64", (-1, -1)),
            ("confidence", "float32", (-1, -1)),
            ("logits", "float32", (-1, -1, VOCABULARY)),
        ]
    return inputs + past, outputs + present


def taps(system: str) -> int:
    return TAPS + (system == "dflare")


def built_capacity(system: str) -> int:
    """Committed tokens, and what a step may write behind them, pending features and blocks: in whole 64s."""
    step = {"d2sd": 4 * BLOCK + 4 * BLOCK, "dflare": BLOCK + BLOCK}[system]
    assert step <= 64
    return SEQ_LEN + 64


def parsed(api: tensorrt_api.TensorRT, model: Path) -> tuple[Any, list[Any]]:
    """The network that TensorRT-RTX's own parser makes, and what has to live as long."""
    logger, messages = api.logger()
    builder = api.trt.Builder(logger)
    network = api.network(builder)
    parser = api.trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(model)), messages.errors
    return network, [logger, builder, parser]


def test_networks_have_the_contract_s_inputs_outputs_and_aliases(built: Built) -> None:
    tensorrt_rtx()
    api = tensorrt_api.load("tensorrt-rtx")
    for role in built.info.roles:
        network, _kept = parsed(api, built.stages / role / "2-lowered.onnx")
        found = [
            [(t.name, api.dtype(t.dtype), tuple(t.shape)) for t in (get(i) for i in range(count))]
            for get, count in (
                (network.get_input, network.num_inputs), (network.get_output, network.num_outputs),
            )
        ]  # fmt: skip
        assert found == list(expected(role, built.system, built.dtype))
        updates = [
            layer
            for layer in (network.get_layer(index) for index in range(network.num_layers))
            if layer.type == api.trt.LayerType.KV_CACHE_UPDATE
        ]
        aliases = {layer.get_output(0).name: layer.get_input(0).name for layer in updates}
        caches = [name for name, _, _ in found[0] if name.startswith("past_")]
        assert aliases == {name.replace("past", "present"): name for name in caches}


def test_engines_have_two_profiles_from_the_limits(built: Built) -> None:
    tensorrt_rtx()
    api = tensorrt_api.load("tensorrt-rtx")
    builder = api.trt.Builder(api.logger()[0])
    engines = built.info.engines
    assert engines is not None
    tree, capacity = TREES[built.system], built_capacity(built.system)

    def read_back(role: str, index: int, name: str) -> list[tuple[int, ...]]:
        made = optimization_profile(builder, built.info.graphs[role].spec, engines.profiles[role][index])
        return [tuple(shape) for shape in made.get_shape(name)]

    assert all([p.name for p in given] == ["decode", "prefill"] for given in engines.profiles.values())
    assert read_back("target", 0, "input_ids") == [(1, 1), (BATCH, tree), (BATCH, tree)]
    assert read_back("target", 0, "visibility") == [(1, 1, 1), (BATCH, tree, tree), (BATCH, tree, tree)]
    assert read_back("target", 0, "logit_rows") == [(1, 1), (BATCH, tree), (BATCH, tree)]
    assert read_back("target", 1, "input_ids") == [(1, 1), (1, CHUNK), (1, CHUNK)]
    assert read_back("target", 1, "logit_rows") == [(1, 1), (1, 1), (1, 1)]
    cache = [(rows, HEADS, capacity, HEAD_DIM) for rows in (1, BATCH, BATCH)]
    assert read_back("target", 0, "past_key_0") == cache
    assert read_back("drafter", 0, "block_ids") == [(1, 1), (BATCH, BLOCK), (BATCH, BLOCK)]
    width = taps(built.system) * HIDDEN
    assert read_back("drafter", 0, "context_features") == [(1, 1, width), (BATCH, BLOCK, width), (BATCH, BLOCK, width)]
    assert read_back("drafter", 1, "context_features") == [(1, 1, width), (1, CHUNK, width), (1, CHUNK, width)]
    assert read_back("drafter", 1, "block_ids") == [(1, 1), (1, 1), (1, 1)]
    if built.system == "d2sd":
        rows = 4 * BLOCK
        assert read_back("vp_drafter", 0, "block_ids") == [(1, 1), (BATCH, rows), (BATCH, rows)]
        assert read_back("vp_drafter", 0, "context_features")[2] == (BATCH, 4 * BLOCK, width)


def test_it_is_refused_where_no_gpu_is(built: Built) -> None:
    from dflash_trt import load
    from dflash_trt.errors import BundleError

    with pytest.raises(BundleError, match=r"built for compute capability 8\.6, 12\.0, and there is no CUDA GPU here"):
        load(built.result.output)
