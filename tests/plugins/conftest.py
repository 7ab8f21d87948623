from __future__ import annotations

import importlib.util

import native
import pytest

if importlib.util.find_spec("triton") is None:  # it is for Linux alone
    collect_ignore = ["kernels", "test_aot.py", "test_bound_graphs.py"]


@pytest.fixture(scope="session")
def built() -> native.Built:
    return native.build()
