"""Whole device steps are captured once and replayed, and nothing in them waits for the host.

The latter is checked on tensors without data (device "meta"), where whatever would read one fails.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime.device_steps import SYSTEMS, engine_of
from runtime.triples import prompts_of
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trt.backends.torch import TorchSession
from dflash_trt.runtime import device_step
from dflash_trt.runtime.device_step import DeviceStep
from dflash_trt.runtime.engine import Engine

pytestmark = pytest.mark.usefixtures("fixed_rows")


class StandIn:
    """In place of a CUDA graph: the step runs as often as to capture it, and then at each replay."""

    def __init__(self, step: Callable[[], None], pool: Any) -> None:
        for _ in range(4):
            step()
        self._step, self._pool, self.replays = step, pool, 0

    def replay(self) -> None:
        self.replays += 1
        self._step()

    def pool(self) -> Any:
        return self if self._pool is None else self._pool


def test_each_step_is_captured_once_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may come of the runs of the capture; all graphs share their memory."""
    engine, expected = (engine_of(tmp_path, "d2sd", max_batch_size=2) for _ in range(2))
    graphs: list[StandIn] = []

    def captured(step: Callable[[], None], device: str, pool: Any) -> StandIn:
        graphs.append(StandIn(step, pool))
        return graphs[-1]

    monkeypatch.setattr(device_step, "captured", captured)
    for session in engine.sessions.values():
        session.whole_steps = True
    engine.device_step = True
    steps = 0
    for sizes, branches in (((3,), 4), ((8,), 4), ((3, 8), 4), ((9,), 4), ((9,), 1), ((4, 4), 4)):
        prompts = prompts_of(engine, *sizes)
        outputs = engine.generate(prompts, max_tokens=15, branches=branches)
        for output, plain in zip(outputs, expected.generate(prompts, max_tokens=15), strict=True):
            assert output.token_ids == plain.token_ids
        steps += max(output.statistics.steps for output in outputs)
    assert len(graphs) == 3
    assert sum(graph.replays for graph in graphs) == steps
    assert [graph.pool() for graph in graphs] == [graphs[0]] * 3


def test_a_capture_leaves_no_row_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = engine_of(tmp_path, "dflash")
    monkeypatch.setattr(device_step, "captured", lambda step, device, pool: StandIn(step, pool))
    step = DeviceStep(engine.target, engine.drafter, engine.limits, engine.mask_token_id, 2)
    step.load([3, 4], [1, 1], [9, 9], [True, True])
    step.capture()
    assert not step.state.active.any()
    assert step.state.context_len.tolist() == [3, 4]


class OnDevice(TorchDispatchMode):
    """Fails where an operation takes or gives a tensor that is not on the device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.operations = device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != self.device:
                raise AssertionError(f"{func} with a tensor on {tensor.device}")
        self.operations += 1
        return result


class NothingFromTheHost(TorchFunctionMode):
    """Fails where values of the host become a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.tensor, torch.as_tensor, torch.from_numpy)
        return func(*args, **(kwargs or {}))


def without_data(engine: Engine, batch: int, branches: int) -> DeviceStep:
    """A step all of whose tensors are on the device "meta", which has no memory."""
    sessions: dict[str, Any] = {
        role: TorchSession(copy.deepcopy(session.module), session.graph, "meta")  # type: ignore[attr-defined]
        for role, session in engine.sessions.items()
        if branches or role != "vp_drafter"
    }
    return DeviceStep(
        sessions["target"], sessions["drafter"], engine.limits, engine.mask_token_id, batch,
        vp_drafter=sessions.get("vp_drafter"), branches=branches,
    )  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_never_waits_for_the_host(tmp_path: Path, system: str) -> None:
    """No operation reads a value, has a shape that depends on one, or takes a tensor from the host."""
    engine = engine_of(tmp_path, system)
    for branches in (0, 1, 4) if engine.vp_drafter else (0,):
        step = without_data(engine, 3, branches)
        with OnDevice("meta") as mode, NothingFromTheHost():
            step.step()
        assert mode.operations > 100
        assert step.state.outcome.shape == (3, 3 + step.limits.longest_path)


@pytest.mark.parametrize(
    "wait",
    [
        lambda state: state.anchor[0].item(),
        lambda state: state.anchor.tolist(),
        lambda state: bool(state.active.any()),
        lambda state: state.anchor[state.active],
        lambda state: state.active.nonzero(),
        lambda state: state.anchor + torch.arange(3),
        lambda state: state.anchor.gather(0, torch.tensor([1])),
        lambda state: state.anchor.copy_(torch.tensor([1, 2, 3])),
        lambda state: torch.tensor([1, 2, 3], device="meta"),
    ],
    ids=["item", "tolist", "branch", "mask", "nonzero", "host tensor", "host index", "host copy", "host list"],
)
def test_a_step_that_would_wait_is_found(tmp_path: Path, wait: Callable[[Any], Any]) -> None:
    state = without_data(engine_of(tmp_path, "dflash"), 3, 0).state
    with torch.inference_mode(), pytest.raises((RuntimeError, AssertionError)):  # noqa: SIM117
        with OnDevice("meta"), NothingFromTheHost():
            wait(state)
