"""The Hugging Face folder that `examples/smollm2/prepare.py` makes of a GGUF file computes what the file says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_forward import logits
from smollm2_models import EXAMPLE, gguf_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SIZES = {"layers": 2, "hidden": 32, "heads": 4, "groups": 2, "ffn": 48}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def prepare(file: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLE / "prepare.py", "--gguf", file, "--output", output]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def write_gguf(file: Path, architecture: str = "llama", pre: str = "smollm", extra: str | None = None) -> None:
    """A small random model, quantised like the real one, with a byte-level tokenizer of a few merges."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("small")
    letters = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    letters += [chr(256 + place) for place in range(256 - len(letters))]  # the byte alphabet of GPT-2
    tokens = [*SPECIAL, *letters, "Ġt", "he", "Ġthe"]
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(64)
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_feed_forward_length(SIZES["ffn"])
    writer.add_block_count(SIZES["layers"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["groups"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    )
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_1) -> None:
        values = random.standard_normal(shape).astype(np.float32) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        if len(shape) == 1 or shape[-1] % 32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    hidden, kv = SIZES["hidden"], SIZES["hidden"] // SIZES["heads"] * SIZES["groups"]
    add("token_embd.weight", len(tokens), hidden, kind=gguf.GGMLQuantizationType.Q8_0)
    add("output_norm.weight", hidden)
    for layer in range(SIZES["layers"]):
        for name, *shape in (
            ("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q", hidden, hidden), ("attn_k", kv, hidden),
            ("attn_v", kv, hidden), ("attn_output", hidden, hidden), ("ffn_gate", SIZES["ffn"], hidden),
            ("ffn_up", SIZES["ffn"], hidden), ("ffn_down", hidden, SIZES["ffn"]),
        ):  # fmt: skip
            add(f"blk.{layer}.{name}.weight", *shape)
    if extra:
        add(extra, hidden, hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "m.gguf")
    result = prepare(folder / "m.gguf", folder / "hf")
    assert result.returncode == 0, result.stderr
    return folder / "m.gguf", folder / "hf"


def test_it_computes_what_the_file_says(small: tuple[Path, Path]) -> None:
    file, folder = small
    tokens = [1, 70, 258, 259, 5, 261, 100, 2, 71]
    with torch.inference_mode():
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    np.testing.assert_allclose(found.numpy(), logits(file, tokens), rtol=1e-3, atol=1e-4)


def test_its_tokenizer(small: tuple[Path, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small[1])
    assert tokenizer.tokenize("to the 12") == ["t", "o", "Ġthe", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer("Grüße, 世界 the end").input_ids) == "Grüße, 世界 the end"
    message = [{"role": "user", "content": "the"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>user\nthe<|im_end|>\n"
    assert tokenizer("<|im_start|>the").input_ids[0] == 1
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architecture": "qwen3"}, "architecture is qwen3"),
        ({"pre": "llama-bpe"}, "('gpt2', 'llama-bpe')"),
        ({"extra": "output.weight"}, "has a tensor output.weight"),
    ],
)
def test_what_it_does_not_know(change: dict, text: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", **change)
    result = prepare(tmp_path / "m.gguf", tmp_path / "hf")
    assert result.returncode == 2
    assert text in result.stderr
    assert not (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_real_one(smollm2: Path) -> None:
    """SmolLM2-135M-Instruct: the same logits, and it knows what it should."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    message = [{"role": "user", "content": "What is the capital of France?"}]
    text = (
        tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) + "The capital of France is"
    )
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    with torch.inference_mode():
        found = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)(torch.tensor([tokens])).logits[0]
    expected = logits(gguf_file(), tokens)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=2e-3)
    assert tokenizer.decode([int(expected[-1].argmax())]) == " Paris"
