"""TensorFolder: what it reads, and one test for each way a folder of weights can be broken (fault 14)."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint.safetensors_file import read_entries
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.errors import CheckpointError

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def write_raw(file: Path, header: object, data: bytes) -> Path:
    """A safetensors file with any header at all."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return file


def write(file: Path, tensors: dict[str, np.ndarray]) -> Path:
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, value in tensors.items():
        end = len(data) + value.nbytes
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": [len(data), end]}
        data += value.tobytes()
    return write_raw(file, header, data)


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_index(folder: Path, weight_map: dict) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """a and b in shard 1, c in shard 2."""
    write(tmp_path / "s1.safetensors", {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float16)})
    write(tmp_path / "s2.safetensors", {"c": np.arange(5, dtype=np.float32)})
    write_index(tmp_path, {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors"})
    return tmp_path


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_every_dtype_without_copying(tmp_path: Path, dtype: str) -> None:
    value = np.linspace(-3, 3, 12).reshape(3, 4).astype(DTYPES[dtype])
    write(tmp_path / "model.safetensors", {"odd": np.ones(1, np.float16), "w": value})
    tensors = TensorFolder.open(tmp_path)
    assert tensors.names() == ("odd", "w")
    assert len(tensors) == 2
    assert "w" in tensors
    assert "x" not in tensors
    assert (tensors["w"].dtype, tensors["w"].shape, tensors["w"].nbytes) == (dtype, (3, 4), value.nbytes)
    raw = tensors["w"].file.read_bytes()
    assert raw[tensors["w"].offset :][: value.nbytes] == value.tobytes()
    assert tensors.read("w").dtype == value.dtype
    assert not tensors.read("w").flags.owndata
    assert not tensors.read("w").flags.writeable
    np.testing.assert_array_equal(tensors.read("w"), value)
    assert not tensors.bits("w").flags.owndata
    np.testing.assert_array_equal(tensors.bits("w"), value.view(f"u{value.itemsize}"))
    assert tensors.read_float32("w").dtype == np.float32
    np.testing.assert_array_equal(tensors.read_float32("w"), value.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("items", [1, 5, 12, 100])
def test_reads_block_by_block(tmp_path: Path, dtype: str, items: int) -> None:
    value = np.linspace(-3, 3, 12).reshape(3, 4).astype(DTYPES[dtype])
    others = {"odd": np.ones(1, np.float16), "none": np.ones((0, 3), np.float32)}
    write(tmp_path / "model.safetensors", {**others, "w": value, "last": np.ones(3, np.float32)})
    tensors = TensorFolder.open(tmp_path)
    blocks = list(tensors.blocks("w", items))
    assert [len(block) for block in blocks] == [min(items, 12 - start) for start in range(0, 12, items)]
    assert {block.dtype for block in blocks} == {value.dtype}
    np.testing.assert_array_equal(np.concatenate(blocks), value.reshape(-1))
    assert list(tensors.blocks("none", items)) == []
    assert [block.tolist() for block in tensors.blocks("odd", items)] == [[1.0]]


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"w": np.ones(1000, np.float32)})
    blocks = TensorFolder.open(tmp_path).blocks("w", 10)
    next(blocks)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(200)
    with pytest.raises(CheckpointError, match="was cut"):
        list(blocks)


MEMORY = """
import sys
from pathlib import Path
from dflash_trt.checkpoint.tensors import TensorFolder

def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

tensors = TensorFolder.open(sys.argv[1])
before, total = peak(), 0
for block in tensors.blocks("w", 1 << 20):
    total += block.size
print(total, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
def test_blocks_of_a_large_tensor_take_little_memory(tmp_path: Path) -> None:
    """Mapped, a tensor that was read whole would count as the process's own memory."""
    items = 1 << 28
    raw = json.dumps({"w": entry(0, 2 * items, [items], "BF16")}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + 2 * items)
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path], capture_output=True, text=True, check=True)
    total, grown = map(int, done.stdout.split())
    assert total == items
    assert grown < 50_000_000


def test_scalar_and_empty_tensors_read_back(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"none": np.ones((0, 3), np.float32), "one": np.float32(7).reshape(())})
    tensors = TensorFolder.open(tmp_path)
    assert tensors.read("none").shape == (0, 3)
    assert tensors.read("one") == 7


def test_reads_shards(sharded: Path) -> None:
    tensors = TensorFolder.open(sharded)
    assert sorted(tensors) == ["a", "b", "c"]
    assert [file.name for file in tensors.files()] == ["s1.safetensors", "s2.safetensors"]
    np.testing.assert_array_equal(tensors.read("c"), np.arange(5))


def test_reads_an_explicit_list_of_files(sharded: Path) -> None:
    assert TensorFolder.from_files([sharded / "s2.safetensors"]).names() == ("c",)


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        TensorFolder.open(folder)
    for part in parts:
        assert part in str(caught.value)


def test_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "there is no such folder")


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    refused(write(tmp_path / "x.safetensors", {"a": np.ones(1, np.float32)}), "is a file, not a checkpoint folder")


def test_no_weights(tmp_path: Path) -> None:
    refused(tmp_path, "no weights")


def test_only_pickled_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    refused(tmp_path, "pytorch_model.bin", "Convert to safetensors")


def test_shards_without_their_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    refused(sharded, "no model.safetensors.index.json", "s1.safetensors")


def test_single_file_beside_an_index(sharded: Path) -> None:
    write(sharded / "model.safetensors", {"a": np.ones(1, np.float32)})
    refused(sharded, "both model.safetensors and")


def test_missing_shard(sharded: Path) -> None:
    (sharded / "s2.safetensors").unlink()
    refused(sharded, "1 of 2 shards are missing: s2.safetensors")


def test_index_names_a_tensor_the_shard_lacks(sharded: Path) -> None:
    write_index(sharded, {"a": "s1.safetensors", "b": "s1.safetensors", "c": "s2.safetensors", "d": "s2.safetensors"})
    refused(sharded, "tensor d should be in s2.safetensors, but is not there")


def test_index_names_the_wrong_shard(sharded: Path) -> None:
    write_index(sharded, {"a": "s1.safetensors", "b": "s2.safetensors", "c": "s2.safetensors"})
    refused(sharded, "tensor b should be in s2.safetensors, but is in s1.safetensors")


def test_tensor_the_index_does_not_name(sharded: Path) -> None:
    write_index(sharded, {"a": "s1.safetensors", "c": "s2.safetensors"})
    refused(sharded, "does not name tensor b", "s1.safetensors")


def test_tensor_in_two_shards(sharded: Path) -> None:
    write(sharded / "s2.safetensors", {"c": np.ones(5, np.float32), "a": np.ones((2, 3), np.float32)})
    refused(sharded, "tensor a is in two files, s1.safetensors and s2.safetensors")


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"{", b"[1]", b'{"weight_map": {}}', b'{"weight_map": [1]}', b"{}"])
def test_broken_index(sharded: Path, content: bytes) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(content)
    refused(sharded, "model.safetensors.index.json")


@pytest.mark.parametrize("shard", ["../s1.safetensors", "/etc/passwd", "..", "", 3])
def test_index_leading_out_of_its_folder(sharded: Path, shard: object) -> None:
    write_index(sharded, {"a": shard})
    refused(sharded, "weight_map.a", "bare file name")


def test_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1234\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    refused(tmp_path, "model.safetensors", "Git-LFS pointer", "git lfs pull")


def test_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    refused(tmp_path, "model.safetensors", "cannot be read")


def test_truncated_data(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"a": np.ones(100, np.float32)})
    file.write_bytes(file.read_bytes()[:-7])
    refused(tmp_path, "is truncated", "model.safetensors")


def test_trailing_bytes(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"a": np.ones(1, np.float32)})
    file.write_bytes(file.read_bytes() + b"xx")
    refused(tmp_path, "bytes that no tensor owns")


@pytest.mark.parametrize("content", [b"", b"\x01\x00", b"\xff" * 16, (50).to_bytes(8, "little") + b"{}"])
def test_absurd_header_length(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, "truncated or no safetensors file")


@pytest.mark.parametrize("header", [b"not json", b"\xff\xfe\xfd", b"[]", b"[" * 100_000])
def test_header_that_is_no_json_object(tmp_path: Path, header: bytes) -> None:
    write_raw(tmp_path / "model.safetensors", header, b"")
    refused(tmp_path, "its header is not")


@pytest.mark.parametrize(
    "fields",
    [
        3,
        {},
        entry(8, 0, [2]),
        entry(-8, 0, [2]),
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]},
        {"dtype": 1, "shape": [2], "data_offsets": [0, 8]},
    ],
)
def test_malformed_entry(tmp_path: Path, fields: object) -> None:
    write_raw(tmp_path / "model.safetensors", {"w": fields}, bytes(8))
    refused(tmp_path, "malformed header entry for tensor w")


def test_size_that_does_not_fit_the_shape(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"w": entry(0, 8, [3])}, bytes(8))
    refused(tmp_path, "tensor w occupies 8 bytes, but F32 [3] needs 12")


def test_overlapping_tensors(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12))
    refused(tmp_path, "tensor b overlaps with tensor a")


def test_gap_between_tensors(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"a": entry(0, 8, [2]), "b": entry(12, 16, [1])}, bytes(16))
    refused(tmp_path, "tensor b leaves a gap after tensor a")


def test_offsets_out_of_range(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"a": entry(0, 800, [200])}, bytes(8))
    refused(tmp_path, "is truncated")


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "I32", "F64", "BOOL"])
def test_unsupported_dtype(tmp_path: Path, dtype: str) -> None:
    write_raw(tmp_path / "model.safetensors", {"q.weight": entry(0, 8, [1], dtype)}, bytes(8))
    refused(tmp_path, f"q.weight ({dtype})", "F32, F16 or BF16")


def test_file_without_tensors(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"__metadata__": {}}, b"")
    refused(tmp_path, "holds no tensors")


def test_explicit_list_may_not_be_empty() -> None:
    with pytest.raises(CheckpointError, match="no safetensors files"):
        TensorFolder.from_files([])


@settings(deadline=None)
@given(data=st.data())
def test_damaged_bytes_read_or_raise_checkpoint_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever bytes change, the reader answers with entries inside the file or with its own error."""
    file = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    raw = bytearray(write(file, {"a": np.ones(3, np.float32), "b": np.ones(2, np.float16)}).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    try:
        entries = read_entries(file)
    except CheckpointError:
        return
    assert all(found.offset + found.nbytes <= file.stat().st_size for found in entries)
