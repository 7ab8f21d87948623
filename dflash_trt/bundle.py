"""The bundle: the folder a build writes and the runtime loads.

    bundle/
      config.json          TensorRT-LLM's keys + "dflash_trt"
      target/ drafter/     model.onnx and its external data; of TensorRT rank0.engine and its own config.json
      vp_drafter/          the same (D2SD)
      plugins/             the plugin library, where engines call it
      tokenizer/           the target's
      report.json          what verification measured

Every file but config.json is recorded with size and SHA-256; config.json carries a digest of itself, so that one
changed byte anywhere is noticed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_trt import __version__
from dflash_trt.backends.engine_record import PLUGIN_FOLDER, EngineRecord
from dflash_trt.checkpoint.spec import DecoderSpec, DrafterSpec, Dtype, Frozen, RopeSpec, TargetSpec
from dflash_trt.config import BackendName, WeightKind
from dflash_trt.documents import DocumentError, parse, to_values
from dflash_trt.errors import BundleError
from dflash_trt.export.contract import GraphSpec, Role
from dflash_trt.hashing import sha256_of
from dflash_trt.progress import Advance
from dflash_trt.runtime.branching import PassCosts
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.trace import System

FORMAT = 4
CONFIG = "config.json"
REPORT = "report.json"
MODEL = "model.onnx"
_NO_DIGEST = "0" * 64
_LINKS = "; its weight files may be hard links to the checkpoint: do not edit that"


@dataclass(frozen=True, kw_only=True)
class FileRecord(Frozen):
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class GraphRecord(Frozen):
    """One graph of a bundle: its I/O, where it or its engine lies, and the safetensors files that hold its own weights.
    """

    spec: GraphSpec
    model: str | None
    weights: tuple[str, ...]
    parameters: int


@dataclass(frozen=True, kw_only=True)
class BundleInfo(Frozen):
    """The section "dflash_trt" of config.json: all the runtime needs to know."""

    format: int
    digest: str
    system: System
    roles: tuple[Role, ...]
    backend: BackendName
    precision: Dtype
    weights: WeightKind
    block_size: int
    trained_block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    limits: Limits
    target: TargetSpec
    drafter: DrafterSpec
    vp_drafter: DrafterSpec | None
    graphs: dict[Role, GraphRecord]
    tool_versions: dict[str, str]
    compute_capability: str | None
    engines: EngineRecord | None
    costs: PassCosts | None
    files: dict[str, FileRecord]

    def drafter_of(self, role: Role) -> DrafterSpec:
        """The spec of one of the drafters."""
        spec = self.vp_drafter if role == "vp_drafter" else self.drafter
        assert spec is not None
        return spec


def installed_version(package: str) -> str | None:
    """The version of an installed package, None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def tool_versions(names: tuple[str, ...] = ("torch", "onnx", "onnxscript", "onnxruntime")) -> dict[str, str]:
    """Versions of this package, of Python's ML packages that shape a bundle, and nothing for those not installed."""
    found = {name: installed_version(name) for name in names}
    return {"dflash_trt": __version__} | {name: version for name, version in found.items() if version is not None}


def files_to_record(folder: Path) -> list[Path]:
    """Every file under `folder` but config.json, in the order of names."""
    found = [path for path in folder.rglob("*") if not path.is_dir()]
    return sorted(path for path in found if path.relative_to(folder).as_posix() != CONFIG)


def write_config(folder: Path, info: BundleInfo, advance: Advance = lambda amount: None) -> BundleInfo:
    """Writes config.json, with the files as they are now and the digest of the text itself; returns what it holds.

    Args:
        advance: called with the number of bytes hashed, from several threads.
    """
    files = files_to_record(folder)
    digests = sha256_of(files, advance)
    records = {
        path.relative_to(folder).as_posix(): FileRecord(size=path.stat().st_size, sha256=digests[path])
        for path in files
    }
    info = replace(info, digest=_NO_DIGEST, files=records)
    config = {**_tensorrt_llm_keys(info, info.target), "dflash_trt": to_values(info)}
    text = json.dumps(config, indent=2) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    (folder / CONFIG).write_bytes(text.replace(_NO_DIGEST, digest, 1).encode())
    return replace(info, digest=digest)


def write_engine_config(folder: Path, info: BundleInfo, role: Role) -> None:
    """Makes the folder of one graph an engine directory of TensorRT-LLM's: config.json beside rank0.engine."""
    spec = info.target if role == "target" else info.drafter_of(role)
    text = json.dumps(_tensorrt_llm_keys(info, spec), indent=2) + "\n"
    (folder / role / CONFIG).write_text(text, encoding="utf-8")


def _tensorrt_llm_keys(info: BundleInfo, spec: DecoderSpec) -> dict[str, Any]:
    """The keys TensorRT-LLM's engine directories have, with its names."""
    limits = info.limits
    return {
        "version": __version__,
        "pretrained_config": {
            "architecture": info.target.architecture,  # it must be one that TensorRT-LLM knows, of drafters too
            "dtype": info.precision,
            "logits_dtype": "float32",
            "vocab_size": spec.vocab_size,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_size": spec.head_dim,
            "hidden_act": "silu",
            "norm_epsilon": spec.rms_norm_eps,
            "position_embedding_type": "rope_gpt_neox",
            "rotary_base": spec.rope.theta,
            "rotary_scaling": _rotary_scaling(spec.rope),
            "attn_bias": spec.qkv_bias,
            "mlp_bias": spec.mlp_bias,
            "qk_layernorm": spec.qk_norm,
            **({"qwen_type": "qwen3"} if info.target.family == "qwen3" else {}),
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
            "max_position_embeddings": spec.max_position_embeddings,
            "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        },
        "build_config": {
            "max_batch_size": limits.max_batch_size,
            "max_input_len": limits.max_input_len,
            "max_seq_len": limits.max_seq_len,
            "max_beam_width": 1,
            "opt_num_tokens": None,
            "max_num_tokens": limits.max_batch_size * max(limits.prefill_chunk, limits.tree_size),
            "max_draft_len": limits.tree_size - 1,
        },
    }


def _rotary_scaling(rope: RopeSpec) -> dict[str, Any] | None:
    """As Hugging Face writes it; None without scaling."""
    if rope.kind == "default":
        return None
    fields = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "attention_factor")
    given = {name: getattr(rope, name) for name in fields if getattr(rope, name) is not None}
    return {"rope_type": rope.kind, **given}


def read_info(folder: Path) -> BundleInfo:
    """Reads config.json alone: digest, format and fields checked, files not.

    Raises:
        BundleError: no bundle, another format, or a damaged config.json.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise BundleError("there is no such folder", where=str(folder), mend="Give the folder `build --output` wrote")
    try:
        text = path.read_bytes().decode("utf-8")  # not read_text: it would hide a changed line end from the digest
        config = json.loads(text)
    except FileNotFoundError as error:
        what = f"has no {CONFIG}, so it is not a bundle"
        raise BundleError(what, where=str(folder), mend="Give the folder `build --output` wrote") from error
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"cannot be read: {error}", where=str(path), mend="Build the bundle again") from error
    section = config.get("dflash_trt") if isinstance(config, dict) else None
    if not isinstance(section, dict):
        what = 'has no section "dflash_trt", so the folder is not a bundle'
        raise BundleError(what, where=str(path), mend="Give the folder `build --output` wrote")
    if section.get("format") != FORMAT:
        raise BundleError(
            f"bundle format {section.get('format')}, {_built_with(section)}; "
            f"running {__version__}, which reads format {FORMAT}",
            where=str(path),
            mend="Upgrade dflash-trt, or build the bundle again",
        )
    digest = section.get("digest")
    blanked = text.replace(digest, _NO_DIGEST, 1) if isinstance(digest, str) and len(digest) == 64 else ""
    if hashlib.sha256(blanked.encode()).hexdigest() != digest:
        raise BundleError("was changed after the build", where=str(path), mend="Build the bundle again")
    try:
        return parse(BundleInfo, section, "bundle")
    except DocumentError as error:
        what = f"{error} ({_built_with(section)}, running {__version__})"
        raise BundleError(what, where=str(path), mend="Build the bundle again") from error


def _built_with(section: dict[str, Any]) -> str:
    versions = section.get("tool_versions")
    built = versions.get("dflash_trt") if isinstance(versions, dict) else None
    return f"built with dflash-trt {built or 'of an unknown version'}"


def check_files(folder: Path, info: BundleInfo) -> None:
    """Compares sizes, then hashes, of every recorded file; none may have been added.

    Raises:
        BundleError: a file is missing, was added, has another size, or other bytes.
    """
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in (CONFIG, *info.files):
            raise BundleError("was added after the build", where=str(path), mend="Remove it")
    for name, record in info.files.items():
        path = folder / name
        if not path.is_file():
            raise BundleError("is missing from the bundle", where=str(path), mend="Build the bundle again")
        if path.stat().st_size != record.size:
            raise BundleError(
                f"has {path.stat().st_size} bytes, {record.size} were built", where=str(path), mend="Build it again"
            )
    digests = sha256_of(folder / name for name in info.files)
    for name, record in info.files.items():
        path = folder / name
        found = digests[path]
        if found != record.sha256:
            raise BundleError(
                f"was changed after the build (sha256 {found[:12]}..., built {record.sha256[:12]}...)",
                where=str(path),
                mend=f"Build the bundle again{'' if name.startswith(PLUGIN_FOLDER) else _LINKS}",
            )


def is_bundle(folder: Path) -> bool:
    """Whether the folder looks like a bundle, of whatever version."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and isinstance(config.get("dflash_trt"), dict)
