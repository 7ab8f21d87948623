"""What every section is given: device, seed, options, and how long it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu.roofline import Ceilings


class NotRunError(Exception):
    """A section that cannot run here; the message says why."""


class Budget:
    """Seconds a section may take, counted from now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        return self._end - self._clock()

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether something that takes about `seconds` still fits."""
        return self.left() > seconds


@dataclass(frozen=True)
class Options:
    """The command line, as the worker gets it.

    Attributes:
        device: "cuda", or "cpu" for trying the script itself: kernels run in Triton's interpreter, with small sizes.
        tensorrt_root: folder with TensorRT's headers, or with include/ that has them.
        engine: a TensorRT-RTX engine file to load instead of building one.
    """

    device: str = "cuda"
    seed: int = 0
    quick: bool = False
    tune: bool = False
    tensorrt_root: str | None = None
    engine: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Context:
    """Of one section.

    Attributes:
        root: of the checkout.
        scratch: a folder for files, empty at first.
        ceilings: what an earlier section measured; None before.
        note: shows what is being done.
    """

    options: Options
    budget: Budget
    root: Path
    scratch: Path
    ceilings: Ceilings | None = None
    note: Callable[[str], None] = field(default=lambda text: None)

    @property
    def on_gpu(self) -> bool:
        return self.options.device == "cuda"

    def need_gpu(self) -> None:
        """Raises NotRunError on a CPU, where figures mean nothing."""
        if not self.on_gpu:
            raise NotRunError("needs a GPU")
