"""The sizes a bundle was built for; requests and buffers are checked against them."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.checkpoint.spec import Frozen

_SLOTS = 64


@dataclass(frozen=True, kw_only=True)
class Limits(Frozen):
    """All in tokens, but for max_batch_size and branches.

    Attributes:
        max_batch_size: sequences decoded at once.
        max_seq_len: prompt and output together.
        max_input_len: prompt.
        block_size: anchor and drafts of the first draft.
        prefill_chunk: tokens of a prompt per target pass.
        vp_block_size: the anchor, kept drafts and re-drafts of a branch (D2SD); at least block_size, 0 without.
        branches: of D2SD, the most per step; a block of B tokens has B - 1 prefixes to branch from, so no more occur.
    """

    max_batch_size: int
    max_seq_len: int
    max_input_len: int
    block_size: int
    prefill_chunk: int
    vp_block_size: int = 0
    branches: int = 0

    @property
    def redraft_rows(self) -> int:
        """Blocks of one re-drafting pass: the branches, and the trunk's extension where VP blocks are longer."""
        if not self.branches:
            return 0
        return min(self.branches, self.block_size - 1) + (self.vp_block_size > self.block_size)

    @property
    def tree_size(self) -> int:
        """The most nodes verified in a step: the trunk, and what each of the shortest prefixes leaves to re-draft.

        70 for blocks of 16 and 4 branches.
        """
        if not self.branches:
            return self.block_size
        branches = range(min(self.branches, self.block_size - 1))
        return self.vp_block_size + sum(self.vp_block_size - 1 - kept for kept in branches)

    @property
    def longest_path(self) -> int:
        """The most tokens a step can accept, and so the features it leaves pending."""
        return max(self.block_size, self.vp_block_size if self.branches else 0)

    @property
    def longest_pending(self) -> int:
        """Features a VP drafter that is not asked every step may have waiting."""
        return 4 * self.longest_path

    @property
    def step_slots(self) -> int:
        """Cache slots behind the committed tokens that a step may write.

        A drafter writes its padded pending features and then its block (all blocks, of a re-draft), the target a tree.
        """
        draft = self.longest_path + self.block_size
        redraft = self.longest_pending + self.redraft_rows * self.vp_block_size if self.branches else 0
        return max(draft, redraft, self.tree_size)

    @property
    def capacity(self) -> int:
        """Cache slots, and rows of the rotary tables: a step may begin at the last position of a sequence.

        Whole multiples of 64: the rows of a cache then begin where TensorRT takes an address, at 256 bytes.
        """
        return -(-(self.max_seq_len + self.step_slots) // _SLOTS) * _SLOTS
