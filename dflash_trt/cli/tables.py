"""Tables of results, on stdout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # doctor and inspect must work where torch does not
    from dflash_trt.evaluation.verify import VerifyReport
    from dflash_trt.pipeline import BuildResult

_STATUS = {"passed": "green", "failed": "red", "not run": "yellow"}


def print_build(result: BuildResult) -> None:
    """The graphs of a built bundle, and what its verification said."""
    table = Table(title=f"{result.output} ({result.info.backend}, {result.info.precision})", title_justify="left")
    for name in ("graph", "parameters", "size", "seconds"):
        table.add_column(name, justify="left" if name == "graph" else "right")
    for graph in result.graphs:
        table.add_row(graph.role, f"{graph.parameters:,}", f"{graph.bytes / 1e6:,.1f} MB", f"{graph.seconds:.1f}")
    _console().print(table)
    if result.report is not None:
        print_report(result.report)


def print_report(report: VerifyReport) -> None:
    """The checks of a verification."""
    table = Table(title="verification", title_justify="left")
    for name in ("check", "status", "measured", "limit"):
        table.add_column(name, overflow="fold")
    for check in report.checks:
        figures = ", ".join(f"{name} {_short(value)}" for name, value in check.measured.items() if value is not None)
        measured = "; ".join(part for part in (figures, check.reason) if part)
        table.add_row(check.name, Text(check.status, style=_STATUS[check.status]), measured, check.limit)
    _console().print(table)


def print_description(description: dict[str, Any]) -> None:
    """One row per field."""
    table = Table(title=f"{description['kind']}: {description['path']}", title_justify="left", show_header=False)
    table.add_column("field")
    table.add_column("value", overflow="fold")
    for name, value in description.items():
        if name in ("kind", "path"):
            continue
        table.add_row(name, json.dumps(value) if isinstance(value, (dict, list)) else str(value))
    _console().print(table)


def print_doctor(findings: dict[str, Any]) -> None:
    """What was found, then each backend."""
    table = Table(title=f"dflash-trt {findings['dflash_trt']}", title_justify="left", show_header=False)
    table.add_row("python", f"{findings['python']} on {findings['platform']}, {findings['cpus']} CPUs")
    gpus = [f"{g['name']} (compute {g['compute_capability']}, driver {g['driver']})" for g in findings["gpus"]]
    table.add_row("GPUs", ", ".join(gpus) or "none found")
    table.add_row("packages", ", ".join(f"{n} {v}" for n, v in findings["packages"].items() if v))
    table.add_row("not installed", ", ".join(n for n, v in findings["packages"].items() if not v) or "-")
    table.add_row("tools", ", ".join(f"{n} {p or 'missing'}" for n, p in findings["tools"].items()))
    for name, backend in findings["backends"].items():
        table.add_row(f"backend {name}", "usable" if backend["usable"] else f"no: {backend['note']}")
    _console().print(table)


def _console() -> Console:
    return Console(soft_wrap=False, markup=False, emoji=False)  # a path may hold "[x]" or ":x:"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
