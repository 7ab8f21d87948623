"""Cases of the two operators: random inputs, what their definitions say as plain loops, one-node models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from hypothesis import strategies as st
from onnx import helper

from dflash_trt.ops import (
    DOMAIN,
    OPSET,
    VERSION,
    kv_injection,
    kv_injection_onnx,
    staircase_attention,
    staircase_attention_onnx,
)

ONNX_FLOAT = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
}


# --- StaircaseAttention ---


@dataclass(frozen=True)
class AttentionCase:
    """Inputs and attributes, named as in the operator."""

    query: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    context_len: np.ndarray
    visibility: np.ndarray
    sinks: np.ndarray | None
    position_ids: np.ndarray
    scale: float
    sliding_window: int = 0
    causal: int = 1
    softcap: float = 0.0

    def inputs(self) -> list[np.ndarray | None]:
        """In the operator's order."""
        return [
            self.query, self.key_cache, self.value_cache, self.context_len, self.visibility, self.sinks,
            self.position_ids,
        ]  # fmt: skip

    def attributes(self) -> dict[str, Any]:
        names = ("scale", "sliding_window", "causal", "softcap")
        return {name: getattr(self, name) for name in names}

    def overload(self) -> str:
        return staircase_attention_onnx.overload(self.sinks is not None, self.sliding_window, self.softcap)

    def rounded(self, dtype: torch.dtype) -> AttentionCase:
        """The same case with values that `dtype` represents, still held in float32."""
        floats = ("query", "key_cache", "value_cache", "sinks")
        return replace(self, **{name: _rounded(getattr(self, name), dtype) for name in floats})


def _rounded(array: np.ndarray | None, dtype: torch.dtype) -> np.ndarray | None:
    return None if array is None else torch.from_numpy(array).to(dtype).float().numpy()


def attention_case(
    seed: int,
    batch: int = 2,
    kv_heads: int = 2,
    group: int = 2,
    queries: int = 4,
    dim: int = 8,
    max_context: int = 9,
    slack: int = 3,
    window: int = 0,
    causal: int = 1,
    softcap: float = 0.0,
    sinks: bool = False,
) -> AttentionCase:
    """Every row has a context length of its own, visibility is arbitrary but for itself, positions may repeat."""
    rng = np.random.default_rng(seed)
    context_len = rng.integers(0, max_context + 1, batch)
    capacity = int(context_len.max()) + queries + slack
    cache = (batch, kv_heads, capacity, dim)
    visibility = rng.random((batch, queries, queries)) < 0.5
    visibility |= np.eye(queries, dtype=bool)
    # mostly depths of a tree, now and then anything
    depth = rng.integers(0, queries, (batch, queries)) if rng.random() < 0.8 else rng.integers(-3, 20, (batch, queries))
    return AttentionCase(
        query=rng.standard_normal((batch, kv_heads * group, queries, dim)).astype(np.float32),
        key_cache=rng.standard_normal(cache).astype(np.float32),
        value_cache=rng.standard_normal(cache).astype(np.float32),
        context_len=context_len,
        visibility=visibility,
        sinks=rng.standard_normal(kv_heads * group).astype(np.float32) if sinks else None,
        position_ids=np.maximum(context_len[:, None] + depth, 0),
        scale=0.7,
        sliding_window=window,
        causal=causal,
        softcap=softcap,
    )


def shapes() -> st.SearchStrategy[dict[str, int]]:
    """Arguments of `attention_case` that have nothing to do with the operator's attributes."""
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**31),
            "batch": st.integers(1, 3),
            "kv_heads": st.integers(1, 3),
            "group": st.integers(1, 3),
            "queries": st.integers(1, 9),
            "dim": st.sampled_from((4, 8, 16)),
            "max_context": st.integers(0, 12),
            "slack": st.integers(0, 5),
        }
    )


def sees(case: AttentionCase, row: int, query: int, slot: int) -> bool:
    """The definition: slots j < context_len (inside the window), and context_len + j with visibility[i][j]."""
    context, queries = int(case.context_len[row]), case.visibility.shape[1]
    if slot < context:
        key_position = slot
    elif slot < context + queries and case.visibility[row, query, slot - context]:
        key_position = int(case.position_ids[row, slot - context])
    else:
        return False
    if case.sliding_window == 0:
        return True
    distance = int(case.position_ids[row, query]) - key_position
    if case.causal:
        return 0 <= distance < case.sliding_window
    return abs(distance) < case.sliding_window


def attention_formula(case: AttentionCase) -> np.ndarray:
    """The operator in float64, one output row at a time."""
    batch, heads, queries, dim = case.query.shape
    kv_heads, capacity = case.key_cache.shape[1:3]
    out = np.zeros((batch, queries, heads * dim))
    for b in range(batch):
        for h in range(heads):
            keys, values = (cache[b, h * kv_heads // heads] for cache in (case.key_cache, case.value_cache))
            for i in range(queries):
                scores, seen = [], [slot for slot in range(capacity) if sees(case, b, i, slot)]
                for slot in seen:
                    score = float(case.query[b, h, i].astype(np.float64) @ keys[slot]) * case.scale
                    scores.append(case.softcap * math.tanh(score / case.softcap) if case.softcap else score)
                sink = [] if case.sinks is None else [float(case.sinks[h])]
                top = max(scores + sink)
                total = sum(math.exp(score - top) for score in scores + sink)
                for score, slot in zip(scores, seen, strict=True):
                    weight = math.exp(score - top) / total
                    out[b, i, h * dim : (h + 1) * dim] += weight * values[slot].astype(np.float64)
    return out


def attention_reference(case: AttentionCase, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The eager reference of the package."""
    tensors = _tensors(case.inputs(), dtype)
    return staircase_attention.staircase_attention(*tensors, **case.attributes()).float().numpy()


# --- KVInjection ---


@dataclass(frozen=True)
class InjectionCase:
    """Inputs and the attribute, named as in the operator."""

    key: np.ndarray
    value: np.ndarray
    key_norm_weight: np.ndarray | None
    position_ids: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    write_start: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    eps: float = 0.03  # unlike the default of RMSNormalization

    @property
    def rotary(self) -> int:
        """Components of a key that rotate."""
        return 2 * self.cos.shape[1]

    def overload(self) -> str:
        return kv_injection_onnx.overload(self.key_norm_weight is not None, self.rotary < self.key.shape[-1])

    def inputs(self) -> list[np.ndarray | None]:
        """In the operator's order."""
        return [
            self.key, self.value, self.key_norm_weight, self.position_ids, self.cos, self.sin, self.write_start,
            self.key_cache, self.value_cache,
        ]  # fmt: skip

    def rounded(self, dtype: torch.dtype) -> InjectionCase:
        """The same case with values that `dtype` represents, still held in float32; the tables stay as they are."""
        floats = ("key", "value", "key_norm_weight", "key_cache", "value_cache")
        return replace(self, **{name: _rounded(getattr(self, name), dtype) for name in floats})


def injection_case(
    seed: int, batch: int, kv_heads: int, rows: int, dim: int, max_start: int, slack: int, norm: bool, passing: int = 0
) -> InjectionCase:
    """Every row of the batch starts at a slot of its own; positions may repeat. `passing` components do not rotate."""
    rng = np.random.default_rng(seed)
    write_start = rng.integers(0, max_start + 1, batch)
    cache = (batch, kv_heads, int(write_start.max()) + rows + slack, dim)
    max_pos = max_start + rows + 3
    angles = np.arange(max_pos)[:, None] * (10.0 ** -np.arange((dim - passing) // 2))
    return InjectionCase(
        key=rng.standard_normal((batch, rows, kv_heads, dim)).astype(np.float32),
        value=rng.standard_normal((batch, rows, kv_heads, dim)).astype(np.float32),
        key_norm_weight=rng.standard_normal(dim).astype(np.float32) if norm else None,
        position_ids=rng.integers(0, max_pos, (batch, rows)),
        cos=np.cos(angles).astype(np.float32),
        sin=np.sin(angles).astype(np.float32),
        write_start=write_start,
        key_cache=rng.standard_normal(cache).astype(np.float32),
        value_cache=rng.standard_normal(cache).astype(np.float32),
    )


def injections() -> st.SearchStrategy[InjectionCase]:
    return st.builds(
        injection_case,
        seed=st.integers(0, 2**31),
        batch=st.integers(1, 3),
        kv_heads=st.integers(1, 3),
        rows=st.integers(1, 9),
        dim=st.sampled_from((4, 8, 16)),
        max_start=st.integers(0, 12),
        slack=st.integers(0, 5),
        norm=st.booleans(),
        passing=st.sampled_from((0, 0, 2)),
    )


def injection_formula(case: InjectionCase) -> tuple[np.ndarray, np.ndarray]:
    """The operator in float64, one key at a time."""
    keys, values = case.key_cache.astype(np.float64), case.value_cache.astype(np.float64)
    batch, rows, heads, dim = case.key.shape
    for b in range(batch):
        for i in range(rows):
            slot, position = int(case.write_start[b]) + i, int(case.position_ids[b, i])
            for h in range(heads):
                key = case.key[b, i, h].astype(np.float64)
                if case.key_norm_weight is not None:
                    key = key / math.sqrt(float(key @ key) / dim + case.eps) * case.key_norm_weight
                half = case.rotary // 2
                for d in range(half):
                    cos, sin = float(case.cos[position, d]), float(case.sin[position, d])
                    first, second = key[d], key[d + half]
                    keys[b, h, slot, d] = first * cos - second * sin
                    keys[b, h, slot, d + half] = second * cos + first * sin
                keys[b, h, slot, case.rotary :] = key[case.rotary :]
                values[b, h, slot] = case.value[b, i, h]
    return keys, values


def injection_reference(case: InjectionCase, dtype: torch.dtype = torch.float32) -> tuple[np.ndarray, np.ndarray]:
    """The eager operator of the package, on copies of the caches."""
    keys, values = kv_injection.kv_injection(*injection_tensors(case, dtype), case.eps)
    return keys.float().numpy(), values.float().numpy()


def injection_tensors(case: InjectionCase, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Copies of the inputs, floats in `dtype` but for the tables."""
    tensors = _tensors(case.inputs(), dtype)
    tensors[4], tensors[5] = torch.from_numpy(case.cos), torch.from_numpy(case.sin)
    return tensors


def _tensors(arrays: list[np.ndarray | None], dtype: torch.dtype) -> list[Any]:
    tensors = [None if array is None else torch.from_numpy(array.copy()) for array in arrays]
    return [tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors]


# --- one-node models ---


def one_node_model(
    schema: onnx.defs.OpSchema,
    function: onnx.FunctionProto,
    overload: str,
    absent: str | None,
    attributes: dict[str, Any],
    dtype: str = "float32",
) -> onnx.ModelProto:
    """A model of one call plus its body. Its float inputs and outputs are float32 and cast around the call.

    Args:
        absent: the optional input to leave out.
    """
    nodes, inputs, outputs, before, after = [], [], [], [], []
    for index, parameter in enumerate(schema.inputs):
        if parameter.name == absent:
            nodes.append("")
            continue
        kind = {"tensor(int64)": onnx.TensorProto.INT64, "tensor(bool)": onnx.TensorProto.BOOL}.get(
            parameter.type_str, onnx.TensorProto.FLOAT
        )
        inputs.append(helper.make_tensor_value_info(f"in_{parameter.name}", kind, [None] * _RANKS[parameter.name]))
        nodes.append(f"in_{parameter.name}")
        if parameter.type_str == "T" and dtype != "float32":
            nodes[index] = f"cast_{parameter.name}"
            before.append(helper.make_node("Cast", [f"in_{parameter.name}"], [nodes[index]], to=ONNX_FLOAT[dtype]))
    names = [f"out_{parameter.name}" for parameter in schema.outputs]
    call = helper.make_node(schema.name, nodes, [], domain=DOMAIN, overload=overload, **attributes)
    for parameter, name in zip(schema.outputs, names, strict=True):
        rank = 3 if schema.name == staircase_attention.NAME else 4
        outputs.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * rank))
        if dtype == "float32":
            call.output.append(name)
        else:
            call.output.append(f"raw_{parameter.name}")
            after.append(helper.make_node("Cast", [f"raw_{parameter.name}"], [name], to=onnx.TensorProto.FLOAT))
    return helper.make_model(
        helper.make_graph([*before, call, *after], "one_node", inputs, outputs),
        functions=[function],
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
        ir_version=11,
    )


_RANKS = {
    "query": 4, "key_cache": 4, "value_cache": 4, "context_len": 1, "visibility": 3, "sinks": 1, "position_ids": 2,
    "key": 4, "value": 4, "key_norm_weight": 1, "cos": 2, "sin": 2, "write_start": 1,
}  # fmt: skip


@cache
def attention_model(
    overload: str, scale: float, sliding_window: int, causal: int, softcap: float, dtype: str
) -> onnx.ModelProto:
    return one_node_model(
        staircase_attention_onnx.schema(),
        staircase_attention_onnx.function_body(overload),
        overload,
        None if "sinks" in overload else "sinks",
        {"scale": scale, "sliding_window": sliding_window, "causal": causal, "softcap": softcap},
        dtype,
    )


@cache
def injection_model(overload: str, eps: float, dtype: str) -> onnx.ModelProto:
    function = kv_injection_onnx.function_body(overload)
    absent = "key_norm_weight" if "no_norm" in overload else None
    return one_node_model(kv_injection_onnx.schema(), function, overload, absent, {"eps": eps}, dtype)


def ort_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@cache
def _attention_session(*args: Any) -> onnxruntime.InferenceSession:
    return ort_session(attention_model(*args))


@cache
def _injection_session(*args: Any) -> onnxruntime.InferenceSession:
    return ort_session(injection_model(*args))


def named_inputs(schema: onnx.defs.OpSchema, arrays: list[np.ndarray | None]) -> dict[str, np.ndarray]:
    """What the one-node models take."""
    pairs = zip(schema.inputs, arrays, strict=True)
    return {f"in_{parameter.name}": array for parameter, array in pairs if array is not None}


def attention_body(case: AttentionCase, dtype: str = "float32") -> np.ndarray:
    """The function body, run by ONNX Runtime."""
    attributes = case.attributes()
    session = _attention_session(case.overload(), *attributes.values(), dtype)
    return session.run(None, named_inputs(staircase_attention_onnx.schema(), case.inputs()))[0]


def injection_body(case: InjectionCase, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """The function body, run by ONNX Runtime."""
    session = _injection_session(case.overload(), case.eps, dtype)
    keys, values = session.run(None, named_inputs(kv_injection_onnx.schema(), case.inputs()))
    return keys, values
