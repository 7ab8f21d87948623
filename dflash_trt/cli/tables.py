"""Tables of results, on stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # doctor and inspect must work where torch does not
    from dflash_trt.evaluation.report import VerifyReport
    from dflash_trt.pipeline import BuildResult
    from dflash_trt.preflight.fault import Fault
    from dflash_trt.preflight.report import PreflightReport

_STATUS = {"passed": "green", "failed": "red", "not run": "yellow"}


def print_build(result: BuildResult) -> None:
    """The graphs of a built bundle, and what its verification said."""
    info = result.info
    kinds = [info.backend, info.precision, *([] if info.weights == "float" else [f"{info.weights} weights"])]
    table = Table(title=f"{result.output} ({', '.join(kinds)})", title_justify="left")
    for name in ("graph", "parameters", "size", "seconds"):
        table.add_column(name, justify="left" if name == "graph" else "right")
    for graph in result.graphs:
        table.add_row(graph.role, f"{graph.parameters:,}", f"{graph.bytes / 1e6:,.1f} MB", f"{graph.seconds:.1f}")
    _console().print(table)
    if result.report is not None:
        print_report(result.report)


def print_report(report: VerifyReport) -> None:
    """The checks of a verification, and how many of them passed, failed or were not run."""
    table = Table(title="verification", title_justify="left")
    for name in ("check", "status", "measured", "limit"):
        table.add_column(name, overflow="fold")
    for check in report.checks:
        figures = ", ".join(f"{name} {_short(value)}" for name, value in check.measured.items() if value is not None)
        measured = "; ".join(part for part in (figures, check.reason) if part)
        table.add_row(check.name, Text(check.status, style=_STATUS[check.status]), measured, check.limit)
    _console().print(table)
    _print_whole(", ".join(f"{count} {status}" for status, count in report.counts.items()))


def print_preflight(report: PreflightReport) -> None:
    """What was found against the plugin library and each graph, what its engine would cost, and the answer."""
    _print_faults(f"plugin library: {report.target}", report.faults)
    for graph in report.graphs:
        _print_faults(f"{graph.name}: {report.target}", graph.faults)
        for line in graph.estimate.lines():
            _print_whole(f"{graph.name}: {line}")
    _print_whole(f"plugin registry: {report.registry.said}")
    _print_whole(f"inputs, outputs, profiles: {report.interface}")
    _print_whole(report.summary())


def _print_faults(title: str, faults: Sequence[Fault]) -> None:
    """A row per kind of fault; nothing without faults."""
    from dflash_trt.preflight.fault import grouped

    if not faults:
        return
    table = Table(title=title, title_justify="left")
    for name in ("rule", "where", "fault"):
        table.add_column(name, overflow="fold")
    for group in grouped(faults):
        table.add_row(Text(group.rule, style="red"), group.where, group.text)
    _console().print(table)


def print_description(description: dict[str, Any]) -> None:
    """One row per field; of a trace its tables."""
    if description["kind"] == "trace":
        print_trace(description)
        return
    table = Table(title=f"{description['kind']}: {description['path']}", title_justify="left", show_header=False)
    table.add_column("field")
    table.add_column("value", overflow="fold")
    for name, value in description.items():
        if name in ("kind", "path"):
            continue
        table.add_row(name, json.dumps(value) if isinstance(value, (dict, list)) else str(value))
    _console().print(table)


def print_trace(found: dict[str, Any]) -> None:
    """A trace's means, then by position, by kept prefix and by rank of the branches, and the files of its pictures."""
    table = Table(show_header=False)
    table.add_column("field")
    table.add_column("value", overflow="fold")
    blocks = f"blocks of {found['block_size']}"
    blocks += f", re-drafted {found['vp_block_size']}" if found["vp_block_size"] else ""
    system = f"{found['system']}, K = {found['branches']}, {blocks}"
    table.add_row("system", system if found["speculation"] else f"{found['system']} bundle, token by token")
    table.add_row("sampling", json.dumps(found["sampling"]))
    table.add_row("tokens", f"{found['prompt_tokens']} of the prompt, {found['new_tokens']} new")
    cut = f", {found['cut_steps']} cut by a stop token or the length limit" if found["cut_steps"] else ""
    table.add_row("steps", f"{found['steps']}{cut}")
    tau, trunk = (_fixed(found[name], 2) for name in ("mean_acceptance_length", "trunk_mean_acceptance_length"))
    table.add_row("tau (tokens per step)", f"{tau}; with the trunk alone {trunk}")
    verified, branches = (_fixed(found[name], 1) for name in ("verified_tokens_per_step", "branches_per_step"))
    table.add_row("verified per step", f"{verified} tokens, {branches} branches")
    if found["branches_per_step"]:
        gain = f", {_fixed(found['mean_gain'], 2)} tokens each" if found["won_steps"] else ""
        table.add_row("branches won", f"{found['won_steps']} of {found['steps']} steps{gain}")
    for name, title in (("trunk_calibration", "first drafts"), ("redraft_calibration", "re-drafts")):
        values = found[name]
        if values["judged"]:
            text = f"{_fixed(values['accepted'])} of {values['judged']} judged; calibration error "
            table.add_row(f"{title} accepted", text + _fixed(values["error"]))
    _print_whole(f"trace: {found['path']}")
    _console().print(table)
    _print_rows("position", found["positions"], {"steps": 0, "tree": 3, "trunk": 3, "predicted": 3})
    columns = {"steps": 0, "predicted": 3, "broke": 3}
    if found["branches_per_step"]:
        columns |= {"drafted": 0, "drafted_predicted": 3, "drafted_broke": 3, "won": 0, "gain": 2}
    whole = found["block_size"] - 1
    prefixes = [{**row, "kept": "all" if row["kept"] == whole else row["kept"]} for row in found["kept_prefixes"]]
    _print_rows("kept", prefixes, columns)
    columns = {"drafted": 0, "predicted": 3, "broke": 3, "won": 0, "gain": 2, "mean_acceptance_length": 2}
    _print_rows("rank", found["branch_ranks"], columns)
    for file in found["figures"]:
        _print_whole(file)


def _print_whole(line: str) -> None:
    """On one line, however long, so that a path in it can be copied."""
    _console().print(line, soft_wrap=True, highlight=False)


_TITLES = {
    "position": "Share of steps whose path gets so far (predicted: the trunk, by its confidences)",
    "kept": "Trunk right for so many drafts and no further: share of steps; branches for it",
    "rank": "Branches by rank of r(i), and tau without those of later ranks",
}
_HEADS = {
    "drafted": "branches",
    "drafted_predicted": "their r",
    "drafted_broke": "broke",
    "mean_acceptance_length": "tau",
}


def _print_rows(key: str, rows: list[dict[str, Any]], columns: dict[str, int]) -> None:
    """A table of numbers, each column with so many decimals; nothing without rows."""
    if not rows:
        return
    table = Table()
    for name in (key, *columns):
        table.add_column(_HEADS.get(name, name), justify="right")
    for row in rows:
        table.add_row(str(row[key]), *(_fixed(row[name], decimals) for name, decimals in columns.items()))
    _console().print(_TITLES[key])  # not as the table's title, which would be folded to its width
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
    plugins = findings["plugins"]
    built = plugins["built"] and f"{plugins['path']}, TensorRT {plugins['tensorrt']}, triton {plugins['triton']}"
    table.add_row("plugin library", built or f"no: {plugins['note']}")
    _console().print(table)


def _console() -> Console:
    return Console(soft_wrap=False, markup=False, emoji=False)  # a path may hold "[x]" or ":x:"


def _fixed(value: float | None, decimals: int = 3) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
