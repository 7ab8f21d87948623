"""`dflash-trt run`."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.branch_count import BranchCount
from dflash_trt.cli.output_file import output_fault
from dflash_trt.errors import RequestError, UsageError

if TYPE_CHECKING:
    from dflash_trt.loading import Device
    from dflash_trt.runtime.engine import Engine, Generation
    from dflash_trt.runtime.trace import Branches, Drafts


@click.command("run")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt", help="The prompt; without it and --prompt-file it is read from stdin.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="File with the prompt, UTF-8, taken as it is.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="New tokens at most, within max_seq_len.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=int, default=0, help="Sample from the k likeliest tokens; 0 is off.")
@click.option("--top-p", type=float, default=1.0, help="Sample from the likeliest tokens of this mass; 1 is off.")
@click.option("--min-p", type=float, default=0.0, help="Drop tokens below this share of the top probability.")
@click.option("--repetition-penalty", type=float, default=1.0, help="As in transformers; 1 is off.")
@click.option("--presence-penalty", type=float, default=0.0, help="Subtracted for tokens in the output.")
@click.option("--frequency-penalty", type=float, default=0.0, help="Subtracted per occurrence in the output.")
@click.option("--seed", type=int, help="Repeats a sampled output.")
@click.option("--stop", multiple=True, help="Text that ends the output; may be given several times.")
@click.option("--bad-word", "bad_words", multiple=True, help="Text not to write; may be given several times.")
@click.option("--min-tokens", type=int, default=0, help="New tokens before one may end the output; 0 is off.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence tokens.")
@click.option("--branches", type=BranchCount(), help="Branches per step (D2SD), or auto.  [default: as built]")
@click.option("--drafts", type=BranchCount(), help="Drafts a step verifies at most, or auto.  [default: whole blocks]")
@click.option("--no-speculation", "speculation", flag_value=False, default=True, help="Decode token by token.")
@click.option("--chat/--no-chat", default=False, show_default=True, help="Put the prompt into the chat template.")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="CPU threads; 0 lets the backend choose.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to run.")
@click.option("--trace", type=click.Path(path_type=Path), help="Record every step in this file, for `inspect`.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    bad_words: tuple[str, ...],
    branches: Branches | None,
    drafts: Drafts | None,
    speculation: bool,
    chat: bool,
    threads: int,
    device: Device,
    trace: Path | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate text with a bundle. The text goes to stdout as it is generated, the figures to stderr."""
    from dflash_trt.runtime.sampling import SamplingParams

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as the prompt is, whatever the locale
    SamplingParams(**sampling)  # refuse a bad value before the bundle is read
    text = _prompt(prompt, prompt_file)
    if trace is not None:
        _check_trace(trace, bundle)

    from dflash_trt.documents import to_json
    from dflash_trt.loading import load_engine

    engine = load_engine(bundle, threads=threads, device=device)
    tokens = _encode(engine, text, chat)
    sampling["bad_token_ids"] = engine.tokenizer.bad_words(bad_words)
    started = time.perf_counter()
    generation = None
    options: dict[str, Any] = {"speculation": speculation, "branches": branches, "drafts": drafts, **sampling}
    for event in engine.generate(tokens, stream=True, trace=trace is not None, **options):
        generation = event.generation
        if not as_json:
            click.echo(event.text, nl=False)  # flushes
    assert generation is not None
    seconds = time.perf_counter() - started
    if trace is not None:
        assert generation.trace is not None
        _write(trace, to_json(generation.trace, indent=1))
    if as_json:
        click.echo(json.dumps(_result(generation, seconds)))
    else:
        click.echo()
        click.echo(_figures(generation, seconds, speculation), err=True)


def _check_trace(file: Path, bundle: Path) -> None:
    """Refuses, before anything is generated, a trace that could not be written or would damage the bundle."""
    if file.suffix != ".json":
        what, mend = "must end in .json, by which `inspect` knows it", "Name it so"
    elif (fault := output_fault(file, [bundle])) is not None:
        what, mend = fault
    else:
        return
    raise UsageError(what, where=f"--trace {file}", mend=mend)


def _write(file: Path, text: str) -> None:
    """Replaces the file in one step: what was there is lost only when the new one is complete."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        what = f"cannot be written: {error.strerror}"
        raise UsageError(what, where=f"--trace {file}", mend="Name another file") from error


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from whichever place it was given."""
    if prompt is not None and prompt_file is not None:
        raise UsageError("--prompt and --prompt-file were both given", mend="Give one of them")
    if prompt is not None:
        text = prompt
    elif prompt_file is not None:
        try:
            data = prompt_file.read_bytes()
        except OSError as error:
            what = f"cannot be read: {error.strerror}"
            raise UsageError(what, where=f"--prompt-file {prompt_file}", mend="Give a text file, or pipe it") from error
        text = _utf8(data, str(prompt_file))
    elif sys.stdin is None or sys.stdin.isatty():
        raise UsageError("there is no prompt", mend="Give --prompt, --prompt-file, or pipe it to stdin")
    else:
        text = _utf8(sys.stdin.buffer.read(), "stdin")
    if not text:
        raise RequestError("is empty", where="prompt", mend="Give some text")
    return text


def _utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"is not valid UTF-8 (byte {error.start})", where=where, mend="Convert it to UTF-8"
        ) from error


def _encode(engine: Engine, text: str, chat: bool) -> list[int]:
    tokenizer = engine.tokenizer
    if chat:
        text = tokenizer.apply_chat([{"role": "user", "content": text}])
    tokenizer.check_length(text, engine.limits.max_input_len)
    return tokenizer.encode(text, add_special_tokens=not chat)


def _result(generation: Generation, seconds: float) -> dict[str, Any]:
    """The object of --json; tokens per second count the whole generation, prefill included."""
    statistics = generation.statistics
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "acceptance_lengths": statistics.acceptance_lengths,
        "mean_acceptance_length": statistics.mean_acceptance_length,
        "acceptance_rate": statistics.acceptance_rate,
        "tokens_per_second": len(generation.token_ids) / seconds,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": len(generation.prompt_token_ids),
        "seed": generation.seed,
        "statistics": statistics.to_dict(),
    }


def _figures(generation: Generation, seconds: float, speculation: bool) -> str:
    statistics = generation.statistics
    parts = [
        f"{len(generation.token_ids)} tokens ({generation.finish_reason})",
        f"{len(generation.token_ids) / seconds:.1f} tokens/s",
    ]
    if not speculation:
        parts.append("token by token")
    elif statistics.mean_acceptance_length is not None:
        parts.append(f"mean acceptance length {statistics.mean_acceptance_length:.2f}")
    if statistics.acceptance_rate is not None:
        parts.append(f"acceptance rate {statistics.acceptance_rate:.2f}")
    return "; ".join(parts)
