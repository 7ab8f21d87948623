"""Loads the plugin library into the registry of a TensorRT that PYTHONPATH names, by way of the version adapter, and
prints every creator with its fields as JSON: [[name, version, namespace], {field: type}]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tensorrt_lean as trt

from dflash_trt.backends.parser_version import ParserVersion
from dflash_trt.backends.tensorrt_api import TensorRT


def main(library: Path) -> list[object]:
    api = TensorRT(
        trt=trt, flavour="tensorrt", version=trt.__version__, parser=ParserVersion.parse(trt.__version__, "tensorrt")
    )
    api.load_plugins(library)
    assert api.creator_fields("KVInjection", "2", "dflash_trt") is None
    identities = [[c.name, c.plugin_version, c.plugin_namespace] for c in api.registry().all_creators]
    return [[identity, api.creator_fields(*identity)] for identity in identities]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
