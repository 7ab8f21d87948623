"""Text of a request as tokens."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.errors import RequestError
from dflash_trt.runtime.limits import Limits
from dflash_trt.runtime.sequence import check_prompt
from dflash_trt.runtime.text import Tokenizer
from dflash_trt.serving.settings import Settings


class Prompts:
    """Encodes prompts and bad words.

    Args:
        chat: each text is a user's message, put into the model's chat template.
        add_special_tokens: the tokenizer's own; a chat template writes those it wants.
    """

    def __init__(
        self, tokenizer: Tokenizer, limits: Limits, vocab_size: int, *, chat: bool, add_special_tokens: bool
    ) -> None:
        self._tokenizer, self._limits, self._vocab_size = tokenizer, limits, vocab_size
        self._chat, self._special = chat, add_special_tokens and not chat

    @classmethod
    def of(cls, settings: Settings, tokenizer: Tokenizer, limits: Limits, vocab_size: int) -> Prompts:
        """As the model's parameters say."""
        flags = {name: settings.flag(name) for name in ("chat", "add_special_tokens")}
        return cls(tokenizer, limits, vocab_size, **flags)

    def encode(self, text: str | None) -> list[int]:
        """The tokens of a prompt; text that cannot fit is not tokenised.

        Raises:
            RequestError: None (it was not sent), empty, or too long.
        """
        if not text:
            what = "is missing" if text is None else "is empty"
            raise RequestError(what, where="text_input", mend="Send some text")
        if self._chat:
            text = self._tokenizer.apply_chat([{"role": "user", "content": text}])
        self._tokenizer.check_length(text, self._limits.max_input_len)
        tokens = self._tokenizer.encode(text, add_special_tokens=self._special)
        check_prompt(tokens, self._limits, self._vocab_size)
        return tokens

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the words."""
        return self._tokenizer.bad_words(words)
