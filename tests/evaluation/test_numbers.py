"""The numeric comparison: it fails where it should, and excuses only near ties."""

from __future__ import annotations

import numpy as np
import pytest
from engines import torch_engine
from makers import make_drafter, make_target

from dflash_trt.evaluation.numbers import LIMITS, compare_graphs
from dflash_trt.loading import open_info, reference_session


class Disturbed:
    """A session whose outputs are changed by a function of (name, array)."""

    def __init__(self, session, change) -> None:
        self._session, self._change = session, change

    def __getattr__(self, name: str):
        return getattr(self._session, name)

    def run(self, inputs, outputs, cache):
        results = self._session.run(inputs, outputs, cache)
        plain = {name: value if isinstance(value, np.ndarray) else value.numpy() for name, value in results.items()}
        return {name: self._change(name, value.copy()) for name, value in plain.items()}


@pytest.fixture(scope="module")
def references(torch_bundle):
    info = open_info(torch_bundle)
    return info, {role: reference_session(torch_bundle, info, role) for role in info.roles}


def failed(references, role: str, change) -> set[str]:
    info, sessions = references
    results = compare_graphs(info, role, Disturbed(sessions[role], change), sessions[role])
    return {result.output for result in results if not result.passed}


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_equal_sessions_pass(references, role):
    assert failed(references, role, lambda name, value: value) == set()


def test_nan_fails(references):
    def change(name, value):
        if name == "logits":
            value[0, 0, 0] = np.nan
        return value

    assert failed(references, "target", change) == {"logits"}


def test_noise_beside_an_outlier_channel_fails(references):
    """Real hidden states have channels of 2e4 among values around 1: they must not excuse the rest."""
    random = np.random.default_rng(0)

    def outlier(name, value):
        if name == "context_features":
            value = value.copy()
            value[..., 0] = 2e4
        return value

    def noisy(name, value):
        value = outlier(name, value)
        if name == "context_features":
            value[..., 1:] += random.normal(0, 0.3, value[..., 1:].shape)
        return value

    info, sessions = references
    reference = Disturbed(sessions["target"], outlier)
    results = compare_graphs(info, "target", Disturbed(sessions["target"], noisy), reference)
    assert {result.output for result in results if not result.passed} == {"context_features"}


@pytest.mark.parametrize(("role", "ids"), [("target", "token_ids"), ("drafter", "draft_ids")])
def test_one_wrong_id_fails_and_a_near_tie_does_not(references, role, ids):
    def wrong(name, value):
        if name == ids:
            value.reshape(-1)[-1] = (value.reshape(-1)[-1] + 1) % 300
        return value

    assert failed(references, role, wrong) == {ids}

    info, sessions = references

    def tied(name, value):
        if name == "logits":  # the reference hardly prefers its own
            value[..., 1] = value.max(-1)
        return value

    def other(name, value):
        return np.ones_like(value) if name == ids else tied(name, value)

    reference = Disturbed(sessions[role], tied)
    results = {r.output: r for r in compare_graphs(info, role, Disturbed(sessions[role], other), reference)}
    assert results[ids].passed
    assert results[ids].measured["near_ties"] > 0


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
