"""Layers as TensorRT's inspector describes them, in engines built with detailed profiling verbosity."""

from __future__ import annotations

import json
from typing import Any


def tensor(dtype: str, *dims: int, name: str = "t", key: str = "Format/Datatype") -> dict[str, Any]:
    return {"Name": name, "Dimensions": list(dims), key: dtype}


def layer(kind: str, inputs: list[Any], output: str, name: str = "x", **rest: Any) -> dict[str, Any]:
    outputs = [tensor(output, -1, -1, 64)]
    return {"Name": name, "LayerType": kind, "Inputs": inputs, "Outputs": outputs, "StreamId": 0, **rest}


def engine_json(*layers: Any) -> str:
    return json.dumps({"Layers": list(layers), "Bindings": ["input_ids", "logits"]})


def gemm(dtype: str, name: str = "x", key: str = "Format/Datatype") -> dict[str, Any]:
    """With the two scalars that scale it."""
    scalars = [tensor("Float", 1, name="alpha", key=key), tensor("Float", 1, name="beta", key=key)]
    return layer("gemm", [tensor(dtype, -1, 64, key=key), tensor(dtype, 64, 64, key=key), *scalars], dtype, name)


def fused(dtype: str, name: str = "x") -> dict[str, Any]:
    """A product that casts what it reads in float32."""
    return layer("gemm", [tensor("Float", -1, 64), tensor(dtype, 64, 64)], dtype, name)


HALF = (
    layer("kgen", [tensor("Int64", -1, -1), tensor("Half", 320, 64)], "Half", TacticName="__myl_Gather_0x1"),
    layer("kgen", [tensor("Half", -1, -1, 64)], "Float", TacticName="__myl_CastMulMeanAddSqrt_0x2"),
    gemm("Half", "q_proj"),
    layer("kgen", [tensor("Half", -1, 4, -1, 16)] * 3, "Half", TacticName="_gemm_mha_v2_0x3"),
    layer("PluginV3", [tensor("Half", -1, 2, 40, 16), tensor("Int64", -1)], "Half"),
)
FC = gemm("Float", "fc")
