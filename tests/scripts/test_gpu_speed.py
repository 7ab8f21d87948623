"""What scripts/gpu_check.py measures on a GPU: its arithmetic, and that it runs through, with stand-ins for graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gpu import pairs, timing, tuning
from gpu.attention_speed_cases import WAYS, Inputs
from gpu.context import Budget, Context, Options
from gpu.results import Result
from gpu.roofline import AttentionShape, Ceilings, attention_floor, injection_bytes
from gpu.sections import attention_speed, injection_speed, step

from dflash_trt.ops.staircase_attention import staircase_attention_reference
from dflash_trt.plugins.kernels.tiling import Tile
from dflash_trt.runtime.device_step import DeviceStep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cpu(tmp_path: Path) -> Context:
    return Context(Options(device="cpu", seed=3), Budget(200.0), ROOT, tmp_path)


def test_roofline_by_hand() -> None:
    """Qwen3-8B's heads, 70 queries over 4096 tokens, on a device of 4 TB/s and 800 TFLOP/s."""
    shape = AttentionShape(batch=1, queries=70, context=4096)
    keys_values = 2 * 8 * 4166 * 128 * 2  # 17,063,936
    assert shape.bytes == keys_values + 2 * 32 * 70 * 128 * 2 == 18_210_816
    assert shape.flops == 4 * 32 * 70 * 4166 * 128 == 4_777_902_080
    ceilings = Ceilings(bandwidth=4e12, flops={"bf16": 800e12, "fp16": 400e12})
    assert attention_floor(shape, ceilings, "bf16") == pytest.approx(
        5.972e-6, rel=1e-4
    )  # flops: 5.972 µs; bytes: 4.553
    assert attention_floor(shape, Ceilings(1e12, ceilings.flops), "bf16") == pytest.approx(18.21e-6, rel=1e-3)
    eight = AttentionShape(batch=8, queries=70, context=4096)
    assert (eight.bytes, eight.flops) == (8 * shape.bytes, 8 * shape.flops)
    # a row: keys and values of 8 heads of 128 in and out, a position, cos and sin of 64
    assert injection_bytes(rows=16, batch=2) == 32 * (4 * 8 * 128 * 2 + 8 + 512)


def test_inputs_in_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda: 50)
    assert timing.rotation(10) == 20
    assert timing.rotation(1) == timing.MOST_INPUTS
    assert timing.rotation(10_000) == 2
    assert timing.rotation(1, most=7) == 7


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Timing that runs each call once and takes a second; the number of calls of each measurement."""
    counts: list[int] = []

    def graph_seconds(calls: list[Callable[[], Any]], replays: int = 7) -> float:
        for call in calls[:1]:
            call()
        counts.append(len(calls))
        return 1.0

    def wall_seconds(work: Callable[[], Any], repeats: int, warm_up: int = 3) -> float:
        work()
        return 3.0

    for module in (attention_speed, injection_speed, tuning):
        monkeypatch.setattr(module, "graph_seconds", graph_seconds)
        monkeypatch.setattr(module, "rotation", lambda size, most=2: 2)
    monkeypatch.setattr(injection_speed, "wall_seconds", wall_seconds)
    for module in (attention_speed, injection_speed):
        monkeypatch.setattr(module, "l2_bytes", lambda: 50_000_000)
    monkeypatch.setattr(Context, "need_gpu", lambda self: None)
    monkeypatch.setattr(Inputs, "plan", lambda self: (Tile(16, 32, 4, 1), 2))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return counts


def test_attention_speed_runs_through(cpu: Context, as_on_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_speed, "CONTEXTS", (40,))
    monkeypatch.setattr(attention_speed, "QUERIES", (3,))
    monkeypatch.setattr(attention_speed, "BATCHES", (1,))
    monkeypatch.setattr(attention_speed, "_shapes", lambda quick: [("fp16", AttentionShape(1, 3, 40))])
    cpu.ceilings = Ceilings(1e6, {"fp16": 1e12})
    result = Result("attention_speed")
    attention_speed.run(cpu, result)
    assert [check.ok for check in result.checks] == [True]
    (row,) = result.tables[0].rows
    size = (2 * 8 * 43 * 128 + 2 * 32 * 3 * 128) * 2
    cells = dict(zip(attention_speed.COLUMNS, row, strict=True))
    assert cells["roofline, µs"] == f"{size:.1f}"
    assert cells["of roofline"] == f"{size / 1e6:.0%}"
    assert (cells["SDPA / kernel"], cells["way"], cells["folded / kernel"]) == ("1.0", "enable_gqa", "1.0")
    assert as_on_gpu == [4] * 4


def test_targets_are_the_worst_figures() -> None:
    base = {"dtype": "bf16", "batch": 1, "tile": "", "splits": 1, "kernel": 2.0, "roofline": 1.0, "folded": 3.0}
    cases: list[dict[str, Any]] = [
        {**base, "queries": 70, "context": 512, "enable_gqa": 9.0, "expanded": 8.0},
        {**base, "queries": 70, "context": 4096, "enable_gqa": None, "expanded": 10.0},
        {**base, "queries": 16, "context": 8192, "enable_gqa": None, "expanded": None, "roofline": 1.4},
    ]
    assert list(attention_speed.targets(cases).values()) == ["50%", "4.0"]
    assert attention_speed.row(cases[2])[-5:] == [None, None, None, "3000000.0", "1.5"]
    assert attention_speed.targets([]) == {}


@pytest.mark.parametrize("way", WAYS)
def test_torchs_ways_are_the_operator(way: str) -> None:
    shape = AttentionShape(batch=2, queries=5, context=43, heads=6, kv_heads=2, dim=16, itemsize=4)
    inputs = Inputs.random(shape, torch.float32, "cpu")
    found = WAYS[way](inputs, inputs.mask())().reshape(2, 6, 5, 16).transpose(1, 2).flatten(2)
    arguments = (inputs.query, inputs.key_cache, inputs.value_cache, inputs.context_len, inputs.visibility)
    wanted = staircase_attention_reference(*arguments, None, inputs.position_ids, 0.25, 0, 1, 0.0)
    torch.testing.assert_close(found, wanted)


def test_tuning_runs_through(cpu: Context, as_on_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_SHAPES", [(1, 40)])
    monkeypatch.setattr(tuning, "_tiles", lambda queries: [Tile(16, 64, 4, 2)])
    monkeypatch.setattr(tuning, "AttentionShape", lambda batch, queries, length: AttentionShape(batch, 3, length))
    monkeypatch.setattr(Inputs, "kernel", lambda self, tile, splits: lambda: None)
    result = Result("attention_speed")
    tuning.run(cpu, result)
    assert [row[:3] for row in result.tables[0].rows] == [[16, 1, 40], [70, 1, 40]]
    assert result.tables[0].rows[0][3] == "16x32/4/1, 2"


def test_injection_speed_runs_through(cpu: Context, as_on_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injection_speed, "ROWS", (16,))
    cpu.ceilings = Ceilings(1e6, {})
    result = Result("injection_speed")
    injection_speed.run(cpu, result)
    speed = injection_bytes(16, 1)
    assert result.tables[0].rows[0] == [16, 1, "1000000.00", "0", f"{speed / 1e6:.0%}", "3000000", "3"]
    assert as_on_gpu == [2, 2]


def test_steps_run_through(cpu: Context, as_on_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The trained models, and random ones in Qwen3-8B's shape but for their sizes."""
    monkeypatch.setattr(DeviceStep, "capture", lambda self: None)
    monkeypatch.setattr(step, "_STEPS", 1)
    monkeypatch.setattr(step, "_WARM_UP", 0)
    monkeypatch.setattr(step, "CONTEXT", 64)
    small: dict[str, Any] = dict(hidden_size=64, intermediate_size=64, vocab_size=300, max_position_embeddings=1024)
    target = replace(pairs.QWEN3_8B, **small, num_layers=2, policies=pairs.QWEN3_8B.policies[:2])
    drafter = replace(
        pairs.QWEN3_8B_DFLASH, **small, target_hidden_size=64, taps=(0, 1), mask_token_id=299, num_target_layers=2
    )
    random = pairs.random_pair(target, drafter, "cpu", 256)
    for models in (random, pairs.without_branches(random)):
        eager, captured, finite = step.latencies(models, seed=1)
        assert finite
        assert eager > 0
        assert captured > 0
    result = Result("step", tables=[step.Table("", [])])
    step._measure(cpu, result, "tiny d2sd", "float32", lambda: step._tiny(cpu, "d2sd", "float32"))
    assert result.checks[0].ok
    assert result.tables[0].rows[0][:3] == ["tiny", "d2sd", "float32"]


def test_the_large_pair_is_that_of_the_configs() -> None:
    """Sizes from build_configs/, which name the published checkpoints."""
    expected = yaml.safe_load((ROOT / "build_configs" / "qwen3-8b-d2sd-b16.yaml").read_text())["expect"]
    for spec, fields in ((pairs.QWEN3_8B, expected["target"]), (pairs.QWEN3_8B_DFLASH, expected["drafter"])):
        for name, value in fields.items():
            found = getattr(spec, name)
            assert (list(found) if isinstance(found, tuple) else found) == value, name
    assert pairs.bytes_of(pairs.QWEN3_8B, pairs.QWEN3_8B_DFLASH) == 2 * (8_190_735_360 + 2 * 1_048_626_432)
