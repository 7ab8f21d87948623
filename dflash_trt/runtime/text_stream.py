"""Text that streams: token ids go in one by one, text that can no longer change comes out, stop strings end it.

The outcome is a function of the token sequence alone, not of how a decoder grouped it into steps, and the pieces
always add up to the decoding of the whole. Time is linear in the number of tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import NamedTuple, Protocol

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamPiece(NamedTuple):
    """Newly stable text, and whether a stop string has ended the output (then nothing more will come)."""

    text: str
    stopped: bool


class TextStream:
    """Incremental decoding with stop strings.

    Args:
        tokenizer: the backend tokenizer.
        stop: non-empty strings. The one completed first ends the text, which is cut before it; when two are completed
            by the same character, the longer counts.
        skip_special_tokens: as in decoding the whole.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, stop: tuple[str, ...] = (), *, skip_special_tokens: bool = True
    ) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = {i for i, token in added.items() if token.special} if skip_special_tokens else set()
        self._decoder: _Decoder = _ByteDecoder(tokenizer) if _is_byte_level(tokenizer) else _WindowDecoder(tokenizer)
        self._stop = stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, token_id: int) -> StreamPiece:
        """Take one token. After a stop string, tokens are ignored."""
        if self.matched is not None or token_id in self._skipped:
            return StreamPiece("", self.matched is not None)
        return self._release(self._decoder.feed(token_id), last=False)

    def finish(self) -> StreamPiece:
        """Release what was held back, when no more tokens will come."""
        if self.matched is not None:
            return StreamPiece("", True)
        return self._release(self._decoder.finish(), last=True)

    def _release(self, text: str, last: bool) -> StreamPiece:
        held = self._held + text
        # By the end first: the choice must not depend on how many characters came at once.
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := held.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return StreamPiece(held[:start], True)
        keep = 0 if last else self._possible_stop(held)
        self._held = held[len(held) - keep :]
        return StreamPiece(held[: len(held) - keep], False)

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that may be the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)


class _Decoder(Protocol):
    def feed(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteDecoder:
    """For byte-level vocabularies (GPT-2, Llama 3, Qwen): tokens are bytes, so UTF-8 decides what is complete."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_alphabet()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            data = bytes(self._bytes[character] for character in token)
        except KeyError:  # an added token with characters outside the alphabet stands for itself
            data = token.encode("utf-8")
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For all other vocabularies: decodes a window of the last tokens twice, and the difference is new.

    The window starts with the tokens of the last piece, because the first token of a decoding is special (leading
    space, "##"). Byte tokens (<0xE2>) are held to the end of their run: one invalid byte turns a whole run into
    replacement characters, also those of its bytes that came before.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._holds_bytes = "ByteFallback" in _decoder_types(tokenizer)
        self._window: list[int] = []
        self._context = 0  # tokens of the window whose text is out already
        self._context_text = ""

    def feed(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        return "" if self._holds_bytes and _BYTE_TOKEN.fullmatch(token) else self._new_text(last=False)

    def finish(self) -> str:
        return self._new_text(last=True)

    def _new_text(self, last: bool) -> str:
        text = self._decode()[len(self._context_text) :]
        if not text or (text.endswith(_REPLACEMENT) and not last):
            return ""
        self._window = self._window[self._context :]
        self._context, self._context_text = len(self._window), self._decode()
        return text

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


def _decoder_types(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Type names of the tokenizer's decoder and, for a sequence, of its parts."""
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]


def _is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    return _decoder_types(tokenizer) in (["ByteLevel"], ["ByteLevel", "Fuse"])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte -> the byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
