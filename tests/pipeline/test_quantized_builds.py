"""Bundles of quantised weights: verified, lossless, and what is wrong with them is found."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import dflash_trt
from dflash_trt.bundle import BundleInfo, read_info, write_config
from dflash_trt.config import BuildConfig
from dflash_trt.errors import UsageError
from dflash_trt.export.quantization import QUANTIZED, read_quantized
from dflash_trt.loading import open_info, reference_session
from dflash_trt.runtime.engine import Engine

ROOT = Path(__file__).parents[2]
HELDOUT = (ROOT / "examples" / "tiny" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
PROMPTS = [json.loads(line)["prompt"] for line in HELDOUT]
SAMPLING = {"greedy": {}, "sampled": {"temperature": 0.8, "seed": 42}}
BUNDLES = [("d2sd", "int8"), ("d2sd", "int4"), ("dflare", "int4")]


@pytest.fixture(scope="module", params=BUNDLES, ids="-".join)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BundleInfo]:
    """A bundle of the trained pair, built with its verification."""
    system, weights = request.param
    folder = tmp_path_factory.mktemp("quantized") / "bundle"
    config = ROOT / "build_configs" / f"tiny-{system}.yaml"
    result = dflash_trt.build(config=config, output=folder, weights=weights, max_seq_len=256)
    assert result.report is not None
    assert {check.status for check in result.report.checks} == {"passed"}
    return folder, result.info


@pytest.fixture(scope="module")
def engine(built: tuple[Path, BundleInfo]) -> Engine:
    return dflash_trt.load(built[0], threads=1)


def test_it_says_what_it_is(built: tuple[Path, BundleInfo], run_cli: Callable) -> None:
    folder, info = built
    assert read_info(folder).weights == info.weights in ("int8", "int4")
    described = json.loads(run_cli("inspect", folder, "--json").out)
    assert (described["weights"], described["precision"]) == (info.weights, "float32")
    operators = json.loads(run_cli("inspect", folder / "drafter" / "model.onnx", "--json").out)["operators"]
    assert operators["com.microsoft::MatMulNBits"] >= 2 * 7 + 2


def test_its_report_tells_quality_and_bytes(built: tuple[Path, BundleInfo]) -> None:
    folder, info = built
    report = json.loads((folder / "report.json").read_text())
    assert report["weights"] == info.weights
    checks = {check["name"]: check["measured"] for check in report["checks"]}
    quality = checks["quality: target"]
    assert quality.keys() == {"positions", "greedy_agreement", "mean_kl_divergence", "perplexity_ratio"}
    assert quality["positions"] > 300
    # seen: 0.990, 0.0002, 1.000 with int8; 0.905, 0.017, 1.01 with int4
    agreement, divergence, ratio = {"int8": (0.97, 1e-3, 1.01), "int4": (0.85, 5e-2, 1.1)}[info.weights]
    assert agreement < quality["greedy_agreement"] < 1
    assert 0 < quality["mean_kl_divergence"] < divergence
    assert 1 / ratio < quality["perplexity_ratio"] < ratio
    for role in info.roles:
        weights = checks[f"weights: {role}"]
        # a block of 32 floats against its integers and one scale
        ratio = {"int8": (32 + 4) / 128, "int4": (16 + 4) / 128}[info.weights]
        assert weights["bytes_per_pass"] == pytest.approx(ratio * weights["float_bytes_per_pass"])
    assert checks["rows: target"]["unequal_rows"] == 0


@pytest.mark.parametrize("sampling", SAMPLING)
def test_speculation_changes_no_token(engine: Engine, sampling: str) -> None:
    drafted = [engine.generate(prompt, max_tokens=40, **SAMPLING[sampling]) for prompt in PROMPTS[::6]]
    plain = [
        engine.generate(prompt, max_tokens=40, speculation=False, **SAMPLING[sampling]) for prompt in PROMPTS[::6]
    ]
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    statistics = [output.statistics for output in drafted]
    assert sum(one.accepted_drafts for one in statistics) > 0.3 * sum(one.steps for one in statistics)
    batched = engine.generate(PROMPTS[::6][: engine.limits.max_batch_size], max_tokens=40, **SAMPLING[sampling])
    for alone, row in zip(drafted, batched, strict=False):
        assert alone.token_ids == row.token_ids


def test_threads_change_no_token(built: tuple[Path, BundleInfo], engine: Engine) -> None:
    other = dflash_trt.load(built[0], threads=2)
    for prompt in PROMPTS[:3]:
        found, wanted = (one.generate(prompt, max_tokens=40).token_ids for one in (other, engine))
        assert found == wanted


def test_the_head_lies_there_once(built: tuple[Path, BundleInfo]) -> None:
    folder, info = built
    (inode,) = {
        os.stat(folder / role / f"{'' if role == 'target' else 'target.'}{QUANTIZED}").st_ino for role in info.roles
    }
    assert inode
    for role in info.roles:
        assert not any(QUANTIZED in name for name in info.graphs[role].weights)


def test_the_reference_is_of_either_weights(built: tuple[Path, BundleInfo]) -> None:
    folder, info = built
    for role in info.roles:
        quantised, floats = (reference_session(folder, info, role, weights=w).module for w in (None, "float"))
        layer = "model.layers.0.mlp.up_proj" if role == "target" else "layers.0.mlp.up_proj"
        for name in (layer, "lm_head" if role == "target" else "target.lm_head"):
            one, other = (module.get_submodule(name).weight.numpy() for module in (quantised, floats))
            assert 0 < np.abs(one - other).max() < 0.2 * np.abs(other).max()
        embedding = "model.embed_tokens" if role == "target" else "target.model.embed_tokens"
        one, other = (module.get_submodule(embedding).weight.numpy() for module in (quantised, floats))
        np.testing.assert_array_equal(one, other)


# --- what is wrong is found ---


@pytest.fixture(scope="module")
def small(pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair's, which drafts nothing of worth: what fails here besides acceptance is what a test changed."""
    folder = tmp_path_factory.mktemp("small") / "bundle"
    dflash_trt.build(**pair._asdict(), output=folder, weights="int8", max_seq_len=96, verify=False)
    return folder


def failures(run_cli: Callable, folder: Path, code: int = 1) -> dict[str, str]:
    outcome = run_cli("verify", folder, "--json")
    assert outcome.code == code, outcome.err
    return {c["name"]: c["reason"] for c in json.loads(outcome.out)["checks"] if c["status"] == "failed"}


def changed(small: Path, tmp_path: Path, change: Callable[[Path], None]) -> Path:
    """A copy that is sealed again after a change."""
    folder = Path(shutil.copytree(small, tmp_path / "changed"))
    change(folder)
    write_config(folder, read_info(folder))
    return folder


def test_nothing_is_wrong_with_it(small: Path, run_cli: Callable) -> None:
    assert failures(run_cli, small).keys() <= {"acceptance"}


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("factor", [2.0, 1.1, -1.0, 0.0, np.nan])
def test_a_wrong_scale_is_found(small: Path, tmp_path: Path, run_cli: Callable, role: str, factor: float) -> None:
    def change(folder: Path) -> None:
        entry = read_quantized(folder / role / QUANTIZED)[f"{prefix}layers.1.mlp.up_proj.weight.scales"]
        with entry.file.open("r+b") as file:
            file.seek(entry.offset + 4 * 3)
            scale = np.frombuffer(file.read(4), np.float32) * np.float32(factor)
            file.seek(entry.offset + 4 * 3)
            file.write(scale.tobytes())

    prefix = "model." if role == "target" else ""
    found = failures(run_cli, changed(small, tmp_path, change))
    assert f"{prefix}layers.1.mlp.up_proj.weight, row 3, block 0" in found[f"weights: {role}"]


def test_a_wrong_byte_is_found(small: Path, tmp_path: Path, run_cli: Callable) -> None:
    def change(folder: Path) -> None:
        entry = read_quantized(folder / "target" / QUANTIZED)["lm_head.weight.quantized"]
        with entry.file.open("r+b") as file:
            file.seek(entry.offset + 5)
            byte = file.read(1)[0]
            file.seek(entry.offset + 5)
            file.write(bytes([byte ^ 64]))

    assert "lm_head.weight, row 0, block 0" in failures(run_cli, changed(small, tmp_path, change))["weights: target"]


@pytest.mark.parametrize("parts", [(".quantized", ".scales"), (".scales",)])
def test_a_swapped_tensor_is_found(small: Path, tmp_path: Path, run_cli: Callable, parts: tuple[str, ...]) -> None:
    """The weights are right, the graph is not."""

    def change(folder: Path) -> None:
        file = folder / "target" / "model.onnx"
        model = ir.load(file)
        for part in parts:
            names = [f"model.layers.{layer}.self_attn.v_proj.weight{part}" for layer in (0, 2)]
            one, other = (model.graph.initializers[name] for name in names)
            one.const_value, other.const_value = (
                ir.ExternalTensor(t.location, t.offset, t.length, t.dtype, shape=t.shape, name=name)
                for name, t in zip(names, (other.const_value, one.const_value), strict=True)
            )
        ir.save(model, file)

    found = failures(run_cli, changed(small, tmp_path, change))
    assert {"numbers: target.logits", "numbers: target.present_key_*, present_value_*"} <= found.keys()
    assert "weights: target" not in found


@pytest.mark.parametrize("backend", ["torch", "tensorrt", "tensorrt-rtx"])
def test_it_is_for_one_backend(pair, tmp_path: Path, backend: str, run_cli: Callable) -> None:
    outcome = run_cli(
        "build", "--target", pair.target, "--drafter", pair.drafter, "--output", tmp_path / "b",
        "--backend", backend, "--weights", "int4",
    )  # fmt: skip
    assert outcome.code == 2
    wanted = f"--weights: int4 is for --backend onnxruntime, {backend} takes float weights. Leave it out"
    assert wanted in " ".join(outcome.err.split())
    assert not (tmp_path / "b").exists()


def test_floats_are_for_all_of_them(tmp_path: Path) -> None:
    for backend in ("torch", "onnxruntime"):
        BuildConfig(
            target=tmp_path, drafter=tmp_path, output=tmp_path / "b", backend=backend, weights="float"
        ).check_backend()


def test_a_configuration_names_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("target: t\ndrafter: d\noutput: o\nweights: int4\n")
    assert BuildConfig.from_options(file).weights == "int4"
    assert BuildConfig.from_options(file, weights="int8").weights == "int8"
    file.write_text("target: t\ndrafter: d\noutput: o\n")
    assert BuildConfig.from_options(file).weights == "float"
    file.write_text("target: t\ndrafter: d\noutput: o\nweights: int2\n")
    with pytest.raises(UsageError, match=r"int2.*'float', 'int8' or 'int4'"):
        BuildConfig.from_options(file)


def test_config_json_keeps_it(small: Path, tmp_path: Path) -> None:
    info = open_info(small)
    assert info.weights == "int8"
    folder = Path(shutil.copytree(small, tmp_path / "copy"))
    write_config(folder, replace(info, weights="int4"))
    assert read_info(folder).weights == "int4"
