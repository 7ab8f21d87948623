"""The sections in the order they run: what each may take in seconds (they add up to less than the whole may take)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

SECONDS = {
    "environment": 15.0,
    "kernels": 140.0,
    "ceilings": 15.0,
    "attention_speed": 75.0,
    "injection_speed": 20.0,
    "step": 95.0,
    "plugins": 65.0,
    "rtx": 20.0,
}
TUNING_SECONDS = 240.0  # more for attention_speed, when asked for


def load(name: str) -> Callable[..., Any]:
    """The section's `run(context, result)`; imported only when it is its turn, so that its imports are its own."""
    return importlib.import_module(f"gpu.sections.{name}").run


def seconds(name: str, tune: bool) -> float:
    return SECONDS[name] + (TUNING_SECONDS if tune and name == "attention_speed" else 0.0)
