"""Where the bytes of every initialiser lie in the bundle.

A tensor whose dtype is the graph's stays in the checkpoint's own safetensors file, which the bundle hard-links (ONNX
Runtime refuses external data outside the model's folder, and symbolic links); others are converted once, streamed,
into safetensors files of the bundle. The embedding and the head exist once: the drafter's folder links the target's.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.decoder import SPEC_DTYPES
from dflash_trt.checkpoint.drafter_kinds import FUSION_WEIGHTS
from dflash_trt.checkpoint.spec import Dtype
from dflash_trt.checkpoint.target import EMBEDDING, LM_HEAD
from dflash_trt.checkpoint.tensors import TensorEntry, TensorFolder, numpy_dtype
from dflash_trt.errors import ExportError
from dflash_trt.export.quantization import PACKED, QUANTIZED, SCALES, read_quantized, write_quantized
from dflash_trt.export.safetensors_writer import write_safetensors

CONVERTED = "weights.safetensors"
SHARED = "shared.safetensors"
TABLES = "tables.safetensors"
TARGET_PREFIX = "target."
_RESERVED = (CONVERTED, SHARED, TABLES, QUANTIZED)

_SAFETENSORS_DTYPE = {dtype: name for name, dtype in SPEC_DTYPES.items()}
_IR_DTYPE = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "U8": ir.DataType.UINT8,
}
_SHARED_NAMES = (EMBEDDING, LM_HEAD)

_BLOCK = 1 << 22  # items converted at a time: 16 MB of float32
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)

log = logging.getLogger(__name__)

Progress = Callable[[int], None]


@dataclass
class PlacedWeights:
    """The tensors of one graph as they lie in its bundle folder: initialiser name -> entry inside `folder`."""

    folder: Path
    entries: dict[str, TensorEntry] = field(default_factory=dict)

    def bind(self, model: ir.Model) -> None:
        """Points every weight of `model` at its bytes.

        Raises:
            ExportError: an initialiser nobody placed, or one of another shape or dtype.
        """
        for name, value in model.graph.initializers.items():
            if value.const_value is not None and not isinstance(value.const_value, ir.ExternalTensor):
                continue  # a small constant of the graph's own
            entry = self.entries.get(name)
            if entry is None:
                raise ExportError("no tensor was placed for this initialiser", where=name)
            shape = () if value.shape is None else tuple(value.shape.numpy())
            if shape != entry.shape:
                raise ExportError(f"placed tensor has shape {entry.shape}, the graph {shape}", where=name)
            if value.dtype != _IR_DTYPE[entry.dtype]:
                raise ExportError(f"placed tensor is {entry.dtype}, the graph has {value.dtype}", where=name)
            value.const_value = ir.ExternalTensor(
                location=entry.file.name,
                offset=entry.offset,
                length=entry.nbytes,
                dtype=_IR_DTYPE[entry.dtype],
                shape=ir.Shape(entry.shape),
                name=name,
                base_dir=self.folder,
            )


def link(source: Path, destination: Path) -> None:
    """Hard-links, or copies where that is not possible (another filesystem, a file of somebody else's, too many links).

    An existing destination is left as it is.
    """
    if destination.exists():
        return
    try:
        os.link(source.resolve(), destination)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        log.warning("%s cannot be hard-linked into the bundle (%s): copying it", source, error.strerror)
        shutil.copyfile(source, destination)


def _chunks(tensors: TensorFolder, name: str, dtype: np.dtype, progress: Progress) -> Iterator[np.ndarray]:
    """A tensor converted block by block; `progress` counts the bytes read."""
    for block in tensors.blocks(name, _BLOCK):
        progress(block.nbytes)
        yield block.astype(dtype)


def _place(
    tensors: TensorFolder, names: list[str], dtype: Dtype, folder: Path, converted_file: str, progress: Progress
) -> dict[str, TensorEntry]:
    """Places tensors in `folder`, in place where the dtype fits; returns name -> entry.

    `layer_fusion_weights` keep their dtype: their softmax is to be the same wherever it is taken from.
    """
    wanted = _SAFETENSORS_DTYPE[dtype]
    entries: dict[str, TensorEntry] = {}
    to_convert = []
    for name in names:
        entry = tensors[name]
        if entry.dtype != wanted:
            to_convert.append(name)
            continue
        if entry.file.name in _RESERVED or entry.file.name.startswith(TARGET_PREFIX):
            mend = "Rename the file, in the shard index too"
            raise ExportError("the bundle has a file of its own by this name", where=str(entry.file), mend=mend)
        link(entry.file, folder / entry.file.name)
        entries[name] = _moved(entry, folder / entry.file.name)
        progress(entry.nbytes)
    if to_convert:
        to_convert.sort(key=lambda name: name == FUSION_WEIGHTS)  # last: an odd size would misalign what follows
        path = folder / converted_file
        dtypes = {name: tensors[name].dtype if name == FUSION_WEIGHTS else wanted for name in to_convert}
        write_safetensors(
            path,
            {name: (dtypes[name], tensors[name].shape) for name in to_convert},
            lambda name: _chunks(tensors, name, numpy_dtype(dtypes[name]), progress),
        )
        entries.update(TensorFolder.from_files([path]))
    return entries


def _moved(entry: TensorEntry, file: Path) -> TensorEntry:
    return TensorEntry(entry.name, entry.dtype, entry.shape, file, entry.offset, entry.nbytes)


def _place_tables(tables: Mapping[str, np.ndarray], folder: Path) -> dict[str, TensorEntry]:
    path = folder / TABLES
    write_safetensors(path, {n: ("F32", t.shape) for n, t in tables.items()}, lambda name: iter([tables[name]]))
    return dict(TensorFolder.from_files([path]).items())


def place_target(
    tensors: TensorFolder, tables: Mapping[str, np.ndarray], dtype: Dtype, folder: Path, progress: Progress
) -> PlacedWeights:
    """Places a target's tensors and its rotary tables in its bundle folder.

    Args:
        tensors: those of the model alone; without `lm_head.weight` the head is the embedding.
        tables: `rope_cos`, `rope_sin` float32.
        dtype: of the graph.
        folder: exists already.
        progress: called with the number of bytes placed, as the checkpoint has them.
    """
    shared = [name for name in _SHARED_NAMES if name in tensors]
    own = [name for name in tensors if name not in _SHARED_NAMES]
    placed = PlacedWeights(folder, _place(tensors, shared, dtype, folder, SHARED, progress))
    placed.entries.update(_place(tensors, own, dtype, folder, CONVERTED, progress))
    placed.entries.update(_place_tables(tables, folder))
    placed.entries.setdefault(LM_HEAD, placed.entries[EMBEDDING])
    return placed


def place_drafter(
    tensors: TensorFolder,
    tables: Mapping[str, np.ndarray],
    target: PlacedWeights,
    dtype: Dtype,
    folder: Path,
    progress: Progress,
) -> PlacedWeights:
    """Places a drafter's tensors and tables, and links the target's embedding and head beside them.

    `layer_fusion_weights` are among them although the graph has only the `fusion_shares` of the tables: the reference
    is loaded from the bundle.
    """
    placed = PlacedWeights(folder, _place(tensors, list(tensors), dtype, folder, CONVERTED, progress))
    placed.entries.update(_place_tables(tables, folder))
    for name in _SHARED_NAMES:
        entry = target.entries[name]
        file = folder / f"{TARGET_PREFIX}{entry.file.name}"
        link(entry.file, file)
        placed.entries[f"{TARGET_PREFIX}{name}"] = _moved(entry, file)
    return placed


def place_quantized(placed: PlacedWeights, bits: int, progress: Progress, target: PlacedWeights | None = None) -> None:
    """Places the weights of every product a second time, quantised; those of floats stay for the reference.

    Args:
        placed: a graph's; `NAME.quantized` and `NAME.scales` come to each weight NAME.
        bits: 8 or 4.
        progress: called with the number of bytes read.
        target: of a drafter, where the head is taken from: its file is linked, as for floats.
    """
    path = placed.folder / QUANTIZED
    weights = {name: entry for name, entry in placed.entries.items() if _is_factor(name, entry)}
    write_quantized(path, TensorFolder(placed.folder, weights, ()), bits, progress)
    placed.entries.update(read_quantized(path))
    if target is not None:
        file = placed.folder / f"{TARGET_PREFIX}{QUANTIZED}"
        link(target.folder / QUANTIZED, file)
        for part in (PACKED, SCALES):
            entry = target.entries[f"{LM_HEAD}{part}"]
            placed.entries[f"{TARGET_PREFIX}{entry.name}"] = _moved(entry, file)


def bytes_to_quantize(placed: PlacedWeights) -> int:
    """What `place_quantized` reads."""
    return sum(entry.nbytes for name, entry in placed.entries.items() if _is_factor(name, entry))


def _is_factor(name: str, entry: TensorEntry) -> bool:
    """Whether a tensor is the graph's own, and what a linear layer multiplies by."""
    own = entry.file.name != TABLES and not name.startswith(TARGET_PREFIX)
    return own and len(entry.shape) == 2 and name not in (EMBEDDING, FUSION_WEIGHTS)
