"""What a user would otherwise run, on the same weights in float32 and the same threads: `transformers`' generate(),
token by token, and the decode loop of DFlash's authors (`dflash` on PyPI). Both on the CPU, greedy.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_trt.errors import UsageError
from dflash_trt.evaluation.bench_modes import EngineMode, Run
from dflash_trt.evaluation.bench_weights import check_checkpoint
from dflash_trt.runtime.statistics import GenerationStatistics

TRANSFORMERS, AUTHORS = "transformers", "authors"


class TransformersMode:
    """`AutoModelForCausalLM.generate`, with its cache. The first token's time is when a streamer is given it."""

    label = TRANSFORMERS

    def __init__(self, model: Any, stop_ids: Sequence[int]) -> None:
        from transformers import GenerationConfig

        self._model = model
        # That of the folder may ask for sampling; and without a padding token generate() warns.
        self._config = GenerationConfig(
            do_sample=False,
            use_cache=True,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=stop_ids[0] if stop_ids else 0,
        )

    def run(self, prompt: Sequence[int], max_tokens: int, sampling: Mapping[str, Any]) -> Run:
        import torch

        self._config.max_new_tokens = max_tokens
        clock = _Clock()
        ids = torch.tensor([list(prompt)])
        started = time.perf_counter()
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=self._config, streamer=clock
        )
        ended = time.perf_counter()
        return Run(tuple(output[0, len(prompt) :].tolist()), ended - started, clock.first_token - started)


class _Clock:
    """A streamer that keeps when it was given the first new token; before that it is given the prompt."""

    first_token = 0.0

    def __init__(self) -> None:
        self._given = 0

    def put(self, value: Any) -> None:
        self._given += 1
        if self._given == 2:
            self.first_token = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


class AuthorsMode:
    """The authors' `dflash_generate`, timed by its own statistics.

    Args:
        module: `dflash.model`.
        dflash: the mode whose steps should be the same.
    """

    label = AUTHORS

    def __init__(self, module: Any, target: Any, drafter: Any, dflash: EngineMode) -> None:
        self._module, self._target, self._drafter = module, target, drafter
        self._stop_ids = list(dflash.bundle.engine.eos_token_ids)
        self._block_size = dflash.bundle.info.block_size
        self.same_steps_as = dflash.label

    def run(self, prompt: Sequence[int], max_tokens: int, sampling: Mapping[str, Any]) -> Run:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what transformers says to it
            started = time.perf_counter()
            result = self._module.dflash_generate(
                self._drafter,
                self._target,
                torch.tensor([list(prompt)]),
                max_new_tokens=max_tokens,
                stop_token_ids=self._stop_ids,
                block_size=self._block_size,
                return_stats=True,
            )
            seconds = time.perf_counter() - started
        statistics, produced = GenerationStatistics(), 0
        for yielded in result.acceptance_lengths:
            drafts = min(self._block_size, max_tokens - produced) - 1  # as the loop cuts its last blocks
            statistics.record_step(proposed=drafts, yielded=yielded)
            produced += yielded
        statistics.target_passes, statistics.draft_passes = statistics.steps + 1, statistics.steps
        tokens = tuple(result.output_ids[0, len(prompt) :].tolist())
        decode_seconds = result.time_per_output_token * result.num_output_tokens
        return Run(tokens, seconds, seconds - decode_seconds, statistics)


def baseline_modes(
    modes: Sequence[EngineMode], target: Path | None, drafter: Path | None, threads: int
) -> list[TransformersMode | AuthorsMode]:
    """The columns that the checkpoint folders allow.

    Args:
        modes: of the bundles.
        target: of their target; None for no column.
        drafter: of the first drafter of one of them, a DFlash one.

    Raises:
        UsageError: a folder that is not what a bundle was built from, or a package that is missing.
    """
    if target is None:
        if drafter is not None:
            raise UsageError("needs the target's folder, too", where="--drafter", mend="Give --target")
        return []
    bundle = modes[0].bundle
    kinds = [kind for kind in (bundle.info.precision, bundle.info.weights) if kind not in ("float32", "float")]
    if kinds:
        what = f"{bundle.folder} computes in {kinds[0]}; what it is compared with does in float32"
        raise UsageError(what, where="--target", mend="Leave it out, or build the bundle in float32")
    check_checkpoint(target, bundle.folder, bundle.info, "target")
    dflash = None if drafter is None else _mode_of(drafter, modes)
    module = None if dflash is None else _imported("dflash.model", "--drafter", "pip install --no-deps dflash==0.1.0")
    _imported("transformers", "--target", "pip install transformers torch")
    model = _load(target, threads)
    columns: list[TransformersMode | AuthorsMode] = [TransformersMode(model, bundle.engine.eos_token_ids)]
    if dflash is not None and module is not None:
        import torch

        module._cuda_time = time.perf_counter  # its clock waits for a GPU, and there may be none
        network = module.DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()
        columns.append(AuthorsMode(module, model, network, dflash))
    return columns


def _mode_of(drafter: Path, modes: Sequence[EngineMode]) -> EngineMode:
    """The mode that verifies the whole blocks of this drafter."""
    whole = [mode for mode in modes if _drafts_whole_blocks(mode)]
    if not whole:
        mend = "Leave it out, or give a bundle of it"
        raise UsageError("the authors' loop runs DFlash alone, which no bundle has", where="--drafter", mend=mend)
    refusal: UsageError | None = None
    for mode in whole:
        try:
            check_checkpoint(drafter, mode.bundle.folder, mode.bundle.info, "drafter")
            return mode
        except UsageError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def _drafts_whole_blocks(mode: EngineMode) -> bool:
    options = mode.options
    drafts_alone = not options.get("branches") and "drafts" not in options and options.get("speculation", True)
    return drafts_alone and mode.bundle.info.drafter.system == "dflash"


def _imported(module: str, where: str, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"needs the package {module.partition('.')[0]} ({error})"
        raise UsageError(what, where=where, mend=f"Install it: {install}") from error


def _load(target: Path, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
