"""What the C API launches, recorded by a stand-in CUDA runtime, what it refuses and how it tells of errors."""

from __future__ import annotations

import native
from plugins.c_api import call, check_the_c_api, pointers
from plugins.launches import FAKE, events


def test_the_c_api_launches_what_the_rules_say(built: native.Built) -> None:
    for cc in (80, 90):
        check_the_c_api(built, FAKE, cc)


def test_the_library_tells_its_version(built: native.Built) -> None:
    assert call(built, []) == [{"event": "version", "version": native.VERSION}]


def test_the_c_api_refuses_what_it_cannot_do(built: native.Built) -> None:
    good = pointers(7)
    lines = call(
        built,
        [
            ("accept_path", [*good, 1, 129, 16, [0]]),
            ("accept_path", [*good, 1, 70, 129, [0]]),
            ("accept_path", [*good, -1, 70, 16, [0]]),
            ("accept_path", [[0], *good[1:], 1, 70, 16, [0]]),
            ("accept_path", [*good[:6], [0x7008], 1, 70, 16, [0]]),
            ("move_rows", [good[0], 2, *good[1:4], 1, 8, 4096, 255, 16, [0]]),
            ("gather_features", [*good[:4], 70_000, 70, 64, 16, 17, [0]]),
            ("gather_features", [*good[:4], 1, 70, 64, 16, 17, [0]]),
        ],
    )
    assert [line["error"] for line in events(lines, "call")] == [
        "dflash_trt_accept_path: nodes is 129; it must be from 1 to 128",
        "dflash_trt_accept_path: path_capacity is 129; it must be from 1 to 128",
        "dflash_trt_accept_path: batch is -1; it must be at least 0",
        "dflash_trt_accept_path: tokens is null",
        "dflash_trt_accept_path: bonus is at 0x7008, which is not a multiple of 16",
        "dflash_trt_move_rows: row_bytes is 255; it must be a multiple of 4",
        "dflash_trt_gather_features: gather_features: a grid of 17 x 1 x 70000 is more than CUDA takes "
        "(2147483647 x 65535 x 65535)",
        "",
    ]
    assert [line["status"] for line in events(lines, "call")] == [1] * 7 + [0]


def test_a_failing_cuda_call_is_an_error_of_the_c_api(built: native.Built) -> None:
    (line,) = events(
        call(built, [("accept_path", [*pointers(7), 1, 70, 16, [0]])], FAKE_CUDART_FAIL="cudaLaunchKernel:2"), "call"
    )
    assert line["status"] == 1
    assert line["error"].startswith("dflash_trt_accept_path: launching accept_path_90 (grid 1 x 1 x 1, 256 threads")
