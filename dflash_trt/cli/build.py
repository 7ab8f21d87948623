"""`dflash-trt build`."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import click

_DIR = click.Path(path_type=Path)


@click.command("build")
@click.option("--target", type=_DIR, help="Target checkpoint (Hugging Face folder).")
@click.option("--drafter", type=_DIR, help="Drafter checkpoint.")
@click.option("--vp-drafter", type=_DIR, help="Variable-prefix drafter checkpoint (D2SD).")
@click.option("--output", type=_DIR, help="Bundle to write.")
@click.option(
    "--backend", type=click.Choice(["onnxruntime", "tensorrt", "tensorrt-rtx", "torch"]), help="[default: onnxruntime]"
)
@click.option("--config", type=_DIR, help="YAML file of build options; options on the line win.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="[default: float32; with TensorRT and TensorRT-RTX bfloat16]",
)
@click.option(
    "--weights",
    type=click.Choice(["float", "int8", "int4"]),
    help="ONNX Runtime: of linear layers; few bits are faster and less exact.  [default: float]",
)
@click.option("--max-batch-size", type=int, help="Sequences decoded at once.  [default: 1]")
@click.option("--max-seq-len", type=int, help="Prompt and output, in tokens.  [default: 2048, or what was trained]")
@click.option("--max-input-len", type=int, help="Prompt, in tokens.  [default: max-seq-len - 1]")
@click.option("--block-size", type=int, help="Anchor and drafts.  [default: as trained]")
@click.option("--branches", type=int, help="Branches per step at most (D2SD).  [default: 4]")
@click.option("--vp-block-size", type=int, help="Tokens of a branch (D2SD).  [default: block-size, or as trained]")
@click.option("--dump-ir", type=_DIR, help="Write the graph after each stage to this folder.")
@click.option("--no-verify", "verify", flag_value=False, default=None, help="Skip the verification.")
@click.option("--force", is_flag=True, default=None, help="Replace an existing bundle.")
@click.option("--stop-after", type=click.Choice(["lower"]), help="Engines: write everything up to them.")
@click.option("--compute-capability", metavar="N,...", help="TensorRT-RTX: GPUs, as 86,89.  [default: this one]")
@click.option("--plugins", type=click.Choice(["on", "off", "auto"]), help="TensorRT: the own plugins.  [default: auto]")
@click.option("--tensorrt-version", metavar="X.Y", help="With --stop-after: whose parser.  [default: installed]")
@click.option("--builder-optimization-level", type=int, help="Engines: 0 to 5, fast to thorough.")
@click.option("--workspace", type=int, metavar="MIB", help="Engines: memory a layer may use.")
@click.option("--weight-streaming", is_flag=True, default=None, help="Engines: weights may stay in host memory.")
@click.option("--refit", is_flag=True, default=None, help="Engines: weights can be replaced later.")
@click.option("--input-timing-cache", type=_DIR, help="TensorRT: what an earlier build measured.")
@click.option("--output-timing-cache", type=_DIR, help="TensorRT: where to keep what this one measures.")
def command(config: Path | None, **options: Any) -> None:
    """Compile a target and a drafter into a bundle.

    Nothing appears at the output path before the bundle is complete and has passed its verification.
    """
    from dflash_trt.config import BuildConfig

    settings = BuildConfig.from_options(config, **options)

    from dflash_trt.cli.tables import print_build
    from dflash_trt.pipeline import build
    from dflash_trt.progress import RichProgress

    print_build(build(settings, RichProgress(_clean_up_when_terminated().is_set)))


def _clean_up_when_terminated() -> threading.Event:
    """Makes SIGTERM and SIGHUP what Ctrl-C is, unless the caller has them ignored (nohup).

    Returns:
        Set when one came. The exception alone is not enough: some library may swallow it.
    """
    interrupted = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    for name, default in (
        ("SIGINT", signal.default_int_handler), ("SIGTERM", signal.SIG_DFL), ("SIGHUP", signal.SIG_DFL),
    ):  # fmt: skip
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == default:
            signal.signal(number, interrupt)
    return interrupted
