"""Whether a target and a drafter belong together, said with both files, the field and both values."""

from __future__ import annotations

from dflash_trt.checkpoint.config import ConfigFile
from dflash_trt.checkpoint.drafter import DrafterCheckpoint
from dflash_trt.checkpoint.target import TargetCheckpoint
from dflash_trt.errors import PairError


def check_pair(
    target: TargetCheckpoint, drafter: DrafterCheckpoint, block_size: int | None, option: str = "--block-size"
) -> int:
    """Check the pair and settle the block size.

    Args:
        block_size: tokens a runtime block holds, the anchor included; None for the trained one.
        option: what asks for it, for messages.

    Returns:
        The runtime block size, 2 .. the trained block size.

    Raises:
        PairError: the first thing that does not fit.
    """
    mine, theirs = drafter.spec, target.spec
    for field, drafted, own, own_field in (
        ("hidden_size", mine.hidden_size, theirs.hidden_size, "hidden_size"),
        ("target_hidden_size", mine.target_hidden_size, theirs.hidden_size, "hidden_size"),
        ("vocab_size", mine.vocab_size, theirs.vocab_size, "vocab_size"),
        ("num_target_layers", mine.num_target_layers, theirs.num_layers, "num_hidden_layers"),
    ):
        if drafted is not None and drafted != own:
            what = f"{field} is {drafted} in {_config(drafter)}, but {own_field} is {own} in {_config(target)}"
            raise PairError(what, mend="Use the drafter that was trained for this target")
    _check_taps(target, drafter)
    if mine.mask_token_id >= theirs.vocab_size:
        what = f"mask_token_id is {mine.mask_token_id} in {_config(drafter)}"
        what += f", but vocab_size is {theirs.vocab_size} in {_config(target)}: the mask needs an embedding row"
        raise PairError(what, mend="Use the drafter that was trained for this target")
    _check_tokenizer(target)
    return _settle_block_size(drafter, block_size, option)


def check_vp_drafter(
    target: TargetCheckpoint, drafter: DrafterCheckpoint, vp_drafter: DrafterCheckpoint, block_size: int,
    asked: int | None,
) -> int:  # fmt: skip
    """Check the VP drafter of D2SD against the target and the first drafter, and settle its block size.

    Args:
        block_size: of the first drafter at run time.
        asked: tokens of a VP block; None for the trained ones.

    Returns:
        The VP drafter's runtime block size, block_size .. its trained one.

    Raises:
        PairError: the first thing that does not fit.
    """
    size = check_pair(target, vp_drafter, asked, "--vp-block-size, by default --block-size")
    first, second = drafter.spec, vp_drafter.spec
    for field, own, other in (
        ("mask_token_id", second.mask_token_id, first.mask_token_id),
        ("target_layer_ids", list(second.taps), list(first.taps)),
    ):
        if own != other:
            what = f"{field} is {own} in {_config(vp_drafter)}, but {other} in {_config(drafter)}"
            raise PairError(what, mend="Both drafters read the same features: use two that were trained alike")
    if size < block_size:
        source = "--vp-block-size" if asked else _config(vp_drafter)
        what = f"the VP drafter's block is {size} ({source}), but must hold the first drafter's, which is {block_size}"
        raise PairError(what, mend=f"Use --block-size {size} or less, or larger VP blocks")
    return size


def _config(checkpoint: TargetCheckpoint | DrafterCheckpoint) -> str:
    return str(checkpoint.path / "config.json")


def _check_taps(target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    outside = [tap for tap in drafter.spec.taps if tap >= target.spec.num_layers]
    if outside:
        what = f"target_layer_ids names layer {outside[0]} in {_config(drafter)}"
        what += f", but num_hidden_layers is {target.spec.num_layers} in {_config(target)}"
        raise PairError(what, mend=f"Valid ids are 0 to {target.spec.num_layers - 1}")


def _check_tokenizer(target: TargetCheckpoint) -> None:
    """Every id the target's tokenizer can emit has an embedding row; no tokenizer.json, no check."""
    path = target.path / "tokenizer.json"
    if not path.exists():
        return
    content = ConfigFile(path)
    vocabulary, added = content.section("model").values.get("vocab"), content.values.get("added_tokens") or []
    # Unigram models have a list, whose places are the ids.
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary or ()) - 1]
    ids += [token.get("id") for token in added if isinstance(token, dict)]
    largest = max((token for token in ids if isinstance(token, int)), default=-1)
    if largest >= target.spec.vocab_size:
        what = f"token id {largest} is in {path}, but vocab_size is {target.spec.vocab_size} in {_config(target)}"
        raise PairError(what, mend="The tokenizer is another model's")


def _settle_block_size(drafter: DrafterCheckpoint, block_size: int | None, option: str) -> int:
    trained = drafter.spec.block_size
    if block_size is None:
        return trained
    if block_size < 2:
        raise PairError(f"block size {block_size} asked ({option}), but a block holds at least 2 tokens: anchor, draft")
    if block_size > trained:
        what = f"block size {block_size} asked ({option}), but block_size is {trained} in {_config(drafter)}"
        raise PairError(what, mend=f"Ask for {trained} or less: no drafter fills a larger block than it was trained on")
    return block_size
