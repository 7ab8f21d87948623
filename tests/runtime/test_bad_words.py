"""The token sequences of bad words, for tokenizers that treat spaces differently."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runtime_text import TOKENIZERS

from dflash_trt.errors import RequestError
from dflash_trt.runtime.text import Tokenizer


def wrapped(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    with TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        return Tokenizer(Path(folder))


WRAPPED = {kind: wrapped(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
EXPECTED: dict[str, dict[str, list[list[str]]]] = {
    "bytes": {
        "ab": [["a", "b"], ["Ġ", "a", "b"]],
        " ab": [["Ġ", "a", "b"]],
        "</s>": [["</s>"], ["Ġ", "</s>"]],
    },
    # the mark is put before a text's beginning, so the form inside a text is another one
    "fallback": {
        "ab": [["▁a", "b"], ["ab"], ["▁", "▁a", "b"]],
        " ab": [["▁", "▁a", "b"], ["▁a", "b"]],
        "<unk>": [["<unk>"], ["▁", "▁", "<unk>"], ["▁", "<unk>"]],
    },
    "wordpiece": {"play": [["play"]], "playing": [["play", "##ing"]], "xyz": [], "é": [["é"]]},
    "plain": {"two": [["two"]], " two": [], "xyz": []},  # "xyz" and " two" would be the unknown token "one"
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_sequences_of_words(kind: str) -> None:
    ours = WRAPPED[kind]
    for word, expected in EXPECTED[kind].items():
        found = [[TOKENIZERS[kind].id_to_token(token) for token in sequence] for sequence in ours.bad_words([word])]
        assert sorted(found) == sorted(expected), word
    together = ours.bad_words([*EXPECTED[kind], *EXPECTED[kind]])
    assert set(together) == {sequence for word in EXPECTED[kind] for sequence in ours.bad_words([word])}
    assert len(set(together)) == len(together)


words = st.text(st.sampled_from("abé fT\n🙂,"), min_size=1, max_size=6)


@settings(max_examples=200)
@given(before=st.sampled_from(["", "f", " ", "a ", ",", "\n", "T\n"]), word=words)
@pytest.mark.parametrize("name", ["bytes", "fallback"])
def test_a_sequence_spells_its_word(name: str, before: str, word: str) -> None:
    """And the other way round: a word that a text holds as tokens of its own is among them."""
    ours = WRAPPED[name]
    sequences = ours.bad_words([word])
    for sequence in sequences:
        assert ours.decode(sequence, skip_special_tokens=False).strip() == word.strip()
    head, text = ours.encode(before), ours.encode(before + word)
    apart = bool(before) and text[: len(head)] == head
    assert not apart or tuple(text[len(head) :]) in sequences


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", ""], r"bad_words\[1\]: is empty"),
        (["a", b"b"], r"bad_words\[1\]: is a bytes"),
        (["\ud800"], r"bad_words\[0\]: .*surrogate"),
    ],
)
def test_refused_words(words: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        WRAPPED["bytes"].bad_words(words)
