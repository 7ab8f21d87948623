"""Records of engines and of plugin libraries, as a build writes them into a bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from dflash_trt.backends.engine_record import BuilderOptions, EngineFacts, EngineRecord, PluginRecord
from dflash_trt.backends.profiles import profiles
from dflash_trt.export.contract import Role
from dflash_trt.runtime.limits import Limits

LIBRARY = "plugins/libdflash_trt_plugins.so"
FACTS = EngineFacts(bytes=1, seconds=1.0, layers={"float32": 9}, float32_products=1)


def library_record(content: bytes) -> PluginRecord:
    """Of a library of these bytes, for an H100."""
    return PluginRecord(
        file=LIBRARY, version="0.1.0", tensorrt="10.14.1", compute_capabilities=(90,),
        sha256=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip


def built_record(limits: Limits, roles: Iterable[Role], plugins: PluginRecord | None, **changes: Any) -> EngineRecord:
    """Of bound engines that TensorRT 10.14.1.48 built for an H100; `changes` are other values of fields."""
    roles = tuple(roles)
    values: dict[str, Any] = {
        "name": "TensorRT",
        "stage": "built",
        "parser": "TensorRT 10.14",
        "version": "10.14.1.48",
        "compute_capabilities": (90,),
        "bound": True,
        "plugins": plugins,
        "plugins_reason": "",
        "profiles": {role: profiles(role, limits) for role in roles},
        "options": BuilderOptions(compute_capabilities=(90,)),
        "facts": dict.fromkeys(roles, FACTS),
    }
    return EngineRecord(**values | changes)
