"""The kernels of a few head sizes and dtypes ahead of time: `python -m gpu.compile_kernels FOLDER CC DIMS DTYPES JOBS`.

A process of its own, as the compilation forks and a process that uses a GPU must not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dflash_trt.plugins import aot


def main(folder: str, cc: str, dims: str, dtypes: str, jobs: str) -> None:
    heads, names = {0, *map(int, dims.split(","))}, {"", *dtypes.split(",")}
    entries = aot.build(
        Path(folder), (int(cc),), int(jobs), lambda variant: variant.head_dim in heads and variant.dtype in names
    )
    print(f"{len(entries)} kernels")


if __name__ == "__main__":
    main(*sys.argv[1:])
