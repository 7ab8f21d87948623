"""Commands for plugin_driver (plugins/tests/plugin_driver.cpp), and what it answers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from gpu.attention_cases import Attention
from gpu.injection_cases import Injection, bits
from gpu.native_build import Programs

_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "int64", torch.bool: "bool",
}  # fmt: skip
_TIMEOUT = 120  # seconds, of one run


class Script:
    """A run of the driver: its commands, and the files that its tensors come from and go to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[str] = []
        self._files = 0

    def attention(self, case: Attention) -> Path:
        """One enqueue of StaircaseAttention; the file of its output."""
        self.commands.append(
            f"create StaircaseAttention scale:f32={case.scale!r} sliding_window:i32={case.sliding_window} "
            f"causal:i32={case.causal} softcap:f32={case.softcap!r}"
        )
        self.commands.append("tensors")
        caches = (case.key_cache, case.value_cache)
        for tensor in (case.query, *caches, case.context_len, case.visibility, case.sinks, case.position_ids):
            if tensor is not None:
                self._input(tensor)
        batch, heads, queries, dim = case.query.shape
        self.commands.append(f"output {_NAMES[case.query.dtype]} {batch},{queries},{heads * dim}")
        return self._enqueue(1)[0]

    def injection(self, case: Injection) -> list[Path]:
        """One enqueue of KVInjection into caches that its outputs share; the files of both."""
        self.commands += [f"create KVInjection eps:f32={case.eps!r}", "tensors"]
        inputs = [
            tensor
            for tensor in (
                case.key, case.value, case.key_norm_weight, case.position_ids, case.cos, case.sin, case.write_start,
                case.key_cache, case.value_cache,
            )
            if tensor is not None
        ]  # fmt: skip
        for tensor in inputs:
            self._input(tensor)
        for index, cache in ((len(inputs) - 2, case.key_cache), (len(inputs) - 1, case.value_cache)):
            self.commands.append(f"output {_NAMES[cache.dtype]} {_dims(cache)} {index}")
        return self._enqueue(2)

    def _input(self, tensor: torch.Tensor) -> None:
        path = self._file()
        bits(tensor).cpu().numpy().tofile(path)
        self.commands.append(f"input {_NAMES[tensor.dtype]} {_dims(tensor)} {path}")

    def _enqueue(self, outputs: int) -> list[Path]:
        files = [self._file() for _ in range(outputs)]
        self.commands += ["configure", "shape_change", "enqueue"]
        self.commands += [f"save {index} {path}" for index, path in enumerate(files)]
        return files

    def _file(self) -> Path:
        self._files += 1
        return self.folder / f"tensor{self._files}.bin"

    def run(self, programs: Programs) -> list[dict[str, Any]]:
        """The lines of its answer. Raises RuntimeError: the driver or a plugin refused something."""
        done = subprocess.run(
            [str(programs.driver)], input="\n".join(self.commands) + "\n", env=programs.environment, text=True,
            capture_output=True, check=False, timeout=_TIMEOUT,
        )  # fmt: skip
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        logged = "; ".join(line["message"] for line in lines if line["event"] == "log")
        if done.returncode:
            raise RuntimeError(f"plugin_driver: exit {done.returncode}: {done.stderr[-800:]} {logged}")
        refused = [line["event"] for line in lines if line.get("status", 0) != 0 or line.get("made") is False]
        if refused or logged:
            raise RuntimeError(f"plugins refused {', '.join(refused) or 'nothing'}: {logged}")
        return lines


def read(path: Path, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that the driver saved, on the device of `like` and of its dtype."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=like.dtype).view(shape).to(like.device)


def _dims(tensor: torch.Tensor) -> str:
    return ",".join(map(str, tensor.shape))
