"""The texts of an export: LLM-API options, the serve command, what it is all about."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

OPTIONS, SCRIPT, README, DRAFTER, PACKAGE = "llm_api.yaml", "serve.sh", "README.md", "drafter", "dflash_trt_dflare"

# Prompts beyond this many tokens come in chunks: the taps of a pass are kept, a hidden state each for every token.
_PASS_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What is served, and within which limits; paths are absolute.

    `context_cache_bytes`: of the drafter's keys and values of the context, which TensorRT-LLM allocates beside its KV
    cache for max_batch_size + 1 sequences of full length.
    """

    system: Literal["dflash", "dflare"]
    target: Path
    drafter: Path
    mask_token_id: int
    taps: tuple[int, ...]
    max_draft_len: int
    max_batch_size: int
    max_seq_len: int
    context_cache_bytes: int


def llm_options(serving: Serving) -> dict[str, Any]:
    """Arguments of `tensorrt_llm.LLM` beside the model, with the names of its schema."""
    step = serving.max_batch_size * (serving.max_draft_len + 1)
    return {
        "max_batch_size": serving.max_batch_size,
        "max_seq_len": serving.max_seq_len,
        "max_num_tokens": max(min(serving.max_seq_len, _PASS_TOKENS), step),
        "enable_chunked_prefill": serving.max_seq_len > _PASS_TOKENS,
        # The drafter reads states of every prompt token; those of a reused prefix would not be computed.
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.8},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": serving.max_batch_size},
        "speculative_config": {
            "decoding_type": "DFlash",
            "max_draft_len": serving.max_draft_len,
            "speculative_model": str(serving.drafter),
            "mask_token_id": serving.mask_token_id,
            "target_layer_ids": list(serving.taps),
        },
    }


def options_text(serving: Serving) -> str:
    """llm_api.yaml."""
    head = (
        "# For trtllm-serve --config, or LLM(model=..., **options) with the options of this file.\n"
        "# Block reuse stays off: the drafter needs the target's states of every prompt token, and those of a reused\n"
        "# prefix are not computed. free_gpu_memory_fraction leaves room for the drafter's context cache.\n"
    )
    return head + yaml.safe_dump(llm_options(serving), sort_keys=False, default_flow_style=None)


def script_text(serving: Serving) -> str:
    """serve.sh: a server of the target with the drafter; its arguments go to trtllm-serve."""
    command = f'exec trtllm-serve {shlex.quote(str(serving.target))} --config "$here/{OPTIONS}"'
    lines = [
        "#!/bin/sh",
        "# An OpenAI-compatible server of the target, with the drafter. Arguments go to trtllm-serve: --port 8001.",
        "set -eu",
        'here=$(CDPATH="" cd -- "$(dirname -- "$0")" && pwd)',
    ]
    if serving.system == "dflare":
        # the processes that run the model import the package by its name
        lines.append('export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"')
        command += f' --custom_module_dirs "$here/{PACKAGE}"'
    return "\n".join([*lines, f'{command} "$@"', ""])


def readme_text(serving: Serving) -> str:
    """README.md of the export."""
    name = {"dflash": "DFlash", "dflare": "DFlare"}[serving.system]
    package = (
        f"- `{PACKAGE}/`: the draft model, which TensorRT-LLM lacks: each layer's mix of the taps, and the context's\n"
        "  own key and value projections, on TensorRT-LLM's DFlash model and worker. One GPU (no tensor parallelism).\n"
        "  It needs a TensorRT-LLM that has `register_draft_model`; an earlier one fails on importing the package.\n"
        if serving.system == "dflare"
        else ""
    )
    tested = ", the package's mathematics against dflash-trt's own, and its hooks with stand-ins" if package else ""
    loading = f", after `import {PACKAGE}`" if package else ""
    return f"""# A {name} drafter for TensorRT-LLM's PyTorch backend

    ./serve.sh --port 8000

serves `{serving.target}`: up to {serving.max_draft_len} drafts a step, {serving.max_batch_size} sequences of
{serving.max_seq_len} tokens. From Python{loading}: `LLM(model=..., **yaml.safe_load(open("{OPTIONS}")))`.

- `{OPTIONS}`: the options, `speculative_config` among them. They overrule options of the same name on the command line.
- `{DRAFTER}/`: the drafter with its config in TensorRT-LLM's words; weights are hard links to the checkpoint where the
  filesystem allows it.
{package}\
- `config.json`: what was exported; by it `dflash-trt trtllm export --force` knows the folder as its own.

The paths of target and drafter are absolute. After moving either, export again (weights are linked, so it takes a
moment), or edit `speculative_model` in `{OPTIONS}` and the target in `{SCRIPT}`.

Besides the KV cache, TensorRT-LLM keeps keys and values of the drafter's context: about
{serving.context_cache_bytes / 2**20:.0f} MiB here, growing with batch and length. If they do not fit, lower
`free_gpu_memory_fraction`, or export with less.

## What was run

Nothing here was run with TensorRT-LLM. The options, the drafter's config and the package's registration were written
after the sources of its 1.3.0 release candidates; the fields of `speculative_config` are in the published schema of
1.3.0rc27 and 1.4.0rc1. Tested without TensorRT-LLM: what the folder holds{tested}.

After the first start look at the acceptance rate: a drafter that is served wrongly is lossless and slow. Compare with
what `dflash-trt verify` reports for the same pair.
"""
