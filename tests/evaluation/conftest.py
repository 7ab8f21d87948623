"""Fixtures of the evaluation's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def torch_d2sd_bundle(pair, vp_drafter, tmp_path_factory) -> Path:
    """The pair's bundle with a VP drafter and three branches, for the torch backend: it is built fast."""
    import dflash_trt

    output = tmp_path_factory.mktemp("bundle") / "bundle"
    options = {"vp_drafter": vp_drafter, "branches": 3, "max_seq_len": 96, "backend": "torch", "verify": False}
    dflash_trt.build(**pair._asdict(), output=output, **options)
    return output
