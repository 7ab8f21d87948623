"""Bad input: exit code 2, one clear message on stderr, no traceback, nothing written and nothing lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from makers import REMOVED, edit_json


def _refused(outcome, *words: str) -> None:
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line]
    # click puts two lines of usage above its own messages.
    assert len(lines) == (3 if lines[0].startswith("Usage:") else 1), err
    assert lines[-1].lower().startswith("error: ")
    for word in words:
        assert word in lines[-1]


# -- run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompt", ""), ["prompt", "empty"]),
        (("--prompt", "a" * 96), ["96 tokens", "at most 95", "--max-input-len"]),
        (("--prompt", "a" * 5000), ["at least 385 tokens", "at most 95", "--max-input-len"]),  # one may have 13 bytes
        (("--prompt", "a\udcff"), ["Unicode"]),
        (("--prompt", "a", "--max-tokens", 0), ["max_tokens", "0"]),
        (("--prompt", "a", "--max-tokens", -3), ["max_tokens", "-3"]),
        (("--prompt", "a", "--max-tokens", "many"), ["--max-tokens", "many"]),
        (("--prompt", "a", "--temperature", -0.1), ["temperature", "-0.1"]),
        (("--prompt", "a", "--temperature", "nan"), ["temperature", "nan"]),
        (("--prompt", "a", "--temperature", "inf"), ["temperature", "inf"]),
        (("--prompt", "a", "--top-p", 0), ["top_p"]),
        (("--prompt", "a", "--top-p", 1.5), ["top_p", "1.5"]),
        (("--prompt", "a", "--top-k", -1), ["top_k", "-1"]),
        (("--prompt", "a", "--min-p", 2), ["min_p"]),
        (("--prompt", "a", "--seed", -1), ["seed", "-1"]),
        (("--prompt", "a", "--seed", 2**64), ["seed"]),
        (("--prompt", "a", "--stop", ""), ["stop"]),
        (("--prompt", "a", "--bad-word", ""), ["bad_words[0]", "empty"]),
        (("--prompt", "a", "--min-tokens", -1), ["min_tokens", "-1"]),
        (("--prompt", "a", "--min-tokens", 9, "--max-tokens", 8), ["min_tokens", "max_tokens (8)"]),
        (("--prompt", "a", "--repetition-penalty", 0), ["repetition_penalty"]),
        (("--prompt", "a", "--prompt-file", "/dev/null"), ["--prompt", "--prompt-file"]),
        (("--prompt-file", "/nowhere/prompt.txt"), ["/nowhere/prompt.txt", "No such file"]),
        (("--prompt-file", "/"), ["directory"]),
        (("--prompt-file", "/dev/null"), ["prompt", "empty"]),
        (("--prompt", "a", "--chat"), ["chat template", "--no-chat"]),
        (("--prompt", "a", "--threads", -1), ["--threads"]),
    ],
)
def test_run_refuses(run_cli, bundle, options, words):
    _refused(run_cli("run", bundle, *options), *words)


@pytest.mark.parametrize("data", [b"abc\xff", b"\xc3", b"\xed\xa0\x80"])
def test_run_refuses_what_is_not_utf8(run_cli, bundle, tmp_path, data):
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    position = str(len(data) - len(data.lstrip(b"abc")))
    _refused(run_cli("run", bundle, "--prompt-file", file), str(file), "UTF-8", position)
    _refused(run_cli("run", bundle, stdin=data), "stdin", "UTF-8", position)


def test_run_refuses_an_empty_stdin(run_cli, bundle):
    _refused(run_cli("run", bundle), "prompt", "empty")


def test_run_without_any_stdin_asks_for_a_prompt(run_cli, bundle, monkeypatch):
    import dflash_trt.cli.run as module

    class System:
        """`sys` of a process started with stdin closed."""

        stdin = None
        stdout = None

    monkeypatch.setattr(module, "sys", System)
    _refused(run_cli("run", bundle), "no prompt", "--prompt")


def test_run_refuses_what_is_no_bundle(run_cli, pair, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, word in (
        (tmp_path / "missing", "no such folder"),
        (tmp_path / "file", "no such folder"),
        (tmp_path / "empty", "config.json"),
        (pair.target, "not a bundle"),
    ):
        _refused(run_cli("run", path, "--prompt", "a"), str(path), word)
        _refused(run_cli("verify", path), str(path), word)


def test_debug_shows_the_traceback_and_the_message(run_cli, tmp_path):
    args = ("run", tmp_path / "missing", "--prompt", "a")
    for place in (0, 1, len(args)):
        code, out, err = run_cli(*args[:place], "--debug", *args[place:])
        assert (code, out) == (2, "")
        assert "Traceback (most recent call last)" in err
        assert err.splitlines()[-1].startswith("error: ")


# -- build


@pytest.fixture
def refused_build(run_cli, pair, tmp_path):
    """Expects a build to be refused with these words, and the folder of its output to stay as it was."""
    work = tmp_path / "work"
    work.mkdir()

    def run(*options: object, words: tuple[str, ...] = (), **replaced: object) -> None:
        args = {"target": pair.target, "drafter": pair.drafter, "output": work / "bundle"} | replaced
        line = [part for name, value in args.items() if value is not None for part in (f"--{name}", value)]
        before = _content(work)
        _refused(run_cli("build", *line, *options), *words)
        assert _content(work) == before

    run.work = work
    return run


def _content(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--backend", "tensorflow"), ["tensorflow", "onnxruntime"]),
        (("--backend", "tensorrt"), ["--backend tensorrt", "is not installed", "pip install", "--stop-after lower"]),
        (("--dtype", "float16"), ["onnxruntime", "float16", "--dtype float32"]),
        (("--dtype", "bfloat16"), ["onnxruntime", "bfloat16", "--dtype float32"]),
        (("--dtype", "int8"), ["int8"]),
        (("--vp-drafter", "/nowhere"), ["/nowhere", "no such folder"]),
        (("--branches", 4), ["--branches", "D2SD"]),
        (("--branches", 0), ["--branches"]),
        (("--vp-block-size", 8), ["--vp-block-size", "--vp-drafter"]),
        (("--block-size", 9), ["9", "block_size is 8"]),
        (("--block-size", 1), ["--block-size", "1"]),
        (("--block-size", 0), ["--block-size"]),
        (("--max-seq-len", 513), ["513", "512", "max_position_embeddings"]),
        (("--max-seq-len", 1), ["--max-seq-len", "1"]),
        (("--max-input-len", 0), ["--max-input-len", "0"]),
        (("--max-input-len", 64, "--max-seq-len", 64), ["--max-input-len", "64"]),
        (("--max-batch-size", 0), ["--max-batch-size", "0"]),
        (("--max-batch-size", "two"), ["two"]),
        (("--config", "/nowhere/build.yaml"), ["/nowhere/build.yaml", "No such file"]),
        (("--config", "/"), ["directory"]),
    ],
)
def test_build_refuses_an_option(refused_build, options, words):
    refused_build(*options, words=words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("blok_size: 8\n", ["blok_size", "block_size"]),
        ("verify: false\nblock_size: [8, }\n", ["YAML", "line 2"]),
        ("\xff\xfe", ["YAML"]),
        ("- target\n", ["mapping"]),
        ("", ["mapping"]),
        ("block_size: eight\n", ["block_size", "eight"]),
        ("backend: tensorflow\n", ["backend", "tensorflow"]),
        ("dtype: int8\n", ["dtype", "int8"]),
        ("target: 5\n3: 4\n", []),
        ("expect: {target: {hidden_size: 4096}}\n", ["hidden_size = 32", "4096"]),
        ("expect: {drafter: {taps: [0, 1, 3]}}\n", ["taps = [0, 2, 3]", "[0, 1, 3]"]),
        ("expect: {drafters: {}}\n", ["expect.drafters"]),
    ],
)
def test_build_refuses_a_configuration(refused_build, tmp_path, text, words):
    file = tmp_path / "build.yaml"
    file.write_bytes(text.encode("latin-1"))
    refused_build("--config", file, words=words)


def test_build_names_the_missing_option(refused_build):
    for name in ("target", "drafter", "output"):
        refused_build(words=(f"--{name}", "missing"), **{name: None})


def test_build_refuses_checkpoints_that_are_none(refused_build, pair, tmp_path):
    refused_build(words=("/nowhere/model",), target="/nowhere/model")
    refused_build(words=("/nowhere/model",), drafter="/nowhere/model")
    refused_build(words=(str(pair.drafter),), target=pair.drafter)
    refused_build(words=(str(pair.target),), drafter=pair.target)
    bare = Path(shutil.copytree(pair.target, tmp_path / "bare"))
    (bare / "tokenizer.json").unlink()
    refused_build(words=(str(bare), "tokenizer.json"), target=bare)


def test_build_refuses_a_pair_that_does_not_belong_together(refused_build, pair, tmp_path):
    other = Path(shutil.copytree(pair.drafter, tmp_path / "other"))
    edit_json(other / "config.json", num_target_layers=7)
    refused_build(words=("num_target_layers is 7", "num_hidden_layers is 4"), drafter=other)
    edit_json(other / "config.json", num_target_layers=4, block_size=REMOVED)
    refused_build(words=("block_size",), drafter=other)


def test_build_refuses_to_replace_without_force(refused_build, bundle):
    shutil.copytree(bundle, refused_build.work / "bundle")
    refused_build(words=("exists already", "--force"))


def test_build_with_force_keeps_what_is_no_bundle(refused_build, pair):
    folder = refused_build.work / "bundle"
    folder.mkdir()
    refused_build("--force", words=("not a bundle",))
    (folder / "thesis.tex").write_text("years of work")
    refused_build("--force", words=("not a bundle",))
    for text in ('["dflash_trt"]', '{"dflash_trt": 1}', "dflash_trt", '"dflash_trt"', "[" * 100_000):
        (folder / "config.json").write_text(text)
        refused_build("--force", words=("not a bundle",))
    before = _content(pair.target)
    refused_build("--force", output=pair.target, words=(str(pair.target), "not a bundle"))
    assert _content(pair.target) == before


def test_build_with_force_keeps_a_file_and_a_broken_link(refused_build):
    file = refused_build.work / "file"
    file.write_text("x")
    refused_build("--force", output=file, words=("not a bundle",))
    link = refused_build.work / "link"
    link.symlink_to("nowhere")
    refused_build("--force", output=link, words=("not a bundle",))


def test_build_refuses_an_output_that_cannot_be_written(refused_build):
    (refused_build.work / "file").write_text("x")
    refused_build(output=refused_build.work / "file" / "bundle", words=("cannot be written",))
    refused_build(output=refused_build.work / "file" / "deeper" / "bundle", words=("cannot be written",))
    refused_build(output="/proc/bundle", words=("/proc/bundle", "cannot be written"))
    refused_build(output=refused_build.work / ("x" * 300), words=("too long",))


def test_build_refuses_to_dump_into_the_bundle(refused_build):
    for inside in ("bundle", "bundle/ir", "bundle/a/b"):
        refused_build("--dump-ir", refused_build.work / inside, words=("--dump-ir",))


def test_an_internal_error_is_one_message_too(run_cli, bundle, monkeypatch):
    def fail(*args: object, **options: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr("dflash_trt.loading.load_engine", fail)
    code, out, err = run_cli("run", bundle, "--prompt", "a")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "internal error" in err
    assert "KeyError: 'surprise'" in err
    assert "Traceback" in run_cli("--debug", "run", bundle, "--prompt", "a").err


@pytest.mark.parametrize("threads", [100_000, 10_000_000])
def test_threads_have_a_bound(bundle, run_cli, threads):
    code, out, err = run_cli("run", bundle, "--prompt", "x", "--threads", threads)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: --threads: {threads} must be")
