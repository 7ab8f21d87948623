"""Text in and out of a bundle: its tokenizer and chat template, and text that streams as tokens arrive."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from dflash_trt.errors import BundleError, RequestError
from dflash_trt.runtime.chat_template import compile_template
from dflash_trt.runtime.text_length import GENEROUS, TokenReach, token_reach
from dflash_trt.runtime.text_stream import StreamPiece, TextStream

__all__ = ["StreamPiece", "TextStream", "Tokenizer"]


class Tokenizer:
    """The tokenizer of a bundle.

    Args:
        folder: holds `tokenizer.json`, and where the model has them `tokenizer_config.json` and `chat_template.jinja`
            (which wins over a template inside the configuration, as in transformers).

    Raises:
        BundleError: a file is missing or unreadable, or the chat template does not compile.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BundleError("no such file", where=str(path), mend="Build the bundle again from a target that has it.")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise BundleError(f"cannot be read: {error}", where=str(path), mend="Build the bundle again.") from error
        # Some files carry the settings of a training run; a prompt must never be cut or padded by them.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_config(folder / "tokenizer_config.json")
        self._template = self._compile_template()

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can work."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A rendered chat has its special tokens already: give False for it.

        Raises:
            RequestError: not a string, or not valid Unicode (a lone surrogate).
        """
        _check_text(text, "text")
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def check_length(self, text: str, max_input_len: int) -> None:
        """Refuses a prompt that cannot fit, without tokenising it; whether one fits that passes, its tokens tell.

        Where the longest token bounds how few tokens a text can have (see `text_length`), nothing is refused that could
        fit. With other tokenizers, texts are refused of more than 1024 characters for each token of `max_input_len`.

        Raises:
            RequestError: naming `max_input_len`.
        """
        if self._reach is not None:
            fewest = self._reach.fewest_tokens(text)
            refused = fewest > max_input_len
            what = f"has at least {fewest} tokens; the bundle takes at most {max_input_len} (max_input_len)"
        else:
            refused = len(text) > (most := GENEROUS * max_input_len)
            what = f"has {len(text)} characters; for {max_input_len} tokens (max_input_len) at most {most} are read"
        if refused:
            raise RequestError(what, where="prompt", mend="Shorten it, or build with a larger --max-input-len")

    @cached_property
    def _reach(self) -> TokenReach | None:
        return token_reach(self._tokenizer)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token (a padded vocabulary) give nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, stop: Sequence[str] = (), *, skip_special_tokens: bool = True) -> TextStream:
        """Incremental decoding that ends at any of the stop strings."""
        return TextStream(self._tokenizer, tuple(stop), skip_special_tokens=skip_special_tokens)

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences to ban for these words, as `SamplingParams.bad_token_ids` takes them.

        A word is tokenised as it is and after a space, each at the beginning of a text and inside one (TensorRT-LLM has
        only the first of these four); one that begins with white space has its place given and gets no other space.
        What is banned is these tokens one after the other: the same letters cut differently, or within a longer token,
        are not. What the vocabulary cannot spell gives no sequence, since it cannot be generated either.

        Raises:
            RequestError: a word that is empty, not a string, or not valid Unicode.
        """
        sequences: dict[tuple[int, ...], None] = {}
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        unknown_id = None if unknown is None else self._tokenizer.token_to_id(unknown)
        for index, word in enumerate(words):
            _check_text(word, f"bad_words[{index}]")
            if not word:
                raise RequestError("is empty", where=f"bad_words[{index}]", mend="Leave it out")
            forms = [word] if word[0].isspace() else [word, f" {word}"]
            found = [tuple(ids) for form in forms for ids in (self._ids(form), self._ids_inside(form))]
            sequences |= dict.fromkeys(ids for ids in found if ids and (unknown_id not in ids or str(unknown) in word))
        return tuple(sequences)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _ids_inside(self, text: str) -> list[int]:
        """Behind the start of a line, which some tokenizers set apart from the start of a text; [] where they merge."""
        before, whole = self._ids("\n"), self._ids(f"\n{text}")
        return whole[len(before) :] if whole[: len(before)] == before else []

    def apply_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for a conversation; further template variables (`enable_thinking`, ...) go by name.

        Args:
            messages: at least one, each with "role" and whatever else the template reads ("content", ...).

        Raises:
            RequestError: no template, malformed messages, or the template refuses them.
        """
        if self._template is None:
            raise RequestError(
                "the model has no chat template",
                where=str(self._folder),
                mend="Use a plain prompt (--no-chat), or add chat_template.jinja to the target and build again.",
            )
        example = 'Pass for example [{"role": "user", "content": "Hello"}].'
        if not messages:
            raise RequestError("must hold at least one message", where="messages", mend=example)
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError("must be an object with a string 'role'", where=f"messages[{index}]", mend=example)
        values = self._special_tokens() | {"tools": None, "documents": None} | variables
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # a template is the model author's program: anything can come out of it
            raise RequestError(
                f"the chat template refused them: {error}",
                where="messages",
                mend="Bring roles and contents into the form this model expects.",
            ) from error

    def _special_tokens(self) -> dict[str, str]:
        """Template variables `bos_token`, `eos_token`, ...; one that is null in the configuration stays undefined."""
        named = {key: value for key, value in self._config.items() if key.endswith("_token")}
        texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def _compile_template(self) -> jinja2.Template | None:
        path = self._folder / "chat_template.jinja"
        source: Any = self._config.get("chat_template")
        if path.is_file():
            source = path.read_text(encoding="utf-8")
        elif isinstance(source, list):  # several by name
            source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
        if source is None:
            return None
        try:
            return compile_template(source)
        except jinja2.TemplateError as error:
            raise BundleError(
                f"the chat template does not compile: {error}", where=str(self._folder), mend="Mend it in the target."
            ) from error


def _check_text(text: str, where: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"is a {type(text).__name__}", where=where, mend="Pass a string.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"character {error.start} is {text[error.start]!r}, a lone surrogate, so it is not valid Unicode",
            where=where,
            mend="Decode the input as UTF-8 with errors='replace', or remove the character.",
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    """`tokenizer_config.json` as a dictionary; empty when there is none."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"is not JSON: {error}", where=str(path), mend="Build the bundle again.") from error
    if not isinstance(config, dict):
        raise BundleError("must be a JSON object", where=str(path), mend="Build the bundle again.")
    return config
