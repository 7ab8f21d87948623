"""Correctness of every kernel against float64 or a plain walk, on fresh random inputs."""

from __future__ import annotations

import torch

from gpu.attention_checks import check_attention
from gpu.context import Context
from gpu.dispatch_checks import check_capture, check_operators
from gpu.injection_checks import check_injection
from gpu.path_checks import check_paths
from gpu.results import Result


def run(context: Context, result: Result) -> None:
    """What takes long to compile comes last, as it is what the time may not allow."""
    for part in (check_paths, check_operators, check_capture, check_injection, check_attention):
        try:
            part(context, result)
        except Exception as error:
            result.check(part.__name__, False, f"{type(error).__name__}: {error}")
            if context.on_gpu:
                torch.cuda.synchronize()  # raises when the device is lost to this process
