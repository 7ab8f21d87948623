"""Writing safetensors files as a stream: the library's own writer needs every tensor in memory at once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from dflash_trt.checkpoint.safetensors_file import ITEM_BYTES


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    read: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Writes one file.

    Args:
        path: must not exist.
        tensors: name -> (safetensors dtype, shape).
        read: gives a tensor as consecutive chunks, already in its dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # readers may map the data: start it aligned
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in tensors:
            for chunk in read(name):
                file.write(np.ascontiguousarray(chunk).tobytes())
