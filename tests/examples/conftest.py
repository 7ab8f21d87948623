"""SmolLM2 as a checkpoint folder, made once a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from smollm2_models import EXAMPLE, gguf_file


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `examples/smollm2/prepare.py` writes."""
    file, output = gguf_file(), tmp_path_factory.mktemp("smollm2") / "target"
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", "--gguf", file, "--output", output], check=True)
    return output
