"""What the bridge uses of TensorRT-LLM, in the shape its sources give it, on a CPU.

The draft model is that of tensorrt_llm/_torch/models/modeling_dflash.py at commit 009d8fa4 (1.3.0 release candidates),
reduced to what a worker calls before the block is drafted; `Session` is tensorrt_llm/runtime/session.py at 46d548bf
(1.x), over the engines of `backends.fake_engine`, which compute. Signatures and checks are theirs, the code is not.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from backends.fake_engine import Built, FakeContext, FakeEngine, FakeLogger, FakeTensorRT
from torch import nn

BUILDERS: dict[str, Any] = {}
ARCHITECTURES: dict[str, Any] = {}


def _register(registry: dict[str, Any], key: str) -> Any:
    def decorate(registered: Any) -> Any:
        registry[key] = registered
        return registered

    return decorate


class Norm(nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.variance_epsilon = eps


class DFlashForCausalLM(nn.Module):
    """Loads a DFlash drafter's tensors, refuses others, and projects the context as DFlash does."""

    def __init__(self, draft_config: Any, *, dflash_attention_backend: str = "VANILLA") -> None:
        super().__init__()
        self.config = draft_config.pretrained_config
        assert self.config.architectures == ["Qwen3ForCausalLM"], "another backbone would be built"
        self.dflash_attention_backend = dflash_attention_backend
        attention = dict(
            q_size=self.config.num_attention_heads * self.config.head_dim,
            kv_size=self.config.num_key_value_heads * self.config.head_dim,
            head_dim=self.config.head_dim,
            num_heads=self.config.num_attention_heads,
            num_key_value_heads=self.config.num_key_value_heads,
        )
        layers = range(self.config.num_hidden_layers)
        self.model = SimpleNamespace(
            layers=[SimpleNamespace(self_attn=SimpleNamespace(**attention)) for _ in layers]
        )
        self._fused_kv_weight = None
        self._k_norm_stacked = None
        self._k_norm_eps = None
        self._num_attn_layers = 0

    def load_weights(self, weights: dict, weight_mapper: Any = None, **kwargs: Any) -> None:
        assert weight_mapper == "mapper"
        left = dict(weights)
        if "fc.weight" in left:
            self.fc = nn.Linear(1, 1)
            del left["fc.weight"]
        weight = left.pop("hidden_norm.weight")
        self.hidden_norm = nn.RMSNorm(len(weight), eps=self.config.rms_norm_eps, dtype=weight.dtype)
        self.hidden_norm.weight.data.copy_(weight)
        for index, layer in enumerate(self.model.layers):
            name = f"layers.{index}."
            parts = [left.pop(f"{name}self_attn.{part}_proj.weight") for part in "qkv"]
            layer.self_attn.qkv_proj = SimpleNamespace(weight=torch.cat(parts), bias=None)
            layer.self_attn.k_norm = Norm(left.pop(f"{name}self_attn.k_norm.weight"), self.config.rms_norm_eps)
            for rest in ("self_attn.q_norm", "self_attn.o_proj", "input_layernorm", "post_attention_layernorm"):
                del left[f"{name}{rest}.weight"]
            for rest in ("gate", "up", "down"):
                del left[f"{name}mlp.{rest}_proj.weight"]
        del left["norm.weight"]
        assert not left, f"tensors a DFlash drafter does not have: {sorted(left)}"

    def project_target_hidden(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm(self.fc(hidden_states))

    def precompute_context_kv(
        self, projected_hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("DFlash's own projection was called")

    def _build_fused_kv_buffers(self) -> None:
        attentions = [layer.self_attn for layer in self.model.layers]
        first = attentions[0]
        self._fused_kv_weight = torch.cat([a.qkv_proj.weight[first.q_size :] for a in attentions])
        self._k_norm_stacked = torch.stack([a.k_norm.weight.data for a in attentions])
        self._k_norm_eps = first.k_norm.variance_epsilon
        self._num_attn_layers = len(attentions)

    def _fused_rope_inplace(self, k_flat: torch.Tensor, positions: torch.Tensor, N: int, L: int) -> None:  # noqa: N803
        """k_flat [N*L, kv heads * head dim]; row i*L + l is layer l of position i."""
        half = self.config.head_dim // 2
        angles = positions[:, None] * self.config.rope_theta ** (-torch.arange(half) / half)
        cos, sin = (part.repeat_interleave(L, dim=0)[:, None] for part in (angles.cos(), angles.sin()))
        heads = k_flat.view(N * L, self.config.num_key_value_heads, 2 * half)
        first, second = heads[..., :half].clone(), heads[..., half:].clone()
        heads[..., :half] = first * cos - second * sin
        heads[..., half:] = second * cos + first * sin


def install_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tensorrt_llm._torch` with registries that are empty."""
    BUILDERS.clear()
    ARCHITECTURES.clear()
    _install(
        monkeypatch,
        {
            "tensorrt_llm": {},
            "tensorrt_llm._torch": {},
            "tensorrt_llm._torch.models": {},
            "tensorrt_llm._torch.models.modeling_dflash": {"DFlashForCausalLM": DFlashForCausalLM},
            "tensorrt_llm._torch.models.modeling_utils": {
                "register_draft_model": lambda mode: _register(BUILDERS, mode),
                "register_auto_model": lambda name: _register(ARCHITECTURES, name),
            },
            "tensorrt_llm._torch.speculative": {},
            "tensorrt_llm._torch.speculative.interface": {"SpeculativeDecodingMode": SimpleNamespace(DFLASH="DFLASH")},
        },
    )


def _install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    for name, content in modules.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


# -- the engine flow

VERSION = "10.14.1.48"  # of TensorRT, which TensorRT-LLM 1.2.1 requires


class Engine(FakeEngine):
    """An engine that gives a context memory of its own, too, where nothing else is asked for."""

    def __init__(self, built: Built) -> None:
        super().__init__(built, rtx=False)
        self.own_contexts: list[FakeContext] = []

    def create_execution_context(self, strategy: Any = None) -> FakeContext | None:
        if strategy is not None:
            return super().create_execution_context(strategy)
        self.own_contexts.append(FakeContext(self._built))
        return self.own_contexts[-1]


class TensorRT(FakeTensorRT):
    """The module `tensorrt`, by which the bytes of an engine file stand for what `files` says."""

    __spec__ = ModuleSpec("tensorrt", None)
    __version__ = VERSION

    def __init__(self, files: dict[bytes, Built]) -> None:
        super().__init__(next(iter(files.values())))
        self.files = files

    def _runtime(self, logger: Any) -> Any:
        def deserialize_cuda_engine(serialized_engine: Any) -> Engine | None:
            self.calls.append("deserialize_cuda_engine")
            built = self.files[bytes(serialized_engine)]
            if not built.readable:
                return None
            self.engines.append(Engine(built))
            return self.engines[-1]

        return SimpleNamespace(deserialize_cuda_engine=deserialize_cuda_engine)


class Session:
    """`tensorrt_llm.runtime.Session`; `runs` has the context of each pass."""

    runs: list[FakeContext] = []  # noqa: RUF012

    @staticmethod
    def from_serialized_engine(engine: Any) -> Session:
        session = Session()
        session._runtime = sys.modules["tensorrt"].Runtime(FakeLogger())
        session._engine = session._runtime.deserialize_cuda_engine(engine)
        session._context = None
        if not session.engine.streamable_weights_size:
            session._context = session.engine.create_execution_context()
            session._context.set_optimization_profile_async(0, 7)
        return session

    @property
    def engine(self) -> Any:
        return self._engine

    @property
    def context(self) -> Any:
        return self._context

    def run(self, inputs: dict[str, Any], outputs: dict[str, Any], stream: int, context: Any = None) -> bool:
        if context is None:
            context = self.context
        for tensors in (inputs, outputs):
            for name, tensor in tensors.items():
                address = tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor
                context.set_tensor_address(name, address)
        self.runs.append(context)
        return context.execute_async_v3(stream)


def install_engine_flow(monkeypatch: pytest.MonkeyPatch, tensorrt: TensorRT, *, version: str = "1.2.1") -> None:
    """`tensorrt`, and `tensorrt_llm` with or without `runtime.Session` (gone after 1.2)."""
    monkeypatch.setattr(Session, "runs", [])
    runtime = {"Session": Session} if version.startswith("1.2") else {}
    _install(monkeypatch, {"tensorrt_llm": {"__version__": version}, "tensorrt_llm.runtime": runtime})
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
