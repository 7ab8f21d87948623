"""Shapes without weights: they are those of the published checkpoints, and holes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from makers import make_drafter, make_target
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dflash_trt.checkpoint import drafter as drafters
from dflash_trt.checkpoint import target as targets
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.target import read_target
from dflash_trt.checkpoint.tensors import TensorFolder

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = EXAMPLES / "tiny"
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """`make_shape`, which returns the folder it wrote."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from make_shape import make_shape

    def make(shape: Path | str, name: str = "shape", **options: object) -> Path:
        make_shape(shape, tmp_path / name, **options)
        return tmp_path / name

    return make


def command(*options: object) -> subprocess.CompletedProcess[str]:
    line = [str(part) for part in (sys.executable, EXAMPLES / "make_shape.py", *options)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def allocated(folder: Path) -> int:
    return 512 * sum(file.stat().st_blocks for file in folder.iterdir())


# What the published indices say: bytes of all tensors, how many there are, in how many files.
@pytest.mark.parametrize(
    ("shape", "size", "tensors", "files"),
    [("qwen3-8b", 16_381_470_720, 399, 5), ("qwen3-4b", 8_044_936_192, 398, 3)],
)
def test_a_target_is_of_the_published_size(make: Make, shape: str, size: int, tensors: int, files: int) -> None:
    folder = make(shape)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == size
    assert len(index["weight_map"]) == tensors
    names = sorted({*index["weight_map"].values()})
    assert names == [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    lengths = [(folder / name).stat().st_size for name in names]
    assert size < sum(lengths) < size + 100_000
    assert max(lengths) < 1.2 * min(lengths)
    assert allocated(folder) < 1_000_000


# What the papers and the files' sizes say.
@pytest.mark.parametrize(
    ("shape", "system", "parameters", "tensors"),
    [
        ("qwen3-4b-dflash-b16", "dflash", 537_427_200, 58),
        ("qwen3-8b-dflash-b16", "dflash", 1_048_626_432, 58),
        ("qwen3-4b-dflare-b16", "dflare", 743_221_055, 94),
        ("qwen3-8b-dflare-b16", "dflare", 1_409_353_535, 94),
    ],
)
def test_a_drafter_is_of_the_published_size(
    make: Make, shape: str, system: str, parameters: int, tensors: int
) -> None:
    folder, target = make(shape), make(shape[:8], "target")
    checkpoint = read_drafter(folder)
    assert (checkpoint.spec.system, len(checkpoint.tensors)) == (system, tensors)
    assert drafters.parameter_count(checkpoint.spec) == parameters
    assert sum(entry.nbytes for entry in checkpoint.tensors.values()) == 2 * parameters
    assert allocated(folder) < 100_000
    assert check_pair(read_target(target), checkpoint, None) == 16
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-4b", "qwen3-8b"])
def test_a_target_has_the_tensors_transformers_expects(make: Make, shape: str) -> None:
    folder = make(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert {name: entry.shape for name, entry in TensorFolder.open(folder).items()} == expected


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_any_dtype_and_number_of_files(make: Make, dtype: str, stored: str) -> None:
    folder = make("qwen3-8b-dflare-b16", dtype=dtype, shards=4)
    checkpoint = read_drafter(folder)
    assert {entry.dtype for entry in checkpoint.tensors.values()} == {stored}
    assert checkpoint.spec.dtype == dtype == json.loads((folder / "config.json").read_text())["torch_dtype"]
    assert len(checkpoint.tensors.files()) == 4
    assert not checkpoint.tensors.read("layer_fusion_weights").any()


def test_as_many_files_as_tensors(make: Make) -> None:
    folder = make("qwen3-8b-dflash-b16", shards=58)
    sizes = [len(TensorFolder.from_files([file])) for file in sorted(folder.glob("*.safetensors"))]
    assert sizes == [1] * 58


def test_what_is_written_says_that_it_is_no_model(make: Make) -> None:
    folder = make("qwen3-8b-dflash-b16")
    assert "weights are all zero" in (folder / "README.md").read_text()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "weights are all zero" in file.metadata()["note"]
        assert not file.get_tensor("norm.weight").any()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tie", [True, False])
def test_the_shape_of_any_config(make: Make, tmp_path: Path, family: str, tie: bool) -> None:
    model = make_target(tmp_path / "real", family, tie, attention_bias=True, eos_token_id=[7, 9], bos_token_id=300)
    folder = make(tmp_path / "real" / "config.json", dtype="float32")
    changed = json.loads((tmp_path / "real" / "config.json").read_text()) | {"dtype": "float32"}
    assert json.loads((folder / "config.json").read_text()) == changed
    real, shape = read_target(tmp_path / "real"), read_target(folder)
    assert shape.spec == real.spec
    assert {name: entry.shape for name, entry in shape.tensors.items()} == targets.expected_tensors(real.spec)
    assert sum(math.prod(entry.shape) for entry in shape.tensors.values()) == sum(p.numel() for p in model.parameters())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [tokenizer.id_to_token(token) for token in (7, 9, 300)] == ["<|7|>", "<|9|>", "<|300|>"]


@pytest.mark.parametrize("kind", ["dflash", "dflare"])
@pytest.mark.parametrize("told", [True, False])
def test_a_drafter_of_any_config(make: Make, tmp_path: Path, kind: str, told: bool) -> None:
    """By its name, or, where training code calls all drafters alike, by being told."""
    make_target(tmp_path / "target")
    names = {"architectures": ["DFlashDraftModel"]} if told else {}
    tensors = make_drafter(tmp_path / "real", tmp_path / "target", taps=[0, 2, 3], kind=kind, **names)
    folder = make(tmp_path / "real" / "config.json", dtype="float32", system=kind if told else None)
    assert read_drafter(folder).spec == read_drafter(tmp_path / "real").spec
    assert {name: entry.shape for name, entry in TensorFolder.open(folder).items()} == {
        name: value.shape for name, value in tensors.items()
    }


def test_the_tokenizer_takes_any_text_and_ends_it(make: Make) -> None:
    folder = make("qwen3-8b")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("def f():\n\t'ü 日本'\x00")
    assert max(ids) < 256
    assert tokenizer.decode(ids) == "def f():\n\t'ü 日本'\x00"
    assert (tokenizer.eos_token_id, tokenizer.eos_token) == (151645, "<|151645|>")
    assert tokenizer.decode([*ids, 151645], skip_special_tokens=True) == "def f():\n\t'ü 日本'\x00"


def test_a_tokenizer_can_be_given(make: Make) -> None:
    folder = make("qwen3-8b", tokenizer=TINY / "target")
    assert (folder / "tokenizer.json").read_bytes() == (TINY / "target" / "tokenizer.json").read_bytes()


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "shape"
    done = command("qwen3-8b", "--output", folder, "--dtype", "float32", "--shards", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{folder}: 32.76 GB in 7 files, 0.")
    assert read_target(folder).spec.dtype == "float32"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ("Give a SHAPE, or --config",)),
        (("qwen3-8b", "--config", "c.json"), ("Give a SHAPE, or --config",)),
        (("qwen3-9b",), ("'qwen3-9b' is not one of", "qwen3-8b")),
        (("--config", "nowhere/config.json"), ("nowhere", "no such folder")),
        (("qwen3-8b", "--shards", 400), ("400 files for 399 tensors",)),
        (("qwen3-8b", "--shards", 0), ("0 files for 399 tensors",)),
        (("qwen3-8b", "--tokenizer", EXAMPLES), ("has no tokenizer.json",)),
    ],
)
def test_refused(tmp_path: Path, options: tuple[object, ...], words: tuple[str, ...]) -> None:
    done = command(*options, "--output", tmp_path / "shape")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_refused_configs(tmp_path: Path) -> None:
    config = json.loads((TINY / "target" / "config.json").read_text())
    for changes, words in (
        ({"architectures": ["MistralForCausalLM"]}, ("config.json: architectures", "Qwen3ForCausalLM")),
        ({"vocab_size": 200, "eos_token_id": None, "bos_token_id": None}, ("200 ids are too few", "--tokenizer")),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        done = command("--config", tmp_path / "config.json", "--output", tmp_path / "shape")
        assert done.returncode == 2
        assert all(word in done.stderr for word in words), done.stderr
        assert not (tmp_path / "shape").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "shape").mkdir()
    done = command("qwen3-8b-dflash-b16", "--output", tmp_path / "shape")
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert list((tmp_path / "shape").iterdir()) == []
