"""A thread that serves an engine: requests come from any thread, what they give goes to callbacks."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dflash_trt.errors import BackendError, DflashError, EngineClosedError
from dflash_trt.runtime.generation import StreamEvent, StreamReader
from dflash_trt.runtime.scheduler import DEFAULT_QUEUE, ServingLoad
from dflash_trt.runtime.sequence import SequenceState
from dflash_trt.runtime.speculation import Speculation

if TYPE_CHECKING:
    from dflash_trt.runtime.engine import Engine
    from dflash_trt.runtime.sampling import SamplingParams
    from dflash_trt.runtime.trace import Branches

OnEvent = Callable[[StreamEvent | DflashError], None]

_log = logging.getLogger(__name__)


class EngineWorker:
    """Serves many requests at once, each as the engine would alone. The engine is the worker's until it is closed.

    Args:
        max_queue: requests that may wait for one of the `limits.max_batch_size` slots.
        speculation: "auto" drafts as much as pays, "on" always, "off" never; no output token depends on it.
        branches: as in `Engine.generate`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int = DEFAULT_QUEUE,
        speculation: Speculation = "auto",
        branches: Branches | None = None,
    ) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler(max_queue=max_queue, speculation=speculation, branches=branches)
        self._requests: dict[SequenceState, tuple[StreamReader, OnEvent]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._why = "the engine was closed, or serves another process"
        self._thread = threading.Thread(target=self._run, name="dflash-trt engine", daemon=True)
        atexit.register(self.close)  # a thread that is inside a backend when the interpreter ends takes it down
        self._thread.start()

    def submit(self, prompt: str | Sequence[int], params: SamplingParams, on_event: OnEvent) -> Ticket:
        """Takes a request, or refuses it at once.

        Args:
            on_event: called in the worker's thread, once for each step that yielded something; the last event has its
                `generation` set, or is the error the request ended with. It must be quick.

        Raises:
            RequestError: a prompt that cannot be served. EngineClosedError. QueueFullError: as many wait as may.
        """
        sequence = self._engine.sequence(prompt, params)
        with self._changed:
            if self._closed or not self._thread.is_alive():  # after a fork there is no thread in the child
                raise self._closed_error()
            self._scheduler.submit(sequence)
            self._requests[sequence] = StreamReader(sequence), on_event
            self._changed.notify()
        return Ticket(self, sequence)

    def cancel(self, sequence: SequenceState) -> None:
        """Ends a request: no event follows but one that is on its way, and the next step begins without it."""
        with self._changed:
            self._requests.pop(sequence, None)
            sequence.cancelled = True
            self._changed.notify()

    def load(self) -> ServingLoad:
        """A snapshot of what is going on."""
        return self._scheduler.load()

    def close(self) -> None:
        """Stops after the step that runs; requests still there end with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        atexit.unregister(self.close)
        if threading.current_thread() is not self._thread:  # but a receiver's call
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        last: DflashError = self._closed_error()
        try:
            while self._wait():
                for sequence in self._scheduler.step():
                    self._deliver(sequence)
        except BaseException as error:
            _log.exception("the engine's thread failed")
            self._why = f"the engine stopped: {type(error).__name__}: {error}"
            last = BackendError(self._why, mend="Load it again")
        with self._changed:
            self._closed = True
            left, self._requests = self._requests, {}
        for _, on_event in left.values():
            _call(on_event, last)
        self._scheduler.end_all(last)

    def _closed_error(self) -> EngineClosedError:
        return EngineClosedError(self._why, mend="Load it again")

    def _wait(self) -> bool:
        """Until there is something to do; False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._scheduler.is_idle)
            return not self._closed

    def _deliver(self, sequence: SequenceState) -> None:
        with self._changed:
            request = self._requests.get(sequence)
            if sequence.is_over:
                self._requests.pop(sequence, None)
        if request is None:  # cancelled meanwhile
            return
        reader, on_event = request
        if not _call(on_event, sequence.error or reader.event()):
            self.cancel(sequence)


class Ticket:
    """A request that was taken."""

    def __init__(self, worker: EngineWorker, sequence: SequenceState) -> None:
        self._worker, self._sequence = worker, sequence

    def cancel(self) -> None:
        """Ends it, from any thread; its slot is free before the next step. After its end nothing happens."""
        self._worker.cancel(self._sequence)


def _call(on_event: OnEvent, event: StreamEvent | DflashError) -> bool:
    """Whether the receiver took it: an error of its own must not end the other requests."""
    try:
        on_event(event)
    except Exception:
        _log.exception("a request's receiver failed; the request is cancelled")
        return False
    return True
