"""The sizes a bundle was built for; requests and buffers are checked against them."""

from __future__ import annotations

from dflash_trt.checkpoint.spec import Frozen


class Limits(Frozen):
    """All in tokens.

    Attributes:
        max_batch_size: sequences decoded at once.
        max_seq_len: prompt and output together.
        max_input_len: prompt.
        block_size: anchor and drafts.
        prefill_chunk: tokens of a prompt per target pass.
    """

    max_batch_size: int
    max_seq_len: int
    max_input_len: int
    block_size: int
    prefill_chunk: int

    @property
    def capacity(self) -> int:
        """Cache slots, and rows of the rotary tables.

        A block may start at the last position of a sequence, and the drafter writes one block more behind it, where
        rows of a batch have fewer pending features than others.
        """
        return self.max_seq_len + 2 * self.block_size
