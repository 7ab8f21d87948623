"""Files that commands write beside their results."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def output_fault(file: Path, bundles: Iterable[Path]) -> tuple[str, str] | None:
    """Why a file cannot be written or would damage a bundle, and the mend; None where nothing stands against it."""
    folder = file.absolute().parent
    if file.exists() and not file.is_file():
        return "is there and is no file", "Name another file"
    if not folder.is_dir():
        return "its folder does not exist", "Create it, or name another file"
    if not os.access(folder, os.W_OK):
        return "its folder cannot be written to", "Name another file"
    if any(folder.resolve().is_relative_to(bundle.resolve()) for bundle in bundles):
        return "lies in a bundle, which must stay as it was built", "Name another file"
    return None
