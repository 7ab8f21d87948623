"""The folder `dflash-trt trtllm export` writes, read back as TensorRT-LLM's sources read it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from makers import REMOVED, make_drafter, make_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import dflash_trt
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.errors import BundleError, DflashError, ExportError, PairError, UsageError
from dflash_trt.output import atomic_output
from dflash_trt.trtllm.export import export

TINY = Path(dflash_trt.__file__).parents[1] / "examples" / "tiny"
PACKAGE = Path(dflash_trt.__file__).parent / "trtllm" / "out_of_tree" / "dflash_trt_dflare"
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "use_sliding_window": True}


def halved(folder: Path) -> Path:
    """The checkpoint in bfloat16."""
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_target(folder)
    return halved(folder)


def drafter(folder: Path, target: Path, taps: list[int] | None = None, **changes) -> Path:
    make_drafter(folder, target, taps or [0, 2, 3], **changes)
    return halved(folder)


@pytest.fixture(scope="module", params=["dflash", "dflare"])
def tiny(request, tmp_path_factory):
    """(system, export) of a pair of the examples, at a path with a space and a quote."""
    folder = tmp_path_factory.mktemp("it's exported") / request.param
    return request.param, export(TINY / "target", TINY / request.param, folder)


def config_of(folder: Path) -> dict:
    return json.loads((folder / "drafter" / "config.json").read_text())


def test_files(tiny):
    system, done = tiny
    expected = {"README.md", "config.json", "llm_api.yaml", "serve.sh", "drafter/config.json"}
    expected |= {"drafter/model.safetensors"}
    if system == "dflare":
        expected |= {f"dflash_trt_dflare/{name}.py" for name in ("__init__", "context", "modeling")}
    assert set(done.files) == expected
    assert {str(path.relative_to(done.folder)) for path in done.folder.rglob("*") if path.is_file()} == expected
    for source in PACKAGE.glob("*.py"):
        if system == "dflare":
            assert (done.folder / "dflash_trt_dflare" / source.name).read_bytes() == source.read_bytes()


def test_options_have_the_names_of_the_schema(tiny):
    system, done = tiny
    options = yaml.safe_load((done.folder / "llm_api.yaml").read_text())
    assert options == {
        "max_batch_size": 8,
        "max_seq_len": 2048,
        "max_num_tokens": 2048,
        "enable_chunked_prefill": False,
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.8},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": 8},
        "speculative_config": {
            "decoding_type": "DFlash",
            "max_draft_len": 7,
            "speculative_model": str(done.folder / "drafter"),
            "mask_token_id": 4095,
            "target_layer_ids": {"dflash": [1, 2, 3, 4], "dflare": [0, 1, 2, 3, 4]}[system],
        },
    }


def test_the_drafter_is_the_same_one_in_other_words(tiny):
    system, done = tiny
    mine, own = read_drafter(done.folder / "drafter"), read_drafter(TINY / system)
    name = {"dflash": "DFlashDraftModel", "dflare": "DFlareDraftModel"}[system]
    assert mine.spec == replace(own.spec, architecture=name)
    assert os.path.samefile(done.folder / "drafter" / "model.safetensors", TINY / system / "model.safetensors")


def test_transformers_reads_what_tensorrt_llm_asks_for(tiny):
    """TensorRT-LLM reads the config with AutoConfig, then looks at these attributes."""
    _, done = tiny
    config = AutoConfig.from_pretrained(done.folder / "drafter")
    assert config.model_type == "qwen3"
    assert config.dflash_config["mask_token_id"] == 4095
    assert config.block_size == 8
    assert config.use_sliding_window is False
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim, config.vocab_size) == (192, 2, 32, 4096)


def test_the_script_hands_trtllm_serve_what_lies_there(tiny, tmp_path):
    system, done = tiny
    stub = tmp_path / "trtllm-serve"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$@"\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": "/before"}
    command = [done.folder / "serve.sh", "--port", "8001"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=True)
    path, model, *arguments = run.stdout.splitlines()
    assert Path(model) == (TINY / "target").resolve()
    expected = ["--config", f"{done.folder}/llm_api.yaml"]
    if system == "dflare":
        expected += ["--custom_module_dirs", f"{done.folder}/dflash_trt_dflare"]
        assert path == f"{done.folder}:/before"
    else:
        assert path == "/before"
    assert arguments == [*expected, "--port", "8001"]


def test_the_readme_says_what_was_not_run(tiny):
    system, done = tiny
    text = (done.folder / "README.md").read_text()
    assert "Nothing here was run with TensorRT-LLM" in text
    assert ("dflash_trt_dflare" in text) == (system == "dflare")
    cache = {"dflash": 2, "dflare": 3}[system] * 2 * 9 * (2048 + 8) * 2 * 32 * 2  # layers, K and V, sequences, ...
    assert done.serving.context_cache_bytes == cache
    assert f"{cache / 2**20:.0f} MiB" in text


def test_limits(target, tmp_path):
    own = drafter(tmp_path / "drafter", target)
    done = export(target, own, tmp_path / "out", max_draft_len=3, max_batch_size=40, max_seq_len=100)
    options = yaml.safe_load((done.folder / "llm_api.yaml").read_text())
    assert options["speculative_config"]["max_draft_len"] == 3
    assert (options["max_batch_size"], options["max_seq_len"], options["max_num_tokens"]) == (40, 100, 160)


def test_long_prompts_come_in_chunks(tmp_path):
    make_target(tmp_path / "target", num_hidden_layers=1, max_position_embeddings=20000)
    own = drafter(tmp_path / "drafter", halved(tmp_path / "target"), [0], layers=1)
    done = export(tmp_path / "target", own, tmp_path / "out", max_seq_len=20000)
    options = yaml.safe_load((done.folder / "llm_api.yaml").read_text())
    assert (options["max_num_tokens"], options["enable_chunked_prefill"]) == (8192, True)


def test_another_dialect_is_said_in_tensorrt_llms_words(target, tmp_path):
    """AngelSpec's: model_type that transformers does not know, fields at the top level; and code that does not come."""
    own = drafter(
        tmp_path / "drafter",
        target,
        kind="dflare",
        architectures=["DFlashDraftModel"],
        model_type="dflash",
        model_arch="dflare",
        num_target_layers=3,
        target_layer_ids=[0, 2, 3],
        mask_token_id=319,
        dflash_config={"mask_token_id": REMOVED, "target_layer_ids": REMOVED},
        auto_map={"AutoModel": "code.Model"},
        dtype="bfloat16",
    )
    done = export(target, own, tmp_path / "out")
    config = config_of(done.folder)
    assert config["architectures"] == ["DFlareDraftModel"]
    assert config["model_type"] == "qwen3"
    assert config["torch_dtype"] == "bfloat16"
    assert config["dflash_config"] == {"mask_token_id": 319, "target_layer_ids": [0, 2, 3]}
    assert not {"auto_map", "model_arch", "target_layer_ids", "mask_token_id", "dtype"} & set(config)


@pytest.mark.parametrize(
    "changes",
    [SLIDING, SLIDING | {"dflash_config": {"use_swa": True, "swa_window_size": 7}, "use_sliding_window": REMOVED}],
)
def test_sliding_layers_are_qwen3s(target, tmp_path, changes):
    done = export(target, drafter(tmp_path / "drafter", target, **changes), tmp_path / "out")
    config = config_of(done.folder)
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 7)
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert set(config["dflash_config"]) == {"mask_token_id", "target_layer_ids"}


def test_shards_and_their_index_come_along(target, tmp_path):
    own = drafter(tmp_path / "drafter", target)
    tensors = load_file(own / "model.safetensors")
    names = sorted(tensors)
    (own / "model.safetensors").unlink()
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, own / file, {"format": "pt"})
    weight_map = {name: file for file, part in shards.items() for name in part}
    (own / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    done = export(target, own, tmp_path / "out")
    assert read_drafter(done.folder / "drafter").spec == read_drafter(own).spec


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"taps": [2, 0, 3]}, "sorts the states"),
        ({"is_causal": True}, "other way round"),
        (SLIDING | {"is_causal": False}, "other way round"),
        ({"dflash_config": {"output_multiplier": 0.5}}, "output_multiplier"),
        ({"dflash_config": {"input_embedding_scale": 2.0}}, "input_embedding_scale"),
        ({"dflash_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
    ],
)
def test_what_tensorrt_llm_would_read_as_something_else(target, tmp_path, changes, words):
    own = drafter(tmp_path / "drafter", target, **changes)
    with pytest.raises(ExportError, match=words) as refused:
        export(target, own, tmp_path / "out")
    assert str(own / "config.json") in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_precisions_that_do_not_go_together(target, tmp_path):
    whole = tmp_path / "whole"
    make_drafter(whole, target, [0, 2, 3])
    with pytest.raises(ExportError, match="float32"):
        export(target, whole, tmp_path / "out")
    file = whole / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ExportError, match=r"float16, but the target's.* bfloat16"):
        export(target, whole, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_draft_len": 8}, PairError, "--max-draft-len and the anchor"),
        ({"max_draft_len": 0}, PairError, "at least 2"),
        ({"max_batch_size": 0}, UsageError, "--max-batch-size: is 0"),
        ({"max_seq_len": 513}, UsageError, "--max-seq-len: is 513, but must be 2 to 512"),
        ({"max_seq_len": 1}, UsageError, "--max-seq-len"),
        ({"vp_drafter": Path("anything")}, UsageError, "--vp-drafter: D2SD needs"),
    ],
)
def test_values_that_cannot_be(target, tmp_path, options, error, words):
    own = drafter(tmp_path / "drafter", target)
    with pytest.raises(error, match=words):
        export(target, own, tmp_path / "out", **options)


def test_only_an_output_of_ours_is_replaced(target, tmp_path):
    own, output = drafter(tmp_path / "drafter", target), tmp_path / "out"
    export(target, own, output)
    with pytest.raises(BundleError, match="--force"):
        export(target, own, output)
    (output / "left.txt").write_text("x")
    export(target, own, output, force=True, max_draft_len=2)
    assert not (output / "left.txt").exists()
    shutil.rmtree(output)
    output.mkdir()
    with pytest.raises(BundleError, match="is not an export"):
        export(target, own, output, force=True)


def test_a_bundle_is_not_replaced_by_an_export_nor_the_other_way(target, torch_bundle, tmp_path):
    own, output = drafter(tmp_path / "drafter", target), tmp_path / "out"
    bundle = shutil.copytree(torch_bundle, tmp_path / "bundle")
    with pytest.raises(BundleError, match="is not an export"):
        export(target, own, bundle, force=True)
    export(target, own, output)
    with pytest.raises(BundleError, match="is not a bundle"), atomic_output(output, force=True):
        pass


def test_an_export_is_no_bundle(tiny):
    from dflash_trt.bundle import read_info

    with pytest.raises(DflashError, match="is not a bundle"):
        read_info(tiny[1].folder)
