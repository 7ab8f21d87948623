"""The operators on CUDA: the kernels of `dflash_trt.plugins.kernels`, registered when a device is first used.

Not before, because they need triton, which a machine without a GPU may lack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dflash_trt.errors import BackendError
from dflash_trt.ops.library import LIBRARY

_WHERE = "torch on CUDA"


@functools.cache
def register() -> None:
    """Makes the operators run on CUDA tensors; called by whoever puts modules there, any number of times.

    Raises:
        BackendError: triton is not installed. From then on the operators raise it for what the kernels do not support.
    """
    for name, launch in _launchers().items():
        LIBRARY.impl(name, _refusing(launch), "CUDA")


def _launchers() -> dict[str, Callable[..., Any]]:
    """Operator -> what launches its kernel, with the operator's arguments."""
    try:
        from dflash_trt.plugins.kernels import accepted_path, kv_injection, staircase_attention
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise BackendError("triton is not installed", where=_WHERE, mend="pip install triton") from error
    return {
        "kv_injection_": kv_injection.kv_injection_,
        "staircase_attention": staircase_attention.staircase_attention,
        "accept_path": accepted_path.accept_path_,
        "move_rows_": accepted_path.move_rows_,
        "gather_features": accepted_path.gather_features_,
    }


def _refusing(launch: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher on its tensors' device; its refusals (ValueError) reach the user as other errors of a backend do."""

    @functools.wraps(launch)
    def checked(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
        try:
            with torch.cuda.device_of(first):  # triton launches on the current one
                return launch(*args, **kwargs)
        except ValueError as error:
            raise BackendError(str(error), where=_WHERE, mend="Use another backend for this model") from error

    return checked
