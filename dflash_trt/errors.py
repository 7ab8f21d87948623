"""One small hierarchy of errors.

Every error a user can cause says three things: what is wrong, where (file, field, tensor, node), and how to mend it.
The command line prints it in one message and exits with `exit_code`.
"""

from __future__ import annotations


class DflashError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: what is wrong, with the value and the rule it breaks.
        where: the file, field, tensor, graph node or option concerned; empty when `what` already names it.
        mend: what the user can do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        self.what = what
        self.where = where
        self.mend = mend
        super().__init__(self.message())

    def message(self) -> str:
        """The whole message: `where: what. mend`."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.mend:
            text = f"{text.rstrip('.')}. {self.mend}"
        return text


class UsageError(DflashError):
    """A parameter or option value that cannot be used."""


class CheckpointError(DflashError):
    """A checkpoint folder that cannot be read or breaks a rule on its own."""


class PairError(DflashError):
    """A target and a drafter that do not belong together."""


class ExportError(DflashError):
    """A graph that cannot be exported or rewritten."""


class BackendError(DflashError):
    """A backend that is not installed or cannot do what was asked."""


class BundleError(DflashError):
    """A bundle that is missing, damaged, or built by something that does not match."""


class RequestError(DflashError):
    """A generation request that cannot be served as asked."""


class QueueFullError(RequestError):
    """A request that is refused since as many wait as may: it can be tried again."""


class EngineClosedError(RequestError):
    """A request to an engine that was closed, or that was there when it was."""


class CheckFailed(DflashError):  # noqa: N818 - not an error: the check worked, its answer is no
    """A check ran and its answer is no (exit code 1)."""

    exit_code = 1
