"""Whether two bundles, or a bundle and a checkpoint folder, hold the same weights: else speeds are not comparable."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dflash_trt.bundle import BundleInfo
from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.target import read_target
from dflash_trt.checkpoint.tensors import TensorFolder
from dflash_trt.errors import UsageError
from dflash_trt.export.contract import Role
from dflash_trt.loading import float_weights


def have_same_weights(first: Path, info: BundleInfo, second: Path, other: BundleInfo, role: Role) -> bool:
    """Whether a graph of two bundles has one configuration, the same tensors, and computes in one precision."""
    specs = [one.target if role == "target" else one.drafter_of(role) for one in (info, other)]
    if specs[0] != specs[1] or (info.precision, info.weights) != (other.precision, other.weights):
        return False
    ours, theirs = float_weights(first, info, role), float_weights(second, other, role)
    return ours.keys() == theirs.keys() and not _differing(ours, theirs)


def check_same_target(first: Path, info: BundleInfo, second: Path, other: BundleInfo) -> None:
    """Refuses two bundles of different targets.

    Raises:
        UsageError: naming both.
    """
    if not have_same_weights(first, info, second, other, "target"):
        what = f"its target is not that of {first}, or computes in another precision"
        raise UsageError(what, where=str(second), mend="Compare bundles of one target, or bench one by one")


def check_checkpoint(checkpoint: Path, bundle: Path, info: BundleInfo, role: Role) -> None:
    """Refuses a checkpoint folder that is not what a graph of the bundle was built from.

    Raises:
        UsageError: naming what differs. CheckpointError: the folder cannot be read.
    """
    option = f"--{role.replace('_', '-')} {checkpoint}"
    mend = f"Give the folder that {bundle} was built from"
    if role == "target":
        target = read_target(checkpoint)
        same, tensors = target.spec == info.target, target.tensors
    else:
        drafter = read_drafter(checkpoint)
        same, tensors = drafter.spec == info.drafter_of(role), drafter.tensors
    if not same:
        raise UsageError(f"its configuration is not that of the {role} in {bundle}", where=option, mend=mend)
    placed = float_weights(bundle, info, role)
    if missing := [name for name in tensors if name not in placed]:
        raise UsageError(f"tensor {missing[0]} is not in {bundle}", where=option, mend=mend)
    if differing := _differing(tensors, placed):
        raise UsageError(f"tensor {differing} is not that of {bundle}", where=option, mend=mend)


def _differing(first: TensorFolder, second: TensorFolder) -> str | None:
    """The first tensor of `first` that `second` has with other values; None if there is none."""
    return next((name for name in first if not _is_same(first, second, name)), None)


def _is_same(first: TensorFolder, second: TensorFolder, name: str) -> bool:
    """In the same place of the same file, or of the same values (float32 holds those of float16 and bfloat16)."""
    one, other = first[name], second[name]
    if one.shape != other.shape:
        return False
    if one.offset == other.offset and one.file.samefile(other.file):
        return True
    return np.array_equal(first.read_float32(name), second.read_float32(name))
