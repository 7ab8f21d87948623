"""The TensorRT plugins' `enqueue` and the C API on real device memory, without TensorRT itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dflash_trt.plugins.kernels.tiling import architecture
from gpu import attention_cases, injection_cases, native_build, path_cases
from gpu.attention_cases import DTYPES, Attention
from gpu.context import Context
from gpu.driver_script import Script, read
from gpu.injection_cases import Injection, bits
from gpu.results import Result

DIMS = (64, 128)
HALVES = ("fp16", "bf16")
ATTENTIONS: dict[str, dict[str, Any]] = {
    "Q 16": {"kv_heads": 8, "queries": 16, "context": 1000},
    "Q 70, staircase": {"kv_heads": 8, "queries": 70, "context": 1500, "kind": "staircase"},
    "one query": {"queries": 1, "context": 300},
    "no context, sinks": {"queries": 9, "context": 0, "sinks": True},
    "window, sinks": {"queries": 33, "context": 700, "window": 100, "sinks": True, "kind": "tree"},
    "symmetric window": {"queries": 16, "context": 400, "window": 50, "causal": 0, "kind": "block_diagonal"},
    "softcap": {"queries": 16, "context": 400, "softcap": 3.0},
}
INJECTIONS: dict[str, dict[str, Any]] = {
    "norm": {},
    "no norm": {"norm": False},
    "part rotated": {"passing": 8},
    "many rows": {"rows": 200, "capacity": 300, "inside": True},
}
Judges = list[tuple[str, Callable[[], str]]]  # of each case its name, and what says what is wrong
_SECONDS_TO_BUILD = 35.0


def run(context: Context, result: Result) -> None:
    context.need_gpu()
    tools = native_build.toolchain(context.options.tensorrt_root, context.root)
    result.facts["nvcc"] = str(tools.nvcc)
    if not context.budget.allows(_SECONDS_TO_BUILD):
        result.skipped.append("build of the plugin library: time")
        return
    context.note("compiling kernels ahead of time")
    generated = context.scratch / "generated"
    cc = architecture(torch.cuda.get_device_capability())
    native_build.compile_kernels(context.root, generated, cc, DIMS, HALVES)
    context.note("compiling the plugin library")
    programs = native_build.build(context.root, tools, context.scratch / "build", generated)
    result.facts["seconds left after the build"] = round(context.budget.left(), 1)
    context.note("enqueue")
    check_enqueue(context, result, programs)
    context.note("C API")
    check_c_api(context, result, programs)


def check_enqueue(context: Context, result: Result, programs: native_build.Programs) -> None:
    """A check per case. Each dtype is one run of the driver, so that what fails in one does not hide the other."""
    for dtype in HALVES:
        script = Script(context.scratch)
        judges: Judges = []
        for dim in DIMS:
            add_cases(script, judges, dtype, dim, context)
        try:
            script.run(programs)
        except Exception as error:
            result.check(f"enqueue, {dtype}", False, f"{type(error).__name__}: {error}")
            continue
        for name, judge in judges:
            problem = judge()
            result.check(f"enqueue {name}", not problem, problem)


def add_cases(script: Script, judges: Judges, dtype: str, dim: int, context: Context) -> None:
    """All cases of a dtype and a head size to the script, and for each what judges its outputs after the run."""
    seed, device = context.options.seed, context.options.device
    for name, shape in ATTENTIONS.items():
        case = attention_cases.make(seed, DTYPES[dtype], dim=dim, **shape).to(device)
        output = script.attention(case)
        label = f"StaircaseAttention: {dtype}, head {dim}, {name}"
        judges.append((label, lambda case=case, output=output: _attention_problem(case, output)))
    for name, shape in INJECTIONS.items():
        injection = injection_cases.make(seed, DTYPES[dtype], device, dim=dim, **shape)
        caches = script.injection(injection)
        label = f"KVInjection: {dtype}, head {dim}, {name}"
        judges.append((label, lambda case=injection, caches=caches: _injection_problem(case, caches)))


def _attention_problem(case: Attention, output: Any) -> str:
    batch, heads, queries, dim = case.query.shape
    found = read(output, case.query, (batch, queries, heads * dim))
    worst = attention_cases.distance(found, *attention_cases.expected(case))
    return "" if worst <= 1 else f"{worst:.3g} times its bound away"


def _injection_problem(case: Injection, caches: Any) -> str:
    keys, values = (read(path, case.key_cache, tuple(case.key_cache.shape)) for path in caches)
    return injection_cases.wrong(replace(case, key_cache=keys, value_cache=values), case)


def check_c_api(context: Context, result: Result, programs: native_build.Programs) -> None:
    """accept_path, move_rows and gather_features as a runtime calls them: raw pointers and a stream."""
    library = ctypes.CDLL(str(programs.library))
    library.dflash_trt_last_error.restype = ctypes.c_char_p
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    seed, nodes, width, batch, heads, dim = context.options.seed, 70, 70, 3, 2, 128
    trees = path_cases.make(seed, batch, nodes)
    inputs = [t.cuda() for t in (trees.tokens, trees.choices, trees.visibility, trees.parents)]
    path = torch.full((batch, width), -7, device="cuda")
    path_len, bonus = (torch.full((batch,), -7, device="cuda") for _ in range(2))
    context_len = torch.randint(50, (batch,), generator=torch.Generator().manual_seed(seed))
    caches = [torch.randn(batch, heads, 50 + nodes, dim, device="cuda").half() for _ in range(4)]
    before = [cache.clone() for cache in caches]
    addresses = torch.tensor([cache.data_ptr() for cache in caches], device="cuda")
    features = torch.randn(batch, nodes, 1000, device="cuda").bfloat16()
    gathered = torch.full((batch, width + 1, 1000), float("nan"), device="cuda", dtype=torch.bfloat16)
    lengths = context_len.cuda()
    calls: list[tuple[str, list[Any]]] = [
        ("accept_path", [*inputs, path, path_len, bonus, batch, nodes, width]),
        ("move_rows", [addresses, len(caches), path, path_len, lengths, batch, heads, 50 + nodes, dim * 2, width]),
        ("gather_features", [features, path, path_len, gathered, batch, nodes, 2000, width, width + 1]),
    ]
    torch.cuda.synchronize()
    for name, arguments in calls:
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in arguments]
        status = getattr(library, f"dflash_trt_{name}")(*values, stream)
        if status:
            result.check(f"C API {name}", False, library.dflash_trt_last_error().decode())
            return
    torch.cuda.synchronize()
    paths = path_cases.walks(trees)
    last = [int(trees.choices[b, p[-1]]) for b, p in enumerate(paths)]
    accepted = torch.equal(path.cpu(), path_cases.padded(paths, width)) and path_len.tolist() == [len(p) for p in paths]
    result.check("C API accept_path", accepted and bonus.tolist() == last)
    moved = [path_cases.moved(cache, paths, context_len.tolist()) for cache in before]
    result.check("C API move_rows", all(torch.equal(bits(a), bits(b)) for a, b in zip(caches, moved, strict=True)))
    wanted = path_cases.gathered(features, paths, width + 1)
    result.check("C API gather_features", torch.equal(bits(gathered), bits(wanted)))
