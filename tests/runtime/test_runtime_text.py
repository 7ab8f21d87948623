"""The tokenizer wrapper and streaming text, against full decoding and transformers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash_trt.errors import BundleError, RequestError
from dflash_trt.runtime.text import TextStream, Tokenizer

CORPUS = ["The quick brown fox, naïve café, été; 你好世界 こんにちは 🙂🙃👨‍👩‍👧 def f(x):\n\treturn x  # ok\n"] * 3
TEMPLATE = (
    "{% if tools is not none %}never{% endif %}{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'bad' %}{{ raise_exception('no ' + m.role) }}{% endif %}\n"
    "<|{{ m['role'] }}|>{% generation %}{{ m['content'] | trim }}{% endgeneration %}{{ eos_token }}\n"
    "{% if loop.index > 4 %}{% break %}{% endif %}\n"
    "{% endfor %}{{ {'k': '<é>'} | tojson }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "日本"])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama-2 style: words with a mark for the space, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "ab", "é", "�"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    pieces = ["[UNK]", "un", "##aff", "##able", "play", "##ing", ",", "é"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def no_decoder() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2}, unk_token="one"))


TOKENIZERS = {"bytes": byte_level(), "fallback": byte_fallback(), "wordpiece": word_piece(), "plain": no_decoder()}


def run(stream: TextStream, ids: Iterable[int]) -> tuple[list[str], bool]:
    pieces = []
    for token_id in ids:
        piece, stopped = stream.feed(token_id)
        pieces.append(piece)
        if stopped:
            return pieces, True
    piece, stopped = stream.finish()
    return [*pieces, piece], stopped


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150)
@given(data=st.data())
def test_pieces_of_any_tokens_add_up_to_the_full_decoding(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=40))
    pieces, _ = run(TextStream(tokenizer, skip_special_tokens=skip), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
@settings(max_examples=200)
@given(text=st.text(alphabet=st.sampled_from("aé你🙂👨\u200d 日本b\n") | st.characters(codec="utf-8"), max_size=30))
def test_unicode_text_streams_in_whole_characters(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text).ids
    full = tokenizer.decode(ids)
    sent = ""
    stream = TextStream(tokenizer)
    for token_id in ids:
        sent += stream.feed(token_id).text
        assert full.startswith(sent), "nothing is ever taken back"
    assert sent + stream.finish().text == full


def test_a_character_of_several_tokens_appears_once_complete() -> None:
    tokenizer = byte_level()
    stand_ins = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🦀")[0][0]
    ids = [tokenizer.token_to_id(character) for character in stand_ins]
    assert len(ids) == 4
    pieces, _ = run(TextStream(tokenizer), ids)
    assert pieces == ["", "", "", "🦀", ""]
    pieces, _ = run(TextStream(tokenizer), ids[:3])
    assert pieces == ["", "", "", "�"], "a cut character shows only at the end"


class CountingTokenizer:
    """Counts the tokens that decoding looks at."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer, self.looked_at = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.looked_at += len(ids)
        return self._tokenizer.decode(ids, **options)

    def id_to_token(self, token_id: int) -> str:
        self.looked_at += 1
        return self._tokenizer.id_to_token(token_id)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_time_is_linear(kind: str) -> None:
    counting = CountingTokenizer(TOKENIZERS[kind])
    ids = [i % counting.get_vocab_size() for i in range(5000)]
    pieces, _ = run(TextStream(counting), ids)
    assert "".join(pieces) == TOKENIZERS[kind].decode(ids)
    assert counting.looked_at < 8 * len(ids)


def reference_stop(text: str, stops: list[str]) -> str | None:
    """Character by character: what stands before the stop string that is completed first (the longest, if several)."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - len(max(done, key=len))]
    return None


@settings(max_examples=400)
@given(
    st.text(alphabet="abé🙂", max_size=25),
    st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings(text: str, stops: list[str]) -> None:
    tokenizer = TOKENIZERS["bytes"]
    stream = TextStream(tokenizer, tuple(stops))
    pieces, stopped = run(stream, tokenizer.encode(text).ids)
    expected = reference_stop(text, stops)
    assert stopped == (expected is not None)
    assert "".join(pieces) == (text if expected is None else expected)
    assert (stream.matched in stops) if stopped else stream.matched is None
    assert stream.feed(5) == ("", True) or not stopped


@settings(max_examples=200)
@given(
    st.text(alphabet="ab", max_size=20), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.data()
)
def test_stop_strings_do_not_depend_on_tokenization(text: str, stops: list[str], data: st.DataObject) -> None:
    """The same text in other tokens gives the same result."""
    vocab = {p: i for i, p in enumerate(["a", "b", "ab", "ba", "aab", "abab"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    ids, rest = [], text
    while rest:
        piece = data.draw(st.sampled_from([p for p in vocab if rest.startswith(p)]))
        ids.append(vocab[piece])
        rest = rest[len(piece) :]
    pieces, stopped = run(TextStream(tokenizer, tuple(stops)), ids)
    expected = reference_stop(text, stops)
    assert (stopped, "".join(pieces)) == (expected is not None, text if expected is None else expected)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    tokenizer = TOKENIZERS["bytes"]
    stream = TextStream(tokenizer, ("abba",))
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    assert [stream.feed(i).text for i in (b, a, b, a)] == ["b", "", "", "ab"]
    assert stream.finish().text == "a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_tokenizer_equals_transformers(folder: Path) -> None:
    ours = Tokenizer(folder)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    for text in ("", "naïve café, 你好 🙂 and more words than four", "a</s>b <tool>日本"):
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    for prompt in (True, False):
        messages = [{"role": "user", "content": " hi é "}, {"role": "assistant", "content": "<b>"}] * 3
        rendered = ours.apply_chat(messages, add_generation_prompt=prompt)
        assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert rendered.startswith("<s><|user|>hi é</s>\n")


def test_the_template_file_wins_and_lists_go_by_name(folder: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    config = {"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "from list"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(folder).apply_chat(messages) == "from list"
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') | length }} {{ enable_thinking }}")
    assert Tokenizer(folder).apply_chat(messages, enable_thinking=False) == "4 False"


def test_stream_of_the_wrapper(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("naïve café, 你好STOP🙂")
    pieces, stopped = run(tokenizer.stream(["STOP"]), ids)
    assert ("".join(pieces), stopped) == ("naïve café, 你好", True)


def test_no_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template.*--no-chat"):
        tokenizer.apply_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\]: must be an object"),
        ([{"role": "user", "content": "x"}, {"content": "y"}], r"messages\[1\]"),
        ([{"role": "bad", "content": "x"}], "refused them: no bad"),
        ([{"role": "user"}], "refused them"),
    ],
)
def test_refused_messages(folder: Path, messages: list, message: str) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("m['content'] | trim", "m['content'] + ''"))
    with pytest.raises(RequestError, match=message):
        Tokenizer(folder).apply_chat(messages)


def test_templates_are_sandboxed(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match=r"unsafe|not safely|underscore|undefined"):
        Tokenizer(folder).apply_chat(messages)
    assert len(messages) == 1


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
def test_lone_surrogates_are_refused(folder: Path, text: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        Tokenizer(folder).encode(text)


def test_other_types_are_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="bytes"):
        Tokenizer(folder).encode(b"x")


def test_broken_folders(folder: Path) -> None:
    with pytest.raises(BundleError, match=r"none/tokenizer.json: no such file"):
        Tokenizer(folder / "none")
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(BundleError, match="does not compile"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(BundleError, match=r"tokenizer_config.json: is not JSON"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer.json: cannot be read"):
        Tokenizer(folder)
