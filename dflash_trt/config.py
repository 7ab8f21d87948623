"""`BuildConfig`: everything a build needs, from a YAML file, from options, or both (options win)."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
import yaml

from dflash_trt.checkpoint.spec import DecoderSpec, Dtype
from dflash_trt.errors import PairError, UsageError

BackendName = Literal["onnxruntime", "tensorrt", "tensorrt-rtx", "torch"]
WeightKind = Literal["float", "int8", "int4"]
_PATHS = ("target", "drafter", "vp_drafter", "output", "dump_ir", "input_timing_cache", "output_timing_cache")
_ENGINES = ("tensorrt", "tensorrt-rtx")
_ENGINE_OPTIONS = (
    "stop_after",
    "compute_capability",
    "plugins",
    "tensorrt_version",
    "builder_optimization_level",
    "workspace",
    "weight_streaming",
    "refit",
    "input_timing_cache",
    "output_timing_cache",
)


class _Options(pydantic.BaseModel):
    """Immutable, no unknown fields."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class Expectation(_Options):
    """Spec fields a configuration was written for, e.g. `{hidden_size: 4096, taps: [1, 9, 17, 25, 33]}`."""

    target: dict[str, Any] = pydantic.Field(default_factory=dict)
    drafter: dict[str, Any] = pydantic.Field(default_factory=dict)
    vp_drafter: dict[str, Any] = pydantic.Field(default_factory=dict)


class BuildConfig(_Options):
    """Options of `dflash-trt build`.

    Attributes:
        target, drafter, vp_drafter: checkpoint folders.
        output: the bundle to write.
        dtype: of weights, caches and compute; None is float32, in which decoding is lossless token for token, and
            bfloat16 for TensorRT and TensorRT-RTX.
        weights: of every linear layer, for ONNX Runtime: "int8" and "int4" are read faster than float, and rounded.
        max_seq_len: prompt and output together, in tokens; None is 2048, or what both models were trained for if less.
        max_input_len: prompt; None is max_seq_len - 1.
        block_size: anchor and drafts; None is the drafter's trained block.
        prefill_chunk: prompt tokens per target pass; None is 256, and 128 with plugins, which take no more.
        branches: of D2SD, the most per step; needs vp_drafter; None is 4 with one.
        vp_block_size: the anchor, kept drafts and re-drafts of a branch; None is block_size where that is given, else
            the VP drafter's trained block.
        dump_ir: folder for each stage's graph.
        verify: check numbers, losslessness and tau before the bundle appears.
        force: replace an existing bundle.
        expect: what the checkpoints must be like.

    Of TensorRT and TensorRT-RTX alone:

    Attributes:
        stop_after: "lower" writes the lowered graphs, their profiles and the configuration, and no engine.
        compute_capability: what TensorRT-RTX compiles for, such as 86; None is the GPU at hand.
        plugins: whether calls become plugins; "auto" where the library is there and has the kernels.
        tensorrt_version: whose parser to lower for, with stop_after; None is the installed one.
        builder_optimization_level: 0..5; None is TensorRT's own choice, as for `workspace`, in MiB.
        weight_streaming, refit: builder flags.
        input_timing_cache, output_timing_cache: of TensorRT, to begin with and to write.
    """

    target: Path
    drafter: Path
    vp_drafter: Path | None = None
    output: Path
    backend: BackendName = "onnxruntime"
    dtype: Dtype | None = None
    weights: WeightKind = "float"
    max_batch_size: int = pydantic.Field(default=1, ge=1)
    max_seq_len: int | None = pydantic.Field(default=None, ge=2)
    max_input_len: int | None = pydantic.Field(default=None, ge=1)
    block_size: int | None = pydantic.Field(default=None, ge=2)
    prefill_chunk: int | None = pydantic.Field(default=None, ge=1)
    branches: int | None = pydantic.Field(default=None, ge=0, strict=True)
    vp_block_size: int | None = pydantic.Field(default=None, ge=2)
    dump_ir: Path | None = None
    verify: bool = True
    force: bool = False
    expect: Expectation = Expectation()
    stop_after: Literal["lower"] | None = None
    compute_capability: tuple[int, ...] | None = None
    plugins: Literal["on", "off", "auto"] = "auto"
    tensorrt_version: str | None = None
    builder_optimization_level: int | None = pydantic.Field(default=None, ge=0, le=5)
    workspace: int | None = pydantic.Field(default=None, ge=1)
    weight_streaming: bool = False
    refit: bool = False
    input_timing_cache: Path | None = None
    output_timing_cache: Path | None = None

    @pydantic.field_validator("compute_capability", mode="before")
    @classmethod
    def _capabilities(cls, value: Any) -> Any:
        """"86,8.9" and [86, "8.9"] are (86, 89)."""
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        if value is None or isinstance(value, tuple):
            return value
        found = [re.fullmatch(r"(1?\d)\.?(\d)", str(part).strip()) for part in parts]
        if not found or None in found:
            raise ValueError("compute capabilities such as 86,89,120")
        return tuple(int(match[1] + match[2]) for match in found if match)

    @pydantic.field_validator("plugins", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """YAML reads on and off as true and false."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    @pydantic.field_validator("tensorrt_version", mode="before")
    @classmethod
    def _version(cls, value: Any) -> Any:
        """YAML reads 10.14 as a number, and 10.10 as 10.1, so it has to be text."""
        if isinstance(value, float):
            raise ValueError(f'text: "{value}" in quotes')
        return value

    @classmethod
    def from_options(cls, config: Path | str | None = None, **options: Any) -> BuildConfig:
        """Reads `config` (YAML; its paths are relative to its folder) and lays the options that are not None over it.

        Raises:
            UsageError: an unknown field, a value out of range, or a required one missing.
        """
        values = _read_yaml(Path(config)) if config is not None else {}
        values.update({name: value for name, value in options.items() if value is not None})
        try:
            return cls.model_validate(values)
        except pydantic.ValidationError as error:
            raise _usage_error(error, Path(config) if config is not None else None) from error

    def check_backend(self) -> None:
        """Raises UsageError for an option that another backend has."""
        if self.weights != "float" and self.backend != "onnxruntime":
            what = f"{self.weights} is for --backend onnxruntime, {self.backend} takes float weights"
            mend = "Leave it out, or build for onnxruntime"
            raise UsageError(what, where="--weights", mend=mend)
        if self.backend in _ENGINES:
            return
        for name in _ENGINE_OPTIONS:
            if getattr(self, name) != BuildConfig.model_fields[name].default:
                option = f"--{name.replace('_', '-')}"
                what = f"is for --backend tensorrt and tensorrt-rtx, not for {self.backend}"
                raise UsageError(what, where=option, mend="Leave it out, or choose one of these backends")

    def check_expected(self, specs: Mapping[str, DecoderSpec]) -> None:
        """Raises PairError where a checkpoint, by role, differs from what the configuration expects."""
        for role, spec in specs.items():
            fields = [field.name for field in dataclasses.fields(spec)]
            for name, wanted in getattr(self.expect, role).items():
                if name not in fields:
                    mend = f"Fields: {', '.join(fields)}"
                    raise UsageError("no such field of a checkpoint", where=f"expect.{role}.{name}", mend=mend)
                found = getattr(spec, name)
                found = list(found) if isinstance(found, tuple) else found
                if found != wanted:
                    raise PairError(
                        f"{role} has {name} = {found}, the configuration was written for {wanted}",
                        where=str(getattr(self, role)),
                        mend="Give the checkpoint the configuration names, or another configuration",
                    )


def _usage_error(error: pydantic.ValidationError, config: Path | None) -> UsageError:
    """One problem in the words of the command line: an unknown field may explain a missing one, so it comes first."""
    order = {"extra_forbidden": 0, "missing": 2}
    problem = min(error.errors(), key=lambda problem: order.get(problem["type"], 1))
    field = ".".join(str(part) for part in problem["loc"])
    option = f"--{field.replace('_', '-')}"
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field, BuildConfig.model_fields, n=1)
        mend = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(BuildConfig.model_fields)}"
        return UsageError(f"there is no build option {field}", where=str(config or ""), mend=mend)
    if problem["type"] == "missing":
        where = f"{config}, {field}" if config else option
        return UsageError("is missing", where=where, mend=f"Give {option} on the line, or {field} in a configuration")
    rule = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    where = f"{config}, {field}" if config else option
    return UsageError(f"{problem['input']!r} must be {rule}", where=where, mend="Change or omit it")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise UsageError(what, where=f"--config {path}", mend="Give a YAML file of build options") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"is not valid YAML ({_in_one_line(error)})", where=str(path)) from error
    if not isinstance(values, dict):
        raise UsageError(
            "must be a mapping of build options", where=str(path), mend="For example: max_seq_len: 1024"
        )
    return {
        name: path.parent / value if name in _PATHS and isinstance(value, str) else value
        for name, value in values.items()
    }


def _in_one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())
