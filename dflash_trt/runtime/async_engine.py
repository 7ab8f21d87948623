"""`AsyncEngine`: an engine that serves many requests at once, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dflash_trt.errors import DflashError
from dflash_trt.runtime.generation import Generation, StreamEvent
from dflash_trt.runtime.sampling_params import SamplingParams
from dflash_trt.runtime.scheduler import DEFAULT_QUEUE, ServingLoad
from dflash_trt.runtime.speculation import Speculation
from dflash_trt.runtime.worker import EngineWorker, Ticket

if TYPE_CHECKING:
    from dflash_trt.runtime.engine import Engine
    from dflash_trt.runtime.trace import Branches


class AsyncEngine:
    """Serves an engine with continuous batching; each request gives what `Engine.generate` would.

        async with AsyncEngine(dflash_trt.load("bundle")) as engine:
            async for event in engine.stream("def main():", max_tokens=64):
                print(event.text, end="")

    Args:
        max_queue: requests that may wait for one of the `limits.max_batch_size` slots; more are refused at once.
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
        self._worker = EngineWorker(engine, max_queue=max_queue, speculation=speculation, branches=branches)

    async def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Generation:
        """The whole output; `sampling`: fields of `SamplingParams`. A task that is cancelled frees its slot.

        Raises:
            RequestError, UsageError, BackendError: as `Engine.generate`. QueueFullError: as many wait as may.
        """
        async with aclosing(self.stream(prompt, **sampling)) as events:
            async for event in events:
                if event.generation is not None:
                    return event.generation
        raise AssertionError("a stream ends with its generation")

    async def stream(self, prompt: str | Sequence[int], **sampling: Any) -> AsyncGenerator[StreamEvent]:
        """An event for each step that yielded something. Closing the iterator frees the slot.

        Raises:
            RequestError, UsageError, BackendError, QueueFullError: as `generate`.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[StreamEvent | DflashError]()

        def deliver(event: StreamEvent | DflashError) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        # A long prompt takes a while to encode, and must not hold up the other requests of this loop.
        params = SamplingParams(**sampling)
        submitting = asyncio.ensure_future(asyncio.to_thread(self._worker.submit, prompt, params, deliver))
        try:
            ticket = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(_cancel_ticket)
            raise
        try:
            while True:
                event = await events.get()
                if isinstance(event, DflashError):
                    raise event
                yield event
                if event.generation is not None:
                    return
        finally:
            ticket.cancel()

    def load(self) -> ServingLoad:
        """A snapshot of what is going on."""
        return self._worker.load()

    async def close(self) -> None:
        """Stops after the step that runs; requests still there end with an error."""
        await asyncio.to_thread(self._worker.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _cancel_ticket(submitting: asyncio.Future[Ticket]) -> None:
    """Of a task that was cancelled before its request was taken."""
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
