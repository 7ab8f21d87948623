"""Train the tiny target and drafters in ``examples/tiny`` on the Python standard library, on two CPU cores.

Stages run in order: tokenizer, target, data, dflash, vp_drafter, dflare, export, measure. Each leaves its result in the
work directory and the costly ones are skipped when that result exists; training also checkpoints every few minutes, so
killing and rerunning continues.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import click
import torch
import torch.nn.functional as F
from block_drafters import (
    BlockDrafter,
    DFlareDrafter,
    DFlashDrafter,
    block_loss,
    epoch_batches,
    fit,
    progress,
    target_features,
)
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Qwen3Config, Qwen3ForCausalLM

EOS, MASK = "<|endoftext|>", "<|MASK|>"
VOCAB = 4096
SEED = 20602
# Character tables and formatted documentation: not code, and a lot of it.
SKIPPED = ("encodings/", "pydoc_data/")
HELD_OUT_ONE_IN = 20

SIZES = dict(
    vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_attention_heads=6, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=10000.0, rope_scaling=None, hidden_act="silu",
    attention_bias=False, attention_dropout=0.0, tie_word_embeddings=True, initializer_range=0.02, model_type="qwen3",
    use_sliding_window=False, sliding_window=None, use_cache=True, torch_dtype="bfloat16",
    bos_token_id=None, eos_token_id=VOCAB - 2, pad_token_id=VOCAB - 2,
)
TARGET = dict(architectures=["Qwen3ForCausalLM"], num_hidden_layers=6, **SIZES)
TARGET_FIT = dict(steps=2000, lr=3e-3, warmup=160, cosine=4000, cooldown=700, weight_decay=0.1, every=200)
TARGET_BATCH, TARGET_LENGTH = 8, 512

DATA_BATCHES, DATA_BATCH, DATA_LENGTH = 80, 128, 256
DATA_PROMPT = (48, 128)
DATA_SAMPLED, DATA_TEMPERATURE = 0.3, (0.8, 1.0)

# The last block is not tapped: Transformers hands its output out only after the final norm.
DFLASH = dict(
    architectures=["DFlashDraftModel"], num_hidden_layers=2, layer_types=["full_attention"] * 2, block_size=8,
    num_target_layers=TARGET["num_hidden_layers"],
    dflash_config=dict(mask_token_id=VOCAB - 1, target_layer_ids=[1, 2, 3, 4]), **SIZES,
)
# Two phases: (batches of the data, optimisation). The second, with more data, starts over with a lower learning rate.
DFLASH_PHASES = (
    (48, dict(steps=6000, lr=4e-3, warmup=200, cosine=7000, cooldown=1000, weight_decay=0.01, every=100)),
    (80, dict(steps=6000, lr=3e-3, warmup=100, cosine=6000, cooldown=1, weight_decay=0.01, every=100)),
)
DRAFTER_BATCH, DRAFTER_ANCHORS, GAMMA = 8, 32, 4.0

# The VP drafter is a DFlash drafter by format, and continues from the trained one. It is shown l = 0 .. block - 2
# tokens after the anchor with Pr(l) ~ PREFIX_BASE**l.
VP_FIT = dict(steps=5000, lr=2e-3, warmup=100, cosine=5500, cooldown=500, weight_decay=0.01, every=100)
PREFIX_BASE = 0.9

DFLARE = dict(
    architectures=["QwenDFlareDraftModel"], num_hidden_layers=3, layer_types=["full_attention"] * 3, block_size=8,
    num_target_layers=TARGET["num_hidden_layers"],
    dflash_config=dict(mask_token_id=VOCAB - 1, target_layer_ids=[0, 1, 2, 3, 4]), **SIZES,
)
DFLARE_FIT = dict(steps=6000, lr=4e-3, warmup=200, cosine=10000, cooldown=1000, weight_decay=0.01, every=100)
# Early positions matter most to begin with; later epochs look further into the block.
DFLARE_GAMMA, DFLARE_GAMMA_STEP = 2.5, 0.5

HELD_OUT_PROMPTS, HELD_OUT_TOKENS = 64, (48, 96)
MEASURED_TOKENS = 96

console = Console(stderr=True)


@dataclass(frozen=True)
class Run:
    """Where a run keeps its intermediate and final results, and whether it compiles the target's training step."""

    work: Path
    out: Path
    compile: bool


def sources() -> tuple[dict[str, str], dict[str, str]]:
    """Standard library sources by relative path: (training, held out). The split looks at the path alone."""
    root = Path(sysconfig.get_path("stdlib"))
    split: tuple[dict[str, str], dict[str, str]] = {}, {}
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if "site-packages/" in name or name.startswith(SKIPPED) or digest in seen or not content.strip():
            continue
        seen.add(digest)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:  # sources in other encodings, mostly tests of them
            continue
        held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0
        split[held_out][name] = text
    return split


def train_tokenizer(run: Run) -> None:
    """Byte-level BPE on the training files, and both splits as token streams (one separator after each file)."""
    if (run.work / "corpus.safetensors").exists():
        return
    training, held_out = sources()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator(training.values(), trainer)
    tokenizer.add_special_tokens([EOS, MASK])  # after the vocabulary: the last two ids
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(run.work / "tokenizer.json"))
    streams = {}
    for name, files in (("training", training), ("held_out", held_out)):
        ids = [i for e in tokenizer.encode_batch(list(files.values())) for i in (*e.ids, VOCAB - 2)]
        streams[name] = torch.tensor(ids, dtype=torch.int32)
        size = sum(len(text.encode()) for text in files.values())
        console.print(f"{name}: {len(files)} files, {size / 1e6:.1f} MB, {len(ids) / 1e6:.2f} M tokens")
    save_file(streams, run.work / "corpus.safetensors")


def fit_with_progress(title: str, module: torch.nn.Module, loss_at: Callable[[int], tuple[Tensor, Tensor]],
                      checkpoint: Path, settings: dict) -> None:
    """``fit`` under a progress bar of its own."""
    bar, report = progress(title, settings["steps"], console)
    with bar:
        fit(module, loss_at, checkpoint=checkpoint, report=report, **settings)


def new_target() -> Qwen3ForCausalLM:
    """A freshly initialised target, the same on every call."""
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(Qwen3Config.from_dict(TARGET)).float()


def train_target(run: Run) -> None:
    """Next-token training of the target on the training stream."""
    result = run.work / "target.safetensors"
    if result.exists():
        return
    stream = load_file(run.work / "corpus.safetensors")["training"].long()
    rows = len(stream) // TARGET_LENGTH - 1  # one row is left for the shift of later epochs
    target = new_target()

    def loss_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of ``tokens`` [N, S]."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = target(tokens, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        labels = tokens[:, 1:].flatten()
        return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()

    # Fusing the small element-wise operations makes the target's step about 1.6 times faster. The drafter's step
    # gains nothing: its masked attention compiles to something slower than the kernel eager mode picks.
    step_loss = torch.compile(loss_of) if run.compile else loss_of

    def loss_at(step: int) -> tuple[Tensor, Tensor]:
        starts = [row * TARGET_LENGTH + epoch * 197 % TARGET_LENGTH
                  for epoch, row in epoch_batches(step, TARGET_BATCH, rows, SEED)]
        return step_loss(torch.stack([stream[start:start + TARGET_LENGTH] for start in starts]))

    fit_with_progress("target", target, loss_at, run.work / "target.ckpt", TARGET_FIT)
    # Everything after this stage, the drafter included, sees the weights as shipped: rounded to bfloat16.
    save_file({k: v.bfloat16() for k, v in target.state_dict().items() if k != "lm_head.weight"}, result)


def trained_target(run: Run) -> Qwen3ForCausalLM:
    """The target as shipped, computing in float32, frozen."""
    target = new_target()
    target.load_state_dict(load_file(run.work / "target.safetensors"), strict=False)  # no lm_head: it is tied
    return target.eval().requires_grad_(False)


def cut_prompt(tokenizer: Tokenizer, text: str, start: int, count: int) -> list[int] | None:
    """``count`` ids of ``text`` from the start of the line holding ``start``, if they survive decoding."""
    start = text.rfind("\n", 0, start) + 1
    ids = tokenizer.encode(text[start:start + 16 * count]).ids[:count]
    prompt = tokenizer.decode(ids, skip_special_tokens=False)
    return ids if len(ids) == count and prompt.strip() and tokenizer.encode(prompt).ids == ids else None


@torch.inference_mode()
def continue_prompts(target: Qwen3ForCausalLM, prompts: Tensor, length: int, temperatures: Tensor) -> Tensor:
    """Extend ``prompts`` [N, P] to [N, length]; rows of ``temperatures`` [N] that are 0 decode greedily."""
    tokens, cache = prompts, DynamicCache(config=target.config)
    sampled = temperatures > 0
    while tokens.shape[1] < length:
        logits = target(tokens[:, cache.get_seq_length():], past_key_values=cache, logits_to_keep=1).logits[:, -1]
        following = logits.argmax(-1)
        if sampled.any():
            scores = logits[sampled] / temperatures[sampled, None]
            following[sampled] = torch.multinomial(scores.softmax(-1), 1)[:, 0]
        tokens = torch.cat([tokens, following[:, None]], dim=1)
    return tokens


def generate_data(run: Run) -> None:
    """Sequences the drafter learns from: training prompts continued by the target, one file per batch."""
    folder = run.work / "data"
    folder.mkdir(exist_ok=True)
    todo = [i for i in range(DATA_BATCHES) if not (folder / f"{i:03}.safetensors").exists()]
    if not todo:
        return
    target, tokenizer = trained_target(run), Tokenizer.from_file(str(run.work / "tokenizer.json"))
    files = list(sources()[0].values())
    sizes = [len(text) for text in files]
    bar, report = progress("data", DATA_BATCHES, console)
    with bar:
        for index in todo:
            rng = random.Random(SEED + index)
            torch.manual_seed(SEED + index)
            count = rng.randint(*DATA_PROMPT)  # one prompt length per batch, so that no row needs padding
            prompts: list[list[int]] = []
            while len(prompts) < DATA_BATCH:
                text = rng.choices(files, sizes)[0]
                prompts += filter(None, [cut_prompt(tokenizer, text, rng.randrange(len(text)), count)])
            low, high = DATA_TEMPERATURE
            temperatures = torch.empty(DATA_BATCH).uniform_(low, high) * (torch.rand(DATA_BATCH) < DATA_SAMPLED)
            tokens = continue_prompts(target, torch.tensor(prompts), DATA_LENGTH, temperatures)
            save_file({"tokens": tokens.int(), "start": torch.full((DATA_BATCH,), count)},
                      folder / f"{index:03}.safetensors")
            report(index + 1, f"prompt {count}")


def block_training(run: Run, drafter: BlockDrafter, target: Qwen3ForCausalLM) -> Callable[..., tuple[Tensor, Tensor]]:
    """The loss of a step of a block-diffusion drafter, from random anchors of the generated sequences.

    Returns ``loss_at(step, used=None, seed=SEED, gamma=None, visible=None)``: ``used`` sequences are drawn from (all),
    ``gamma(epoch)`` weighs the positions (GAMMA), ``visible()`` [batch, anchors] tokens are shown after each anchor.
    """
    parts = [load_file(path) for path in sorted((run.work / "data").glob("*.safetensors"))]
    sequences, starts = (torch.cat([part[key] for part in parts]).long() for key in ("tokens", "start"))
    shape = DRAFTER_BATCH, DRAFTER_ANCHORS
    last = DATA_LENGTH - drafter.config.block_size
    taps = drafter.config.dflash_config["target_layer_ids"]

    def loss_at(step: int, used: int | None = None, seed: int = SEED,
                gamma: Callable[[int], float] = lambda epoch: GAMMA,
                visible: Callable[[], Tensor] = lambda: torch.zeros(shape, dtype=torch.long)) -> tuple[Tensor, Tensor]:
        batch = list(epoch_batches(step, DRAFTER_BATCH, used or len(sequences), seed))
        rows = torch.tensor([row for _, row in batch])
        tokens, first = sequences[rows], starts[rows, None]
        anchors = first + (torch.rand(shape) * (last - first + 1)).long()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                features = target_features(target, tokens, taps)
            return block_loss(drafter, target.lm_head.weight, tokens, features, anchors, visible(), gamma(batch[0][0]))

    return loss_at


def train_dflash(run: Run) -> None:
    """The DFlash drafter."""
    result = run.work / "dflash.safetensors"
    if result.exists():
        return
    target = trained_target(run)
    torch.manual_seed(SEED)
    drafter = DFlashDrafter(Qwen3Config.from_dict(DFLASH))
    drafter.warm_start(target)
    loss_at = block_training(run, drafter, target)
    for phase, (batches, settings) in enumerate(DFLASH_PHASES):
        if phase:
            torch.manual_seed(SEED + phase)
        batch_loss = partial(loss_at, used=batches * DATA_BATCH, seed=SEED + phase)
        checkpoint = run.work / f"dflash.{phase}.ckpt"
        fit_with_progress(f"dflash, phase {phase + 1}", drafter, batch_loss, checkpoint, settings)
    save_drafter(drafter, result)


def train_vp_drafter(run: Run) -> None:
    """The variable-prefix drafter of D2SD, from the trained DFlash drafter on."""
    result = run.work / "vp_drafter.safetensors"
    if result.exists():
        return
    target = trained_target(run)
    drafter = DFlashDrafter(Qwen3Config.from_dict(DFLASH))
    drafter.load_state_dict(load_file(run.work / "dflash.safetensors"))
    shares = PREFIX_BASE ** torch.arange(DFLASH["block_size"] - 1, dtype=torch.float)
    count = DRAFTER_BATCH * DRAFTER_ANCHORS

    def visible() -> Tensor:
        return torch.multinomial(shares, count, replacement=True).view(DRAFTER_BATCH, DRAFTER_ANCHORS)

    loss_at = partial(block_training(run, drafter, target), seed=SEED + 2, visible=visible)
    torch.manual_seed(SEED + 2)
    fit_with_progress("vp_drafter", drafter, loss_at, run.work / "vp_drafter.ckpt", VP_FIT)
    save_drafter(drafter, result)


def train_dflare(run: Run) -> None:
    """The DFlare drafter, its loss looking further into the block from epoch to epoch."""
    result = run.work / "dflare.safetensors"
    if result.exists():
        return
    target = trained_target(run)
    drafter = DFlareDrafter(Qwen3Config.from_dict(DFLARE))
    drafter.warm_start(target)
    loss_at = partial(block_training(run, drafter, target), seed=SEED + 3,
                      gamma=lambda epoch: DFLARE_GAMMA + DFLARE_GAMMA_STEP * epoch)
    torch.manual_seed(SEED + 3)
    fit_with_progress("dflare", drafter, loss_at, run.work / "dflare.ckpt", DFLARE_FIT)
    save_drafter(drafter, result)


def save_drafter(drafter: BlockDrafter, result: Path) -> None:
    save_file({k: v.bfloat16() for k, v in drafter.state_dict().items()}, result)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export(run: Run) -> None:
    """Write the checkpoints in the published formats, and prompts from files no stage has trained on."""
    target = run.out / "target"
    for name, config in (("target", TARGET), ("dflash", DFLASH), ("vp_drafter", DFLASH), ("dflare", DFLARE)):
        folder = run.out / name
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        tensors = load_file(run.work / f"{folder.name}.safetensors")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(target / "generation_config.json", {"eos_token_id": VOCAB - 2, "pad_token_id": VOCAB - 2})
    write_json(target / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": EOS, "mask_token": MASK,
        "model_max_length": SIZES["max_position_embeddings"], "clean_up_tokenization_spaces": False})
    (target / "tokenizer.json").write_bytes((run.work / "tokenizer.json").read_bytes())

    tokenizer = Tokenizer.from_file(str(run.work / "tokenizer.json"))
    rng = random.Random(SEED)
    files = sorted(sources()[1].items())
    rng.shuffle(files)
    lines: list[str] = []
    while len(lines) < HELD_OUT_PROMPTS:
        for name, text in files:
            ids = cut_prompt(tokenizer, text, rng.randrange(len(text)), rng.randint(*HELD_OUT_TOKENS))
            if ids and len(lines) < HELD_OUT_PROMPTS:
                record = {"id": f"heldout-{len(lines):03}", "file": name, "prompt": tokenizer.decode(ids)}
                lines.append(json.dumps(record) + "\n")
    (run.out / "heldout.jsonl").write_text("".join(lines))


def loops(ids: list[int], longest: int = 24) -> bool:
    """Whether ``ids`` end in at least three repeats (and at least 24 tokens) of at most ``longest`` tokens."""
    return any(len(ids) >= (n := max(3 * period, 24)) and ids[-n:-period] == ids[period - n:]
               for period in range(1, longest + 1))


@torch.inference_mode()
def measure(run: Run) -> None:
    """Held-out quality of the exported target, and acceptance in the loop of the DFlash authors' package."""
    try:
        from dflash import model as authors
    except ImportError as error:
        raise click.ClickException("the measure stage needs the package dflash 0.1.0: pip install dflash") from error
    if not torch.cuda.is_available():
        authors._cuda_time = time.perf_counter  # it synchronises CUDA before reading the clock
    target = AutoModelForCausalLM.from_pretrained(run.out / "target", dtype=torch.float32).eval()
    drafter = authors.DFlashDraftModel.from_pretrained(run.out / "dflash", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.out / "target")

    stream = load_file(run.work / "corpus.safetensors")["held_out"].long()
    loss = right = 0.0
    rows = stream[:len(stream) // TARGET_LENGTH * TARGET_LENGTH].view(-1, TARGET_LENGTH)
    for row in rows:
        logits = target(row[None]).logits[0, :-1]
        loss += F.cross_entropy(logits, row[1:]).item() / len(rows)
        right += (logits.argmax(-1) == row[1:]).float().mean().item() / len(rows)

    responses = []
    records = [json.loads(line) for line in (run.out / "heldout.jsonl").read_text().splitlines()]
    bar, report = progress("measure", len(records), console)
    with bar:
        for done, record in enumerate(records, 1):
            ids = tokenizer(record["prompt"], return_tensors="pt").input_ids
            result = authors.dflash_generate(drafter, target, ids, MEASURED_TOKENS, [VOCAB - 2], return_stats=True)
            new = result.output_ids[0, ids.shape[1]:].tolist()
            responses.append({"id": record["id"], "text": tokenizer.decode(new), "loops": loops(new),
                              "lengths": result.acceptance_lengths})
            report(done, "")
    # Text that repeats itself is easy to draft; the last number says what remains without it.
    answered = [r for r in responses if r["lengths"]]  # no step where the target's first token ends the text
    summary = {
        "target_held_out_loss": loss, "target_held_out_perplexity": math.exp(loss), "target_held_out_accuracy": right,
        "responses": len(responses), "responses_ending_in_a_loop": sum(r["loops"] for r in responses),
        "acceptance_mean_of_responses": fmean(fmean(r["lengths"]) for r in answered),
        "acceptance_mean_of_steps": fmean(n for r in answered for n in r["lengths"]),
        "acceptance_mean_of_responses_without_loops": fmean(fmean(r["lengths"]) for r in answered if not r["loops"]),
    }
    write_json(run.work / "measure.json", {**summary, "texts": responses})
    console.print_json(data=summary)


STAGES: dict[str, Callable[[Run], None]] = {
    "tokenizer": train_tokenizer, "target": train_target, "data": generate_data, "dflash": train_dflash,
    "vp_drafter": train_vp_drafter, "dflare": train_dflare, "export": export, "measure": measure,
}


@click.command(help=__doc__, epilog="Example: python examples/train_tiny.py --work DIR")
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Checkpoints and intermediate results.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "tiny", show_default=True,
              help="Where the export stage writes the checkpoints and heldout.jsonl.")
@click.option("--compile/--no-compile", default=True, show_default=True,
              help="Compile the target's training step; needs a C++ compiler.")
@click.option("--threads", default=2, show_default=True)
@click.argument("stages", nargs=-1, type=click.Choice(list(STAGES)))
def main(work: Path, out: Path, compile: bool, threads: int, stages: tuple[str, ...]) -> None:
    torch.set_num_threads(threads)
    work.mkdir(parents=True, exist_ok=True)
    for stage in stages or STAGES:
        began = time.perf_counter()
        STAGES[stage](Run(work, out, compile))
        console.print(f"{stage}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
