"""`Frozen` values as JSON documents, and back with every field checked.

Values themselves need the standard library alone; pydantic reads and writes them here.
"""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic

T = TypeVar("T")


class DocumentError(ValueError):
    """A document that does not hold the value it should: its first problem, and how many more there are."""


def parse(kind: type[T], values: Any, called: str) -> T:
    """The value of class `kind` that `values`, read from JSON, describe.

    Args:
        called: what the document is, in messages ("trace").

    Raises:
        DocumentError: a field that is missing, unknown, or of another type.
    """
    try:
        return pydantic.TypeAdapter(kind).validate_python(values)
    except pydantic.ValidationError as error:
        raise DocumentError(_in_words(error, called)) from error


def to_values(value: Any) -> dict[str, Any]:
    """What `json.dumps` writes and `parse` reads."""
    return pydantic.TypeAdapter(type(value)).dump_python(value, mode="json")


def to_json(value: Any, indent: int | None = None) -> str:
    """The document as text."""
    return pydantic.TypeAdapter(type(value)).dump_json(value, indent=indent).decode()


def _in_words(error: pydantic.ValidationError, called: str) -> str:
    problems = error.errors(include_url=False)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problems[0]["loc"]).lstrip(".")
    rules = {"missing": "is missing", "unexpected_keyword_argument": f"is no field of a {called}"}
    rule = rules.get(problems[0]["type"], problems[0]["msg"].replace("Input should be", "should be"))
    return f"{place} {rule}{f' (and {len(problems) - 1} more)' if len(problems) > 1 else ''}"
