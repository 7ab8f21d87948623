#!/usr/bin/env python
"""Checks and measures dflash-trt's kernels, decode steps and plugins on a machine with a GPU: see docs/gpu/README.md.

    python scripts/gpu_check.py [--quick] [--sections kernels,step] [--tensorrt-root DIR]

Runs from a checkout as it is, with torch >= 2.9, triton >= 3.6, numpy, safetensors, tokenizers, transformers, click,
rich and pyyaml.
"""

from __future__ import annotations

import sys
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(_SCRIPTS.parent), str(_SCRIPTS)]


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        from gpu.worker import main as work

        work(sys.argv[2])
    else:
        from gpu.command import main as command

        command()


if __name__ == "__main__":
    main()
