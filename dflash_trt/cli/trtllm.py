"""`dflash-trt trtllm`."""

from __future__ import annotations

import json
from pathlib import Path

import click

_DIR = click.Path(path_type=Path)


@click.group("trtllm")
def command() -> None:
    """Serve a drafter with TensorRT-LLM."""


@command.command("export")
@click.option("--target", type=_DIR, required=True, help="Target checkpoint (Hugging Face folder).")
@click.option("--drafter", type=_DIR, required=True, help="Drafter checkpoint: DFlash or DFlare.")
@click.option("--vp-drafter", type=_DIR, help="Refused: TensorRT-LLM has no D2SD.")
@click.option("--output", type=_DIR, required=True, help="Folder to write.")
@click.option("--max-draft-len", type=int, help="Drafts a step.  [default: as trained]")
@click.option("--max-batch-size", type=int, default=8, show_default=True, help="Sequences decoded at once.")
@click.option("--max-seq-len", type=int, help="Prompt and output, in tokens.  [default: 4096, or what was trained]")
@click.option("--force", is_flag=True, help="Replace an earlier export.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export(
    target: Path,
    drafter: Path,
    vp_drafter: Path | None,
    output: Path,
    max_draft_len: int | None,
    max_batch_size: int,
    max_seq_len: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write options and a serve command for TensorRT-LLM 1.3 and later (its PyTorch backend).

    For DFlare, which it lacks, a Python package is written, too. TensorRT-LLM itself is not needed for it.
    """
    from dflash_trt.trtllm.export import export as write

    done = write(
        target,
        drafter,
        output,
        vp_drafter=vp_drafter,
        max_draft_len=max_draft_len,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        force=force,
    )
    serving = done.serving
    if as_json:
        result = {
            "output": str(done.folder),
            "system": serving.system,
            "max_draft_len": serving.max_draft_len,
            "max_batch_size": serving.max_batch_size,
            "max_seq_len": serving.max_seq_len,
            "context_cache_bytes": serving.context_cache_bytes,
            "files": list(done.files),
        }
        click.echo(json.dumps(result, indent=2))
    else:
        click.echo(done.folder / "serve.sh")
        click.echo("written after TensorRT-LLM's sources, not run with it: see README.md there", err=True)
