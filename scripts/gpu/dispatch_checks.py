"""The kernels as they are used: through torch.ops on CUDA tensors, and in a CUDA graph whose lengths change."""

from __future__ import annotations

from dataclasses import replace

import torch

from dflash_trt.ops import accepted_path as path_ops
from dflash_trt.ops import kv_injection as injection_op
from dflash_trt.ops import staircase_attention  # noqa: F401 - defines torch.ops.dflash_trt.staircase_attention
from dflash_trt.runtime.device_step import captured
from gpu import attention_cases, injection_cases, path_cases
from gpu.attention_cases import DTYPES, Attention
from gpu.context import Context
from gpu.results import Result

_ROUNDS = 4


def check_operators(context: Context, result: Result) -> None:
    """On a CPU this runs the operators' references."""
    seed, device = context.options.seed, context.options.device
    if context.on_gpu:
        from dflash_trt.ops.cuda import register

        register()
    for dtype in DTYPES:
        case = attention_cases.make(seed, DTYPES[dtype], context=130, queries=9, kind="tree").to(device)
        found = torch.ops.dflash_trt.staircase_attention(*case.arguments())
        worst = attention_cases.distance(found, *attention_cases.expected(case))
        result.check(f"torch.ops staircase_attention: {dtype}", worst <= 1, f"{worst:.2f} of the bound")
        injection = injection_cases.make(seed, DTYPES[dtype], device, counted=True, inside=True)
        before = replace(injection, key_cache=injection.key_cache.clone(), value_cache=injection.value_cache.clone())
        torch.ops.dflash_trt.kv_injection_(*injection.arguments())
        problem = injection_cases.wrong(injection, before)
        result.check(f"torch.ops kv_injection_: {dtype}", not problem, problem)
    trees = path_cases.make(seed, 2, 40)
    inputs = (trees.tokens, trees.choices, trees.visibility, trees.parents)
    path, path_len, _ = path_ops.accept_path(*(tensor.to(device) for tensor in inputs), 40)
    paths = path_cases.walks(trees)
    right = torch.equal(path.cpu(), path_cases.padded(paths, 40)) and path_len.tolist() == [len(p) for p in paths]
    result.check("torch.ops accept_path", right)
    problem = _rotary_problem(device)
    result.check("torch.onnx.ops rotary_embedding", not problem, problem)


def _rotary_problem(device: str) -> str:
    """Torch's own operator, with which queries are rotated, is young: whether this torch's has the layout we use."""
    x = torch.randn(2, 3, 5, 8, device=device)
    angles = torch.rand(20, 4, device=device)
    positions = torch.arange(10, device=device).view(2, 5)
    found = torch.onnx.ops.rotary_embedding(x, angles.cos(), angles.sin(), positions)
    cos, sin = (table[positions][:, None] for table in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    wanted = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    return "" if torch.allclose(found, wanted, atol=1e-5) else f"off by {float((found - wanted).abs().max()):.3g}"


class Step:
    """Inject rows, attend, accept, move the accepted rows, gather their features: over static buffers, B = 2."""

    def __init__(self, seed: int, device: str) -> None:
        self.case = attention_cases.make(
            seed, torch.float16, context=700 if device == "cuda" else 40, queries=13, dim=64, group=3, slack=11
        ).to(device)
        batch, kv_heads, capacity, dim = self.case.key_cache.shape
        self.injection = injection_cases.make(
            seed, torch.float16, device, batch=batch, rows=13, kv_heads=kv_heads, dim=dim, capacity=capacity,
            positions=capacity, inside=True,
        )  # fmt: skip
        self.trees = path_cases.make(seed, batch, 13)
        self.tree_inputs = [
            tensor.to(device)
            for tensor in (self.trees.tokens, self.trees.choices, self.trees.visibility, self.trees.parents)
        ]
        caches = (self.injection.key_cache, self.injection.value_cache)
        self.buffers = [cache.clone() for cache in caches]
        self.pointers = path_ops.addresses(self.buffers)
        self.features = torch.randn(batch, 13, 96, device=device)

    def run(self) -> None:
        injection_op.kv_injection(*self.injection.arguments()[:-1])
        self.attended = torch.ops.dflash_trt.staircase_attention(*self.case.arguments())
        self.path, self.path_len, self.bonus = path_ops.accept_path(*self.tree_inputs, 13)
        path_ops.move_rows_(self.buffers, self.pointers, self.path, self.path_len, self.case.context_len)
        self.gathered = path_ops.gather_features(self.features, self.path, self.path_len, 13)

    def change(self, seed: int) -> None:
        """New lengths and values in the same buffers, poison where a result goes."""
        case, injection = self.case, self.injection
        device = str(case.query.device)
        batch, kv_heads, capacity, dim = case.key_cache.shape
        context = int(torch.randint(capacity - 13, (), generator=torch.Generator().manual_seed(seed)))
        fresh = attention_cases.make(
            seed, torch.float16, context=context, queries=13, dim=dim, group=3, kind="staircase",
            slack=capacity - context - 13,
        ).to(device)  # fmt: skip
        other = injection_cases.make(
            seed, torch.float16, device, batch=batch, rows=13, kv_heads=kv_heads, dim=dim, capacity=capacity,
            positions=capacity, inside=True,
        )  # fmt: skip
        self.trees = path_cases.make(seed, batch, 13)
        new_trees = (self.trees.tokens, self.trees.choices, self.trees.visibility, self.trees.parents)
        for old, new in zip(self.tree_inputs, new_trees, strict=True):
            old.copy_(new)
        for mine, theirs in ((case, fresh), (injection, other)):
            for name, tensor in vars(mine).items():
                if isinstance(tensor, torch.Tensor):
                    tensor.copy_(getattr(theirs, name))
        for buffer in (*self.buffers, self.features):
            buffer.normal_()
        for output in (self.attended, self.gathered):
            output.fill_(float("nan"))
        self.before = [buffer.clone() for buffer in self.buffers]
        self.untouched = replace(
            injection, key_cache=injection.key_cache.clone(), value_cache=injection.value_cache.clone()
        )

    def problem(self) -> str:
        """What a run left wrong."""
        case: Attention = self.case
        worst = attention_cases.distance(self.attended, *attention_cases.expected(case))
        found = [f"attention is {worst:.3g} times its bound away"] if worst > 1 else []
        wrong = injection_cases.wrong(self.injection, self.untouched)
        found += [f"kv_injection: {wrong}"] if wrong else []
        paths = path_cases.walks(self.trees)
        if not torch.equal(self.path.cpu(), path_cases.padded(paths, 13)):
            found.append("accept_path took another path")
        lengths = case.context_len.tolist()
        for buffer, before in zip(self.buffers, self.before, strict=True):
            if not torch.equal(buffer, path_cases.moved(before, paths, lengths)):
                found.append("move_rows left other rows")
        if not torch.equal(self.gathered, path_cases.gathered(self.features, paths, 13)):
            found.append("gather_features took other rows")
        return "; ".join(found)


def check_capture(context: Context, result: Result) -> None:
    """One capture, replayed with other lengths, trees and values; on a CPU the same calls without a graph."""
    seed = context.options.seed
    step = Step(seed, context.options.device)
    # from here on the step's outputs are those of the graph, which every replay writes anew
    replay = captured(step.run, context.options.device).replay if context.on_gpu else step.run
    replay()
    for number in range(_ROUNDS):
        context.note(f"replay {number}")
        step.change(seed + 1 + number)
        replay()
        problem = step.problem()
        how = "CUDA graph, replay" if context.on_gpu else "without a graph, run"
        result.check(f"{how} with lengths {step.case.context_len.tolist()}", not problem, problem)
