"""`dflash-trt run`: one object with --json, the same tokens with and without speculation, prompts from everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from makers import edit_json
from tokenizers import Tokenizer

CONTRACT = {
    "text": str,
    "token_ids": list,
    "acceptance_lengths": list,
    "mean_acceptance_length": float,
    "tokens_per_second": float,
    "finish_reason": str,
}
PROMPT = "def main(argv):\n    "
GREEDY, SAMPLED = (), ("--temperature", 0.8, "--seed", 7)


@pytest.fixture
def generate(run_cli, bundle):
    """The object of `run --json` for some options."""

    def run(*options: object, prompt: str = PROMPT, folder: Path = bundle) -> dict:
        code, out, err = run_cli("run", folder, "--prompt", prompt, "--json", *options)
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        return json.loads(out)

    return run


def test_json_is_one_object_with_the_keys_of_the_contract(generate):
    result = generate("--max-tokens", 12)
    assert {name: type(result[name]) for name in CONTRACT} == CONTRACT
    assert len(result["token_ids"]) == 12
    # The first token comes from the prefill, all others from steps.
    assert sum(result["acceptance_lengths"]) == 11
    steps = result["acceptance_lengths"]
    assert result["mean_acceptance_length"] == pytest.approx(sum(steps) / len(steps))
    assert result["tokens_per_second"] > 0
    assert result["finish_reason"] == "length"


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_does_not_change_the_tokens(generate, settings):
    drafted = generate("--max-tokens", 40, *settings)
    plain = generate("--max-tokens", 40, *settings, "--no-speculation")
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["text"] == plain["text"]
    assert len(set(drafted["token_ids"])) > 3
    # What ran is told, so a silent fall-back shows.
    assert drafted["statistics"]["proposed_drafts"] > 0
    assert plain["statistics"]["proposed_drafts"] == plain["statistics"]["draft_passes"] == 0
    assert plain["acceptance_lengths"] == [1] * 39


def test_an_agreeing_drafter_makes_whole_blocks(generate, agreeing_bundle):
    result = generate("--max-tokens", 21, folder=agreeing_bundle)
    assert result["token_ids"] == [0] * 21
    assert result["acceptance_lengths"] == [4] * 5
    assert result["mean_acceptance_length"] == 4
    assert result["acceptance_rate"] == 1


@pytest.fixture(scope="module")
def agreeing_bundle(agreeing_pair, tmp_path_factory) -> Path:
    import dflash_trt

    output = tmp_path_factory.mktemp("agreeing") / "bundle"
    dflash_trt.build(**agreeing_pair._asdict(), output=output, backend="torch", verify=False)
    return output


def test_the_seed_decides_a_sampled_output(generate):
    first, again = (generate("--max-tokens", 30, *SAMPLED) for _ in range(2))
    other = generate("--max-tokens", 30, "--temperature", 0.8, "--seed", 8)
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


def test_a_drawn_seed_is_told_and_repeats_the_output(generate):
    options = ("--max-tokens", 30, "--temperature", 1.5)
    drawn = generate(*options)
    assert generate(*options, "--seed", drawn["seed"])["token_ids"] == drawn["token_ids"]


def test_top_k_of_one_and_a_tiny_top_p_are_greedy(generate):
    greedy = generate("--max-tokens", 20)["token_ids"]
    for option in (("--top-k", 1), ("--top-p", 1e-6)):
        assert generate("--max-tokens", 20, *SAMPLED, *option)["token_ids"] == greedy


def test_text_is_the_decoding_of_the_tokens(generate, bundle):
    result = generate("--max-tokens", 30)
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer" / "tokenizer.json"))
    assert result["text"] == tokenizer.decode(result["token_ids"])


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_streamed_text_is_the_text_of_json(run_cli, generate, bundle, settings):
    code, out, err = run_cli("run", bundle, "--prompt", PROMPT, "--max-tokens", 40, *settings)
    assert code == 0
    assert out == generate("--max-tokens", 40, *settings)["text"] + "\n"
    assert "40 tokens" in err
    assert "mean acceptance length" in err


def test_stop_cuts_the_text_before_the_string(generate):
    whole = generate("--max-tokens", 40, *SAMPLED)
    stop = whole["text"][10:12]
    cut = generate("--max-tokens", 40, *SAMPLED, "--stop", "never to be seen", "--stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert len(cut["token_ids"]) < 40


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_bad_word_does_not_come(generate, settings):
    whole = generate("--max-tokens", 40, *settings)["text"]
    words = [letter for letter in whole if letter.isascii() and letter.isprintable()][:3]
    options = [option for word in words for option in ("--bad-word", word)]
    drafted, plain = (generate("--max-tokens", 40, *settings, *options, *more) for more in ((), ("--no-speculation",)))
    assert not any(word in drafted["text"] for word in words)
    assert drafted["token_ids"] == plain["token_ids"]


def test_a_minimum_puts_off_the_end(run_cli, pair, tmp_path):
    import shutil

    import dflash_trt

    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    edit_json(target / "config.json", eos_token_id=list(range(0, 320, 3)))
    (target / "generation_config.json").unlink()
    output = tmp_path / "bundle"
    dflash_trt.build(target=target, drafter=pair.drafter, output=output, backend="torch", verify=False)

    def run(*options: object) -> dict:
        return json.loads(run_cli("run", output, "--prompt", PROMPT, "--json", *SAMPLED, *options).out)

    early, late = run(), run("--min-tokens", 30)
    assert len(early["token_ids"]) < 30 <= len(late["token_ids"])
    assert (early["finish_reason"], late["finish_reason"]) == ("stop", "stop")
    assert late["token_ids"] == run("--min-tokens", 30, "--no-speculation")["token_ids"]


def test_the_prompt_may_come_from_option_file_or_stdin(run_cli, generate, bundle, tmp_path):
    prompt = "naïve ☃\nline two\r\n"
    expected = generate("--max-tokens", 10, prompt=prompt)
    assert expected["prompt_tokens"] == len(prompt.encode())
    file = tmp_path / "prompt.txt"
    file.write_bytes(prompt.encode())
    options = ("--max-tokens", 10, "--json")
    from_file = json.loads(run_cli("run", bundle, "--prompt-file", file, *options).out)
    from_stdin = json.loads(run_cli("run", bundle, *options, stdin=prompt.encode()).out)
    assert from_file["token_ids"] == from_stdin["token_ids"] == expected["token_ids"]
    assert from_file["prompt_tokens"] == from_stdin["prompt_tokens"] == expected["prompt_tokens"]


def test_chat_puts_the_prompt_into_the_template(run_cli, pair, tmp_path):
    import shutil

    import dflash_trt

    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    (target / "chat_template.jinja").write_text(
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<go>"
    )
    output = tmp_path / "bundle"
    dflash_trt.build(target=target, drafter=pair.drafter, output=output, backend="torch", verify=False)
    shared = ("--max-tokens", 8, "--json")
    chat = json.loads(run_cli("run", output, "--prompt", "hi", "--chat", *shared).out)
    by_hand = json.loads(run_cli("run", output, "--prompt", "<user>hi<go>", *shared).out)
    plain = json.loads(run_cli("run", output, "--prompt", "hi", "--no-chat", *shared).out)
    assert chat["token_ids"] == by_hand["token_ids"]
    assert (chat["prompt_tokens"], plain["prompt_tokens"]) == (len("<user>hi<go>"), 2)


def test_the_torch_backend_gives_the_tokens_of_onnxruntime(generate, torch_bundle):
    assert generate("--max-tokens", 20)["token_ids"] == generate("--max-tokens", 20, folder=torch_bundle)["token_ids"]


@pytest.mark.parametrize(("length", "room"), [(94, 2), (95, 1)])
def test_a_prompt_below_the_capacity_is_served_to_the_last_token(generate, length, room):
    for options in ((), ("--no-speculation",)):
        result = generate("--max-tokens", 50, *options, prompt="x" * length)
        assert (len(result["token_ids"]), result["finish_reason"]) == (room, "length")


@pytest.mark.parametrize("length", [80, 83, 88])
def test_generation_may_reach_the_capacity_in_mid_block(generate, length):
    drafted, plain = (generate("--max-tokens", 50, *o, prompt="x" * length) for o in ((), ("--no-speculation",)))
    assert drafted["token_ids"] == plain["token_ids"]
    assert (len(drafted["token_ids"]), drafted["finish_reason"]) == (96 - length, "length")


def test_a_single_token_needs_no_step(generate):
    result = generate("--max-tokens", 1)
    assert (len(result["token_ids"]), result["acceptance_lengths"], result["mean_acceptance_length"]) == (1, [], None)


def test_as_a_process_stdout_has_the_text_in_utf8_whatever_the_locale(bundle, generate):
    command = [sys.executable, "-m", "dflash_trt", "run", str(bundle), "--max-tokens", "40"]
    environment = {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(command, input=PROMPT.encode(), capture_output=True, env=environment, check=False)
    text = generate("--max-tokens", 40)["text"]
    assert not text.isascii()
    assert (done.returncode, done.stdout.decode()) == (0, text + "\n")


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_that_stops_reading_is_no_failure(bundle, options):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "dflash_trt", "run", str(bundle), "--prompt", PROMPT, "--max-tokens", "9"]
    done = subprocess.run([*command, *options], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_standard_streams_are_no_crash(bundle):
    command = f"{sys.executable} -m dflash_trt run {bundle} --prompt a --max-tokens 5"
    done = subprocess.run(["sh", "-c", f"{command} <&- >&-"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "5 tokens" in done.stderr


def test_a_full_disk_is_told(bundle):
    command = [sys.executable, "-m", "dflash_trt", "run", str(bundle), "--prompt", "a", "--max-tokens", "5"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "error: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
