"""Train the tiny target and DFlash drafter in ``examples/tiny`` on the Python standard library, on two CPU cores.

    python examples/train_tiny.py --work DIR [STAGE...]

Stages run in order: tokenizer, target, data, dflash, export, measure. Each leaves its result in DIR and is skipped
when that result exists; training also checkpoints every few minutes, so killing and rerunning continues.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_model import DFlashDrafter, dflash_loss, epoch_batches, fit, progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

EOS, MASK = "<|endoftext|>", "<|MASK|>"
VOCAB = 4096
SEED = 20602
# Character tables and formatted documentation: not code, and a lot of it.
SKIPPED = ("encodings/", "pydoc_data/")
HELD_OUT_ONE_IN = 20

TARGET = dict(
    vocab_size=VOCAB, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, rms_norm_eps=1e-6, hidden_act="silu",
    attention_bias=False, attention_dropout=0.0, tie_word_embeddings=True, initializer_range=0.02,
    use_sliding_window=False, eos_token_id=VOCAB - 2, bos_token_id=None, pad_token_id=VOCAB - 2,
)
ROPE_THETA = 10000.0
TARGET_FIT = dict(steps=4000, lr=3e-3, warmup=0.04, weight_decay=0.1, every=200)
TARGET_BATCH, TARGET_LENGTH = 8, 512

console = Console(stderr=True)


@dataclass(frozen=True)
class Run:
    """Where a run keeps its results, and whether it compiles the training steps."""

    work: Path
    out: Path
    compile: bool

    def compiled(self, function: Callable) -> Callable:
        """``function``, compiled if asked for: about 1.6 times faster, but needs a C++ compiler."""
        return torch.compile(function) if self.compile else function


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


def new_target() -> Qwen3ForCausalLM:
    """A freshly initialised target, the same on every call."""
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(Qwen3Config(**TARGET, rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}))


def train_target(run: Run) -> None:
    """Next-token training of the target on the training stream."""
    result = run.work / "target.safetensors"
    if result.exists():
        return
    stream = load_file(run.work / "corpus.safetensors")["training"].long()
    rows = len(stream) // TARGET_LENGTH - 1  # one row is left for the shift of later epochs
    target = new_target()

    @run.compiled
    def loss_of(tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of ``tokens`` [N, S]."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = target(tokens, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        labels = tokens[:, 1:].flatten()
        return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()

    def loss_at(step: int) -> tuple[Tensor, Tensor]:
        starts = [row * TARGET_LENGTH + epoch * 197 % TARGET_LENGTH
                  for epoch, row in epoch_batches(step, TARGET_BATCH, rows, SEED)]
        return loss_of(torch.stack([stream[start:start + TARGET_LENGTH] for start in starts]))

    bar, report = progress("target", TARGET_FIT["steps"], console)
    with bar:
        fit(target, loss_at, checkpoint=run.work / "target.ckpt", report=report, **TARGET_FIT)
    # Everything after this stage, the drafter included, sees the weights as shipped: rounded to bfloat16.
    save_file({k: v.bfloat16() for k, v in target.state_dict().items() if k != "lm_head.weight"}, result)


STAGES: dict[str, Callable[[Run], None]] = {
    "tokenizer": train_tokenizer,
    "target": train_target,
}


@click.command(help=__doc__)
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Checkpoints and intermediate results.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "tiny", show_default=True,
              help="Where the export stage writes target/, dflash/ and heldout.jsonl.")
@click.option("--compile/--no-compile", default=True, show_default=True, help="Compile the training steps.")
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
