"""The dumped stages of a build, and what it makes of its options."""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx
import pytest
import yaml

import dflash_trt
from dflash_trt.backends.onnxruntime import OrtSession
from dflash_trt.config import BuildConfig
from dflash_trt.errors import RequestError, UsageError
from dflash_trt.loading import open_info

DOMAIN = "dflash_trt"
OPS = {"KVInjection", "StaircaseAttention"}
LAYERS = {"target": 4, "drafter": 2}
# the contract of the graphs, spelled out a second time
INPUTS = {
    "target": ["input_ids", "position_ids", "visibility", "context_len", "logit_rows"],
    "drafter": ["context_features", "feature_len", "context_len", "block_ids", "block_position_ids", "visibility"],
}
OUTPUTS = {
    "target": ["logits", "token_ids", "context_features"],
    "drafter": ["draft_ids", "confidence", "logits"],
}
PROMPTS = ("The quick brown fox jumps over the lazy dog", "x", "def f(a, b):\n    return")


@pytest.fixture(scope="module")
def stages(bundle, dumps) -> dict[str, onnx.ModelProto]:
    """File name -> graph, without weights."""
    return {
        f"{path.parent.name}.{path.name}": onnx.load(path, load_external_data=False) for path in dumps.rglob("*.onnx")
    }


def _nodes(nodes) -> list[onnx.NodeProto]:
    """Nodes, those of subgraphs too."""
    found = []
    for node in nodes:
        found.append(node)
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                found += _nodes(graph.node)
    return found


def test_each_stage_is_dumped_for_both_roles(stages):
    names = [f"{role}.{stage}.onnx" for role in LAYERS for stage in ("0-traced", "1-portable", "2-lowered")]
    assert sorted(stages) == sorted(names)


@pytest.mark.parametrize("role", LAYERS)
@pytest.mark.parametrize("stage", ["0-traced", "1-portable", "2-lowered"])
def test_every_stage_has_the_io_of_the_contract(stages, role, stage):
    graph = stages[f"{role}.{stage}.onnx"].graph
    caches = [f"{kind}_{i}" for i in range(LAYERS[role]) for kind in ("key", "value")]
    assert [value.name for value in graph.input] == INPUTS[role] + [f"past_{cache}" for cache in caches]
    assert [value.name for value in graph.output] == OUTPUTS[role] + [f"present_{cache}" for cache in caches]


@pytest.mark.parametrize("role", LAYERS)
def test_the_portable_graph_calls_the_two_operators_and_has_their_bodies(stages, role):
    traced, portable = stages[f"{role}.0-traced.onnx"], stages[f"{role}.1-portable.onnx"]
    for model in (traced, portable):
        own = [node.op_type for node in _nodes(model.graph.node) if node.domain == DOMAIN]
        assert set(own) == OPS
        assert own.count("StaircaseAttention") == LAYERS[role]
    assert not any(function.domain == DOMAIN for function in traced.functions)
    assert {function.name for function in portable.functions if function.domain == DOMAIN} == OPS
    for function in portable.functions:
        assert all(node.domain in ("", DOMAIN) for node in _nodes(function.node))
    assert {opset.domain: opset.version for opset in portable.opset_import}[DOMAIN] == 1


@pytest.mark.parametrize("role", LAYERS)
def test_the_standard_graph_has_standard_operators_alone(stages, bundle, role):
    model = stages[f"{role}.2-lowered.onnx"]
    assert not model.functions
    assert {opset.domain: opset.version for opset in model.opset_import} == {"": 24}
    assert {node.domain for node in _nodes(model.graph.node)} == {""}
    built = onnx.load(bundle / role / "model.onnx", load_external_data=False)
    assert built.graph.node == model.graph.node


def test_a_dump_holds_no_weights_and_names_the_bundles_files(stages, bundle):
    for name, model in stages.items():
        for tensor in model.graph.initializer:
            places = {entry.key: entry.value for entry in tensor.external_data}
            if places:
                assert (bundle / name.split(".")[0] / places["location"]).is_file()
            else:
                assert tensor.ByteSize() < 128


@pytest.mark.parametrize("stage", ["1-portable", "2-lowered"])
def test_a_dump_opens_where_it_lies(bundle, dumps, stage):
    """Portable graphs run as they are: the weights are linked beside them."""
    info = open_info(bundle)
    for role in LAYERS:
        OrtSession(dumps / role / f"{stage}.onnx", info.graphs[role].spec)


# -- options


def test_a_yaml_file_gives_the_options_and_the_line_wins(pair, tmp_path, run_cli):
    values = {
        "target": os.path.relpath(pair.target, tmp_path),
        "drafter": str(pair.drafter),
        "output": "from_yaml",
        "backend": "torch",
        "max_seq_len": 64,
        "max_batch_size": 3,
        "prefill_chunk": 5,
        "verify": False,
        "expect": {"target": {"hidden_size": 32}, "drafter": {"taps": [0, 2, 3], "block_size": 8}},
    }
    (tmp_path / "build.yaml").write_text(yaml.safe_dump(values))
    code, out, err = run_cli("build", "--config", tmp_path / "build.yaml", "--max-seq-len", 48)
    assert code == 0, err
    assert "from_yaml" in "".join(out.split())
    section = json.loads((tmp_path / "from_yaml" / "config.json").read_text())["dflash_trt"]
    limits = {"max_batch_size": 3, "max_seq_len": 48, "max_input_len": 47, "block_size": 8, "prefill_chunk": 5}
    assert section["limits"] == limits | {"vp_block_size": 0, "branches": 0}


def test_options_and_python_arguments_are_the_same_fields():
    fields = set(BuildConfig.model_fields)
    from dflash_trt.cli.build import command

    assert {parameter.name for parameter in command.params} - {"config"} <= fields
    with pytest.raises(UsageError, match="beams"):
        dflash_trt.build(target="a", drafter="b", output="c", beams=4)


def _engine(pair, output: Path, **options):
    dflash_trt.build(**pair._asdict(), output=output, backend="torch", verify=False, **options)
    return dflash_trt.load(output)


def test_sizes_default_to_what_was_trained(pair, tmp_path):
    limits = _engine(pair, tmp_path / "b").limits
    assert (limits.max_seq_len, limits.max_input_len, limits.block_size) == (512, 511, 8)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_a_prompt_in_chunks_gives_the_tokens_of_one_chunk(pair, tmp_path, settings):
    engines = [_engine(pair, tmp_path / str(chunk), max_seq_len=96, prefill_chunk=chunk) for chunk in (1, 7, 43, 256)]
    assert len(PROMPTS[0]) == 43
    for prompt in (PROMPTS[0], PROMPTS[0] + "!"):
        passes = []
        outputs = []
        for engine in engines:
            result = engine.generate(prompt, max_tokens=16, **settings)
            outputs.append(result.token_ids)
            passes.append(result.statistics.target_passes - result.statistics.steps)
        assert outputs == outputs[:1] * 4
        assert passes == [-(-len(prompt) // chunk) for chunk in (1, 7, 43, 95)]


def test_max_input_len_is_the_longest_prompt(pair, tmp_path):
    engine = _engine(pair, tmp_path / "b", max_seq_len=48, max_input_len=20, prefill_chunk=8)
    assert engine.limits.prefill_chunk == 8
    result = engine.generate("y" * 20, max_tokens=100)
    assert (len(result.token_ids), result.finish_reason) == (28, "length")
    with pytest.raises(RequestError, match=r"21 tokens.*at most 20"):
        engine.generate("y" * 21)


def test_the_smallest_sizes_work(pair, tmp_path):
    engine = _engine(pair, tmp_path / "b", max_seq_len=2, block_size=2)
    assert (engine.limits.max_input_len, engine.limits.prefill_chunk) == (1, 1)
    assert len(engine.generate("a", max_tokens=9).token_ids) == 1


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_a_batch_gives_each_prompt_what_it_gets_alone(bundle, settings):
    engine = dflash_trt.load(bundle, threads=1)
    assert engine.limits.max_batch_size == 2
    together = engine.generate(PROMPTS, max_tokens=24, **settings)  # three prompts, two at once
    for prompt, result in zip(PROMPTS, together, strict=True):
        assert result.token_ids == engine.generate(prompt, max_tokens=24, **settings).token_ids


def test_a_smaller_block_gives_the_same_tokens(pair, torch_bundle, tmp_path):
    expected = dflash_trt.load(torch_bundle).generate(PROMPTS[0], max_tokens=24).token_ids
    engine = _engine(pair, tmp_path / "b", block_size=3, max_seq_len=96)
    result = engine.generate(PROMPTS[0], max_tokens=24)
    assert result.token_ids == expected
    assert result.statistics.proposed_drafts <= 2 * result.statistics.steps
