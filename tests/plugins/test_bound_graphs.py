"""The plugin-bound graphs of the tiny models, run op by op with the kernels in the place of the plugins.

onnx's reference evaluator runs the standard operators, the interpreter the kernels: no runtime of ours, and no function
bodies. What comes out must be what the torch reference decodes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import interpreter  # noqa: F401 - before the kernels
import numpy as np
import onnx_ir as ir
import pytest
import torch
from engines import torch_engine
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import dflash_trt
from dflash_trt.backends.base import check_inputs
from dflash_trt.backends.onnxruntime import OrtCache, OrtSession
from dflash_trt.export.contract import GraphSpec
from dflash_trt.ops import DOMAIN
from dflash_trt.passes.bind_plugins import BindPlugins
from dflash_trt.plugins.kernels.kv_injection import kv_injection_
from dflash_trt.plugins.kernels.staircase_attention import staircase_attention
from dflash_trt.runtime.engine import Engine

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[2] / "examples" / "tiny"
MAX_SEQ_LEN, PREFILL_CHUNK, BRANCHES = 128, 16, 3


def tensors(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Of the same memory, but for weights, which the evaluator keeps read-only."""
    return [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays]


class KVInjection(OpRun):
    """The plugin, by its kernel: the outputs are the caches of the inputs."""

    op_domain = DOMAIN

    def _run(self, *inputs: np.ndarray, eps: float, plugin_version: str, plugin_namespace: str) -> Any:
        assert (plugin_version, plugin_namespace) == ("1", "dflash_trt")
        key, value, *norm, position_ids, cos, sin, write_start, key_cache, value_cache = tensors(inputs)
        weight = norm[0] if norm else None
        kv_injection_(key, value, weight, position_ids, cos, sin, write_start, key_cache, value_cache, float(eps))
        return inputs[-2:]


class StaircaseAttention(OpRun):
    """The plugin, by its kernel."""

    op_domain = DOMAIN

    def _run(self, *inputs: np.ndarray, plugin_version: str, plugin_namespace: str, **attributes: Any) -> Any:
        assert (plugin_version, plugin_namespace) == ("1", "dflash_trt")
        *common, position_ids = tensors(inputs)
        sinks = common.pop() if len(inputs) == 7 else None
        scalars = {name: value.item() if isinstance(value, np.generic) else value for name, value in attributes.items()}
        return (staircase_attention(*common, sinks, position_ids, **scalars).numpy(),)


class EvaluatedSession(OrtSession):
    """A bound graph in the reference evaluator; caches begin as NaN."""

    def __init__(self, model: Path, graph: GraphSpec) -> None:
        self.graph = graph
        self._evaluator = ReferenceEvaluator(str(model), new_ops=[KVInjection, StaircaseAttention])
        self._past = [spec.name for spec in graph.past()]
        self._present = [spec.name for spec in graph.present()]

    def new_cache(self, batch: int, capacity: int) -> OrtCache:
        cache = super().new_cache(batch, capacity)
        for buffer in cache.buffers:
            buffer[:] = np.nan
        return cache

    def capacity_for(self, needed: int, limit: int) -> int:
        return needed

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str], cache: OrtCache) -> dict[str, Any]:
        check_inputs(self.graph, inputs)
        pasts = dict(zip(self._past, cache.buffers, strict=True))
        results = self._evaluator.run([*outputs, *self._present], {**inputs, **pasts})
        for buffer, present in zip(cache.buffers, results[len(outputs) :], strict=True):
            assert np.shares_memory(buffer, present)
        return dict(zip(outputs, results, strict=False))


@pytest.fixture(scope="module")
def reference() -> Engine:
    return torch_engine(
        TINY / "target", TINY / "dflash", TINY / "vp_drafter",
        max_seq_len=MAX_SEQ_LEN, prefill_chunk=PREFILL_CHUNK, branches=BRANCHES,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bound(reference: Engine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The same, its sessions the portable graphs of a build, bound."""
    folder = tmp_path_factory.mktemp("build")
    dflash_trt.build(
        target=TINY / "target", drafter=TINY / "dflash", vp_drafter=TINY / "vp_drafter", branches=BRANCHES,
        output=folder / "bundle", max_seq_len=MAX_SEQ_LEN, verify=False, dump_ir=folder / "dumps",
    )  # fmt: skip
    # onnx reads no weights from files with several links, and copies have one
    folder = Path(shutil.copytree(folder / "dumps", folder / "bound"))
    sessions = {}
    for role, session in reference.sessions.items():
        model = ir.load(folder / role / "1-portable.onnx")
        # the models are as no library has kernels for: small heads, and float32
        BindPlugins(head_dims=(32,), attention_dtypes=(ir.DataType.FLOAT,))(model)
        ir.save(model, folder / role / "bound.onnx")
        sessions[role] = EvaluatedSession(folder / role / "bound.onnx", session.graph)
    return Engine(
        sessions["target"], sessions["drafter"], reference.tokenizer, reference.limits,
        vp_drafter=sessions["vp_drafter"], system="d2sd", mask_token_id=reference.mask_token_id,
        eos_token_ids=reference.eos_token_ids, vocab_size=reference.vocab_size,
    )  # fmt: skip


@pytest.mark.parametrize("branches", [0, BRANCHES], ids=["dflash", "d2sd"])
def test_decoding_equals_the_reference(reference: Engine, bound: Engine, branches: int) -> None:
    lines = (TINY / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompt = reference.tokenizer.encode(json.loads(lines[0])["prompt"])[-(PREFILL_CHUNK + 5) :]
    expected, found = (engine.generate(prompt, branches=branches, max_tokens=14) for engine in (reference, bound))
    assert found.token_ids == expected.token_ids
    assert found.statistics.acceptance_lengths == expected.statistics.acceptance_lengths
    assert max(found.statistics.acceptance_lengths) > 2
