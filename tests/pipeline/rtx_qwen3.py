"""Compiles a random target of Qwen3-0.6B's shape with TensorRT-RTX in a process of its own, and prints its figures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnx_ir as ir
from rtx import tensorrt_rtx

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.engine_builder import build_engine
from dflash_trt.backends.engine_record import BuilderOptions
from dflash_trt.backends.estimate import estimate
from dflash_trt.backends.lowering import lower_tensorrt
from dflash_trt.backends.profiles import profiles
from dflash_trt.checkpoint.target import expected_tensors, parameter_count, read_target
from dflash_trt.export.contract import target_graph
from dflash_trt.export.safetensors_writer import write_safetensors
from dflash_trt.export.weights import place_target
from dflash_trt.modeling.load import meta_target, target_tables
from dflash_trt.pipeline import export_graph
from dflash_trt.runtime.limits import Limits

TAPS = (1, 7, 13, 19, 25)
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def random_target(folder: Path) -> None:
    """A checkpoint in bfloat16: random signs and mantissas, magnitudes 1/64 to 1/32; norms 1 to 2."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    layer = {
        "input_layernorm.weight": (1024,),
        "mlp.down_proj.weight": (1024, 3072),
        "mlp.gate_proj.weight": (3072, 1024),
        "mlp.up_proj.weight": (3072, 1024),
        "post_attention_layernorm.weight": (1024,),
        "self_attn.k_norm.weight": (128,),
        "self_attn.k_proj.weight": (1024, 1024),
        "self_attn.o_proj.weight": (1024, 2048),
        "self_attn.q_norm.weight": (128,),
        "self_attn.q_proj.weight": (2048, 1024),
        "self_attn.v_proj.weight": (1024, 1024),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151936, 1024), "model.norm.weight": (1024,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(28) for name, shape in layer.items()}
    random = np.random.default_rng(0)

    def values(name: str) -> Iterator[np.ndarray]:
        shape = shapes[name]
        exponent, kept = (0x3C80, 0x807F) if len(shape) == 2 else (0x3F80, 0x007F)
        step = 4096
        for start in range(0, shape[0], step):
            bits = random.integers(0, 1 << 16, (min(step, shape[0] - start), *shape[1:]), np.uint16)
            yield (bits & np.uint16(kept)) | np.uint16(exponent)

    write_safetensors(folder / "model.safetensors", {name: ("BF16", shape) for name, shape in shapes.items()}, values)


def peak_memory() -> int:
    """Of this process alone, in bytes: what getrusage says includes the parent's, before this program began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def main(work: Path) -> None:
    tensorrt_rtx()
    random_target(work / "checkpoint")
    target = read_target(work / "checkpoint")
    limits = Limits(max_batch_size=1, max_seq_len=2048, max_input_len=2047, block_size=16, prefill_chunk=256)
    folder = work / "target"
    folder.mkdir()
    tables = target_tables(target.spec, limits.capacity)
    tensors = target.tensors.only(expected_tensors(target.spec))
    placed = place_target(tensors, tables, "bfloat16", folder, lambda amount: None)
    graph = target_graph(target.spec, len(TAPS), "bfloat16")
    api = tensorrt_api.load("tensorrt-rtx")
    started = time.perf_counter()
    module = meta_target(target.spec, TAPS, limits.capacity, "bfloat16")
    model = export_graph(
        module, graph, placed, folder, None,
        lambda traced: lower_tensorrt(traced, limits.capacity, api.parser, plugins=False),
    )  # fmt: skip
    exported = time.perf_counter() - started
    options = BuilderOptions(compute_capabilities=(86,))
    estimated = estimate(ir.load(model)).build_bytes
    facts = build_engine(api, model, graph, profiles("target", limits), options, folder / "rank0.engine")
    peak = peak_memory()
    figures = {"parameters": parameter_count(target.spec), "exported": exported, "peak": peak, "estimated": estimated}
    figures |= asdict(facts)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
