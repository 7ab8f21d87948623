"""Writing safetensors files as a stream: the library's own writer needs every tensor in memory at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from dflash_trt.checkpoint.safetensors_file import ITEM_BYTES

Kinds = Mapping[str, tuple[str, tuple[int, ...]]]  # by tensor name: safetensors dtype, shape


def safetensors_header(tensors: Kinds, metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """What such a file begins with, and the bytes of data that follow.

    Args:
        metadata: strings by name, besides the format.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # readers may map the data: start it aligned
    return len(text).to_bytes(8, "little") + text, end


def write_safetensors(path: Path, tensors: Kinds, read: Callable[[str], Iterable[np.ndarray]]) -> None:
    """Writes one file.

    Args:
        path: must not exist.
        read: gives a tensor as consecutive chunks, already in its dtype.
    """
    header, _ = safetensors_header(tensors)
    with open(path, "xb") as file:
        file.write(header)
        for name in tensors:
            for chunk in read(name):
                file.write(np.ascontiguousarray(chunk).tobytes())
