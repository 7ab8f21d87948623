"""How much text one token can stand for, so that a text that cannot fit is refused before it is tokenised."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models, pre_tokenizers

GENEROUS = 1024
"""Characters per token that are allowed where nothing is proven; the longest tokens of large vocabularies have 128."""

NFC_SHRINKING = 3 * 3
"""How many times shorter NFC can make UTF-8.

Decomposing shortens no character to less than a third, and composing undoes at most a decomposition, which lengthens
none to more than three times.
"""

_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"}


class TokenReach(NamedTuple):
    """The most bytes of a text in UTF-8 that one token can stand for: of an ASCII text, and of any."""

    ascii: int
    any: int

    def fewest_tokens(self, text: str) -> int:
        """No tokenisation of the text has fewer tokens."""
        if text.isascii():
            return math.ceil(len(text) / self.ascii)
        return math.ceil(len(text.encode("utf-8", "surrogatepass")) / self.any)


def token_reach(tokenizer: tokenizers.Tokenizer) -> TokenReach | None:
    """The longest token, and how much a normalizer may shorten what it stands for; None where there is no such bound.

    There is one for BPE over bytes (GPT-2, Llama 3, Qwen) and with byte tokens for what is not in the vocabulary
    (Llama 2), as long as nothing drops characters: neither a normalizer or pre-tokenizer other than the usual ones nor
    an added token that takes in the white space around it.
    """
    shrinking = _shrinking(tokenizer.normalizer)
    splitting = _parts(tokenizer.pre_tokenizer, "pretokenizers")
    added = list(tokenizer.get_added_tokens_decoder().values())
    keeps = all(part["type"] in _KEEPING and part.get("behavior") != "Removed" for part in splitting)
    if shrinking is None or not keeps or any(token.lstrip or token.rstrip for token in added):
        return None
    model, vocabulary = tokenizer.model, tokenizer.get_vocab(with_added_tokens=False)
    if not isinstance(model, models.BPE):
        return None
    if any(part["type"] == "ByteLevel" for part in splitting):
        complete, lengths = set(pre_tokenizers.ByteLevel.alphabet()) <= vocabulary.keys(), map(len, vocabulary)
    else:
        complete = model.byte_fallback and vocabulary.keys() >= _BYTE_TOKENS
        lengths = map(_utf8_len, vocabulary)
    if not complete:  # a character that is not there gives no token, or shares one with its neighbours
        return None
    longest = max(*lengths, 1, *(_utf8_len(form) for token in added for form in _forms(tokenizer, token.content)))
    return TokenReach(longest * shrinking.ascii, longest * shrinking.any)


class _Shrinking(NamedTuple):
    """Bytes of an ASCII text, and of any, for one byte of the normalised text."""

    ascii: int
    any: int


def _shrinking(normalizer: Any) -> _Shrinking | None:
    factor, only_nfc = 1, True
    for part in _parts(normalizer, "normalizers"):
        kind = part["type"]
        only_nfc = only_nfc and kind == "NFC"
        if kind == "NFC":
            factor *= NFC_SHRINKING
        elif kind == "Replace" and part["pattern"].get("String") and part["content"]:
            factor *= max(1, math.ceil(_utf8_len(part["pattern"]["String"]) / _utf8_len(part["content"])))
        elif kind != "Prepend":
            return None
    return _Shrinking(1 if only_nfc else factor, factor)  # ASCII is in NFC


def _forms(tokenizer: tokenizers.Tokenizer, content: str) -> list[str]:
    """An added token as it is found in a text, before or after normalisation."""
    return [content] if tokenizer.normalizer is None else [content, tokenizer.normalizer.normalize_str(content)]


def _utf8_len(text: str) -> int:
    return len(text.encode("utf-8"))


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """What a normalizer or pre-tokenizer consists of, as in `tokenizer.json`."""
    if component is None:
        return []
    waiting, parts = [json.loads(component.__getstate__())], []
    while waiting:
        part = waiting.pop(0)
        if part["type"] == "Sequence":
            waiting = [*part[name], *waiting]
        else:
            parts.append(part)
    return parts
