"""A TensorRT module as far as a build asks it what it can do: builder, configuration and flags, without a compiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from backends.fake_engine import Enumeration, FakeLogger, Value

from dflash_trt.backends.parser_version import Flavour, ParserVersion
from dflash_trt.backends.tensorrt_api import TensorRT

FLAGS = ("DEBUG", "REFIT", "TF32", "STRIP_PLAN", "WEIGHT_STREAMING")
VERSIONS: dict[Flavour, str] = {"tensorrt": "10.16.1.11", "tensorrt-rtx": "1.7.1.116"}


class FakeConfig:
    """An IBuilderConfig that keeps what it is told.

    Attributes:
        good_cache: the only timing cache that it reads; an empty one is always good.
    """

    good_cache = b"measured"

    def __init__(self) -> None:
        self.flags = {"TF32"}
        self.previews: set[str] = set()
        self.pools: dict[str, int] = {}
        self.capabilities: list[str] = []
        self.cache: bytes | None = None
        self.profiling_verbosity: Value | None = None
        self.builder_optimization_level = 3

    def set_flag(self, flag: Value) -> None:
        self.flags.add(flag.name)

    def clear_flag(self, flag: Value) -> None:
        self.flags.discard(flag.name)

    def set_preview_feature(self, feature: Value, enable: bool) -> None:
        (self.previews.add if enable else self.previews.discard)(feature.name)

    def set_memory_pool_limit(self, pool: Value, size: int) -> None:
        self.pools[pool.name] = size

    @property
    def num_compute_capabilities(self) -> int:
        return len(self.capabilities)

    @num_compute_capabilities.setter
    def num_compute_capabilities(self, number: int) -> None:
        self.capabilities = ["NONE"] * number

    def set_compute_capability(self, capability: Value, index: int) -> None:
        self.capabilities[index] = capability.name

    def create_timing_cache(self, data: bytes) -> bytes | None:
        return data if data in (b"", self.good_cache) else None

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return True


class FakeBuilding:
    """A `tensorrt` or `tensorrt_rtx` module; `configs` and `networks` have what its builders made.

    Args:
        flags, previews, creation: of BuilderFlag, PreviewFeature and NetworkDefinitionCreationFlag, in this order.
        capabilities: of ComputeCapability, which the module lacks where there are none.
    """

    ILogger = FakeLogger
    ProfilingVerbosity = Enumeration(LAYER_NAMES_ONLY=0, NONE=1, DETAILED=2)
    MemoryPoolType = Enumeration(WORKSPACE=0, TACTIC_DRAM=4)

    def __init__(
        self,
        flags: tuple[str, ...] = FLAGS,
        previews: tuple[str, ...] = ("PROFILE_SHARING_0806", "ALIASED_PLUGIN_IO_10_03"),
        creation: tuple[str, ...] = ("EXPLICIT_BATCH", "STRONGLY_TYPED"),
        capabilities: tuple[str, ...] = (),
    ) -> None:
        self.BuilderFlag = _enumeration(flags)
        self.PreviewFeature = _enumeration(previews)
        creations = _enumeration(creation)
        # pybind11 raises AttributeError for what is not there
        self.NetworkDefinitionCreationFlag = SimpleNamespace(**creations.__members__, __members__=creations.__members__)
        if capabilities:
            self.ComputeCapability = _enumeration(capabilities)
        self.configs: list[FakeConfig] = []
        self.networks: list[int] = []

    def Builder(self, logger: FakeLogger) -> Any:  # noqa: N802 - as TensorRT has it
        assert isinstance(logger, FakeLogger)

        def create_builder_config() -> FakeConfig:
            self.configs.append(FakeConfig())
            return self.configs[-1]

        return SimpleNamespace(create_builder_config=create_builder_config, create_network=self.networks.append)


def _enumeration(names: tuple[str, ...]) -> Enumeration:
    return Enumeration(**{name: number for number, name in enumerate(names)})


def tensorrt(version: str = VERSIONS["tensorrt"], **parts: Any) -> TensorRT:
    """The face of a TensorRT of this version."""
    return _face("tensorrt", version, FakeBuilding(**parts))


def rtx(version: str = VERSIONS["tensorrt-rtx"], **parts: Any) -> TensorRT:
    """The face of a TensorRT-RTX with the compute capabilities of 1.7, and the flag that it has to have."""
    flags = (*parts.pop("flags", FLAGS), "REQUIRE_USER_ALLOCATION")
    capabilities = ("NONE", "CURRENT", "SM75", "SM80", "SM86", "SM89", "SM120", "SM121")
    return _face("tensorrt-rtx", version, FakeBuilding(flags, capabilities=capabilities, **parts))


def _face(flavour: Flavour, version: str, module: Any) -> TensorRT:
    return TensorRT(trt=module, flavour=flavour, version=version, parser=ParserVersion.parse(version, flavour))
