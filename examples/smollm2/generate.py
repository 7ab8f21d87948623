"""Texts that the target writes itself, with the hidden states a drafter reads: what drafters are trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from decoder import BatchDecoder
from prompts import Prompt
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

ENOUGH = 0.75  # of the texts of a batch have ended: the rest is cut off there


def encoded(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt as the target gets it."""
    if not prompt.chat:
        return tokenizer(prompt.text).input_ids
    message = [{"role": "user", "content": prompt.text}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def write_shards(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], folder: Path, *,
    taps: Sequence[int], batch: int, new_tokens: int, report: Callable[[int, str], None],
) -> None:  # fmt: skip
    """One file per batch of prompts, those already there left alone.

    A file has `tokens` i32 [N] of all texts back to back, prompts included, their `lengths` i32 [batch], those of their
    `prompts` i32 [batch], and `features` bf16 [N, taps*H], the outputs of decoder blocks `taps`. Texts are greedy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    decoder = BatchDecoder(target)
    for number, start in enumerate(range(0, len(prompts), batch)):
        file = folder / f"{number:04}.safetensors"
        some = prompts[start : start + batch]
        if not file.exists():
            save_file(_texts(decoder, tokenizer, some, taps, new_tokens), file.with_suffix(".partial"))
            file.with_suffix(".partial").rename(file)  # a kill while writing must not leave half a file
        report(start + len(some), f"{file.stat().st_size / 1e6:.0f} MB")


def _texts(
    decoder: BatchDecoder, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], taps: Sequence[int],
    new_tokens: int,
) -> dict[str, Tensor]:  # fmt: skip
    ids = [encoded(prompt, tokenizer) for prompt in prompts]
    answers = decoder.decode(ids, new_tokens, tokenizer.eos_token_id, ENOUGH)
    texts = [[*prompt, *answer] for prompt, answer in zip(ids, answers, strict=True)]
    return {
        "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "prompts": torch.tensor([len(one) for one in ids], dtype=torch.int32),
        "features": torch.cat(_features(decoder.model, texts, taps)),
    }


@torch.inference_mode()
def _features(target: LlamaForCausalLM, texts: Sequence[Sequence[int]], taps: Sequence[int]) -> list[Tensor]:
    """Of each text, bf16 [length, taps*H]; texts of like length share a pass."""
    found: dict[int, Tensor] = {}
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    for start in range(0, len(order), 8):
        rows = order[start : start + 8]
        tokens = torch.zeros(len(rows), max(len(texts[row]) for row in rows), dtype=torch.long)
        for place, row in enumerate(rows):
            tokens[place, : len(texts[row])] = torch.tensor(texts[row])
        states = target.model(tokens.to(target.device), output_hidden_states=True, use_cache=False).hidden_states
        joined = torch.cat([states[tap + 1] for tap in taps], dim=-1)  # states[0] is the embedding
        for place, row in enumerate(rows):
            found[row] = joined[place, : len(texts[row])].bfloat16().cpu()
    return [found[row] for row in range(len(texts))]
