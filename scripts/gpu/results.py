"""What a section finds: plain data, so that it goes through JSON from the worker to the report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "failed", "error", "not run"]


@dataclass
class Check:
    """One thing that is right or wrong; `detail` says how far from the bound, or what went wrong."""

    name: str
    ok: bool
    detail: str = ""


@dataclass
class Table:
    """Figures: a row per case, cells as they are shown; None where there is no figure."""

    title: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)
    note: str = ""


@dataclass
class Result:
    """A section's result, filled as it goes, so that what raises loses nothing found before.

    Attributes:
        reason: why it was not run, or what it raised.
        skipped: parts that were not run, each with its reason.
        facts: what is no table: names and values.
        data: figures for programs, kept in the JSON file only.
    """

    section: str
    status: Status = "ok"
    reason: str = ""
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        self.checks.append(Check(name, bool(ok), detail))

    def settle(self) -> None:
        """The status of a section that came to its end."""
        if any(not check.ok for check in self.checks):
            self.status = "failed"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        checks = [Check(**check) for check in values["checks"]]
        tables = [Table(**table) for table in values["tables"]]
        return cls(**{**values, "checks": checks, "tables": tables})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def not_run(section: str, reason: str) -> Result:
    return Result(section, status="not run", reason=reason)


def exit_code(results: list[Result]) -> int:
    """0 when all that ran is right, 1 when a check failed or a section could not come to its end."""
    return int(any(result.status in ("failed", "error") for result in results))
