"""Strict, typed reading of `config.json`: a wrong value stops here, with file, field, value and rule.

A field that is `null` counts as absent. Nothing is coerced: `true` is no integer, `16.0` is no integer, `"16"` neither.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dflash_trt.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"


def lfs_error(path: Path) -> CheckpointError:
    """The error for a file that starts with `LFS_POINTER`."""
    mend = "Fetch it: `git lfs pull` in the checkpoint folder, or download it again"
    return CheckpointError("is a Git-LFS pointer, not the file itself", where=str(path), mend=mend)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: the file is missing, unreadable or a Git-LFS pointer, is not UTF-8 or not JSON, or holds no
            object.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        mend = "Point at a Hugging Face checkpoint folder with all of its files"
        if not path.parent.exists():
            mend += "; a name on the Hub has to be downloaded first"
            raise CheckpointError("there is no such folder", where=str(path.parent), mend=mend) from None
        raise CheckpointError(f"there is no {path.name}", where=str(path.parent), mend=mend) from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if raw.startswith(LFS_POINTER):
        raise lfs_error(path)
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text: byte {error.start} is 0x{raw[error.start]:02x}"
        raise CheckpointError(what, where=str(path), mend="Download it again") from None
    except (ValueError, RecursionError) as error:  # ValueError: JSONDecodeError, or a number of thousands of digits
        place = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise CheckpointError(f"is not valid JSON ({place})", where=str(path), mend="Download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"holds a {type(value).__name__}, but must hold a JSON object", where=str(path))
    return value


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


class ConfigObject:
    """One JSON object of a configuration file, read field by field.

    Getters return None for an absent field; their `required_` twins raise instead. Every getter raises CheckpointError
    for a value that breaks its rule.

    Args:
        values: the parsed object.
        path: the file it comes from, for error messages.
        prefix: where in the file it sits, e.g. `dflash_config.`; empty at the top.
    """

    def __init__(self, values: dict[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix

    def __contains__(self, field: str) -> bool:
        return self.values.get(field) is not None

    def error(self, field: str, rule: str, mend: str = "") -> CheckpointError:
        """The error for a field whose value breaks `rule` ("must be ...")."""
        return CheckpointError(
            f"{self.prefix}{field} is {json.dumps(self.values.get(field))}, but {rule}", where=str(self.path), mend=mend
        )

    def missing(self, field: str, mend: str = "") -> CheckpointError:
        """The error for a required field that is absent."""
        state = "null" if field in self.values else "missing"
        return CheckpointError(f"{self.prefix}{field} is {state}, but is required", where=str(self.path), mend=mend)

    def integer(self, field: str, minimum: int = 1, maximum: int | None = None) -> int | None:
        """An integer within [minimum, maximum], or None."""
        value = self.values.get(field)
        if value is None:
            return None
        above = maximum is not None and isinstance(value, int) and value > maximum
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum or above:
            rule = "must be a positive integer" if minimum == 1 else f"must be an integer, at least {minimum}"
            raise self.error(field, rule if maximum is None else f"{rule} of at most {maximum}")
        return value

    def required_integer(self, field: str, minimum: int = 1, maximum: int | None = None) -> int:
        """An integer within [minimum, maximum]."""
        value = self.integer(field, minimum, maximum)
        if value is None:
            raise self.missing(field)
        return value

    def number(self, field: str, above: float | None = None, minimum: float | None = None) -> float | None:
        """A finite number, greater than `above` and at least `minimum` where these are given, or None."""
        value = self.values.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
            raise self.error(field, "must be a finite number")
        if above is not None and not value > above:
            raise self.error(field, f"must be greater than {above:g}")
        if minimum is not None and value < minimum:
            raise self.error(field, f"must be at least {minimum:g}")
        return float(value)

    def required_number(self, field: str, above: float | None = None, minimum: float | None = None) -> float:
        """A finite number, greater than `above` and at least `minimum` where these are given."""
        value = self.number(field, above, minimum)
        if value is None:
            raise self.missing(field)
        return value

    def boolean(self, field: str) -> bool | None:
        """True, False or None."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(field, "must be true or false")
        return value

    def string(self, field: str) -> str | None:
        """A string or None."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, str):
            raise self.error(field, "must be a string")
        return value

    def integers(self, field: str) -> tuple[int, ...] | None:
        """A list of integers, or None."""
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise self.error(field, "must be a list of integers")
        return tuple(value)

    def strings(self, field: str) -> tuple[str, ...] | None:
        """A list of strings, or None."""
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(field, "must be a list of strings")
        return tuple(value)

    def section(self, field: str) -> ConfigObject:
        """The object under `field`; an empty one when the field is absent."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, dict):
            raise self.error(field, "must be an object")
        return ConfigObject(value or {}, self.path, f"{self.prefix}{field}.")


class ConfigFile(ConfigObject):
    """A configuration file, e.g. a checkpoint's `config.json`.

    Raises:
        CheckpointError: as `read_json_object`.
    """

    def __init__(self, path: Path | str) -> None:
        super().__init__(read_json_object(Path(path)), Path(path))
