"""Our errors in the words of Triton's protocol."""

from __future__ import annotations

from typing import Any

from dflash_trt.errors import DflashError, EngineClosedError, QueueFullError, RequestError, UsageError


def error_response(backend: Any, error: BaseException) -> Any:
    """The response that tells a request its error.

    Args:
        backend: `triton_python_backend_utils`.
    """
    codes = backend.TritonError
    if isinstance(error, (QueueFullError, EngineClosedError)):
        code = codes.UNAVAILABLE
    elif isinstance(error, (RequestError, UsageError)):
        code = codes.INVALID_ARG
    else:
        code = codes.INTERNAL
    message = error.message() if isinstance(error, DflashError) else f"{type(error).__name__}: {error}"
    return backend.InferenceResponse([], codes(message, code))
