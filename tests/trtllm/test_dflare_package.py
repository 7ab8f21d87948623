"""The exported DFlare package: its mathematics against dflash-trt's own drafter, its hooks against stand-ins.

TensorRT-LLM itself is not run: what the stand-ins say about it was read in its sources.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import stand_ins
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import dflash_trt
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.target import read_target
from dflash_trt.modeling.load import load_drafter
from dflash_trt.trtllm.export import export

TINY = Path(dflash_trt.__file__).parents[1] / "examples" / "tiny"
NAME = "dflash_trt_dflare"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "dflare"
    return export(TINY / "target", TINY / "dflare", folder).folder


def load_context(folder: Path) -> ModuleType:
    """context.py by itself: it needs torch alone."""
    spec = importlib.util.spec_from_file_location("exported_context", folder / NAME / "context.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def context(exported) -> ModuleType:
    return load_context(exported)


@pytest.fixture
def package(exported, monkeypatch):
    """The package imported as TensorRT-LLM does it: the folder above on sys.path, then its name."""
    stand_ins.install_draft_model(monkeypatch)
    monkeypatch.syspath_prepend(exported)
    yield importlib.import_module(NAME).modeling
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        del sys.modules[name]


def draft_config(folder: Path, **changes) -> SimpleNamespace:
    config = json.loads((folder / "drafter" / "config.json").read_text()) | changes
    return SimpleNamespace(pretrained_config=SimpleNamespace(**config))


def model_config(gpus: int = 1) -> SimpleNamespace:
    spec = SimpleNamespace(attention_backend="VANILLA")
    return SimpleNamespace(spec_config=spec, mapping=SimpleNamespace(world_size=gpus))


def float32_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(folder / "drafter" / "model.safetensors").items()}


@pytest.fixture
def served(package, exported):
    model = stand_ins.BUILDERS["DFLASH"](model_config(), draft_config(exported), None, None)
    model.load_weights(weights=float32_weights(exported), weight_mapper="mapper")
    return model


# -- mathematics


def cached(features: torch.Tensor, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What dflash-trt's drafter writes for context features [N, T*H] at positions start, start + 1, ...: for each layer
    keys and values [Hkv, N, head_dim] out of its caches."""
    target, drafter = read_target(TINY / "target"), read_drafter(TINY / "dflare")
    spec, rows, block, capacity = drafter.spec, len(features), 4, 64
    module = load_drafter(spec, drafter.tensors, target.spec, target.tensors, capacity, "float32")
    shape = (1, spec.num_kv_heads, capacity, spec.head_dim)
    caches = [torch.zeros(shape) for _ in range(2 * spec.num_layers)]
    with torch.inference_mode():
        out = module(
            features[None],
            torch.tensor([rows]),
            torch.tensor([start]),
            torch.full((1, block), spec.mask_token_id),
            torch.arange(start + rows, start + rows + block)[None],
            torch.ones(1, block, block, dtype=torch.bool),
            *caches,
        )
    written = [cache[0, :, start : start + rows] for cache in out[3:]]
    return list(zip(written[::2], written[1::2], strict=True))


@pytest.mark.parametrize(("rows", "start"), [(9, 0), (1, 20), (0, 5)])
def test_the_worker_stores_what_dflash_trt_caches(served, rows, start):
    """The calls of DFlashWorker for a prompt and for accepted tokens: project, cast to fc's dtype, keys and values."""
    width = read_drafter(TINY / "dflare").spec.hidden_size
    features = torch.randn(rows, 5 * width, generator=torch.Generator().manual_seed(rows)) * 3
    projected = served.project_target_hidden(features).to(served.fc.weight.dtype)
    keys, values = served.precompute_context_kv(projected, torch.arange(start, start + rows))
    expected = cached(features, start)
    assert keys.shape == values.shape == (rows, len(expected), *expected[0][0].shape[::2])
    for layer, (key, value) in enumerate(expected):
        torch.testing.assert_close(keys[:, layer], key.transpose(0, 1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values[:, layer], value.transpose(0, 1), rtol=1e-5, atol=1e-5)
    keys.mul_(0)  # the worker blanks rows that were not accepted, in place
    values.mul_(0)


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(1, 4),
    taps=st.integers(1, 4),
    hidden=st.sampled_from([8, 24]),
    heads=st.integers(1, 3),
    rows=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_context_against_the_equations(context, layers, taps, hidden, heads, rows, seed):
    """Tap by tap and layer by layer in float64; rows are fused in pieces of 4."""
    random = np.random.default_rng(seed)
    weights = {"layer_fusion_weights": random.normal(size=(layers, taps))}
    for layer in range(layers):
        for name in ("k_proj_target", "v_proj_target"):
            weights[f"layers.{layer}.self_attn.{name}.weight"] = random.normal(size=(heads * 6, hidden))
    norm, features = random.normal(size=hidden), random.normal(size=(rows, taps * hidden)) * 50
    tensors = {name: torch.from_numpy(value).float() for name, value in weights.items()}
    module, context._ROWS = context.DFlareContext(tensors, layers, heads), 4
    contexts = module.fuse(torch.from_numpy(features).float(), torch.from_numpy(norm).float(), 1e-6)
    keys, values = module.keys_values(contexts)
    for layer, logits in enumerate(weights["layer_fusion_weights"]):
        shares = np.exp(logits) / np.exp(logits).sum()
        mixed = sum(share * features[:, j * hidden : (j + 1) * hidden] for j, share in enumerate(shares))
        fused = mixed / np.sqrt((mixed**2).mean(-1, keepdims=True) + 1e-6) * norm
        np.testing.assert_allclose(contexts[:, layer], fused, rtol=1e-4, atol=1e-4)
        for name, mine in (("k_proj_target", keys), ("v_proj_target", values)):
            projected = (fused @ weights[f"layers.{layer}.self_attn.{name}.weight"].T).reshape(rows, heads, 6)
            np.testing.assert_allclose(mine[:, layer], projected, rtol=1e-3, atol=1e-3)


def test_large_taps_stay_finite_in_float16(context):
    weights = {"layer_fusion_weights": torch.zeros(1, 2, dtype=torch.float16)}
    weights |= {f"layers.0.self_attn.{n}.weight": torch.eye(8).half() for n in context.TARGET_PROJECTIONS}
    module = context.DFlareContext(weights, 1, 2)
    contexts = module.fuse(torch.full((3, 16), 6e4).half(), torch.ones(8).half(), 1e-6)
    assert contexts.dtype == torch.float16
    torch.testing.assert_close(contexts, torch.ones(3, 1, 8).half())


def test_context_weights_are_told_by_exact_parts(context):
    projections = [f"layers.0.self_attn.{name}.weight" for name in ("k_proj_target", "v_proj_target")]
    assert all(context.is_context_weight(name) for name in ["layer_fusion_weights", *projections])
    others = ["layers.0.self_attn.k_proj.weight", "hidden_norm.weight", "fc.weight"]
    assert not any(context.is_context_weight(name) for name in others)


def test_a_checkpoint_that_is_not_whole_is_refused(context, exported):
    weights = float32_weights(exported)
    with pytest.raises(ValueError, match=r"layer_fusion_weights has 3 rows.* of 2 layers"):
        context.DFlareContext(weights, 2, 2)
    del weights["layers.1.self_attn.v_proj_target.weight"]
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj_target\.weight is missing"):
        context.DFlareContext(weights, 3, 2)


# -- hooks


def test_importing_registers_a_builder_and_an_architecture(package):
    assert set(stand_ins.BUILDERS) == {"DFLASH"}
    assert set(stand_ins.ARCHITECTURES) == {"DFlareDraftModel"}
    # what goes to other processes names the module, which they import
    assert stand_ins.ARCHITECTURES["DFlareDraftModel"].__module__ == f"{NAME}.modeling"
    assert list(inspect.signature(stand_ins.BUILDERS["DFLASH"]).parameters) == [
        "model_config", "draft_config", "lm_head", "model",
    ]  # fmt: skip


def test_what_is_overridden_is_called_alike(package):
    """TensorRT-LLM asks load_weights for an argument weight_mapper, too."""
    base = stand_ins.DFlashForCausalLM
    own = {name: value for name, value in vars(package.DFlareForCausalLM).items() if inspect.isfunction(value)}
    assert set(own) == {
        "__init__", "load_weights", "project_target_hidden", "_build_fused_kv_buffers", "precompute_context_kv",
    }  # fmt: skip
    for name, function in own.items():
        mine, theirs = (inspect.signature(of).parameters.values() for of in (function, getattr(base, name)))
        assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]


def test_the_worker_finds_what_it_asks_for(served):
    assert isinstance(served, stand_ins.DFlashForCausalLM)
    assert served.fc.weight.dtype == served.hidden_norm.weight.dtype == torch.float32
    assert served.dflash_attention_backend == "VANILLA"
    served._build_fused_kv_buffers()
    served._build_fused_kv_buffers()
    assert served._fused_kv_weight.data_ptr() == served.fc.weight.data_ptr()  # the block's stacked weights are let go
    assert served._num_attn_layers == 3
    assert served.config.architectures == ["Qwen3ForCausalLM"]


def test_weights_keep_their_dtype(package, exported):
    model = package.DFlareForCausalLM(draft_config(exported))
    model.load_weights(load_file(exported / "drafter" / "model.safetensors"), weight_mapper="mapper")
    projected = model.project_target_hidden(torch.randn(2, 5 * 192).bfloat16())
    keys, values = model.precompute_context_kv(projected.to(model.fc.weight.dtype), torch.arange(2))
    assert {keys.dtype, values.dtype, projected.dtype} == {torch.bfloat16}
    assert model.fc.shares.dtype == torch.float32


def test_the_builder_serves_dflare_on_one_gpu(package, exported):
    build = stand_ins.BUILDERS["DFLASH"]
    with pytest.raises(ValueError, match=r"not \['DFlashDraftModel'\]: leave out --custom_module_dirs"):
        build(model_config(), draft_config(exported, architectures=["DFlashDraftModel"]), None, None)
    with pytest.raises(ValueError, match="on one GPU"):
        build(model_config(gpus=2), draft_config(exported), None, None)


def test_where_the_builder_is_not_known_nothing_is_served_silently(package):
    with pytest.raises(RuntimeError, match="TLLM_WORKER_USE_SINGLE_PROCESS=1"):
        stand_ins.ARCHITECTURES["DFlareDraftModel"](SimpleNamespace())


def test_the_package_needs_nothing_of_dflash_trt(exported, tmp_path):
    for source in (exported / NAME).glob("*.py"):
        assert "import dflash_trt" not in source.read_text()
        assert "from dflash_trt" not in source.read_text()
    alone = shutil.copytree(exported / NAME, tmp_path / NAME)
    assert load_context(alone.parent).FUSION_WEIGHTS == "layer_fusion_weights"
