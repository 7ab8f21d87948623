"""Where the weights lie: in the checkpoint's own files where the dtype fits, else converted once; shared ones once."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from export.small_pair import POSITIONS, Kind, assert_same, convert_file, run_passes, small_pair
from makers import make_drafter, make_target
from safetensors.numpy import load_file, save_file

from dflash_trt.backends.onnxruntime import OrtSession
from dflash_trt.checkpoint.rope import rope_tables
from dflash_trt.checkpoint.spec import RopeSpec
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.errors import ExportError
from dflash_trt.export.safetensors_writer import write_safetensors
from dflash_trt.export.weights import PlacedWeights, place_drafter, place_target

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLES = dict(zip(("rope_cos", "rope_sin"), rope_tables(RopeSpec(theta=1e4, rotary_dim=16), POSITIONS), strict=True))


class Pair:
    """Two checkpoints and two bundle folders."""

    def __init__(self, root: Path, **target: Any) -> None:
        self.target_path, self.drafter_path = root / "ck_target", root / "ck_drafter"
        make_target(self.target_path, num_hidden_layers=2, **target)
        make_drafter(self.drafter_path, self.target_path, [0, 1])
        self.folders = {role: root / role for role in ("target", "drafter")}
        for folder in self.folders.values():
            folder.mkdir()
        self.placed_bytes: list[int] = []

    def place(self, dtype: Any = "float32") -> tuple[PlacedWeights, PlacedWeights]:
        sources = TensorFolder.open(self.target_path), TensorFolder.open(self.drafter_path)
        report = self.placed_bytes.append
        target = place_target(sources[0], TABLES, dtype, self.folders["target"], report)
        return target, place_drafter(sources[1], TABLES, target, dtype, self.folders["drafter"], report)


def stored(placed: PlacedWeights, name: str) -> bytes:
    """The bytes an initialiser refers to, read as plainly as can be."""
    entry = placed.entries[name]
    with (placed.folder / entry.file.name).open("rb") as file:
        file.seek(entry.offset)
        return file.read(entry.nbytes)


def inode(path: Path) -> tuple[int, int]:
    info = os.stat(path)
    return info.st_dev, info.st_ino


@pytest.mark.parametrize("tie", [True, False])
def test_weights_of_the_right_dtype_stay_in_their_file(tmp_path: Path, tie: bool) -> None:
    pair = Pair(tmp_path, tie=tie)
    before = {path: path.read_bytes() for path in tmp_path.glob("ck_*/*.safetensors")}
    for placed, source in zip(pair.place(), (pair.target_path, pair.drafter_path), strict=True):
        tensors = load_file(source / "model.safetensors")
        file = placed.folder / "model.safetensors"
        assert inode(file) == inode(source / "model.safetensors")
        for name, tensor in tensors.items():
            assert placed.entries[name].file == file
            assert stored(placed, name) == tensor.tobytes()
    assert {path: path.read_bytes() for path in before} == before
    names = {path.name for folder in pair.folders.values() for path in folder.iterdir()}
    assert names == {"model.safetensors", "target.model.safetensors", "tables.safetensors"}


def test_shards_are_linked_one_by_one(tmp_path: Path) -> None:
    pair = Pair(tmp_path, max_shard_size="20KB", tie=False)
    shards = sorted(pair.target_path.glob("*.safetensors"))
    assert len(shards) > 2
    target, drafter = pair.place()
    for shard in shards:
        assert inode(shard) == inode(target.folder / shard.name)
        for name, tensor in load_file(shard).items():
            assert stored(target, name) == tensor.tobytes()
    for name in (EMBEDDING, HEAD):
        assert stored(drafter, f"target.{name}") == stored(target, name)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_and_head_exist_once(tmp_path: Path, tie: bool, dtype: str) -> None:
    """Whether they are the checkpoint's bytes or converted ones."""
    pair = Pair(tmp_path, tie=tie)
    target, drafter = pair.place(dtype)
    for name in (EMBEDDING, HEAD):
        ours, theirs = target.entries[name], drafter.entries[f"target.{name}"]
        assert (ours.offset, ours.nbytes, ours.dtype) == (theirs.offset, theirs.nbytes, theirs.dtype)
        assert ours.file.parent == target.folder
        assert theirs.file.parent == drafter.folder
        assert inode(ours.file) == inode(theirs.file)
    assert (target.entries[EMBEDDING].offset == target.entries[HEAD].offset) == tie


def test_bfloat16_to_float32_is_exact(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for folder in (pair.target_path, pair.drafter_path):
        convert_file(folder / "model.safetensors", "bfloat16")
    for placed, source in zip(pair.place(), (pair.target_path, pair.drafter_path), strict=True):
        tensors = TensorFolder.open(source)
        for name in tensors:
            wanted = tensors.read(name).view(np.uint16).astype(np.uint32) << 16
            assert stored(placed, name) == wanted.tobytes()
            assert placed.entries[name].shape == tensors[name].shape
        assert not (placed.folder / "model.safetensors").exists()
    # the files are proper safetensors files
    assert set(load_file(pair.folders["target"] / "shared.safetensors")) == {EMBEDDING}
    assert load_file(pair.folders["drafter"] / "weights.safetensors")["fc.weight"].dtype == np.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_to_half_is_rounded_to_nearest(tmp_path: Path, dtype: str) -> None:
    pair = Pair(tmp_path)
    target, _ = pair.place(dtype)
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for name, tensor in load_file(pair.target_path / "model.safetensors").items():
        assert stored(target, name) == tensor.astype(numpy_dtype).tobytes()


def test_a_mixed_checkpoint_converts_only_what_it_must(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    norms = tuple(name for name in load_file(pair.target_path / "model.safetensors") if "norm" in name)
    convert_file(pair.target_path / "model.safetensors", "bfloat16", keep=norms)
    target, _ = pair.place("bfloat16")
    for name, entry in target.entries.items():
        expected = "tables" if name.startswith("rope_") else "weights" if name in norms else "model"
        assert entry.file.name == f"{expected}.safetensors"
    assert inode(target.folder / "model.safetensors") == inode(pair.target_path / "model.safetensors")


def test_conversion_is_streamed(tmp_path: Path) -> None:
    """Never more than 16 MB at a time, however large the tensor."""
    (tmp_path / "source").mkdir()
    (tmp_path / "bundle").mkdir()
    big = np.arange(5_000_000, dtype=np.float32).reshape(-1, 10).astype(ml_dtypes.bfloat16)
    save_file({EMBEDDING: big}, tmp_path / "source" / "model.safetensors")
    steps: list[int] = []
    tensors = TensorFolder.open(tmp_path / "source")
    placed = place_target(tensors, TABLES, "float32", tmp_path / "bundle", steps.append)
    assert max(steps) <= 16 * 2**20
    assert sum(steps) == big.nbytes
    assert stored(placed, EMBEDDING) == big.astype(np.float32).tobytes()


def test_progress_counts_every_byte_placed(tmp_path: Path) -> None:
    pair = Pair(tmp_path, tie=False)
    pair.place()
    files = (pair.target_path, pair.drafter_path)
    assert sum(pair.placed_bytes) == sum(t.nbytes for f in files for t in load_file(f / "model.safetensors").values())


def test_tables_are_float32_always(tmp_path: Path) -> None:
    for placed in Pair(tmp_path).place("bfloat16"):
        for name, table in TABLES.items():
            assert placed.entries[name].dtype == "F32"
            assert stored(placed, name) == table.tobytes()


def test_another_filesystem_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    pair = Pair(tmp_path)
    monkeypatch.setattr(os, "link", refuse)
    target, drafter = pair.place()
    source = pair.target_path / "model.safetensors"
    for copy in (target.folder / "model.safetensors", drafter.folder / "target.model.safetensors"):
        assert inode(copy) != inode(source)
        assert copy.read_bytes() == source.read_bytes()


def test_a_checkpoint_of_symbolic_links(tmp_path: Path) -> None:
    """As in the cache of huggingface_hub: the bundle links the file itself."""
    pair = Pair(tmp_path)
    blob = tmp_path / "blob"
    (pair.target_path / "model.safetensors").rename(blob)
    (pair.target_path / "model.safetensors").symlink_to(blob)
    target, _ = pair.place()
    file = target.folder / "model.safetensors"
    assert not file.is_symlink()
    assert inode(file) == inode(blob)


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "shared.safetensors", "tables.safetensors", "target.x.safetensors"]
)
def test_a_shard_named_like_a_file_of_the_bundle_is_refused(tmp_path: Path, name: str) -> None:
    """It would silently be taken for the bundle's own."""
    tensors = {EMBEDDING: np.ones((4, 2), np.float32)}
    (tmp_path / "bundle").mkdir()
    save_file(tensors, tmp_path / name)
    with pytest.raises(ExportError, match=name):
        place_target(
            TensorFolder.from_files([tmp_path / name]), TABLES, "float32", tmp_path / "bundle", lambda count: None
        )


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_saved_graphs_refer_to_the_placed_bytes(role: str) -> None:
    graph = small_pair().graph(role)
    weights_in_memory = {name: tensor.numpy().tobytes() for name, tensor in graph.module.state_dict().items()}
    for file in ("portable.onnx", "model.onnx"):
        weights = ir.load(graph.folder / file).graph.initializers
        assert len(weights) > 20
        for name, value in weights.items():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                assert tensor is not None
                assert tensor.size <= 8
                continue
            entry = graph.placed.entries[name]
            assert (tensor.location, tensor.offset, tensor.length) == (entry.file.name, entry.offset, entry.nbytes)
            assert (value.dtype, tuple(tensor.shape)) == (ir.DataType.FLOAT, entry.shape)
            with (graph.folder / str(tensor.location)).open("rb") as stream:  # onnx_ir itself refuses hard links
                stream.seek(tensor.offset or 0)
                assert stream.read(tensor.length) == weights_in_memory[name]


def test_bind_refuses_what_was_not_placed() -> None:
    graph = small_pair().target
    model = graph.portable()
    entries = dict(graph.placed.entries)
    del entries["model.norm.weight"]
    with pytest.raises(ExportError, match=r"model\.norm\.weight"):
        PlacedWeights(graph.folder, entries).bind(model)


def test_bind_refuses_another_shape() -> None:
    graph = small_pair().target
    entries = dict(graph.placed.entries) | {"model.norm.weight": graph.placed.entries["rope_cos"]}
    with pytest.raises(ExportError, match="shape"):
        PlacedWeights(graph.folder, entries).bind(graph.portable())


def test_weights_at_odd_offsets_run(tmp_path: Path) -> None:
    """Old safetensors files do not align their data; ONNX Runtime and the torch reference read them all the same."""
    graph = small_pair().target
    source = graph.folder / "model.safetensors"
    content = source.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip()
    header += b" " * (1 - (8 + len(header)) % 2)  # data starts at an odd byte
    assert (8 + len(header)) % 2 == 1
    shifted = tmp_path / "ck"
    shifted.mkdir()
    (shifted / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    (tmp_path / "bundle").mkdir()
    tables = {name: np.frombuffer(stored(graph.placed, name), np.float32).reshape(POSITIONS, -1) for name in TABLES}
    tensors = TensorFolder.open(shifted)
    placed = place_target(tensors, tables, "float32", tmp_path / "bundle", lambda count: None)
    assert any(entry.offset % 2 for entry in placed.entries.values())
    model = graph.inlined()
    placed.bind(model)
    ir.save(model, tmp_path / "bundle" / "model.onnx")
    session = OrtSession(tmp_path / "bundle" / "model.onnx", graph.spec, threads=1)
    assert_same(run_passes(session, 320), run_passes(graph.ort(), 320), 1e-6)


def test_the_writer_writes_what_the_library_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": np.float32(2.5).reshape(()),
        "empty": np.zeros((0, 4), np.float32),
    }
    names = {"float32": "F32", "float16": "F16"}
    kinds = {name: (names[array.dtype.name], array.shape) for name, array in arrays.items()}

    def in_chunks(name: str) -> list[np.ndarray]:
        return np.array_split(arrays[name].reshape(-1), 3)

    path = tmp_path / "x.safetensors"
    write_safetensors(path, kinds, in_chunks)
    found = load_file(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    with pytest.raises(FileExistsError):
        write_safetensors(path, kinds, in_chunks)


def test_mixed_kinds_build(tmp_path: Path) -> None:
    """bfloat16 checkpoints run as float32 with the same weights the reference loads."""
    pair = small_pair(Kind(family="llama", tie=False, windows=False, stored="bfloat16"))
    for role in ("target", "drafter"):
        graph = pair.graph(role)
        assert {entry.dtype for entry in graph.placed.entries.values()} == {"F32"}
        assert_same(run_passes(graph.ort(), 320), run_passes(graph.reference(), 320), 1e-4)
