"""Target and drafter together: one test, and one message, for each way they do not fit (faults 3, 6, 7, 12, 13)."""

import json
from pathlib import Path
from typing import Any

import pytest
from makers import edit_json, make_drafter, make_target

from dflash_trt.checkpoint.drafter import read_drafter
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.target import read_target
from dflash_trt.errors import PairError


def check(target: Path, drafter: Path, block_size: int | None = None) -> int:
    return check_pair(read_target(target), read_drafter(drafter), block_size)


def refused(target: Path, drafter: Path, message: str) -> None:
    """Refused with this message, and both files named."""
    with pytest.raises(PairError) as caught:
        check(target, drafter)
    assert message in str(caught.value).replace(f" in {drafter / 'config.json'}", " in D").replace(
        f" in {target / 'config.json'}", " in T"
    )


def test_a_pair_that_fits(made: Path) -> None:
    assert check(made / "target", made / "drafter") == 8


@pytest.mark.parametrize("block_size", [2, 5, 8])
def test_runtime_block_up_to_the_trained_one(made: Path, block_size: int) -> None:
    assert check(made / "target", made / "drafter", block_size) == block_size


@pytest.mark.parametrize(("block_size", "message"), [(9, "block_size is 8 in"), (1, "2 tokens"), (-3, "2 tokens")])
def test_runtime_block_out_of_range(made: Path, block_size: int, message: str) -> None:
    with pytest.raises(PairError, match=message):
        check(made / "target", made / "drafter", block_size)


def other_target(tmp_path: Path, **overrides: Any) -> Path:
    make_target(tmp_path / "other", **overrides)
    return tmp_path / "other"


def test_hidden_size(made: Path, tmp_path: Path) -> None:
    target = other_target(tmp_path, hidden_size=48)
    refused(target, made / "drafter", "hidden_size is 32 in D, but hidden_size is 48 in T")


def test_target_hidden_size(made: Path, tmp_path: Path) -> None:
    """A drafter of the right width that was trained on narrower states."""
    make_drafter(tmp_path / "drafter", made / "target", taps=[1, 2])
    wide = other_target(tmp_path, hidden_size=64)
    make_drafter(tmp_path / "mixed", wide, taps=[1, 2, 3, 0])
    edit_json(tmp_path / "mixed" / "config.json", target_hidden_size=128)
    edit_json(
        tmp_path / "mixed" / "config.json",
        dflash_config={"mask_token_id": 319, "target_layer_ids": [1, 2]},
    )
    refused(wide, tmp_path / "mixed", "target_hidden_size is 128 in D, but hidden_size is 64 in T")


def test_vocab_size(made: Path, tmp_path: Path) -> None:
    target = other_target(tmp_path, vocab_size=330)
    refused(target, made / "drafter", "vocab_size is 320 in D, but vocab_size is 330 in T")


def test_target_depth(made: Path, tmp_path: Path) -> None:
    target = other_target(tmp_path, num_hidden_layers=5)
    refused(target, made / "drafter", "num_target_layers is 4 in D, but num_hidden_layers is 5 in T")


def test_tap_equal_to_the_number_of_layers(made: Path, tmp_path: Path) -> None:
    make_drafter(tmp_path / "drafter", made / "target", taps=[0, 4])
    refused(
        made / "target",
        tmp_path / "drafter",
        "names layer 4 in D, but num_hidden_layers is 4 in T. Valid ids are 0 to 3",
    )


def test_unstated_depth_is_no_fault(made: Path, tmp_path: Path) -> None:
    make_drafter(tmp_path / "drafter", made / "target", taps=[0, 3], num_target_layers=None)
    assert check(made / "target", tmp_path / "drafter") == 8


def test_mask_outside_the_vocabulary(made: Path, tmp_path: Path) -> None:
    make_drafter(tmp_path / "drafter", made / "target", taps=[0], dflash_config={"mask_token_id": 320})
    refused(made / "target", tmp_path / "drafter", "mask_token_id is 320 in D, but vocab_size is 320 in T")


def test_tokenizer_larger_than_the_vocabulary(target_dir: Path, made: Path) -> None:
    tokenizer = json.loads((target_dir / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["id"] = 320
    (target_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(
        target_dir, made / "drafter", f"token id 320 is in {target_dir / 'tokenizer.json'}, but vocab_size is 320 in T"
    )


def test_unigram_tokenizer(target_dir: Path, made: Path) -> None:
    vocabulary = [[f"t{number}", -1.0] for number in range(320)]
    (target_dir / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert check(target_dir, made / "drafter") == 8
    (target_dir / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [*vocabulary, ["x", -1.0]]}}))
    refused(target_dir, made / "drafter", "token id 320")


def test_no_tokenizer_no_check(target_dir: Path, made: Path) -> None:
    (target_dir / "tokenizer.json").unlink()
    assert check(target_dir, made / "drafter") == 8


def test_each_fault_has_its_own_message(made: Path, tmp_path: Path) -> None:
    """Fault 7: two causes never share a message."""
    targets = [
        other_target(tmp_path / str(number), **change)
        for number, change in enumerate(({"hidden_size": 48}, {"vocab_size": 330}, {"num_hidden_layers": 5}))
    ]
    messages = set()
    for target in targets:
        with pytest.raises(PairError) as caught:
            check(target, made / "drafter")
        messages.add(caught.value.what.replace(str(target), ""))
    assert len(messages) == len(targets)
