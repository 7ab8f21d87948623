"""Writes a checkpoint of any shape in files that are holes: as long as the real ones, next to no bytes on the disk.

What depends on sizes in a build (tracing, lowering, laying weights out, hashing, preflight) can be tried with it
without the model. All weights are zero, so what it computes means nothing.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Literal, get_args

import click
from published_shapes import SHAPES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash_trt.build_rules import tokenizer_files
from dflash_trt.checkpoint import drafter as drafters
from dflash_trt.checkpoint import target as targets
from dflash_trt.checkpoint.config import ConfigFile, read_json_object
from dflash_trt.checkpoint.decoder import SPEC_DTYPES, Shapes
from dflash_trt.checkpoint.safetensors_file import ITEM_BYTES
from dflash_trt.checkpoint.spec import DrafterSpec, Dtype, TargetSpec
from dflash_trt.checkpoint.tensors import INDEX, SINGLE
from dflash_trt.errors import DflashError, UsageError
from dflash_trt.export.safetensors_writer import safetensors_header
from dflash_trt.output import atomic_output

System = Literal["dflash", "dflare"]
WARNING = "not a model: the shape of one, whose weights are all zero"
_BYTES = 256  # tokens of a byte-level tokenizer


class Unusable(click.ClickException):
    """What was asked cannot be done: exit code 2, as everywhere in this project."""

    exit_code = 2


def make_shape(
    config: Path | str,
    output: Path,
    *,
    dtype: Dtype = "bfloat16",
    shards: int | None = None,
    tokenizer: Path | None = None,
    system: System | None = None,
) -> None:
    """Writes the checkpoint folder `output`, which must not exist.

    Args:
        config: the name of a published shape, or the `config.json` of a target or a drafter.
        dtype: of all tensors.
        shards: weight files; None for as many as are published, for a `config.json` one.
        tokenizer: folder to copy a target's from; None writes one of single bytes and of the special ids.
        system: of a drafter; None for what its config calls itself.

    Raises:
        DflashError: a config that is not of a supported kind, or more shards than there are tensors.
    """
    values, published = (read_json_object(config), 1) if isinstance(config, Path) else SHAPES[config]
    with atomic_output(output, force=False, kind="a shape", is_one=lambda folder: False) as folder:
        written = folder / "config.json"
        values = values | {"dtype" if "dtype" in values else "torch_dtype": dtype}  # as transformers 5 or 4 has it
        written.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        spec = _spec(ConfigFile(config if isinstance(config, Path) else written), dtype, system)
        shapes = targets.expected_tensors(spec) if isinstance(spec, TargetSpec) else drafters.expected_tensors(spec)
        _write_weights(folder, shapes, dtype, published if shards is None else shards)
        (folder / "README.md").write_text(f"This is {WARNING}. `examples/make_shape.py` wrote it.\n", encoding="utf-8")
        # the reader's own checks have the last word
        if isinstance(spec, TargetSpec):
            _give_tokenizer(folder, spec, tokenizer)
            targets.read_target(folder)
        else:
            drafters.read_drafter(folder)


def _spec(config: ConfigFile, dtype: Dtype, system: System | None) -> TargetSpec | DrafterSpec:
    """What a config describes: a drafter where it names the layers a drafter taps, else a target."""
    if "target_layer_ids" not in config and "dflash_config" not in config:
        return targets.target_spec(config, dtype)
    called = [*(config.strings("architectures") or ()), config.string("model_arch") or ""]
    named: System = "dflare" if any("dflare" in name.lower() for name in called) else "dflash"
    return drafters.drafter_spec(config, system or named, dtype)


def _write_weights(folder: Path, shapes: Shapes, dtype: Dtype, shards: int) -> None:
    """Files of about one size, and their index where there are several."""
    if not 1 <= shards <= len(shapes):
        raise UsageError(f"{shards} files for {len(shapes)} tensors", where="--shards", mend="Every file holds some")
    stored = next(name for name, known in SPEC_DTYPES.items() if known == dtype)
    parts = _split(shapes, shards)
    names = [SINGLE] if shards == 1 else [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    total = 0
    for name, part in zip(names, parts, strict=True):
        kinds = {tensor: (stored, shapes[tensor]) for tensor in part}
        header, size = safetensors_header(kinds, {"note": WARNING})
        with open(folder / name, "xb") as file:
            file.write(header)
            file.truncate(len(header) + size)  # a hole: no block of it is allocated
        total += size
    assert total == ITEM_BYTES[stored] * sum(map(math.prod, shapes.values()))
    if shards > 1:
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(shapes: Shapes, count: int) -> list[list[str]]:
    """The tensors, in their order, in so many runs: each ends where its share of all weights is reached."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total, placed = sum(sizes.values()), 0
    parts: list[list[str]] = [[]]
    for position, (name, size) in enumerate(sizes.items()):
        full, scarce = placed >= total * len(parts) / count, len(sizes) - position <= count - len(parts)
        if parts[-1] and len(parts) < count and (full or scarce):
            parts.append([])
        parts[-1].append(name)
        placed += size
    return parts


def _give_tokenizer(folder: Path, spec: TargetSpec, source: Path | None) -> None:
    """Copies one, or writes one: a token for each byte, and the special ids that the model names."""
    if source is not None:
        for file in tokenizer_files(source):
            shutil.copyfile(file, folder / file.name)
        return
    special = sorted({*spec.eos_token_ids, *([] if spec.bos_token_id is None else [spec.bos_token_id])})
    free = [token for token in range(min(spec.vocab_size, _BYTES + len(special))) if token not in special]
    if len(free) < _BYTES:
        what = f"{spec.vocab_size} ids are too few for {_BYTES} bytes and {len(special)} special tokens"
        raise UsageError(what, where="vocab_size", mend="Give a tokenizer of this vocabulary with --tokenizer")
    vocabulary = dict(zip(sorted(pre_tokenizers.ByteLevel.alphabet()), free, strict=False))
    names = {token: f"<|{token}|>" for token in special}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {name: token for token, name in names.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if spec.eos_token_ids:
        config["eos_token"] = names[spec.eos_token_ids[0]]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES)), required=False)
@click.option("--config", type=click.Path(path_type=Path), help="A config.json, in place of a published SHAPE.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Checkpoint folder to write.")
@click.option("--dtype", type=click.Choice(get_args(Dtype)), default="bfloat16", show_default=True)
@click.option("--shards", type=int, help="Weight files.  [default: as published, of --config 1]")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Folder of a target's.  [default: of single bytes]")
@click.option("--system", type=click.Choice(get_args(System)), help="Of a drafter.  [default: what it calls itself]")
def main(
    shape: str | None, config: Path | None, output: Path, dtype: Dtype, shards: int | None, tokenizer: Path | None,
    system: System | None,
) -> None:  # fmt: skip
    """Write a checkpoint of a published SHAPE, or of the shape that a config.json describes."""
    if (shape is None) == (config is None):
        raise click.UsageError("Give a SHAPE, or --config")
    try:
        make_shape(shape or config or "", output, dtype=dtype, shards=shards, tokenizer=tokenizer, system=system)
    except (DflashError, OSError) as error:
        raise Unusable(str(error)) from error
    files = [file.stat() for file in output.iterdir()]
    length, blocks = sum(file.st_size for file in files), 512 * sum(file.st_blocks for file in files)
    click.echo(f"{output}: {length / 1e9:.2f} GB in {len(files)} files, {blocks / 1e6:.2f} MB of it on the disk")


if __name__ == "__main__":
    main()
