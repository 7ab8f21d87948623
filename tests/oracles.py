"""Independent implementations to compare with: transformers' generate() and the authors' decode loop."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel


def transformers_target(folder: Path) -> PreTrainedModel:
    """The target in float32, as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """The new tokens of transformers' greedy generate()."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return out[0, len(prompt) :].tolist()


def greedy_margins(model: PreTrainedModel, tokens: list[int], start: int) -> list[float]:
    """For each position >= start: the gap between the two best logits that choose it."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, start - 1 : -1]
    best = logits.topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).tolist()


class AuthorsLoop:
    """`dflash.model` (PyPI `dflash` 0.1.0) over the same checkpoint folders."""

    def __init__(self, target_dir: Path, drafter_dir: Path) -> None:
        model = pytest.importorskip("dflash.model")
        model._cuda_time = time.perf_counter  # its clock waits for a GPU
        self._generate = model.dflash_generate
        self.target = transformers_target(target_dir)
        self.drafter = model.DFlashDraftModel.from_pretrained(drafter_dir, dtype=torch.float32).eval()

    def greedy(self, prompt: list[int], tokens: int, stop: list[int] | None = None) -> tuple[list[int], list[int]]:
        """(new tokens, acceptance length of each step)."""
        transformers.set_seed(0)
        result = self._generate(
            self.drafter,
            self.target,
            torch.tensor([prompt]),
            max_new_tokens=tokens,
            stop_token_ids=stop,
            temperature=0.0,
            return_stats=True,
        )
        return result.output_ids[0, len(prompt) :].tolist(), list(result.acceptance_lengths)
