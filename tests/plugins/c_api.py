"""The C API, as the runtime calls it: ctypes, raw pointers and a stream."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import native
from plugins.launches import SMS, Variants, events, launch

C_API = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.dflash_trt_last_error.restype = library.dflash_trt_version.restype = ctypes.c_char_p
print(json.dumps({"event": "version", "version": library.dflash_trt_version().decode()}), flush=True)
for function, arguments in json.loads(sys.argv[2]):
    values = [ctypes.c_void_p(v[0]) if isinstance(v, list) else ctypes.c_int(v) for v in arguments]
    status = getattr(library, "dflash_trt_" + function)(*values)
    error = library.dflash_trt_last_error().decode()
    print(json.dumps({"event": "call", "status": status, "error": error}), flush=True)
"""


def call(built: native.Built, calls: list[tuple[str, list[Any]]], **environment: str) -> list[dict[str, Any]]:
    """Pointers as one-element lists."""
    return built.run([sys.executable, "-c", C_API, built.library, json.dumps(calls)], **environment)


def pointers(count: int) -> list[list[int]]:
    return [[0x1000 * (i + 1)] for i in range(count)]


def check_the_c_api(built: native.Built, variants: Variants, cc: int) -> None:
    stream = [0x77]
    accept = pointers(7)
    move = pointers(4)
    gather = pointers(4)
    lines = call(
        built,
        [
            ("accept_path", [*accept, 3, 70, 16, stream]),
            ("move_rows", [move[0], 72, *move[1:], 3, 8, 4096, 256, 16, stream]),
            ("gather_features", [*gather, 3, 70, 5 * 4096 * 2, 16, 17, stream]),
            ("accept_path", [*accept, 0, 70, 16, stream]),
            ("move_rows", [move[0], 0, *move[1:], 3, 8, 4096, 256, 16, stream]),
        ],
        devices=f"{cc}:{SMS}",
    )
    assert all(line["status"] == 0 and line["error"] == "" for line in events(lines, "call"))
    words = 5 * 4096 * 2 // 4

    def flat(values: list[list[int]]) -> list[int]:
        return [value for (value,) in values]

    expected = [
        launch(variants.one("accept_path", cc), [3, 1, 1], [*flat(accept), 70, 16]),
        launch(variants.one("move_rows", cc), [72 * 8, 1, 3], [*flat(move), 4096, 8, 64, 16]),
        launch(
            variants.one("gather_features", cc),
            [17, math.ceil(words / 1024), 3],
            [*flat(gather), 70, words, 16, 17],
        ),
    ]
    assert events(lines, "launch") == [{**entry, "stream": 0x77} for entry in expected]
