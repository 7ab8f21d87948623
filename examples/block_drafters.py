"""The drafters that ``train_tiny.py`` and ``smollm2/train_drafters.py`` train, and what every training stage shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb


class DraftAttention(nn.Module):
    """Block queries attend to the projected target features (context) and to their own block."""

    def __init__(self, config: Qwen3Config, own_context_projections: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, config.rms_norm_eps)
        if own_context_projections:
            self.k_proj_target = nn.Linear(config.hidden_size, kv_size, bias=False)
            self.v_proj_target = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.own_context_projections = own_context_projections

    def forward(self, u: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """``u`` [N, A*B, H], ``context`` [N, S, H], ``rope`` over S + A*B keys, ``mask`` [N, 1, A*B, S + A*B]."""
        if self.own_context_projections:
            k = torch.cat([self.k_proj_target(context), self.k_proj(u)], dim=1)
            v = torch.cat([self.v_proj_target(context), self.v_proj(u)], dim=1)
        else:
            rows = torch.cat([context, u], dim=1)
            k, v = self.k_proj(rows), self.v_proj(rows)
        q = self.q_norm(self.q_proj(u).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v = v.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        cos, sin = rope
        n = u.shape[1]
        q, _ = apply_rotary_pos_emb(q, q, cos[:, -n:], sin[:, -n:])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DraftLayer(nn.Module):
    """A Qwen3 decoder layer whose attention also reads the target features."""

    def __init__(self, config: Qwen3Config, own_context_projections: bool) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, own_context_projections)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """``x`` [N, A*B, H] -> [N, A*B, H]; the other shapes as in :class:`DraftAttention`."""
        x = x + self.self_attn(self.input_layernorm(x), context, rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockDrafter(nn.Module):
    """What all drafters share; parameter names are those of the published checkpoints."""

    own_context_projections = False

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            DraftLayer(config, self.own_context_projections) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)  # no parameters, no persistent buffers: adds nothing to the file

    def contexts(self, features: Tensor) -> list[Tensor]:
        """``features`` [N, S, taps*H] -> the context of each layer, [N, S, H]."""
        raise NotImplementedError

    def forward(self, features: Tensor, block: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Hidden states of all blocks.

        ``features`` [N, S, taps*H], ``block`` [N, A*B, H] embeddings, ``positions`` [N, S + A*B] absolute,
        ``mask`` [N, 1, A*B, S + A*B] -> [N, A*B, H].
        """
        rope = self.rotary(block, positions)
        for layer, context in zip(self.layers, self.contexts(features), strict=True):
            block = layer(block, context, rope, mask)
        return self.norm(block)

    @torch.no_grad()
    def warm_start(self, target: Qwen3ForCausalLM) -> None:
        """Begin with the target's last layers: a short training has no time to find these itself."""
        for own, source in zip(self.layers, target.model.layers[-len(self.layers):], strict=True):
            own.load_state_dict(source.state_dict(), strict=False)
        self.norm.load_state_dict(target.model.norm.state_dict())


class DFlashDrafter(BlockDrafter):
    """One context for all layers, and the VP drafter: the same model trained with visible prefixes."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        taps = config.dflash_config["target_layer_ids"]
        self.fc = nn.Linear(len(taps) * config.hidden_size, config.hidden_size, bias=False)
        nn.init.normal_(self.fc.weight, std=0.02)

    def contexts(self, features: Tensor) -> list[Tensor]:
        return [self.hidden_norm(self.fc(features))] * len(self.layers)

    @torch.no_grad()
    def warm_start(self, target: Qwen3ForCausalLM) -> None:
        """As above, reading the last tap."""
        super().warm_start(target)
        size = self.config.hidden_size
        self.fc.weight[:, -size:] += torch.eye(size)


class DFlareDrafter(BlockDrafter):
    """Each layer has a mixture of the taps of its own, and projections of its own for the context."""

    own_context_projections = True

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        taps = config.dflash_config["target_layer_ids"]
        self.layer_fusion_weights = nn.Parameter(torch.zeros(config.num_hidden_layers, len(taps)))

    def contexts(self, features: Tensor) -> list[Tensor]:
        shares = self.layer_fusion_weights.softmax(-1)
        mixed = torch.einsum("nsth,dt->dnsh", features.unflatten(-1, (shares.shape[1], -1)), shares.to(features.dtype))
        return list(self.hidden_norm(mixed))

    @torch.no_grad()
    def warm_start(self, target: Qwen3ForCausalLM) -> None:
        """As above, each layer reading mostly the tap just before the target layer it begins as."""
        super().warm_start(target)
        depth = len(self.layers)
        self.layer_fusion_weights[torch.arange(depth), torch.arange(-depth, 0)] += 2.0
        for layer in self.layers:
            attention, scale = layer.self_attn, layer.input_layernorm.weight  # the context passes no input norm
            attention.k_proj_target.weight.copy_(attention.k_proj.weight * scale)
            attention.v_proj_target.weight.copy_(attention.v_proj.weight * scale)


def target_features(target: Qwen3ForCausalLM, tokens: Tensor, taps: list[int]) -> Tensor:
    """``tokens`` [N, S] -> concatenated outputs of decoder blocks ``taps``, [N, S, taps*H]."""
    states = target.model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[tap + 1] for tap in taps], dim=-1)  # states[0] is the embedding


def block_layout(anchors: Tensor, length: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Absolute positions and attention mask of many blocks over one shared context.

    ``anchors`` [N, A] -> positions [N, S + A*B], mask [N, 1, A*B, S + A*B] (True = may attend). A block sees the
    features strictly before its anchor, as at inference, where the anchor has not yet been through the target, and
    every position of its own block, but no other block.
    """
    count, per_row = anchors.shape
    slots = per_row * block_size
    steps = torch.arange(max(length, slots), device=anchors.device)
    query = (anchors[..., None] + steps[:block_size]).flatten(1)
    positions = torch.cat([steps[:length].expand(count, -1), query], dim=1)
    owner = steps[:slots] // block_size
    sees_context = steps[:length] < anchors.repeat_interleave(block_size, dim=1)[..., None]
    sees_block = (owner[:, None] == owner).expand(count, -1, -1)
    return positions, torch.cat([sees_context, sees_block], dim=-1)[:, None]


def block_loss(
    drafter: BlockDrafter, head: Tensor, tokens: Tensor, features: Tensor, anchors: Tensor, visible: Tensor,
    gamma: float, *, lengths: Tensor | None = None, vocabulary: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weighted cross entropy of ``tokens`` [N, S] drafted from ``anchors`` [N, A], and the mean acceptance length.

    ``head`` [V, H] is the target's, tied to its embedding: a drafter owns neither. ``features`` [N, S, taps*H];
    ``visible`` [N, A] tokens after each anchor are shown to the drafter and not learnt: none for a first drafter, some
    for a variable-prefix drafter. ``lengths`` [N] of the texts, where they are padded. ``vocabulary`` [W], ascending,
    limits the softmax to some tokens, all labels among them: a sampled softmax, where the whole would cost the most.

    The second value counts the correct drafts after the visible ones, up to the first miss, and the target's bonus
    token: what greedy verification would accept where the target's greedy choice is the token in the sequence.
    """
    size = drafter.config.block_size
    positions, mask = block_layout(anchors, tokens.shape[1], size)
    offsets = torch.arange(size, device=tokens.device)
    places = anchors[..., None] + offsets
    ends = tokens.shape[1] if lengths is None else lengths[:, None, None]
    block = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1).flatten(1)).view(*anchors.shape, size)
    shown = torch.where(offsets <= visible[..., None], block, drafter.config.dflash_config["mask_token_id"])
    hidden = drafter(features, F.embedding(shown.flatten(1), head), positions, mask)
    hidden = hidden.unflatten(1, (-1, size))[:, :, 1:]  # [N, A, B-1, H]
    labels, after = block[..., 1:], offsets[1:] - visible[..., None]  # after >= 1 at the masked positions
    if vocabulary is not None:
        head, labels = head[vocabulary], torch.searchsorted(vocabulary, labels.contiguous())
    logits = F.linear(hidden, head).float()
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    learnt = (after > 0) & (places[..., 1:] < ends)
    # An early miss throws away everything after it, so early positions weigh more.
    weights = torch.exp(-(after - 1) / gamma) * learnt
    right = ((logits.argmax(-1) == labels) & learnt) | (after <= 0)
    accepted = right.long().cumprod(-1).sum(-1) - visible + 1
    return ((losses * weights).sum(-1) / weights.sum(-1).clamp(min=1e-9)).mean(), accepted.float().mean()


def progress(title: str, total: int, console: Console) -> tuple[Progress, Callable[[int, str], None]]:
    """A started progress bar and its ``update(completed, note)``; where there is no terminal, a line now and then."""
    bar = Progress(TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                   TextColumn("{task.fields[note]}"), console=console, disable=not console.is_terminal)
    task = bar.add_task(title, total=total, note="")

    def update(completed: int, note: str) -> None:
        bar.update(task, completed=completed, note=note)
        if not console.is_terminal and (completed % max(1, total // 40) == 0 or completed == total):
            console.print(f"{title}: {completed}/{total}  {note}")

    return bar, update


def fit(module: nn.Module, loss_at: Callable[[int], tuple[Tensor, Tensor]], *, steps: int, lr: float, warmup: int,
        cosine: int, cooldown: int, weight_decay: float, checkpoint: Path, every: int,
        report: Callable[[int, str], None]) -> None:
    """Train ``module`` with AdamW, continuing from ``checkpoint`` if it exists.

    The learning rate rises over ``warmup`` steps, follows a cosine that would reach zero at step ``cosine``, and falls
    in a straight line to zero over the last ``cooldown`` steps wherever that is lower. A cosine longer than ``steps``
    lets the end of a run be brought forward while it is under way without changing the steps already taken.

    ``loss_at(step)`` returns (loss, a second value to show). It must draw its batch from ``step`` alone or from
    torch's global generator, whose state is part of the checkpoint, so that a resumed run sees the same batches.
    """
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": weight_decay},
                                   {"params": vectors, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95), fused=True)
    start = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        start = state["step"]
    shown = None
    module.train()
    for step in range(start, steps):
        decay = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / (cosine - warmup)))
        scale = min((step + 1) / warmup, decay, (steps - step) / cooldown)
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        loss, extra = loss_at(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        values = torch.stack([loss.detach(), extra.detach()])
        shown = values if shown is None else 0.98 * shown + 0.02 * values
        report(step + 1, f"loss {shown[0]:.3f}  {shown[1]:.3f}")
        if (step + 1) % every == 0 or step + 1 == steps:
            partial = checkpoint.with_suffix(".partial")  # a kill while writing must not lose the last good state
            torch.save({"module": module.state_dict(), "optimizer": optimizer.state_dict(),
                        "rng": torch.get_rng_state(), "step": step + 1}, partial)
            partial.replace(checkpoint)
    module.eval()


def epoch_batches(step: int, batch: int, rows: int, seed: int) -> Iterator[tuple[int, int]]:
    """(epoch, row) of each of the ``batch`` examples of ``step``, a fresh order of all ``rows`` every epoch."""
    for position in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(position, rows)
        generator = torch.Generator().manual_seed(seed * 1000 + epoch)
        yield epoch, int(torch.randperm(rows, generator=generator)[index])
