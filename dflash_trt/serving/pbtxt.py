"""Protobuf's text format, as far as config.pbtxt needs it, without Triton's definitions, which only clients install."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TOKEN = re.compile(r'\s*(?:#[^\n]*\s*)*("(?:[^"\\\n]|\\.)*"|[\w.+-]+|[{}\[\]:,])')
_BLANK = re.compile(r"\s*(?:#[^\n]*\s*)*\Z")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "'": "'", "\\": "\\"}
_WRITTEN = str.maketrans({character: f"\\{name}" for name, character in _ESCAPES.items() if name != "'"})


class Word(str):
    """A value without quotes that is no number: an enum's, or true and false."""


class PbtxtError(ValueError):
    """Text that is not in the format; says where."""


def dump(message: Mapping[str, Any], indent: str = "") -> str:
    """The text of a message: fields by name; a mapping is a message, a sequence of them a repeated field.

    Sequences of numbers stand in brackets.
    """
    lines = []
    for name, value in message.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name} {{\n{dump(value, indent + '  ')}{indent}}}\n")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            if all(isinstance(each, Mapping) for each in value):
                lines += [dump({name: each}, indent) for each in value]
            else:
                lines.append(f"{indent}{name}: [{', '.join(map(_scalar, value))}]\n")
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Word):
        return value
    return f'"{value.translate(_WRITTEN)}"' if isinstance(value, str) else repr(value)


def parse(text: str) -> dict[str, list[Any]]:
    """The fields of a message, each a list of its values in order: dictionaries, strings, `Word`s and numbers.

    Raises:
        PbtxtError: it is not in the format.
    """
    tokens = list(_tokens(text))
    message, end = _message(tokens, 0, closing=None)
    assert end == len(tokens)
    return message


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Each token with its line."""
    position = 0
    while not _BLANK.match(text, position):
        found = _TOKEN.match(text, position)
        if found is None:
            raise PbtxtError(f"line {text.count(chr(10), 0, position) + 1} is not in protobuf's text format")
        yield found[1], text.count("\n", 0, found.start(1)) + 1
        position = found.end()


def _message(tokens: list[tuple[str, int]], at: int, closing: str | None) -> tuple[dict[str, list[Any]], int]:
    fields: dict[str, list[Any]] = {}
    while at < len(tokens):
        name, line = tokens[at]
        if name == closing:
            return fields, at + 1
        if name == ",":
            at += 1
            continue
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise PbtxtError(f"line {line}: {name} where a field's name should be")
        at += 1
        if at < len(tokens) and tokens[at][0] == ":":
            at += 1
        values, at = _values(tokens, at, name)
        fields.setdefault(name, []).extend(values)
    if closing is not None:
        raise PbtxtError(f"ends where {closing} should be")
    return fields, at


def _values(tokens: list[tuple[str, int]], at: int, name: str) -> tuple[list[Any], int]:
    if at >= len(tokens):
        raise PbtxtError(f"ends where the value of {name} should be")
    token, line = tokens[at]
    if token == "{":
        message, at = _message(tokens, at + 1, closing="}")
        return [message], at
    if token == "[":
        values: list[Any] = []
        at += 1
        while at < len(tokens) and tokens[at][0] != "]":
            if tokens[at][0] == ",":
                at += 1
                continue
            more, at = _values(tokens, at, name)
            values += more
        if at >= len(tokens):
            raise PbtxtError("ends where ] should be")
        return values, at + 1
    if token.startswith('"'):
        return [re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), token[1:-1])], at + 1
    if not re.match(r"[\w+-]", token):
        raise PbtxtError(f"line {line}: {token} where the value of {name} should be")
    for convert in (int, float):
        try:
            return [convert(token)], at + 1
        except ValueError:
            continue
    return [Word(token)], at + 1
