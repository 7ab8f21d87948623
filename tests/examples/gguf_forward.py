"""A forward pass of a Llama GGUF file in NumPy, by the conventions of the format alone: an oracle for `prepare.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize


def logits(file: Path, tokens: list[int]) -> np.ndarray:
    """f64 [S, V]. Q and K have rows in pairs of neighbours, which is how they are rotated."""
    reader = GGUFReader(file)
    fields = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    weights = {tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float64) for tensor in reader.tensors}
    heads, groups = fields["attention.head_count"], fields["attention.head_count_kv"]
    size, epsilon = fields["embedding_length"] // heads, fields["attention.layer_norm_rms_epsilon"]
    angles = np.arange(len(tokens))[:, None] * fields["rope.freq_base"] ** (-np.arange(0, size, 2) / size)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weights[name]

    def rotated(x: np.ndarray) -> np.ndarray:
        """`x` [S, heads, size]."""
        even, odd, cos, sin = x[..., ::2], x[..., 1::2], np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)

    x = weights["token_embd.weight"][tokens]
    for layer in range(fields["block_count"]):
        own = f"blk.{layer}."
        rows = norm(x, own + "attn_norm.weight")
        q, k, v = ((rows @ weights[f"{own}attn_{name}.weight"].T).reshape(len(tokens), -1, size) for name in "qkv")
        q, k = rotated(q), rotated(k)
        k, v = (np.repeat(part, heads // groups, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        scores += np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), v).reshape(len(tokens), -1)
        x = x + mixed @ weights[own + "attn_output.weight"].T
        rows = norm(x, own + "ffn_norm.weight")
        gate = rows @ weights[own + "ffn_gate.weight"].T
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * (rows @ weights[own + "ffn_up.weight"].T))
            @ weights[own + "ffn_down.weight"].T
        )
    return norm(x, "output_norm.weight") @ weights["token_embd.weight"].T
