"""What is written: results.json for programs, results.md for people, and the last word on the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gpu.results import Result, Table

ON_A_CPU = "Run on a CPU in Triton's interpreter: this checks the script, nothing about a GPU, and has no figures."


class Report:
    """The results so far, and the folder they are written to after each.

    Args:
        about: version, command, date: what heads the files.
    """

    def __init__(self, folder: Path, about: dict[str, Any], on_gpu: bool) -> None:
        self.folder, self.about, self._on_gpu = folder, about, on_gpu
        self.results: list[Result] = []

    def add(self, result: Result) -> None:
        self.results.append(result)
        self.write()

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"about": self.about, "results": [result.to_dict() for result in self.results]}
        _replace(self.folder / "results.json", json.dumps(content, indent=1, default=str) + "\n")
        _replace(self.folder / "results.md", self.markdown())

    def markdown(self) -> str:
        lines = ["# GPU check", ""]
        lines += [f"- {name}: {value}" for name, value in self.about.items()]
        lines += [""] if self._on_gpu else ["", f"**{ON_A_CPU}**", ""]
        lines += [*table_lines(self.summary()), ""]
        for result in self.results:
            lines += _section(result)
        return "\n".join(lines).rstrip() + "\n"

    def summary(self) -> Table:
        """A row per section."""
        table = Table("Sections", ["section", "result", "checks", "seconds"])
        for result in self.results:
            passed = sum(check.ok for check in result.checks)
            checks = f"{passed} of {len(result.checks)}" if result.checks else ""
            shown = f"{result.status}: {_line(result.reason)}" if result.reason else result.status
            if result.skipped:
                shown += f" ({len(result.skipped)} parts not run)"
            table.rows.append([result.section, shown, checks, f"{result.seconds:.1f}"])
        return table


def table_lines(table: Table) -> list[str]:
    """A markdown table."""

    def line(cells: list[Any]) -> str:
        return "| " + " | ".join("-" if cell is None else _line(str(cell)) for cell in cells) + " |"

    return [line(table.columns), "|" + "---|" * len(table.columns), *(line(row) for row in table.rows)]


def _line(text: str) -> str:
    """For one cell: no line breaks, no bars, not endless."""
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= 300 else text[:297] + "..."


def _section(result: Result) -> list[str]:
    lines = [f"## {result.section}", ""]
    lines += [f"{result.status}: {_line(result.reason)}", ""] if result.reason else []
    for table in result.tables:
        if table.rows:
            lines += [f"### {table.title}", "", *table_lines(table), ""]
            lines += [table.note, ""] if table.note else []
    if result.section != "environment":
        lines += [*(f"- {name}: {value}" for name, value in result.facts.items()), ""] if result.facts else []
    if result.checks:
        failed = [check for check in result.checks if not check.ok]
        lines += [f"{len(result.checks) - len(failed)} of {len(result.checks)} checks passed.", ""]
        lines += [*(f"- FAILED {_line(f'{check.name}: {check.detail}')}" for check in failed), ""] if failed else []
    if result.skipped:
        lines += ["Not run:", "", *(f"- {part}" for part in result.skipped), ""]
    return lines


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: the process may be ended at any time."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
