"""Which ONNX parser a graph is for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from dflash_trt.errors import UsageError

Flavour = Literal["tensorrt", "tensorrt-rtx"]
_NAMES: dict[Flavour, str] = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
OLDEST: dict[Flavour, tuple[int, int]] = {"tensorrt": (10, 14), "tensorrt-rtx": (1, 7)}
LATEST_MAJOR: dict[Flavour, int] = {"tensorrt": 11, "tensorrt-rtx": 1}  # nothing is known of those after it


@dataclass(frozen=True)
class ParserVersion:
    """Which parser a graph is for."""

    flavour: Flavour
    major: int
    minor: int

    @classmethod
    def parse(cls, text: str, flavour: Flavour = "tensorrt") -> ParserVersion:
        """From "10.14", or a longer version, "10.14.1.48".

        Raises:
            UsageError: the text is no version.
        """
        found = re.fullmatch(r"(\d{1,4})\.(\d{1,4})(?:\.\w+)*", text, re.ASCII)
        if found is None:
            mend = f"Give major.minor, such as {_release(OLDEST[flavour])}"
            raise UsageError(f"{text!r} is no version of {_NAMES[flavour]}", mend=mend)
        return cls(flavour, int(found[1]), int(found[2]))

    @classmethod
    def named(cls, name: str) -> ParserVersion:
        """From what `str` makes of one, such as "TensorRT-RTX 1.7".

        Raises:
            UsageError: the text names no parser.
        """
        product, _, version = name.rpartition(" ")
        for flavour, known in _NAMES.items():
            if product == known:
                return cls.parse(version, flavour)
        raise UsageError(f"{name!r} names no parser", mend=f"It must be of {' or '.join(_NAMES.values())}")

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor)."""
        return self.major, self.minor

    @property
    def product(self) -> str:
        """Its name without the version."""
        return _NAMES[self.flavour]

    def __str__(self) -> str:
        return f"{self.product} {_release(self.release)}"


def parse_supported(text: str, flavour: Flavour) -> ParserVersion:
    """The value of --tensorrt-version: a version whose parser is known.

    Raises:
        UsageError: the text is no version, or one that is too old, or of a major version that nothing is known of.
    """
    where, first, last = "--tensorrt-version", OLDEST[flavour], LATEST_MAJOR[flavour]
    try:
        parser = ParserVersion.parse(text, flavour)
    except UsageError as error:
        raise UsageError(error.what, where=where, mend=error.mend) from error
    if parser.release < first or parser.major > last:
        mend = f"Give one from {_release(first)} to {last}.x"
        raise UsageError(f"{_NAMES[flavour]} {text} is not supported", where=where, mend=mend)
    return parser


def _release(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
