from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "plugins"))

import interpreter  # noqa: E402, F401 - before a test imports kernels
import native  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(scope="session")
def built() -> native.Built:
    return native.build()
