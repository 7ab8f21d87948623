"""GPU time of calls: captured in a CUDA graph, so that no launch from Python is in it, and replayed between events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_REPLAYS = 7
COLD = 4  # inputs in rotation take this many times the L2 cache,
MOST_INPUTS = 128  # but are not more than these
_L2_FALLBACK = 64 << 20


def l2_bytes() -> int:
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)) or _L2_FALLBACK


def rotation(bytes_each: int, most: int = MOST_INPUTS) -> int:
    """How many inputs of a size to rotate over, so that none is still in the L2 cache when its turn comes again."""
    return max(2, min(most, -(-COLD * l2_bytes() // bytes_each)))


def graph_seconds(calls: Sequence[Callable[[], Any]], replays: int = _REPLAYS) -> float:
    """Seconds of a call: the median over replays of one graph that holds all `calls` in order.

    Each call runs once before, on a stream of its own: kernels are compiled and libraries set up there, as nothing of
    that is allowed in a capture.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode():
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    graph.replay()
    times = [event_seconds(graph.replay) for _ in range(replays)]
    del graph
    return statistics.median(times) / len(calls)


def event_seconds(work: Callable[[], Any]) -> float:
    """GPU seconds of `work`. It runs once more ahead of that, so that the device has something to do while the host
    launches what is timed."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    work()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def wall_seconds(work: Callable[[], Any], repeats: int, warm_up: int = 3) -> float:
    """Median seconds of `work`, the host's part included; the device is idle before each and waited for after."""
    times = []
    for repeat in range(warm_up + repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if repeat >= warm_up:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
