"""What a verification says: each check passed, failed, or was not run and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Check:
    """One check: what was measured, against which limit, or why it was not run."""

    name: str
    status: Status
    measured: dict[str, Any]
    limit: str
    reason: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """All checks of one bundle."""

    bundle: str
    backend: str
    precision: str
    weights: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed; `counts` says how many were run at all."""
        return all(check.status != "failed" for check in self.checks)

    @property
    def counts(self) -> dict[Status, int]:
        """Checks by status."""
        return {status: sum(check.status == status for check in self.checks) for status in get_args(Status)}

    def failures(self) -> str:
        """The failed checks in one line."""
        return "; ".join(
            f"{check.name} ({check.reason}; limit: {check.limit})" for check in self.checks if check.status == "failed"
        )

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "passed": self.passed, "counts": self.counts}, indent=2) + "\n"
