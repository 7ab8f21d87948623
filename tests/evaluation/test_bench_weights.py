"""Whose weights are whose: between bundles, and between a bundle and a checkpoint folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from makers import edit_json, make_drafter, make_target
from safetensors.numpy import load_file, save_file

import dflash_trt
from dflash_trt.bundle import read_info
from dflash_trt.errors import UsageError
from dflash_trt.evaluation.bench_weights import check_checkpoint, check_same_target, have_same_weights


def halved(source: Path, folder: Path) -> Path:
    """The same folder in bfloat16, whose values another one can be made of."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def converted(pair, tmp_path_factory):
    """A bundle whose drafter was converted from bfloat16 to float32, and that drafter's folder."""
    folder = tmp_path_factory.mktemp("converted")
    drafter = halved(pair.drafter, folder / "drafter")
    dflash_trt.build(
        target=pair.target, drafter=drafter, output=folder / "bundle", max_seq_len=64, backend="torch", verify=False
    )
    return folder / "bundle", drafter


def test_bundles_of_one_target(torch_bundle, torch_d2sd_bundle, converted):
    same = []
    for other in (torch_d2sd_bundle, converted[0]):
        check_same_target(torch_bundle, read_info(torch_bundle), other, read_info(other))
        same.append(have_same_weights(torch_bundle, read_info(torch_bundle), other, read_info(other), "drafter"))
    assert same == [True, False]


def test_bundles_of_two_targets(torch_bundle, pair, tmp_path):
    make_target(tmp_path / "t", seed=9)
    drafter = {"drafter": pair.drafter, "max_seq_len": 64, "backend": "torch", "verify": False}
    dflash_trt.build(target=tmp_path / "t", output=tmp_path / "other", **drafter)
    dflash_trt.build(target=pair.target, output=tmp_path / "half", dtype="float16", **drafter)
    for name in ("other", "half"):
        folder = tmp_path / name
        with pytest.raises(UsageError, match=f"its target is not that of {torch_bundle}") as refused:
            check_same_target(torch_bundle, read_info(torch_bundle), folder, read_info(folder))
        assert refused.value.where == str(folder)


def test_the_folders_a_bundle_was_built_from(torch_bundle, torch_d2sd_bundle, pair, vp_drafter, converted, tmp_path):
    check_checkpoint(pair.target, torch_bundle, read_info(torch_bundle), "target")
    check_checkpoint(pair.drafter, torch_bundle, read_info(torch_bundle), "drafter")
    check_checkpoint(vp_drafter, torch_d2sd_bundle, read_info(torch_d2sd_bundle), "vp_drafter")
    check_checkpoint(converted[1], converted[0], read_info(converted[0]), "drafter")
    copy = shutil.copytree(pair.target, tmp_path / "copy")  # the same bytes in another file
    check_checkpoint(copy, torch_bundle, read_info(torch_bundle), "target")


def test_other_folders_are_refused(torch_bundle, pair, tmp_path):
    info = read_info(torch_bundle)
    make_drafter(tmp_path / "other", pair.target, taps=[0, 2, 3], seed=5)
    with pytest.raises(UsageError, match=r"--drafter .*: tensor \S+ is not that of .*\. Give the folder that .* built"):
        check_checkpoint(tmp_path / "other", torch_bundle, info, "drafter")
    changed = shutil.copytree(pair.target, tmp_path / "changed")
    edit_json(changed / "config.json", rms_norm_eps=0.5)
    with pytest.raises(UsageError, match=r"--target .*: its configuration is not that of the target in"):
        check_checkpoint(changed, torch_bundle, info, "target")


def test_one_number_is_enough(torch_bundle, pair, tmp_path):
    changed = shutil.copytree(pair.target, tmp_path / "changed")
    file = changed / "model.safetensors"
    tensors = {name: np.array(value) for name, value in load_file(file).items()}
    name = sorted(tensors)[-1]
    tensors[name].flat[-1] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=f"tensor {name} is not that of"):
        check_checkpoint(changed, torch_bundle, read_info(torch_bundle), "target")
