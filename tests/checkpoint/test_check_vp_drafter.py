"""A VP drafter that does not fit the target or the first drafter: each fault with its message, and what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from makers import edit_json, make_drafter, make_target

from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.pair import check_vp_drafter
from dflash_trt.checkpoint.target import read_target
from dflash_trt.errors import PairError


def check(made: Path, vp_drafter: Path, block_size: int = 8, asked: int | None = None) -> int:
    read = read_drafter(made / "drafter"), read_drafter(vp_drafter)
    return check_vp_drafter(read_target(made / "target"), *read, block_size, asked)


def vp_drafter(made: Path, tmp_path: Path, taps: tuple[int, ...] = (0, 2, 3), **changes: Any) -> Path:
    make_drafter(tmp_path / "vp", made / "target", list(taps), seed=3, **changes)
    return tmp_path / "vp"


def refused(made: Path, path: Path, message: str, *sizes: int) -> PairError:
    """Refused with this message, every file named."""
    with pytest.raises(PairError) as caught:
        check(made, path, *sizes)
    said = str(caught.value)
    for folder, letter in ((made / "drafter", "D"), (path, "V"), (made / "target", "T")):
        said = said.replace(str(folder / "config.json"), letter)
    assert message in said
    return caught.value


@pytest.mark.parametrize(
    ("trained", "block_size", "asked", "settled"),
    [
        (8, 8, None, 8),
        (12, 8, None, 12),
        (12, 8, 10, 10),
        (12, 8, 8, 8),
        (8, 4, None, 8),  # the first drafter may be run on shorter blocks
        (8, 4, 4, 4),
    ],
)
def test_sizes_that_fit(
    made: Path, tmp_path: Path, trained: int, block_size: int, asked: int | None, settled: int
) -> None:
    assert check(made, vp_drafter(made, tmp_path, block_size=trained), block_size, asked) == settled


def test_a_block_shorter_than_the_first_drafters(made: Path, tmp_path: Path) -> None:
    path = vp_drafter(made, tmp_path, block_size=6)
    error = refused(made, path, "the VP drafter's block is 6 (V), but must hold the first drafter's, which is 8")
    assert "--block-size 6" in error.mend
    assert check(made, path, 6) == 6


def test_a_shorter_block_asked(made: Path, tmp_path: Path) -> None:
    refused(made, vp_drafter(made, tmp_path), "block is 5 (--vp-block-size), but must hold the first drafter's", 8, 5)


def test_a_block_larger_than_trained(made: Path, tmp_path: Path) -> None:
    asked = "block size 9 asked (--vp-block-size, by default --block-size)"
    refused(made, vp_drafter(made, tmp_path), f"{asked}, but block_size is 8 in V", 8, 9)


def test_other_taps(made: Path, tmp_path: Path) -> None:
    path = vp_drafter(made, tmp_path, taps=(0, 1, 3))
    error = refused(made, path, "target_layer_ids is [0, 1, 3] in V, but [0, 2, 3] in D")
    assert "the same features" in error.mend


def test_the_same_taps_in_another_order(made: Path, tmp_path: Path) -> None:
    """The features are concatenated in the checkpoint's order, so this matters."""
    refused(made, vp_drafter(made, tmp_path, taps=(3, 2, 0)), "target_layer_ids is [3, 2, 0] in V, but [0, 2, 3] in D")


def test_another_mask(made: Path, tmp_path: Path) -> None:
    path = vp_drafter(made, tmp_path, dflash_config={"mask_token_id": 318})
    refused(made, path, "mask_token_id is 318 in V, but 319 in D")


def test_another_targets_vp_drafter(made: Path, tmp_path: Path) -> None:
    """What holds of every drafter is checked of this one too, and its own file is named."""
    make_target(tmp_path / "wide", hidden_size=48)
    make_drafter(tmp_path / "vp", tmp_path / "wide", [0, 2, 3])
    refused(made, tmp_path / "vp", "hidden_size is 48 in V, but hidden_size is 32 in T")
    path = vp_drafter(made, tmp_path / "same")
    edit_json(path / "config.json", num_target_layers=5)
    refused(made, path, "num_target_layers is 5 in V, but num_hidden_layers is 4 in T")


def test_layers_and_heads_may_differ(made: Path, tmp_path: Path) -> None:
    """Each drafter has a cache of its own."""
    path = vp_drafter(made, tmp_path, layers=1, num_attention_heads=2, num_key_value_heads=1, is_causal=True)
    assert check(made, path) == 8
