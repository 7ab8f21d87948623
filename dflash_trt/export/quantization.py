"""Weights of few bits, as ONNX Runtime's `MatMulNBits` takes them.

A matrix [N, K] has blocks of 32 along K; the last one of a row may be padded with zeros. A block has one scale, its
number of largest magnitude over -2^(bits-1), and unsigned integers, the nearest to number / scale + 2^(bits-1). Two
of four bits share a byte, the first one its lower half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dflash_trt.checkpoint.safetensors_file import read_entries
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.config import WeightKind
from dflash_trt.export.safetensors_writer import write_safetensors

QUANTIZED = "quantized.safetensors"
PACKED, SCALES = ".quantized", ".scales"  # behind the name of the weight
BLOCK = 32
BITS: dict[WeightKind, int] = {"int8": 8, "int4": 4}  # of those that are quantised

_ITEMS = 1 << 22  # quantised at a time: 16 MB of float32


def packed_shape(shape: tuple[int, int], bits: int) -> tuple[int, int, int]:
    """Of the integers of a matrix [N, K]: [N, blocks, bytes of a block]."""
    return shape[0], -(-shape[1] // BLOCK), BLOCK * bits // 8


def quantize(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 [N, K] -> integers uint8 [N, blocks, BLOCK * bits / 8] and scales float32 [N, blocks]."""
    # not from onnxruntime.quantization, which turns logging on for the whole process
    from onnxruntime.capi import _pybind_state

    rows, columns = weight.shape
    shape = packed_shape((rows, columns), bits)
    packed, scales = np.zeros(shape, np.uint8), np.zeros(shape[:2], np.float32)
    padded = np.zeros((shape[1] * BLOCK, rows), np.float32)
    padded[:columns] = weight.T
    zero_points = np.zeros((rows, -(-shape[1] * bits // 8)), np.uint8)  # symmetric: not used
    run = {4: _pybind_state.quantize_matmul_4bits, 8: _pybind_state.quantize_matmul_8bits}[bits]
    run(packed, padded, scales, zero_points, BLOCK, rows, columns, True)
    return packed, scales


def dequantize(packed: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """The float32 [N, columns] that integers and scales stand for."""
    bits = packed.shape[2] * 8 // BLOCK
    numbers = np.stack((packed & 15, packed >> 4), axis=-1) if bits == 4 else packed
    centred = numbers.reshape(*scales.shape, BLOCK).astype(np.float32) - (1 << bits - 1)
    return (centred * scales[..., None]).reshape(len(packed), -1)[:, :columns]


def write_quantized(path: Path, weights: TensorFolder, bits: int, progress: Callable[[int], None]) -> None:
    """Quantises matrices one after the other, some rows at a time.

    Args:
        path: must not exist.
        weights: of rank 2, of any float dtype.
        progress: called with the number of bytes read.
    """
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, entry in weights.items():
        shape = packed_shape((entry.shape[0], entry.shape[1]), bits)
        kinds |= {name + PACKED: ("U8", shape), name + SCALES: ("F32", shape[:2])}
    scales: list[np.ndarray] = []  # of the matrix that was written last: its scales come behind it

    def read(name: str) -> Iterator[np.ndarray]:
        if name.endswith(SCALES):
            yield from scales
            return
        scales.clear()
        source = name.removesuffix(PACKED)
        columns = weights[source].shape[1]
        for block in weights.blocks(source, max(1, _ITEMS // columns) * columns):
            packed, own = quantize(block.astype(np.float32).reshape(-1, columns), bits)
            progress(block.nbytes)
            scales.append(own)
            yield packed

    write_safetensors(path, kinds, read)


def read_quantized(path: Path) -> TensorFolder:
    """The tensors of a file that `write_quantized` wrote."""
    entries = {entry.name: entry for entry in read_entries(path, ("U8", "F32"))}
    return TensorFolder(path.parent, entries, (path,))


def quantized_names(tensors: TensorFolder) -> list[str]:
    """The weights that such a file has, by their own names."""
    return [name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)]


def dequantized(tensors: TensorFolder, name: str, columns: int) -> np.ndarray:
    """One weight float32 [N, columns] of such a file."""
    return dequantize(tensors.read(name + PACKED), tensors.read(name + SCALES), columns)
