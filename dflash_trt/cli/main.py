"""`dflash-trt`: results go to stdout, progress and messages to stderr.

Exit codes: 0 fine, 1 a check failed, 2 bad usage or bad input (one message; `--debug` adds the traceback).
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
import traceback
from typing import Any

import click

from dflash_trt import __version__
from dflash_trt.errors import DflashError

COMMANDS = {
    "build": "Compile a target and a drafter into a bundle.",
    "run": "Generate text with a bundle.",
    "inspect": "Show what a checkpoint, a graph or a bundle is; draw a trace.",
    "verify": "Check a bundle's numbers, losslessness and acceptance.",
    "bench": "Measure bundles on prompts: speed, acceptance, where time goes.",
    "plugins": "Build the TensorRT plugin library, or show where it is.",
    "triton": "Write a model repository for Triton Inference Server.",
    "trtllm": "Serve a drafter with TensorRT-LLM.",
    "doctor": "Show what this machine can build and run.",
}


def _debug_option() -> click.Option:
    """`--debug`, which may stand before or after the command's name."""

    def remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value:
            ctx.find_root().obj["debug"] = True

    text = "Show the traceback of an error."
    return click.Option(["--debug"], is_flag=True, is_eager=True, expose_value=False, callback=remember, help=text)


def _with_debug_option(command: click.Command) -> click.Command:
    """A copy that has the option, as all its commands have."""
    command = copy.copy(command)
    command.params = [*command.params, _debug_option()]
    if isinstance(command, click.Group):
        command.commands = {name: _with_debug_option(each) for name, each in command.commands.items()}
    return command


class LazyGroup(click.Group):
    """Imports a command's module only when it is needed: `--help` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return _with_debug_option(importlib.import_module(f"dflash_trt.cli.{cmd_name}").command)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read the output has what it wanted; click would exit with 1
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dflash-trt")
def cli() -> None:
    """Lossless speculative decoding with block-diffusion drafters, compiled."""


cli.params.append(_debug_option())


def main(argv: list[str] | None = None) -> None:
    """Entry point: runs a command and turns errors into one message and an exit code."""
    args = sys.argv[1:] if argv is None else argv
    state = {"debug": False}
    try:
        code = cli.main(args, prog_name="dflash-trt", standalone_mode=False, obj=state) or 0
    except click.exceptions.Abort:
        code = 130
        click.echo("interrupted", err=True)
    except click.ClickException as error:
        code = error.exit_code
        error.show()
    except DflashError as error:
        code = error.exit_code
        _report(f"error: {error.message()}", state["debug"])
    except OSError as error:
        code = 2
        place = f"{error.filename}: " if error.filename else ""
        _report(f"error: {place}{error.strerror or error}", state["debug"])
    except Exception as error:
        code = 2
        what = f"{type(error).__name__}: {error} (--debug shows where)"
        _report(f"internal error, please report it: {what}", state["debug"])
    sys.exit(code)


def _report(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    click.echo(message, err=True)
