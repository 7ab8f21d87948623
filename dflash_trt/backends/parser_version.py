"""Which ONNX parser a graph is for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from dflash_trt.errors import UsageError

Flavour = Literal["tensorrt", "tensorrt-rtx"]
_NAMES: dict[Flavour, str] = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}


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
        found = re.fullmatch(r"(\d+)\.(\d+)(?:\.\w+)*", text)
        if found is None:
            raise UsageError(f"{text!r} is no version of {_NAMES[flavour]}", mend="Give major.minor, such as 10.14")
        return cls(flavour, int(found[1]), int(found[2]))

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor)."""
        return self.major, self.minor

    @property
    def product(self) -> str:
        """Its name without the version."""
        return _NAMES[self.flavour]

    def __str__(self) -> str:
        return f"{self.product} {self.major}.{self.minor}"
