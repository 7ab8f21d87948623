"""The header of one safetensors file, checked against the file it heads.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes, little-endian header length N; N bytes of JSON,
{name: {dtype, shape, data_offsets: [begin, end]}}; then the data, which the offsets (counted from its start) tile
without gaps or overlaps.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.config import LFS_POINTER, lfs_error
from dflash_trt.errors import CheckpointError

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
WEIGHTS = ("F32", "F16", "BF16")
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    dtype: safetensors name: "F32", "F16" or "BF16", and "U8" in files of quantised weights.
    offset: of its first byte in the file, header included. nbytes: from there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_entries(file: Path, dtypes: tuple[str, ...] = WEIGHTS) -> list[TensorEntry]:
    """The tensors of one file, in the order of their data; reads the header only.

    Args:
        dtypes: those that it may hold.

    Raises:
        CheckpointError: the file is missing, a Git-LFS pointer, truncated, malformed, or holds an unsupported dtype.
    """
    header, data_start, file_size = _read_header(file)
    tensors = {name: fields for name, fields in header.items() if name != "__metadata__"}
    entries = [_entry(file, name, fields, data_start, dtypes) for name, fields in tensors.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_tiling(file, entries, data_start, file_size)
    _check_dtypes(file, entries, dtypes)
    return entries


def _read_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, the offset at which the data starts, and the file's size in bytes."""
    try:
        with file.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise lfs_error(file)
            file_size = file.stat().st_size
            length = int.from_bytes(start[:8], "little")
            if len(start) < 8 or length > MAX_HEADER_BYTES or 8 + length > file_size:
                what = f"is truncated or no safetensors file: header of {length} bytes in a file of {file_size}"
                raise CheckpointError(what, where=str(file), mend="Download it again")
            stream.seek(8)
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(file)) from None
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):  # both UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError("its header is not JSON: no safetensors file", where=str(file)) from None
    if not isinstance(header, dict):
        raise CheckpointError("its header is not a JSON object: no safetensors file", where=str(file))
    return header, 8 + length, file_size


def _counts(value: Any) -> list[int] | None:
    """The value if it is a list of non-negative integers, else None."""
    if not isinstance(value, list):
        return None
    return value if all(type(item) is int and item >= 0 for item in value) else None


def _entry(file: Path, name: str, fields: Any, data_start: int, dtypes: tuple[str, ...]) -> TensorEntry:
    known = fields if isinstance(fields, dict) else {}
    dtype, shape, offsets = known.get("dtype"), _counts(known.get("shape")), _counts(known.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"malformed header entry for tensor {name}: {json.dumps(fields)}", where=str(file))
    nbytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * ITEM_BYTES[dtype] if dtype in dtypes else nbytes
    if nbytes != expected:
        what = f"tensor {name} occupies {nbytes} bytes, but {dtype} {shape} needs {expected}"
        raise CheckpointError(what, where=str(file), mend="Download it again")
    return TensorEntry(name, dtype, tuple(shape), file, data_start + offsets[0], nbytes)


def _check_tiling(file: Path, entries: list[TensorEntry], data_start: int, file_size: int) -> None:
    """The entries, sorted by offset, fill the data exactly."""
    end, previous = data_start, "the header"
    for entry in entries:
        if entry.offset != end:
            fault = "overlaps with" if entry.offset < end else "leaves a gap after"
            raise CheckpointError(f"tensor {entry.name} {fault} {previous}", where=str(file), mend="Download it again")
        end, previous = entry.offset + entry.nbytes, f"tensor {entry.name}"
    if file_size != end:
        fault = "is truncated: it has" if file_size < end else "has bytes that no tensor owns:"
        what = f"{fault} {file_size} bytes, but its header accounts for {end}"
        raise CheckpointError(what, where=str(file), mend="Download it again")


def _check_dtypes(file: Path, entries: list[TensorEntry], dtypes: tuple[str, ...]) -> None:
    unsupported = [f"{entry.name} ({entry.dtype})" for entry in entries if entry.dtype not in dtypes]
    if unsupported:
        shown = ", ".join(unsupported[:5]) + (f" and {len(unsupported) - 5} more" if len(unsupported) > 5 else "")
        what = f"unsupported dtype: {shown}; weights must be F32, F16 or BF16"
        mend = "Quantised checkpoints are not read: use the unquantised one"
        raise CheckpointError(what, where=str(file), mend=mend)
