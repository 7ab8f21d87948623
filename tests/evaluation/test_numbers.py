"""The numeric comparison: it fails where it should, says where, and excuses only near ties."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import torch_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from makers import make_drafter, make_target

import dflash_trt
from dflash_trt.backends.base import Session
from dflash_trt.backends.profiles import profiles
from dflash_trt.bundle import BundleInfo
from dflash_trt.evaluation.compare_functions import CompareIds, CompareRows
from dflash_trt.evaluation.graph_passes import graph_passes, slots_written
from dflash_trt.evaluation.numbers import CACHES, LIMITS, OutputComparison, compare_graphs
from dflash_trt.loading import open_info, open_session, reference_session
from dflash_trt.runtime.limits import Limits

Change = Callable[[str, np.ndarray, int], Any]


class Disturbed:
    """A session whose outputs, and caches after a pass, are changed by a function of (name, array, pass)."""

    def __init__(self, session: Session, change: Change) -> None:
        self._session, self._change = session, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def new_cache(self, batch: int, capacity: int) -> Any:
        self._number = 0
        return self._session.new_cache(batch, capacity)

    def run(self, inputs, outputs, cache):
        results = {}
        for name, value in self._session.run(inputs, outputs, cache).items():
            plain = value if isinstance(value, np.ndarray) else value.float().numpy()
            results[name] = self._changed(name, plain.copy())
        for spec, buffer in zip(self.graph.present(), cache.buffers, strict=True):
            buffer.copy_(torch.from_numpy(self._changed(spec.name, buffer.float().numpy().copy())))
        self._number += 1
        return results

    def _changed(self, name: str, array: np.ndarray) -> np.ndarray:
        changed = self._change(name, array, self._number)
        return array if changed is None else changed


@dataclass
class Graphs:
    """A bundle of the torch backend: what it says of itself, and its sessions."""

    info: BundleInfo
    sessions: dict[str, Session]

    def compare(self, role: str, change: Change, reference: Change | None = None) -> dict[str, OutputComparison]:
        session = self.sessions[role]
        other = session if reference is None else Disturbed(session, reference)
        results = list(compare_graphs(self.info, role, Disturbed(session, change), other))
        assert len(results) == len({result.output for result in results})
        return {result.output: result for result in results}

    def failed(self, role: str, change: Change) -> dict[str, str]:
        """Output -> reason of what fails."""
        return {name: r.reason for name, r in self.compare(role, change).items() if not r.passed}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def graphs(request, pair, tmp_path_factory) -> Graphs:
    folder = tmp_path_factory.mktemp(request.param) / "bundle"
    dflash_trt.build(
        **pair._asdict(), output=folder, backend="torch", dtype=request.param, max_seq_len=96, verify=False
    )
    return load(folder)


@pytest.fixture(scope="module")
def float32(torch_bundle) -> Graphs:
    return load(torch_bundle)


def load(folder) -> Graphs:
    info = open_info(folder)
    return Graphs(info, {role: reference_session(folder, info, role) for role in info.roles})


def on(output: str, index: tuple, value: Any, number: int) -> Change:
    """Writes a value, or what a function makes of the old one, to one place of an output of one pass."""

    def change(name: str, array: np.ndarray, current: int) -> None:
        if (name, current) == (output, number):
            array[index] = value(array[index]) if callable(value) else value

    return change


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_equal_sessions_pass_and_everything_was_compared(graphs, role):
    results = graphs.compare(role, lambda *_: None)
    assert all(result.passed and not result.reason for result in results.values())
    assert set(results) == {spec.name for spec in graphs.info.graphs[role].spec.outputs} | {CACHES}
    assert results["logits"].measured["top1_agreement"] == 1
    ids, size = ("token_ids", 2 + 8) if role == "target" else ("draft_ids", 1 + 3 * 8)
    assert results[ids].measured == {"agree": size, "near_ties": 0, "differ": 0}
    for name in set(results) - {ids}:
        assert results[name].measured["max_relative_error"] == results[name].measured["max_abs_error"] == 0
        assert results[name].measured["median_abs_value"] > 0


# (graph, output, pass, index, new value); the last pass is 2 of the target, 3 of a drafter
FAULTS = {
    "a logit": ("target", "logits", 2, (0, 3, 17), 50.0),
    "a NaN": ("target", "logits", 0, (0, 0, 5), np.nan),
    "an infinity": ("target", "context_features", 1, (0, 0, 40), np.inf),
    "a feature": ("target", "context_features", 2, (0, 1, 70), 80.0),
    "the features of a tap": ("target", "context_features", 0, (0, 4, slice(32, 64)), 0.0),
    "a token": ("target", "token_ids", 2, (0, 6), lambda old: (old + 1) % 300),
    "a token out of range": ("target", "token_ids", 1, (0, 0), 320),
    "a key": ("target", "present_key_1", 2, (0, 1, 12, 3), 60.0),
    "a value that was not written": ("target", "present_value_3", 2, (0, 0, 30), 0.0),
    "a NaN in a cache": ("target", "present_value_2", 2, (0, 1, 0, 2), np.nan),
    "a draft": ("drafter", "draft_ids", 3, (0, 5), lambda old: (old + 1) % 300),
    "a confidence": ("drafter", "confidence", 1, (0, 2), lambda old: 1 - old),
    "no confidence": ("drafter", "confidence", 2, (0,), 0.0),
    "a negative infinity": ("drafter", "logits", 3, (0, 7, 319), -np.inf),
    "a row of draft logits": ("drafter", "logits", 2, (0, 2), 0.0),
    "a key that was not written": ("drafter", "present_key_0", 3, (0, 1, 20), 0.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_fails_its_output_alone_and_is_named(graphs, fault):
    role, output, number, index, value = FAULTS[fault]
    failed = graphs.failed(role, on(output, index, value, number))
    assert list(failed) == [CACHES if output.startswith("present") else output]
    (reason,) = failed.values()
    assert f"of pass {number}" in reason
    assert output in reason
    if output.startswith("context_features"):
        tap, channel = graphs.info.taps[1 if isinstance(index[-1], slice) else index[-1] // 32], index[-1]
        assert f"of tap {tap}[{', '.join(map(str, index[:2]))}" in reason
        assert isinstance(channel, slice) or f", {channel % 32}]" in reason
    elif isinstance(value, float) and value:  # one element; of a row, either the row or one of its elements
        assert f"{output}{list(index)} of pass {number} is {value} instead of" in reason


def test_a_nan_of_the_reference_is_called_the_references(float32):
    results = float32.compare("target", lambda *_: None, on("logits", (0, 0, 5), np.nan, 0))
    assert [name for name, result in results.items() if not result.passed] == ["logits"]
    assert results["logits"].reason.startswith("the reference has NaN")
    assert results["logits"].measured == {"finite": False}


def test_everything_nan_fails_everything_but_ids(float32):
    def change(name, array, number):
        passed_on = name.startswith("present") and number < 3
        return array if array.dtype.kind == "i" or passed_on else np.full_like(array, np.nan)

    assert set(float32.failed("drafter", change)) == {"confidence", "logits", CACHES}


def test_another_shape_fails(float32):
    failed = float32.failed("target", lambda name, array, _: array[:, :1] if name in ("logits", "token_ids") else None)
    assert set(failed) == {"logits", "token_ids"}
    assert failed["logits"] == "logits of pass 2 has shape (1, 1, 320) instead of (1, 8, 320)"


def test_figures(float32):
    """Measured against numpy on one output."""
    random, found, wanted = np.random.default_rng(0), [], []

    def noisy(name, array, _):
        if name == "logits":
            wanted.append(array.copy())
            array += random.normal(0, 1e-3, array.shape).astype(np.float32)
            array[0, 0, array[0, 0].argmin()] += 100
            found.append(array)

    measured = float32.compare("drafter", noisy)["logits"].measured
    found, wanted = (np.concatenate(list(x), axis=1).astype(np.float64) for x in (found, wanted))
    typical = np.median(np.abs(wanted))
    error, lengths = np.abs(found - wanted), np.linalg.norm(wanted, axis=-1)
    expected = {
        "max_relative_error": np.max(error / np.maximum(np.abs(wanted), typical)),
        "max_abs_error": error.max(),
        "median_abs_value": typical,
        "max_row_error": np.max(np.linalg.norm(found - wanted, axis=-1) / np.maximum(lengths, np.median(lengths))),
        "top1_agreement": np.mean(found.argmax(-1) == wanted.argmax(-1)),
    }
    assert measured == pytest.approx(expected, rel=1e-4)
    assert measured["top1_agreement"] < 1


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize(("share", "passes"), [(0.98, True), (1.02, False)])
def test_the_limit_is_a_share_of_the_larger_of_value_and_median(float32, large, share, passes):
    limit, typical = LIMITS["float32"], None

    def change(name, array, number):
        if (name, number) == ("logits", 2):
            place = np.abs(array).argmax() if large else np.abs(array).argmin()
            array.reshape(-1)[place] += share * limit * max(abs(array.reshape(-1)[place]), typical)

    typical = float32.compare("target", lambda *_: None)["logits"].measured["median_abs_value"]
    result = float32.compare("target", change)["logits"]
    assert result.passed == passes
    assert result.measured["max_relative_error"] == pytest.approx(share * limit, rel=1e-3)


def test_noise_beside_an_outlier_channel_fails(float32):
    """Real hidden states have channels of 2e4 among values around 1: they must not excuse the rest."""
    random = np.random.default_rng(0)

    def outlier(name, array, _):
        if name == "context_features":
            array[..., ::32] = 2e4

    def noisy(name, array, number):
        outlier(name, array, number)
        if name == "context_features":
            array[..., 1:32] += random.normal(0, 0.3, array[..., 1:32].shape)

    results = float32.compare("target", noisy, outlier)
    assert [name for name, result in results.items() if not result.passed] == ["context_features"]


@pytest.mark.parametrize(("role", "ids"), [("target", "token_ids"), ("drafter", "draft_ids")])
def test_a_near_tie_is_excused(float32, role, ids):
    def tied(name, array, _):
        if name == "logits":  # the reference hardly prefers its own
            array[..., 1] = array.max(-1)

    def other(name, array, number):
        if name == ids:
            array[:] = 1
        tied(name, array, number)

    results = float32.compare(role, other, tied)
    assert results[ids].passed
    assert results[ids].measured["near_ties"] > 0


def test_ids_against_a_loop():
    random = np.random.default_rng(1)
    logits = random.normal(size=(1, 40, 9)).astype(np.float32)
    wanted = logits.argmax(-1)
    found = random.integers(-1, 10, wanted.shape)
    near = 0.7 * np.median(np.abs(logits))
    kinds = [
        "agree" if one == own else "near" if 0 <= one < 9 and row[own] - row[one] <= near else "differ"
        for one, own, row in zip(found[0], wanted[0], logits[0], strict=True)
    ]
    verdict = CompareIds({"ids": "logits"}, 0.7)({"ids": found}, {"ids": wanted, "logits": logits})["ids"]
    assert (verdict.agree, verdict.near_ties, verdict.differ) == tuple(map(kinds.count, ("agree", "near", "differ")))
    assert min(verdict.agree, verdict.near_ties, verdict.differ) > 0
    assert verdict.first == (0, kinds.index("differ"))
    assert not verdict


def test_rows_are_measured_by_their_length_or_the_typical_one():
    wanted = np.array([[[3.0, 4.0], [0.03, 0.04]]], np.float32)
    compare = CompareRows({"x": 5.0}, 0.5)
    small = compare({"x": wanted * [[[1], [0]]]}, {"x": wanted})["x"]
    assert (small.error, small.row) == (pytest.approx(0.01), (0, 1))
    assert small
    large = compare({"x": wanted * [[[0.4], [1]]]}, {"x": wanted})["x"]
    assert (large.error, large.row) == (pytest.approx(0.6), (0, 0))
    assert not large


def test_an_onnxruntime_bundle_passes_for_all_roles(d2sd_bundle):
    info = open_info(d2sd_bundle)
    for role in info.roles:
        sessions = open_session(d2sd_bundle, info, role, threads=1), reference_session(d2sd_bundle, info, role)
        results = list(compare_graphs(info, role, *sessions))
        assert len(results) == len(info.graphs[role].spec.outputs) + 1
        assert [result for result in results if not result.passed] == []
        assert any(result.measured.get("agree", 0) > 8 for result in results)
        assert any(result.measured.get("max_abs_error", 0) > 0 for result in results)  # two implementations, not one


@settings(max_examples=60, deadline=None)
@given(
    max_seq_len=st.integers(2, 400), block_size=st.integers(2, 20), extra=st.integers(0, 6), branches=st.integers(0, 6),
    prefill_chunk=st.integers(1, 64),
)  # fmt: skip
def test_passes_are_of_sizes_engines_are_built_for(
    d2sd_bundle, max_seq_len, block_size, extra, branches, prefill_chunk
):
    limits = Limits(
        max_batch_size=1, max_seq_len=max_seq_len, max_input_len=max_seq_len - 1, block_size=block_size,
        prefill_chunk=prefill_chunk, vp_block_size=block_size + extra if branches else 0, branches=branches,
    )  # fmt: skip
    info = replace(open_info(d2sd_bundle), limits=limits)
    for role in info.roles if branches else ("target", "drafter"):
        passes = graph_passes(info, role)
        assert slots_written(passes) <= limits.capacity
        for inputs in passes:
            sizes = {"B": 1, "Q": inputs["visibility"].shape[1]}
            sizes |= {"R": inputs["logit_rows"].shape[1]} if role == "target" else {}
            sizes |= {"N": inputs["context_features"].shape[1]} if role != "target" else {}
            assert any(profile.holds(sizes) for profile in profiles(role, limits)), (role, sizes)


def test_an_engine_of_fixed_shapes_gets_its_whole_capacity_and_what_it_did_not_write_does_not_count(float32):
    class Fixed(Disturbed):
        def capacity_for(self, needed: int, limit: int) -> int:
            return limit

        def new_cache(self, batch: int, capacity: int) -> Any:
            self.capacity = capacity
            return super().new_cache(batch, capacity)

    session = Fixed(float32.sessions["target"], on("present_key_0", (0, 0, slice(60, None)), 7.0, 2))
    results = list(compare_graphs(float32.info, "target", session, float32.sessions["target"]))
    assert session.capacity == float32.info.limits.capacity > 60
    assert all(result.passed for result in results)


def test_polygraphy_writes_nothing_and_gets_its_log_back(float32, capfd):
    from polygraphy.logger import G_LOGGER

    float32.failed("drafter", on("logits", (0, 0, 0), np.nan, 0))
    assert capfd.readouterr() == ("", "")
    G_LOGGER.warning("as ever")
    assert "as ever" in capfd.readouterr().out


def test_polygraphy_is_imported_only_to_compare():
    code = "import dflash_trt.evaluation.verify, sys; sys.exit('polygraphy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_every_precision_has_a_limit():
    assert set(LIMITS) == {"float32", "float16", "bfloat16"}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_finite_never_become_tokens(tmp_path, temperature):
    """An overflow must not look like output."""
    from dflash_trt.errors import BackendError

    make_target(tmp_path / "t", seed=1)
    make_drafter(tmp_path / "d", tmp_path / "t", taps=[1], block_size=4)
    engine = torch_engine(tmp_path / "t", tmp_path / "d")
    engine.target.module.model.norm.weight[0] = float("nan")
    with pytest.raises(BackendError, match=r"(?i)nan"):
        engine.generate([1, 2, 3], max_tokens=4, temperature=temperature, seed=1)
