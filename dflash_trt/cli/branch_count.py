"""The type of `--branches`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dflash_trt.runtime.trace import Branches


class BranchCount(click.ParamType):
    """A number, or "auto"."""

    name = "integer|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Branches:
        return "auto" if value == "auto" else click.INT.convert(value, param, ctx)
