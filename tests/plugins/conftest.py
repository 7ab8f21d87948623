from __future__ import annotations

import native
import pytest


@pytest.fixture(scope="session")
def built() -> native.Built:
    return native.build()
