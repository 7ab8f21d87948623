"""Prompts that cannot fit are refused before they are tokenised, and none that could."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runtime_text import CORPUS, byte_fallback, byte_level, no_decoder, word_piece
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from dflash_trt.errors import RequestError
from dflash_trt.runtime.text import Tokenizer
from dflash_trt.runtime.text_length import NFC_SHRINKING, TokenReach, token_reach

ROOT = Path(__file__).parents[2]


def composing() -> tokenizers.Tokenizer:
    """Qwen's kind: NFC, a split by a pattern, then bytes; with long runs of spaces in one token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pattern = tokenizers.Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([*CORPUS, *(" " * n + "한글 ế" for n in (2, 4, 8, 16, 32))] * 3, trainer)
    tokenizer.add_tokens([AddedToken("ế̌Å", normalized=True), AddedToken("\u1fef\u1fef", normalized=False)])
    return tokenizer


def metaspace() -> tokenizers.Tokenizer:
    """Llama 2's kind as newer files write it."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def shipped() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(ROOT / "examples/tiny/target/tokenizer.json"))


BOUNDED = {
    "bytes": byte_level(),
    "fallback": byte_fallback(),
    "metaspace": metaspace(),
    "composing": composing(),
    "shipped": shipped(),
}
# characters that NFC composes or replaces by shorter ones, and what the vocabularies have long tokens for
COMPOSED = "aeE\u0301\u0302\u0323\u030c\u030a\u212a\u212b\u1fef\u0340한\u1112\u1161\u11ab"
LONG = ["        ", "def", "return", "</s>", "<unk>", "ế̌Å", "\u1fef\u1fef", "<|endoftext|>", "日本", "The quick"]
pieces = st.sampled_from([*COMPOSED, *LONG, *" \n日🙂"]) | st.characters(codec="utf-8")
texts = st.lists(pieces, max_size=40).map("".join)
HUGE = {"ascii": "x" * 10**7, "other": "naïve café " * 10**6, "broken": "\ud800" * 10**7}


def refuses(tokenizer: Tokenizer, text: str, limit: int) -> bool:
    try:
        tokenizer.check_length(text, limit)
    except RequestError:
        return True
    return False


def wrapped(tokenizer: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize("kind", BOUNDED)
@settings(max_examples=300)
@given(text=texts, times=st.sampled_from([1, 1, 7]))
def test_no_text_has_fewer_tokens(kind: str, text: str, times: int) -> None:
    reach = token_reach(BOUNDED[kind])
    assert reach is not None
    whole = text * times
    assert reach.fewest_tokens(whole) <= len(BOUNDED[kind].encode(whole, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", ["bytes", "shipped", "composing"])
def test_the_bound_is_reached_by_the_longest_token(kind: str) -> None:
    tokenizer, reach = BOUNDED[kind], token_reach(BOUNDED[kind])
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    text = tokenizer.decode([vocabulary[max(vocabulary, key=len)]] * 50)
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 50
    assert reach is not None
    assert reach.fewest_tokens(text) == 50


def test_nothing_that_fits_is_refused_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = wrapped(shipped(), tmp_path)
    text = "for line in file:\n" * 20
    needed = len(tokenizer.encode(text))
    assert not any(refuses(tokenizer, text, limit) for limit in (needed, needed + 1, 10 * needed))
    with pytest.raises(RequestError) as caught:
        tokenizer.check_length(text, 3)
    assert str(caught.value) == (
        "prompt: has at least 8 tokens; the bundle takes at most 3 (max_input_len). "
        "Shorten it, or build with a larger --max-input-len"
    )


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("kind", ["bytes", "fallback", "composing", "spaces"])
def test_ten_megabytes_are_not_tokenised(kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = wrapped({**BOUNDED, **UNBOUNDED}[kind], tmp_path)
    monkeypatch.setattr(tokenizer, "encode", pytest.fail)
    assert refuses(tokenizer, text, 4096)


def with_added(**options: bool) -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<x>", **options)])
    return tokenizer


def with_parts(
    normalizer: normalizers.Normalizer | None, *splitting: pre_tokenizers.PreTokenizer
) -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splitting, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


def few_bytes() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


SPACES = tokenizers.Regex(" +")
UNBOUNDED = {
    "left": with_added(lstrip=True),
    "right": with_added(rstrip=True),
    "spaces": with_parts(normalizers.Replace(SPACES, " ")),
    "nothing": with_parts(normalizers.Sequence([normalizers.NFC(), normalizers.Replace("xxxx", "")])),
    "strip": with_parts(normalizers.Strip()),
    "removed": with_parts(None, pre_tokenizers.Split(" ", "removed")),
    "whitespace": with_parts(None, pre_tokenizers.WhitespaceSplit()),
    "unknown dropped": few_bytes(),
    "wordpiece": word_piece(),
    "words": no_decoder(),
}


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_where_nothing_is_proven_the_limit_is_generous(kind: str, tmp_path: Path) -> None:
    assert token_reach(UNBOUNDED[kind]) is None
    tokenizer = wrapped(UNBOUNDED[kind], tmp_path)
    assert not refuses(tokenizer, " " * 1024 * 30, 30)
    assert refuses(tokenizer, " " * (1024 * 30 + 1), 30)
    with pytest.raises(RequestError, match=r"^prompt: has 30721 characters; for 30 tokens .* at most 30720 are"):
        tokenizer.check_length(" " * (1024 * 30 + 1), 30)


def test_replacements_by_something_shorter_count() -> None:
    plain = token_reach(with_parts(None))
    shrunk = token_reach(with_parts(normalizers.Replace("xxxxx", "yy")))
    assert plain is not None
    assert shrunk == TokenReach(3 * plain.ascii, 3 * plain.any)
    assert token_reach(with_parts(normalizers.Replace("yy", "xxxxx"))) == plain


@pytest.mark.slow
def test_how_much_nfc_can_shorten() -> None:
    """Of every character: what it loses when decomposed, and what composing can win back."""
    decompose = normalizers.NFD()
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    lengths = [(len(one.encode()), len(decompose.normalize_str(one).encode())) for one in characters]
    lost, won = max(whole / parts for whole, parts in lengths), max(parts / whole for whole, parts in lengths)
    assert lost * won == NFC_SHRINKING
