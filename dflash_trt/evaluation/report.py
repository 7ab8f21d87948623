"""What a verification says: each check passed, failed, or was not run and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

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
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    def failures(self) -> str:
        """The failed checks in one line."""
        return "; ".join(
            f"{check.name} ({check.reason}; limit: {check.limit})" for check in self.checks if check.status == "failed"
        )

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "passed": self.passed}, indent=2) + "\n"
