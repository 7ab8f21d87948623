"""`dflash-trt triton`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from dflash_trt.cli.branch_count import BranchCount

_DIR = click.Path(path_type=Path)
_LAYOUTS, _SPECULATION = click.Choice(["ensemble", "single"]), click.Choice(["auto", "on", "off"])
_DEVICES = click.Choice(["cpu", "cuda"])


@click.command("triton")
@click.argument("bundle", type=_DIR)
@click.option("--output", type=_DIR, required=True, help="Folder to write.")
@click.option("--layout", type=_LAYOUTS, default="ensemble", show_default=True, help="TensorRT-LLM's, or one model.")
@click.option("--copy", is_flag=True, help="Put the bundle into the repository (hard links where possible).")
@click.option("--speculation", type=_SPECULATION, default="auto", show_default=True, help="When drafts are made.")
@click.option("--branches", type=BranchCount(), help="Branches per step (D2SD), or auto.  [default: as built]")
@click.option("--max-queue", type=int, default=256, show_default=True, help="Requests that may wait for a slot.")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="CPU threads; 0 lets the backend choose.")
@click.option("--device", type=_DEVICES, default="cpu", show_default=True, help="Where to run.")
@click.option("--chat/--no-chat", default=False, show_default=True, help="Put each text into the chat template.")
@click.option("--force", is_flag=True, help="Replace an earlier repository.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, output: Path, force: bool, as_json: bool, **options: Any) -> None:
    """Write a model repository for Triton Inference Server: complete, checked, nothing left to fill in."""
    from dflash_trt.serving.repository import Options, write_repository

    done = write_repository(bundle, output, Options(**options), force=force)
    if as_json:
        result = {
            "output": str(done.folder),
            "models": list(done.models),
            "bundle": str(done.bundle),
            "system": done.info.system,
            "backend": done.info.backend,
        }
        click.echo(json.dumps(result, indent=2))
    else:
        click.echo(done.folder)
        click.echo(f"models: {', '.join(done.models)}; README.md there says how to start the server", err=True)
