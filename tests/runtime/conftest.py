"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_trt.runtime.slots import SlotBatch


@pytest.fixture(scope="module")
def fixed_rows() -> Iterator[None]:
    """Sequences stay in the rows they began in: hinted drafters know what is right by the row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotBatch, "compact", lambda self: None)
        yield
