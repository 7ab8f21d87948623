"""Loads the plugin library into the registry of a TensorRT that PYTHONPATH names, and prints what it finds as JSON.

Without a GPU there is no runtime, so no logger either: reasons go to stderr.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tensorrt_lean as trt

F32, F64, I32, I64 = (getattr(trt.PluginFieldType, name) for name in ("FLOAT32", "FLOAT64", "INT32", "INT64"))
DTYPES = {F32: np.float32, F64: np.float64, I32: np.int32, I64: np.int64}


def create(creator: Any, fields: list[tuple[str, float, Any]], phase: Any = trt.TensorRTPhase.BUILD) -> Any:
    values = [trt.PluginField(name, np.array([value], DTYPES[kind]), kind) for name, value, kind in fields]
    return creator.create_plugin("layer", trt.PluginFieldCollection(values), phase)


def main(library: str) -> dict[str, Any]:
    registry = trt.get_plugin_registry()
    before = {creator.name for creator in registry.all_creators}
    handle = registry.load_library(library)
    result: dict[str, Any] = {"version": trt.__version__}
    result["added"] = sorted({creator.name for creator in registry.all_creators} - before)

    plugins = {
        "KVInjection": [("eps", 1e-6, F32)],
        "StaircaseAttention": [
            ("scale", 0.125, F32),
            ("sliding_window", 7, I64),
            ("causal", 1, I32),
            ("softcap", 0, F32),
        ],
    }
    result["plugins"] = {}
    for name, fields in plugins.items():
        creator = registry.get_creator(name, "1", "dflash_trt")
        plugin = create(creator, fields)
        core, build = (plugin.get_capability_interface(getattr(trt.PluginCapabilityType, c)) for c in ("CORE", "BUILD"))
        result["plugins"][name] = {
            "fields": [[field.name, str(field.type).split(".")[-1]] for field in creator.field_names],
            "identity": [core.plugin_name, core.plugin_version, core.plugin_namespace],
            "outputs": build.num_outputs,
            "metadata": build.metadata_string,
            "build_interface": build.interface_info.major,
            "at_run_time": create(creator, fields, trt.TensorRTPhase.RUNTIME) is not None,
        }
    kv = registry.get_creator("KVInjection", "1", "dflash_trt")
    wrong: dict[str, list[tuple[str, float, Any]]] = {
        "missing": [],
        "unknown": [("eps", 1e-6, F32), ("epsilon", 1e-6, F32)],
        "type": [("eps", 1e-6, F64)],
        "range": [("eps", -1, F32)],
    }
    result["refused"] = [name for name, fields in wrong.items() if create(kv, fields) is None]
    result["other_version"] = registry.get_creator("KVInjection", "2", "dflash_trt") is None
    result["other_namespace"] = registry.get_creator("KVInjection", "1", "") is None

    del kv, plugin, core, build, creator
    registry.deregister_library(handle)
    result["left"] = sorted({creator.name for creator in registry.all_creators} - before)
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
