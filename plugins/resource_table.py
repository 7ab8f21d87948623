"""What compiled kernels use of a multiprocessor, as the table in docs/kernels.md."""

from __future__ import annotations

from typing import Any


def resource_table(entries: list[dict[str, Any]]) -> str:
    """Markdown: a row per variant, and for each architecture its warps, registers of a thread and shared memory."""
    by_use: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for entry in entries:
        use = tuple(entry[name] for name in ("kernel", "dtype", "head_dim", "features", "tile_rows"))
        by_use.setdefault(use, {})[entry["compute_capability"]] = entry
    architectures = sorted({entry["compute_capability"] for entry in entries})
    heads = ["kernel", "dtype", "head", "features", "rows", *(f"sm_{cc}" for cc in architectures)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for use, found in by_use.items():
        cells = [str(part or "") for part in use]
        for cc in architectures:
            entry = found.get(cc)
            cells.append(
                f"{entry['num_warps']} / {entry['registers']} / {entry['shared_bytes'] / 1024:.1f}" if entry else "-"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
