"""The serving thread and `AsyncEngine`: every request answered once, wherever it comes from and however it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime.triples import small_triple

from dflash_trt.backends.torch import TorchCache
from dflash_trt.errors import BackendError, DflashError, EngineClosedError, QueueFullError, RequestError, UsageError
from dflash_trt.runtime.async_engine import AsyncEngine
from dflash_trt.runtime.engine import Engine
from dflash_trt.runtime.generation import Generation, StreamEvent
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.scheduler import Scheduler
from dflash_trt.runtime.worker import EngineWorker

LONG = SamplingParams(max_tokens=1900, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4] * 20, [5, 6], [7, 8, 1, 1], [0], [3] * 33]


class Receiver:
    """Takes the events of one request."""

    def __init__(self) -> None:
        self.events: list[StreamEvent | DflashError] = []
        self.over = threading.Event()
        self.begun = threading.Event()

    def __call__(self, event: StreamEvent | DflashError) -> None:
        assert not self.over.is_set(), "an event after the last"
        self.events.append(event)
        self.begun.set()
        if isinstance(event, DflashError) or event.generation is not None:
            self.over.set()

    def last(self) -> Generation | DflashError:
        assert self.over.wait(60)
        event = self.events[-1]
        if isinstance(event, DflashError):
            return event
        assert event.generation is not None
        return event.generation


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return small_triple(tmp_path, max_batch_size=2, max_seq_len=2000, branches=2)


@pytest.fixture
def worker(engine: Engine) -> Iterator[EngineWorker]:
    with EngineWorker(engine, max_queue=3) as made:
        yield made


def test_threads_get_what_each_would_alone(engine: Engine) -> None:
    options = [{"max_tokens": 20 + number, "temperature": number % 2, "seed": number} for number in range(12)]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(12)]
    expected = [engine.generate(prompt, speculation=False, **own) for prompt, own in zip(prompts, options, strict=True)]
    receivers = [Receiver() for _ in prompts]
    with EngineWorker(engine, branches=1) as worker:
        threads = [
            threading.Thread(target=worker.submit, args=(prompt, SamplingParams(**own), receiver))
            for prompt, own, receiver in zip(prompts, options, receivers, strict=True)
        ]
        for thread in threads:
            thread.start()
        outputs = [receiver.last() for receiver in receivers]
        for thread in threads:
            thread.join()
    for receiver, output, plain in zip(receivers, outputs, expected, strict=True):
        assert isinstance(output, Generation)
        assert (output.token_ids, output.text) == (plain.token_ids, plain.text)
        assert (output.finish_reason, output.seed) == (plain.finish_reason, plain.seed)
        events = [event for event in receiver.events if isinstance(event, StreamEvent)]
        assert [token for event in events for token in event.token_ids] == plain.token_ids
        assert "".join(event.text for event in events) == plain.text
        assert all(event.token_ids for event in events)


def test_cancelling_frees_the_slot(engine: Engine, worker: EngineWorker) -> None:
    receivers = [Receiver() for _ in range(4)]
    tickets = [worker.submit(PROMPTS[0], LONG, receiver) for receiver in receivers]
    assert receivers[0].begun.wait(60)
    wait_for(lambda: worker.load().slots_in_use == 2)
    assert worker.load().queue_depth == 2
    tickets[2].cancel()  # it waits
    tickets[0].cancel()  # it runs
    assert receivers[3].begun.wait(60)
    for ticket in (tickets[1], tickets[3], tickets[3]):
        ticket.cancel()
    wait_for(lambda: worker.load().slots_in_use == 0)
    load = worker.load()
    assert (load.queue_depth, load.totals.cancelled, load.totals.finished) == (0, 4, 0)
    assert not any(receiver.over.is_set() for receiver in receivers)
    assert receivers[2].events == []
    again = Receiver()
    worker.submit(PROMPTS[1], SamplingParams(max_tokens=9), again)
    output = again.last()
    assert isinstance(output, Generation)
    assert output.token_ids == engine.generate(PROMPTS[1], speculation=False, max_tokens=9).token_ids


def test_a_refusal_comes_at_once(worker: EngineWorker) -> None:
    nobody = Receiver()
    for prompt, said in (([], "is empty"), ("", "is empty"), ([1] * 2000, "max_input_len"), ([99], "outside 0..8")):
        with pytest.raises(RequestError, match=said):
            worker.submit(prompt, LONG, nobody)  # type: ignore[arg-type]
    tickets = [worker.submit(PROMPTS[0], LONG, Receiver()) for _ in range(5)]
    with pytest.raises(QueueFullError, match="max_queue is 3"):
        worker.submit(PROMPTS[0], LONG, nobody)
    assert worker.load().totals.refused == 1
    assert nobody.events == []
    for ticket in tickets:
        ticket.cancel()


def test_a_receiver_that_fails_loses_its_request_alone(worker: EngineWorker, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Any) -> None:
        raise ValueError("not my day")

    other = Receiver()
    worker.submit(PROMPTS[0], LONG, broken)
    worker.submit(PROMPTS[1], SamplingParams(max_tokens=30, ignore_eos=True), other)
    output = other.last()
    assert isinstance(output, Generation)
    assert len(output.token_ids) == 30
    wait_for(lambda: worker.load().slots_in_use == 0)
    assert worker.load().totals.cancelled == 1
    assert "not my day" in caplog.text


def test_closing_ends_what_is_there(engine: Engine) -> None:
    worker = EngineWorker(engine)
    receivers = [Receiver() for _ in range(4)]
    for receiver in receivers:
        worker.submit(PROMPTS[0], LONG, receiver)
    assert receivers[0].begun.wait(60)
    worker.close()
    worker.close()
    for receiver in receivers:
        assert isinstance(receiver.last(), RequestError)
    with pytest.raises(RequestError, match="the engine was closed"):
        worker.submit(PROMPTS[0], LONG, Receiver())


def test_a_thread_that_fails_says_so_to_everybody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    receivers = [Receiver(), Receiver(), Receiver()]
    with EngineWorker(engine) as worker:
        monkeypatch.setattr(Scheduler, "step", lambda self: 1 / 0)
        for receiver in receivers[:1]:
            worker.submit(PROMPTS[0], LONG, receiver)
        error = receivers[0].last()
        assert isinstance(error, BackendError)
        assert "ZeroDivisionError" in str(error)
        with pytest.raises(EngineClosedError, match="ZeroDivisionError"):
            worker.submit(PROMPTS[0], LONG, receivers[1])


def test_totals_add_up_after_closing(engine: Engine) -> None:
    worker = EngineWorker(engine)
    receivers = [Receiver() for _ in range(5)]
    for receiver in receivers:
        worker.submit(PROMPTS[0], LONG, receiver)
    assert receivers[0].begun.wait(60)
    worker.close()
    load = worker.load()
    assert (load.slots_in_use, load.queue_depth, load.totals.failed, load.totals.requests) == (0, 0, 5, 5)


def test_a_receiver_may_close_submit_and_cancel(engine: Engine) -> None:
    worker, second, third = EngineWorker(engine), Receiver(), Receiver()

    def first(event: StreamEvent | DflashError) -> None:
        if isinstance(event, StreamEvent) and event.generation is not None:
            worker.submit(PROMPTS[2], SamplingParams(max_tokens=4, ignore_eos=True), second)
            worker.submit(PROMPTS[0], LONG, third).cancel()

    worker.submit(PROMPTS[1], SamplingParams(max_tokens=3, ignore_eos=True), first)
    assert isinstance(second.last(), Generation)
    assert third.events == []
    closing = Receiver()

    def close(event: StreamEvent | DflashError) -> None:
        worker.close()
        closing(event)

    worker.submit(PROMPTS[0], LONG, close)
    assert isinstance(closing.last(), RequestError)
    with pytest.raises(EngineClosedError):
        worker.submit(PROMPTS[0], LONG, Receiver())


def test_a_forked_child_is_refused(engine: Engine) -> None:
    with EngineWorker(engine) as worker:
        child = os.fork()
        if child == 0:
            try:
                worker.submit(PROMPTS[0], LONG, Receiver())
            except EngineClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_interpreter_ends_with_a_worker_at_work(bundle: Path) -> None:
    code = f"""
import time
import dflash_trt
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.worker import EngineWorker
worker = EngineWorker(dflash_trt.load({str(bundle)!r}, threads=1))
worker.submit([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True), lambda event: None)
time.sleep(0.05)
print("over")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_a_device_that_stays_broken_is_told_to_everybody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes fail, and so does the wiping of their rows: nobody is left waiting, and what comes later hears why."""

    def broken(*args: Any) -> Any:
        raise RuntimeError("illegal address")

    receivers = [Receiver() for _ in range(5)]
    with EngineWorker(engine, speculation="on") as worker:
        monkeypatch.setattr(TorchCache, "clear_row", broken)
        monkeypatch.setattr(engine.target, "run", broken)
        for receiver in receivers:
            try:
                worker.submit(PROMPTS[0], LONG, receiver)
            except EngineClosedError as error:
                receiver(error)
        for receiver in receivers:
            error = receiver.last()
            assert isinstance(error, DflashError)
            assert "illegal address" in str(error)
        with pytest.raises(EngineClosedError, match="the engine stopped: RuntimeError: illegal address"):
            worker.submit(PROMPTS[0], LONG, Receiver())
        load = worker.load()
        assert (load.slots_in_use, load.queue_depth) == (0, 0)


# -- asyncio


def test_streams_of_many_tasks(engine: Engine) -> None:
    expected = [engine.generate(prompt, speculation=False, max_tokens=25) for prompt in PROMPTS]

    async def one(served: AsyncEngine, prompt: list[int]) -> tuple[list[int], str]:
        tokens, text = [], ""
        async for event in served.stream(prompt, max_tokens=25):
            tokens += event.token_ids
            text += event.text
        return tokens, text

    async def main() -> list[tuple[list[int], str]]:
        async with AsyncEngine(engine, speculation="on") as served:
            found = await asyncio.gather(*(one(served, prompt) for prompt in PROMPTS))
            whole = await served.generate(PROMPTS[0], max_tokens=25)
            assert whole.token_ids == expected[0].token_ids
            assert served.load().totals.finished == len(PROMPTS) + 1
            return found

    assert asyncio.run(main()) == [(plain.token_ids, plain.text) for plain in expected]


def test_a_task_that_is_cancelled_frees_its_slot(engine: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as served:
            tasks = [asyncio.create_task(served.generate(PROMPTS[0], **vars(LONG))) for _ in range(3)]
            stream = served.stream(PROMPTS[1], **vars(LONG))
            while served.load().slots_in_use < 2:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            assert all(
                isinstance(error, asyncio.CancelledError)
                for error in await asyncio.gather(*tasks, return_exceptions=True)
            )
            event = await anext(stream)
            assert event.token_ids
            await stream.aclose()
            while served.load().slots_in_use or served.load().queue_depth:
                await asyncio.sleep(0.01)
            assert served.load().totals.cancelled == 4

    asyncio.run(main())


def test_a_task_cancelled_before_it_was_taken_leaves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, go_on = threading.Event(), threading.Event()
    sequence = Engine.sequence

    def slow(self: Engine, *args: Any) -> Any:
        encoding.set()
        assert go_on.wait(60)
        return sequence(self, *args)

    monkeypatch.setattr(Engine, "sequence", slow)

    async def main() -> None:
        async with AsyncEngine(engine) as served:
            task = asyncio.create_task(served.generate(PROMPTS[0], **vars(LONG)))
            await asyncio.to_thread(encoding.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            while served.load().totals.cancelled < 1:
                await asyncio.sleep(0.01)
            assert served.load().slots_in_use == 0

    asyncio.run(main())


def test_errors_come_out_of_the_await(engine: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(engine, max_queue=0) as served:
            with pytest.raises(UsageError, match="temperature"):
                await served.generate(PROMPTS[0], temperature=-1)
            with pytest.raises(RequestError, match="is empty"):
                await served.generate([])
            tasks = [asyncio.create_task(served.generate(PROMPTS[0], **vars(LONG))) for _ in range(2)]
            while served.load().slots_in_use < 2:
                await asyncio.sleep(0.01)
            with pytest.raises(QueueFullError):
                await served.generate(PROMPTS[0])
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, RequestError)

    asyncio.run(main())
