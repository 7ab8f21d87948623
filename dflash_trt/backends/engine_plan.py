"""What a build for TensorRT or TensorRT-RTX settles before it begins: which version, which GPU, plugins or not.

Everything is refused here that can be refused here: a build takes minutes to hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.backends import tensorrt_api
from dflash_trt.backends.engine_builder import TimingCache, check_options
from dflash_trt.backends.engine_record import (
    PLUGIN_FOLDER,
    BuilderOptions,
    PluginRecord,
    dotted,
    gpu_compute_capability,
)
from dflash_trt.backends.parser_ops import first_version, support
from dflash_trt.backends.parser_version import Flavour, ParserVersion, parse_supported
from dflash_trt.backends.tensorrt_api import TensorRT
from dflash_trt.checkpoint.spec import DecoderSpec, Dtype
from dflash_trt.config import BuildConfig
from dflash_trt.errors import BackendError, UsageError
from dflash_trt.export.contract import Role
from dflash_trt.native import LIBRARY_NAME, library_facts, library_path
from dflash_trt.plugins.kernels.tiling import MAX_QUERIES, PLUGIN_HEAD_DIMS, architecture
from dflash_trt.runtime.limits import Limits

# With no TensorRT at hand to ask: the oldest parser that takes every operator of these graphs; later ones keep them.
DEFAULT_PARSER: dict[Flavour, str] = {"tensorrt": "10.15", "tensorrt-rtx": "1.7"}
ATTENTION_DTYPES = ("float16", "bfloat16")  # of the plugins' kernels


@dataclass(frozen=True)
class EnginePlan:
    """How the engines of one bundle are built.

    Attributes:
        api: None where the build stops before it is needed, and `missing` says what is not there.
        binds: whether calls become plugins; else TensorRT's own layers do the work. `plugins_reason` says why.
        library, plugins: the plugin library; None where nothing is bound, or where the build stops before it is needed.
        compute_capabilities: the engines are for; empty where the build stops before and none was named.
        missing: what an engine would need that this machine does not have, in one line; empty where all is there.
    """

    flavour: Flavour
    api: TensorRT | None
    parser: ParserVersion
    binds: bool
    library: Path | None
    plugins: PluginRecord | None
    plugins_reason: str
    compute_capabilities: tuple[int, ...]
    options: BuilderOptions
    timing_cache: TimingCache | None
    stops: bool
    missing: str


def plan_engines(
    flavour: Flavour, config: BuildConfig, limits: Limits, specs: Mapping[Role, DecoderSpec], precision: Dtype
) -> EnginePlan:
    """Settles how to build.

    Raises:
        BackendError: what the build needs is not there or cannot do it. UsageError: options that contradict each other.
    """
    stops = config.stop_after == "lower"
    api, missing = _find(flavour, stops)
    parser = _parser(flavour, config.tensorrt_version, api, stops)
    gpu = gpu_compute_capability()
    capabilities = _capabilities(flavour, config.compute_capability, gpu, stops)
    wanted, reason = _plugin_choice(flavour, config, limits, specs, precision)
    binds, library, plugins = wanted, None, None
    if wanted:
        binds, library, plugins, reason = _plugins(config, capabilities)
    if not binds and support("TensorScatter", parser) is None:
        mend = f"--plugins on builds with the plugins, or use {first_version('TensorScatter', flavour)} or later"
        raise BackendError(f"{parser} can update caches in place with plugins only ({reason})", mend=mend)
    if flavour == "tensorrt-rtx" and config.refit and gpu is None:
        mend = "Leave it out, or build where a GPU is"
        raise BackendError("TensorRT-RTX builds engines to be refitted only where a GPU is", where="--refit", mend=mend)
    options = BuilderOptions(
        compute_capabilities=capabilities if flavour == "tensorrt-rtx" else (),
        optimization_level=config.builder_optimization_level,
        workspace=config.workspace,
        refit=config.refit,
        weight_streaming=config.weight_streaming,
    )
    files = config.input_timing_cache, config.output_timing_cache
    timing_cache = None if files == (None, None) else TimingCache(*files)
    if not missing and flavour == "tensorrt" and gpu is None:
        missing = "TensorRT compiles for the GPU at hand, and torch sees none: run the build where one is"
    if api is not None and not stops:
        check_options(api, options, timing_cache)
    return EnginePlan(
        flavour, api, parser, binds, library, plugins, reason, capabilities, options, timing_cache, stops, missing
    )


def fit_limits(plan: EnginePlan, limits: Limits) -> Limits:
    """The plugins' kernels take at most so many queries, so a prompt goes through them in shorter chunks."""
    if not plan.binds:
        return limits
    return replace(limits, prefill_chunk=min(limits.prefill_chunk, MAX_QUERIES))


def _find(flavour: Flavour, stops: bool) -> tuple[TensorRT | None, str]:
    """The TensorRT, or why there is none where the build can do without."""
    try:
        return tensorrt_api.load(flavour), ""
    except BackendError as error:
        if not stops:
            mend = f"{error.mend}; --stop-after lower writes everything up to the engine without it"
            raise BackendError(error.what, where=error.where, mend=mend) from error
        return None, f"{error.what}: {error.mend}"


def _parser(flavour: Flavour, asked: str | None, api: TensorRT | None, stops: bool) -> ParserVersion:
    if asked is not None:
        if not stops:
            mend = "Leave it out, or add --stop-after lower"
            raise UsageError("the installed version is what builds", where="--tensorrt-version", mend=mend)
        return parse_supported(asked, flavour)
    return api.parser if api is not None else ParserVersion.parse(DEFAULT_PARSER[flavour], flavour)


def _capabilities(flavour: Flavour, asked: Sequence[int] | None, gpu: int | None, stops: bool) -> tuple[int, ...]:
    """What to compile for: RTX what is asked for, else the GPU at hand; TensorRT that GPU alone."""
    where = "--compute-capability"
    if flavour == "tensorrt" and asked and not stops and list(asked) != [gpu]:
        there = f"this GPU has {dotted(gpu)}" if gpu is not None else "torch sees no GPU"
        wanted = ", ".join(map(dotted, asked))
        what = f"TensorRT compiles for the GPU at hand: {wanted} is asked for, {there}"
        raise BackendError(what, where=where, mend="Leave it out, or build where that GPU is")
    if asked:
        return tuple(dict.fromkeys(asked))
    if gpu is not None:
        return (gpu,)
    if stops:
        return ()
    if flavour == "tensorrt":
        mend = "Build where a GPU is; --stop-after lower writes everything up to the engine without one"
        raise BackendError("TensorRT compiles for the GPU at hand, and torch sees none", where="GPU", mend=mend)
    mend = "Name what to compile for, as in --compute-capability 86,89,120"
    raise UsageError("is needed where torch sees no GPU", where=where, mend=mend)


def _plugin_choice(
    flavour: Flavour, config: BuildConfig, limits: Limits, specs: Mapping[Role, DecoderSpec], precision: Dtype
) -> tuple[bool, str]:
    """Whether these graphs are to call plugins, and why."""
    if config.plugins == "off":
        return False, "--plugins off"
    reasons = "; ".join(_against_plugins(flavour, config, limits, specs, precision))
    if reasons and config.plugins == "on":
        mend = "--plugins off builds with TensorRT's own layers"
        raise BackendError(reasons, where="--plugins on", mend=mend)
    return not reasons, reasons


def _plugins(
    config: BuildConfig, capabilities: Sequence[int]
) -> tuple[bool, Path | None, PluginRecord | None, str]:
    """Whether to bind, the library, and the reason: graphs can be bound without it, engines not be built."""
    try:
        library, plugins = _library(capabilities)
    except BackendError as error:
        if config.plugins == "auto":
            return False, None, None, error.message()
        if config.stop_after is None:
            raise
        return True, None, None, f"--plugins on; an engine needs the library: {error.message()}"
    return True, library, plugins, f"plugin library {plugins.version}, for TensorRT {plugins.tensorrt}"


def _against_plugins(
    flavour: Flavour, config: BuildConfig, limits: Limits, specs: Mapping[Role, DecoderSpec], precision: Dtype
) -> Iterator[str]:
    if flavour == "tensorrt-rtx":
        yield "TensorRT-RTX takes no plugins"
        return
    if precision not in ATTENTION_DTYPES:
        yield f"the plugins have kernels for {', '.join(ATTENTION_DTYPES)}, not for {precision}"
    sizes = {f"{role} {spec.head_dim}" for role, spec in specs.items() if spec.head_dim not in PLUGIN_HEAD_DIMS}
    if sizes:
        there = ", ".join(map(str, PLUGIN_HEAD_DIMS))
        yield f"the plugins have kernels for head_dim {there}, not for that of {', '.join(sorted(sizes))}"
    widths = {"a step verifies": limits.tree_size, "a re-draft fills": limits.redraft_rows * limits.vp_block_size}
    if config.prefill_chunk is not None:
        widths["a prompt's pass has"] = limits.prefill_chunk
    for what, width in widths.items():
        if width > MAX_QUERIES:
            yield f"{what} {width} tokens; the plugins take at most {MAX_QUERIES}"


def _library(capabilities: Sequence[int]) -> tuple[Path, PluginRecord]:
    """The plugin library.

    Raises:
        BackendError: it was not built, is not what was built, or has no kernels for one of the compute capabilities.
    """
    path = library_path()
    facts = library_facts(path)
    there = ", ".join(map(dotted, facts["compute_capabilities"]))
    for cc in capabilities:
        try:
            served = architecture(divmod(cc, 10)) in facts["compute_capabilities"]
        except ValueError:
            served = False
        if not served:
            what = f"has no kernels for compute capability {dotted(cc)}, only for {there}"
            raise BackendError(what, where=str(path), mend="--plugins off builds with TensorRT's own layers")
    return path, PluginRecord(
        file=f"{PLUGIN_FOLDER}/{LIBRARY_NAME}",
        version=facts["version"],
        tensorrt=facts["tensorrt"],
        compute_capabilities=tuple(facts["compute_capabilities"]),
        sha256=facts["sha256"],
    )
