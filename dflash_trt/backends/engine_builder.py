"""Compiles a lowered graph with TensorRT or TensorRT-RTX, and checks what the network became on the way.

Nothing here asks which TensorRT it is: `tensorrt_api` does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.backends import profiles as profile_rules
from dflash_trt.backends.engine_contract import row_faults
from dflash_trt.backends.engine_record import BuilderOptions, EngineFacts
from dflash_trt.backends.profiles import CAPACITY, Profile
from dflash_trt.backends.tensorrt_api import Messages, TensorRT
from dflash_trt.checkpoint.spec import Dtype
from dflash_trt.errors import BackendError
from dflash_trt.export.contract import GraphSpec, TensorSpec

MIB = 1 << 20


@dataclass(frozen=True)
class TimingCache:
    """Files with what the builder measured before, and for what it measured now, as trtllm-build's."""

    read: Path | None = None
    write: Path | None = None


def build_engine(
    api: TensorRT,
    model: Path,
    graph: GraphSpec,
    given: Sequence[Profile],
    options: BuilderOptions,
    output: Path,
    *,
    plugins: bool = False,
    timing_cache: TimingCache | None = None,
) -> EngineFacts:
    """Parses `model` and writes its engine to `output`.

    Args:
        model: a graph that passed the preflight, its weights beside it.
        graph: its contract.
        plugins: whether the graph calls plugins, whose library is loaded already.
        timing_cache: None for none that outlives the build.

    Raises:
        BackendError: profiles out of order, a graph the parser refuses, a network that is not the contract's, a flag or
            compute capability this version does not have, or a build that fails; with the builder's own reason.
    """
    where, started = f"{graph.role} graph", time.perf_counter()
    profile_rules.check(graph, given)
    misplaced = [*row_faults(graph, given, given[0].dims[CAPACITY].max)]
    if misplaced:
        raise BackendError("; ".join(misplaced), where=where)
    logger, messages = api.logger()
    builder = api.trt.Builder(logger)
    config = _config(api, builder, options, graph.dtype, plugins=plugins)
    if timing_cache is not None:
        _set_timing_cache(api, config, timing_cache.read)
    network = _parse(api, builder, logger, messages, model, where)
    for attention in api.attentions(network):
        attention.decomposable = True  # where there is no fused kernel for its head size and dtype
    _check_network(api, network, graph, given, plugins=plugins)
    for profile in given:
        config.add_optimization_profile(optimization_profile(builder, graph, profile))
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BackendError(f"{api} cannot build the engine: {messages.last_error()}", where=where)
    output.write_bytes(memoryview(plan))
    if timing_cache is not None and timing_cache.write is not None:
        timing_cache.write.write_bytes(memoryview(config.get_timing_cache().serialize()))
    return EngineFacts(
        bytes=int(plan.nbytes),
        seconds=time.perf_counter() - started,
        layers=layer_dtypes(api, network),
        float32_products=float32_products(api, network),
    )


def check_options(api: TensorRT, options: BuilderOptions, timing_cache: TimingCache | None) -> None:
    """Raises BackendError for an option this TensorRT does not have, before anything is done."""
    builder = api.trt.Builder(api.logger()[0])
    config = _config(api, builder, options, "float32", plugins=False)
    if timing_cache is not None:
        _set_timing_cache(api, config, timing_cache.read)
        written = timing_cache.write
        if written is not None and (written.is_dir() or not written.absolute().parent.is_dir()):
            mend = "Give a file in a folder that is there"
            raise BackendError("cannot be written", where=f"--output-timing-cache {written}", mend=mend)


def _config(api: TensorRT, builder: Any, options: BuilderOptions, dtype: Dtype, *, plugins: bool) -> Any:
    config = builder.create_builder_config()
    api.set_flags(config, options.flags(), plugins=plugins)
    if dtype == "float32":  # what is asked for is float32: TF32 has 10 bits of its 23
        config.clear_flag(api.trt.BuilderFlag.TF32)
    config.profiling_verbosity = api.trt.ProfilingVerbosity.DETAILED  # so that layers can be read back
    if options.compute_capabilities:
        api.set_compute_capabilities(config, options.compute_capabilities)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.workspace is not None:
        config.set_memory_pool_limit(api.trt.MemoryPoolType.WORKSPACE, options.workspace * MIB)
    return config


def _set_timing_cache(api: TensorRT, config: Any, file: Path | None) -> None:
    if api.compiles_ahead:
        where = "--input-timing-cache, --output-timing-cache"
        raise BackendError(f"{api.name} times nothing while it compiles", where=where, mend="Leave them out")
    blob = b""
    if file is not None:
        if not file.is_file():
            mend = "Give a file that --output-timing-cache wrote"
            raise BackendError("there is no such file", where=f"--input-timing-cache {file}", mend=mend)
        blob = file.read_bytes()
    cache = config.create_timing_cache(blob)
    if cache is None or not config.set_timing_cache(cache, False):
        mend = "It is of another GPU or version: leave it out, or give one of these"
        raise BackendError(f"{api} refuses the timing cache", where=f"--input-timing-cache {file}", mend=mend)


def _parse(api: TensorRT, builder: Any, logger: Any, messages: Messages, model: Path, where: str) -> Any:
    network = api.network(builder)
    parser = api.trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(model)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        told = [f"node {e.node_name()} ({e.node_operator()}): {' '.join(e.desc().split())}" for e in errors]
        raise BackendError(
            "\n  ".join((f"the parser of {api} refuses the graph:", *(told or [messages.last_error()]))), where=where
        )
    return network


def optimization_profile(builder: Any, graph: GraphSpec, profile: Profile) -> Any:
    """TensorRT's own profile (IOptimizationProfile), for every input of a graph."""
    made = builder.create_optimization_profile()
    for spec in (*graph.inputs, *graph.past()):
        made.set_shape(spec.name, *profile.shapes(spec))
    return made


def _check_network(
    api: TensorRT, network: Any, graph: GraphSpec, given: Sequence[Profile], *, plugins: bool
) -> None:
    capacity = given[0].dims[CAPACITY].max
    found = [*network_faults(api, network, graph, capacity)]
    if not plugins:  # a plugin declares its aliases itself
        found += alias_faults(api, network, graph)
    if found:
        raise BackendError(
            "\n  ".join(("the parsed network is not what the contract says:", *found)), where=f"{graph.role} graph"
        )


def network_faults(api: TensorRT, network: Any, graph: GraphSpec, capacity: int) -> Iterator[str]:
    """Where a parsed network's inputs and outputs differ from the contract in name, order, dtype or shape."""
    for kind, number, get, specs in (
        ("input", network.num_inputs, network.get_input, (*graph.inputs, *graph.past())),
        ("output", network.num_outputs, network.get_output, (*graph.outputs, *graph.present())),
    ):
        tensors = [get(index) for index in range(number)]
        names, wanted = [tensor.name for tensor in tensors], [spec.name for spec in specs]
        if names != wanted:
            yield f"{kind}s are {', '.join(names)}; they must be {', '.join(wanted)}"
            continue
        for tensor, spec in zip(tensors, specs, strict=True):
            if api.dtype(tensor.dtype) != spec.dtype:
                yield f"{kind} {spec.name} is {api.dtype(tensor.dtype)}; it must be {spec.dtype}"
            shape = _shape(spec, capacity)
            if tuple(tensor.shape) != shape:
                yield f"{kind} {spec.name} has shape {tuple(tensor.shape)}; it must be {shape}"


def _shape(spec: TensorSpec, capacity: int) -> tuple[int, ...]:
    """As TensorRT writes it: -1 where it is dynamic."""
    return tuple(d if isinstance(d, int) else capacity if d == CAPACITY else -1 for d in spec.shape)


def alias_faults(api: TensorRT, network: Any, graph: GraphSpec) -> Iterator[str]:
    """Caches whose `present_*` is not the update in place of its `past_*`."""
    updates = api.layers(network, "KV_CACHE_UPDATE")
    sources = {layer.get_output(0).name: layer.get_input(0).name for layer in updates}
    for past, present in zip(graph.past(), graph.present(), strict=True):
        if sources.get(present.name) != past.name:
            yield f"output {present.name} is not an update of {past.name} in place"


def layer_dtypes(api: TensorRT, network: Any) -> dict[str, int]:
    """How many layers compute in each dtype, by their first output."""
    dtypes = Counter(api.dtype(layer.get_output(0).dtype) for layer in api.layers(network) if layer.num_outputs)
    return dict(sorted(dtypes.items()))


def float32_products(api: TensorRT, network: Any) -> int:
    """How many matrix products of a parsed network read float32."""
    products = api.layers(network, "MATRIX_MULTIPLY")
    return sum(api.dtype(layer.get_input(0).dtype) == "float32" for layer in products)
