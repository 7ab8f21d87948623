"""Registering the kernels: what can be told without a GPU."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from dflash_trt.errors import BackendError
from dflash_trt.ops import accepted_path, cuda, kv_injection, staircase_attention

OPERATORS = {
    "kv_injection_": kv_injection,
    "staircase_attention": staircase_attention,
    "accept_path": accepted_path,
    "move_rows_": accepted_path,
    "gather_features": accepted_path,
}


def python(code: str) -> None:
    """In a process of its own: registering lasts as long as the process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_register_serves_every_operator_once() -> None:
    python(f"""
import torch
from dflash_trt.ops import accepted_path, cuda, kv_injection, staircase_attention

def served():
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [has(f"dflash_trt::{{name}}", "CUDA") for name in {list(OPERATORS)}]

assert not any(served())
cuda.register()
cuda.register()
assert all(served())
""")


def test_without_triton_the_error_names_it() -> None:
    python("""
import sys
sys.modules["triton"] = None
from dflash_trt.errors import BackendError
from dflash_trt.ops import cuda
for attempt in range(2):
    try:
        cuda.register()
    except BackendError as error:
        assert str(error) == "torch on CUDA: triton is not installed. pip install triton", error
    else:
        raise AssertionError("registered")
""")


@pytest.mark.parametrize("name", OPERATORS)
def test_launchers_take_the_operators_arguments(name: str) -> None:
    schema = getattr(torch.ops.dflash_trt, name).default._schema
    parameters = inspect.signature(cuda._launchers()[name]).parameters.values()
    positional = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert [parameter.name for parameter in positional] == [argument.name for argument in schema.arguments]
    assert [parameter.default is not parameter.empty for parameter in positional] == [
        argument.has_default_value() for argument in schema.arguments
    ]


def test_a_refusal_is_a_backend_error() -> None:
    def launch(query: torch.Tensor | list[torch.Tensor]) -> int:
        size = len(query)
        if size > 4:
            raise ValueError(f"head_dim is {size}; the kernels have 4")
        return size

    assert cuda._refusing(launch)(torch.zeros(4)) == 4
    assert cuda._refusing(launch)([torch.zeros(4)]) == 1
    with pytest.raises(BackendError, match="torch on CUDA: head_dim is 5; the kernels have 4"):
        cuda._refusing(launch)(torch.zeros(5))


def test_what_the_kernels_lack_is_refused_before_any_launch() -> None:
    def attention(heads: int, queries: int, dim: int) -> None:
        cache = torch.zeros(1, 1, queries + 1, dim)
        cuda._launchers()["staircase_attention"](
            torch.zeros(1, heads, queries, dim), cache, cache, torch.zeros(1, dtype=torch.int64),
            torch.ones(1, queries, queries, dtype=torch.bool), None, torch.zeros(1, queries, dtype=torch.int64),
            1.0, 0, 1, 0.0,
        )  # fmt: skip

    for arguments in ((1, 4, 48), (1, 129, 64)):
        with pytest.raises(ValueError, match=r"head_dim is 48|129 queries"):
            attention(*arguments)
