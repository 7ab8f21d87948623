"""dflash-trt: lossless speculative decoding with block-diffusion drafters, compiled.

    import dflash_trt
    dflash_trt.build(target="...", drafter="...", output="bundle")
    engine = dflash_trt.load("bundle")
    print(engine.generate("def main():", max_tokens=64).text)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_trt.evaluation.bench_report import BenchReport
    from dflash_trt.loading import Device
    from dflash_trt.pipeline import BuildResult
    from dflash_trt.runtime.engine import Engine

__version__ = "0.1.0"
__all__ = ["bench", "build", "load"]


def build(**options: Any) -> BuildResult:
    """Builds a bundle; options are the fields of `dflash_trt.config.BuildConfig`."""
    from dflash_trt.config import BuildConfig
    from dflash_trt.pipeline import build as run

    return run(BuildConfig.from_options(**options))


def load(bundle: str | Path, *, threads: int = 0, device: Device = "cpu") -> Engine:
    """Opens a bundle for generation, after checking versions, sizes and hashes.

    Args:
        bundle: the folder `build` wrote.
        threads: CPU threads of the backend; 0 lets it choose.
        device: "cuda" runs a bundle of the torch backend on a GPU, with the kernels.
    """
    from dflash_trt.loading import load_engine

    return load_engine(Path(bundle), threads=threads, device=device)


def bench(*bundles: str | Path, **settings: Any) -> BenchReport:
    """Measures bundles of one target on prompts.

    Args:
        settings: fields of `dflash_trt.evaluation.bench.BenchSettings`.

    Returns:
        What `dflash-trt bench --json` prints, as values: see `dflash_trt.evaluation.bench_report`.
    """
    from dflash_trt.evaluation.bench import BenchSettings, run_bench

    return run_bench([Path(bundle) for bundle in bundles], BenchSettings(**settings))
