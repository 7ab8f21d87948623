"""Memory of sessions over engines: static buffers, copies that are handed out, and what lies in them between passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from backends.engine_sessions import LIMITS, ROLES, SYSTEMS, VOCAB, outcomes, prompts_for, small, trained
from backends.fake_engine import FakeExecution, executions, over_fakes
from export.small_pair import random_inputs
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trt.backends.engine_session import EngineSession
from dflash_trt.backends.profiles import DimRange, profiles
from dflash_trt.export.contract import GraphSpec, Role, TensorSpec


class Allocations(TorchDispatchMode):
    """Collects the operations that make memory: whose result is in none of the storages they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        if any(t.untyped_storage().data_ptr() not in given for t in _tensors(result)):
            self.found.append(str(func))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def copies(results: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value).copy() for name, value in results.items()}


def on_device(inputs: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in inputs.items()}


@pytest.mark.parametrize("role", ROLES)
def test_passes_allocate_nothing(role: Role) -> None:
    """Only what `run` hands out as numpy is new; and the test would see an allocation."""
    session, _ = small(role)
    cache = session.new_cache(2, LIMITS.capacity)
    inputs = random_inputs(session.graph, 0, 0, VOCAB, 2, 3)
    tensors = on_device(inputs)
    names = [spec.name for spec in session.graph.outputs]
    with Allocations() as seen:
        session.forward(tensors, cache)
        session.run(inputs, [], cache)
        if role == "drafter":
            session.stack([[tensors["context_features"][0, :1]] * 2] * 2, 3)
    assert seen.found == []
    with Allocations() as seen:
        session.run(inputs, names, cache)
    handed_out = len(names) - ("context_features" in names)
    assert len(seen.found) == handed_out
    assert all(operation.startswith("aten.to.") for operation in seen.found), seen.found
    with Allocations() as seen:
        small(role)[1].forward(tensors, cache)
    assert len(seen.found) > 20


@pytest.mark.parametrize("role", ROLES)
def test_results_are_views_of_static_buffers_or_copies(role: Role) -> None:
    session, _ = small(role)
    cache = session.new_cache(2, LIMITS.capacity)
    names = [spec.name for spec in session.graph.outputs]
    first = session.run(random_inputs(session.graph, 0, 0, VOCAB, 2, 3), names, cache)
    kept = copies(first)
    second = session.run(random_inputs(session.graph, 1, 3, VOCAB, 2, 3), names, cache)
    for name in names:
        if name == "context_features":
            assert first[name].data_ptr() == second[name].data_ptr()
        else:
            np.testing.assert_array_equal(first[name], kept[name])
            assert not np.array_equal(first[name], second[name])


def test_stacked_features_are_where_the_engine_reads_them() -> None:
    session, reference = small("drafter")
    cache, expected_cache = (own.new_cache(2, LIMITS.capacity) for own in (session, reference))
    inputs = random_inputs(session.graph, 0, 0, VOCAB, 2, 3)
    pieces = list(torch.from_numpy(inputs["context_features"].copy()))
    for rows in (3, 2, 4):
        features = [[pieces[0][:1], pieces[0][1:]], [pieces[1][:0]]]
        stacked = session.stack(features, rows)
        torch.testing.assert_close(stacked, reference.stack(features, rows), rtol=0, atol=0)
        expected = reference.run(inputs | {"context_features": stacked.clone()}, ["logits"], expected_cache)
        found = session.run(inputs | {"context_features": stacked}, ["logits"], cache)
        np.testing.assert_array_equal(found["logits"], expected["logits"])
        assert executions(session)[0].passes[-1].addresses["context_features"] == stacked.data_ptr()


def poison(buffer: torch.Tensor) -> None:
    buffer.view(torch.uint8).fill_(1 if buffer.dtype == torch.bool else 0xFF)  # NaN, or -1


@pytest.mark.parametrize("device", [False, True], ids=["host loop", "device steps"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_buffers_hold_between_passes_never_matters(
    system: str, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs are ruined after each pass, outputs before each: by then all that is kept of them was copied."""
    reference = trained(system)
    engine = over_fakes(reference)
    engine.device_step = device
    whole = EngineSession._pass
    ruined = 0

    def between(self: EngineSession, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
        nonlocal ruined
        for spec in self.graph.outputs:
            poison(self._buffers[spec.name])
        results = whole(self, *args, **options)
        for spec in self.graph.inputs:
            poison(self._buffers[spec.name])
            poison(self._staging[spec.name][0])
            ruined += 1
        return results

    monkeypatch.setattr(EngineSession, "_pass", between)
    prompts = prompts_for(reference, 48, 7, 30)
    expected = outcomes(reference.generate(prompts, max_tokens=24))
    assert outcomes(engine.generate(prompts, max_tokens=24)) == expected
    assert ruined > 50


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("role", ROLES)
def test_inputs_of_any_layout(role: Role) -> None:
    """Strided and read-only arrays of numpy, tensors, and tensors that are no whole memory."""
    session, _ = small(role)
    names = [spec.name for spec in session.graph.outputs]
    inputs = random_inputs(session.graph, 0, 0, VOCAB, 3, 4)
    expected = copies(session.run(inputs, names, session.new_cache(3, LIMITS.capacity)))
    strided, frozen, tensors = {}, {}, {}
    for name, array in inputs.items():
        strided[name] = np.repeat(array, 2, axis=-1)[..., ::2]
        frozen[name] = array.copy()
        frozen[name].flags.writeable = False
        tensors[name] = torch.from_numpy(np.repeat(array, 2, axis=-1))[..., ::2]
    for given in (strided, frozen, tensors):
        found = session.run(given, names, session.new_cache(3, LIMITS.capacity))
        for name in names:
            np.testing.assert_array_equal(np.asarray(found[name]), expected[name], err_msg=name)


def test_bfloat16_in_numpy_and_in_torch() -> None:
    """The contract's dtype in numpy is ml_dtypes', which torch does not know."""

    class Echo(torch.nn.Module):
        def forward(self, features: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for cache in caches:
                cache += features.sum()
            return (features * 2,)

    graph = GraphSpec(
        role="drafter",
        inputs=(TensorSpec(name="context_features", dtype="bfloat16", shape=("B", "N", 4)),),
        outputs=(TensorSpec(name="context_features", dtype="bfloat16", shape=("B", "N", 4)),),
        num_layers=1,
        num_kv_heads=1,
        head_dim=8,
        dtype="bfloat16",
    )
    (decode, _) = profiles("drafter", LIMITS)
    dims = {name: decode.dims[name] for name in ("B", "N", "C")} | {"Q": DimRange(min=1, opt=1, max=1)}
    fake = FakeExecution(Echo(), graph, replace(decode, dims=dims))
    session = EngineSession(graph, [fake], LIMITS.capacity, "cpu", None)
    plain = np.arange(8, dtype=np.float32).reshape(1, 2, 4).astype(ml_dtypes.bfloat16)
    for given in (plain, torch.arange(8).reshape(1, 2, 4).bfloat16()):
        cache = session.new_cache(1, LIMITS.capacity)
        found = session.run({"context_features": given}, ["context_features"], cache)["context_features"]
        assert found.dtype == torch.bfloat16
        assert found.flatten().tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
        assert all(torch.equal(buffer, torch.full_like(buffer, 28)) for buffer in cache.buffers)
