"""Sessions as polygraphy knows them: a runner for its `Comparator`, which is kept quiet."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.logger import G_LOGGER

from dflash_trt.backends.base import Array, Session, numpy_dtype


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps polygraphy from writing: it logs to stdout, where results go, and what it raises carries its own text.

    numpy too, which would warn of the infinities that polygraphy computes statistics of for its log.
    """
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1), np.errstate(all="ignore"):
        yield


class SessionRunner(BaseRunner):
    """Runs a fixed number of passes of a session, in order, on one cache of one row that each of them updates in place.

    polygraphy and numpy's own functions know no bfloat16: floating inputs are taken, and outputs given, in float32.
    The last pass also gives the caches, by the names of the graph's present outputs.

    Args:
        outputs: those wanted of every pass, and what to call the equal shares of each one's last dimension.
        slots: how many of the cache's the passes write; as many are given.
        limit: the most slots a cache may have.
        num_passes: how often it will be asked to infer.
    """

    def __init__(
        self,
        name: str,
        session: Session,
        outputs: Mapping[str, Sequence[str]],
        *,
        slots: int,
        limit: int,
        num_passes: int,
    ) -> None:
        super().__init__(name=name)
        self._session, self._outputs, self._num_passes = session, outputs, num_passes
        self._slots, self._capacity = slots, session.capacity_for(slots, limit)

    def get_input_metadata_impl(self) -> TensorMetadata:
        metadata = TensorMetadata()
        for spec in self._session.graph.inputs:
            dtype = spec.dtype if spec.dtype in ("int64", "bool") else "float32"
            shape = [None if isinstance(dim, str) else dim for dim in spec.shape]
            metadata.add(spec.name, np.dtype(dtype), shape)
        return metadata

    def activate_impl(self) -> None:
        self._cache = self._session.new_cache(1, self._capacity)
        self._left = self._num_passes

    def infer_impl(self, feed_dict: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        dtypes = {spec.name: numpy_dtype(spec.dtype) for spec in self._session.graph.inputs}
        inputs = {name: array.astype(dtypes[name]) for name, array in feed_dict.items()}
        start = time.perf_counter()
        results = self._session.run(inputs, list(self._outputs), self._cache)
        self.inference_time = time.perf_counter() - start
        found: dict[str, np.ndarray] = {}
        for output, names in self._outputs.items():
            found |= zip(names, np.split(_plain(results[output]), len(names), axis=-1), strict=True)
        self._left -= 1
        if not self._left:
            present = self._session.graph.present()
            for spec, buffer in zip(present, self._cache.buffers, strict=True):
                found[spec.name] = _plain(buffer[:, :, : self._slots])
        return found

    def deactivate_impl(self) -> None:
        del self._cache, self._left


def _plain(value: Array) -> np.ndarray:
    """Integers as they are, all else in float32."""
    if not isinstance(value, np.ndarray):
        value = value.float().cpu().numpy()
    return value if value.dtype.kind == "i" else value.astype(np.float32)
