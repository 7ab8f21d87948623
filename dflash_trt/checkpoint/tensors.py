"""The tensors of a checkpoint folder, read lazily: opening reads headers, reading maps memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from dflash_trt.checkpoint.config import read_json_object
from dflash_trt.checkpoint.safetensors_file import ITEM_BYTES, TensorEntry, read_entries
from dflash_trt.errors import CheckpointError

__all__ = ["TensorEntry", "TensorFolder", "numpy_dtype"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def numpy_dtype(name: str) -> np.dtype:
    """numpy's type of a safetensors dtype; that of BF16 is ml_dtypes', which only this needs."""
    if name == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"F32": np.float32, "F16": np.float16, "U8": np.uint8}[name])


class TensorFolder(Mapping[str, TensorEntry]):
    """Tensors by name, over one or several safetensors files. Made by `open` or `from_files`."""

    def __init__(self, where: Path, entries: dict[str, TensorEntry], files: tuple[Path, ...]) -> None:
        self.where = where
        self._entries = entries
        self._files = files
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, path: Path | str) -> TensorFolder:
        """Open a checkpoint folder: `model.safetensors`, or the shards of `model.safetensors.index.json`.

        Raises:
            CheckpointError: no such folder, no weights in it, index and shards that disagree, or a damaged file.
        """
        folder = Path(path)
        if not folder.is_dir():
            what = "is a file, not a checkpoint folder" if folder.exists() else "there is no such folder"
            raise CheckpointError(what, where=str(folder), mend="Point at a Hugging Face checkpoint folder")
        single, index = folder / SINGLE, folder / INDEX
        if single.exists() and index.exists():
            what = f"holds both {SINGLE} and {INDEX}: which of them is the model is not clear"
            raise CheckpointError(what, where=str(folder), mend="Remove the stale one")
        if index.exists():
            return _open_sharded(folder, index)
        if single.exists() or single.is_symlink():
            return cls.from_files([single], where=folder)
        raise _no_weights(folder)

    @classmethod
    def from_files(
        cls, files: Iterable[Path | str], where: Path | None = None, *, later_wins: bool = False
    ) -> TensorFolder:
        """Open an explicit list of safetensors files.

        Args:
            files: at least one path.
            where: named in error messages; the folder of the first file by default.
            later_wins: of a tensor that is in two files take the later one (a bundle's converted tensors lie beside the
                linked file that also holds the originals) instead of refusing it.

        Raises:
            CheckpointError: a damaged file, or a tensor in two of them.
        """
        paths = tuple(Path(file) for file in files)
        if not paths:
            raise CheckpointError("no safetensors files were given")
        entries: dict[str, TensorEntry] = {}
        for path in paths:
            for entry in read_entries(path):
                if entry.name in entries and not later_wins:
                    both = f"{entries[entry.name].file.name} and {path.name}"
                    what = f"tensor {entry.name} is in two files, {both}"
                    raise CheckpointError(what, where=str(path.parent), mend="Remove the stale file")
                entries[entry.name] = entry
        if not entries:
            raise CheckpointError("holds no tensors", where=str(where or paths[0]), mend="Download it again")
        return cls(where or paths[0].parent, entries, paths)

    def only(self, names: Iterable[str]) -> TensorFolder:
        """The same folder with these tensors alone."""
        return TensorFolder(self.where, {name: self._entries[name] for name in names}, self._files)

    def names(self) -> tuple[str, ...]:
        """Tensor names, in file and data order."""
        return tuple(self._entries)

    def files(self) -> tuple[Path, ...]:
        """The safetensors files."""
        return self._files

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file: float32, float16, ml_dtypes.bfloat16 or uint8.

        Raises:
            KeyError: no such tensor.
        """
        return self.bits(name).view(numpy_dtype(self._entries[name].dtype))

    def read_float32(self, name: str) -> np.ndarray:
        """The tensor as float32, which holds every value of the other dtypes. Raises KeyError as `read`."""
        bits = self.bits(name)
        if self._entries[name].dtype == "BF16":  # the upper half of a float32
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(numpy_dtype(self._entries[name].dtype)).astype(np.float32)

    def bits(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file, floats as uint32 or uint16. Raises KeyError as `read`."""
        entry = self._entries[name]
        if entry.file not in self._maps:
            with entry.file.open("rb") as stream:
                self._maps[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        dtype = np.dtype(f"u{ITEM_BYTES[entry.dtype]}")
        return np.ndarray(entry.shape, dtype, buffer=self._maps[entry.file], offset=entry.offset)

    def blocks(self, name: str, items: int) -> Iterator[np.ndarray]:
        """The tensor's values in their order, flat, so many at a time.

        Read, not mapped: of a tensor of any size no more is ever in memory. Raises KeyError as `read`; CheckpointError
        where the file has become shorter.
        """
        entry = self._entries[name]
        bits, left = np.dtype(f"u{ITEM_BYTES[entry.dtype]}"), math.prod(entry.shape)
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset)
            while left:
                block = np.fromfile(stream, bits, min(items, left))
                if not block.size:
                    raise CheckpointError("was cut while it was being read", where=str(entry.file))
                left -= block.size
                yield block.view(numpy_dtype(entry.dtype))


def _no_weights(folder: Path) -> CheckpointError:
    """Says what the folder holds in place of the weights."""
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    loose = sorted(path.name for path in folder.glob("*.safetensors"))
    if loose:
        what = f"no {SINGLE} and no {INDEX}, only {', '.join(loose[:4])}"
        return CheckpointError(what, where=str(folder), mend="Download the index too, or rename a single file")
    if others:
        what = f"no safetensors weights, only {', '.join(others[:4])}"
        mend = "Convert to safetensors (transformers: from_pretrained, then save_pretrained)"
        return CheckpointError(what, where=str(folder), mend=mend)
    what = f"no weights: neither {SINGLE} nor {INDEX}"
    return CheckpointError(what, where=str(folder), mend="Download the whole checkpoint")


def _read_weight_map(index: Path) -> dict[str, str]:
    """{tensor: file name} of a shard index."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("weight_map must be an object naming at least one tensor", where=str(index))
    for name, shard in weight_map.items():
        # A bare file name: an index must not lead out of its folder.
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"weight_map.{name} is {shard!r}, but must be a bare file name", where=str(index))
    return weight_map


def _open_sharded(folder: Path, index: Path) -> TensorFolder:
    weight_map = _read_weight_map(index)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).exists()]
    if absent:
        what = f"{len(absent)} of {len(shards)} shards are missing: {', '.join(absent)}"
        raise CheckpointError(what, where=str(folder), mend=f"Download them, they are named by {INDEX}")
    tensors = TensorFolder.from_files([folder / shard for shard in shards], where=folder)
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"tensor {name} should be in {shard}, but is not there", where=str(index))
        if tensors[name].file.name != shard:
            what = f"tensor {name} should be in {shard}, but is in {tensors[name].file.name}"
            raise CheckpointError(what, where=str(index))
    unindexed = [entry for name, entry in tensors.items() if name not in weight_map]
    if unindexed:
        what = f"does not name tensor {unindexed[0].name}, which is in {unindexed[0].file.name}"
        raise CheckpointError(what, where=str(index), mend="Index and shards come from different saves")
    return tensors
