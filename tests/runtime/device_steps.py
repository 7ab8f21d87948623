"""Small random engines whose drafts are right now and then, and what they generate by both loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from engines import torch_engine
from makers import make_drafter, make_target
from runtime.hints import chance, hinted

from dflash_trt.runtime.engine import Engine, Generation

SYSTEMS = ("dflash", "dflare", "d2sd", "d2sd, longer")


class HintedModule(torch.nn.Module):
    """A drafter module whose drafts and confidences are `hints.Hinted`'s, whoever runs it."""

    def __init__(
        self, module: torch.nn.Module, rights: Sequence[list[int]], accuracy: float, salt: str, confidences: Any = ()
    ) -> None:
        super().__init__()
        self.module, self.rights, self.accuracy, self.salt = module, rights, accuracy, salt
        self.confidences = confidences

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids, confidence, *rest = self.module(*inputs)
        ids, confidence = ids.clone(), confidence.clone()
        for row, (block, positions) in enumerate(zip(inputs[3].tolist(), inputs[4].tolist(), strict=True)):
            anchor = positions[0]
            starts = [place for place, position in enumerate(positions) if position == anchor]
            for start, end in zip(starts, [*starts[1:], len(block)], strict=True):
                own = block[start:end]
                drafts = hinted(ids[row, start:end].tolist(), own, anchor, self.rights[row], self.accuracy, self.salt)
                ids[row, start:end] = torch.tensor(drafts)
                for place in range(start, end) if self.confidences else ():
                    pick = chance("c", self.salt, anchor, tuple(own), place - start)
                    confidence[row, place] = self.confidences[int(pick * len(self.confidences))]
        return (ids, confidence, *rest)


def hint(
    engine: Engine, prompts: Sequence[list[int]], accuracy: Sequence[float] = (0.6, 0.6), confidences: Any = ()
) -> None:
    """Hints the drafters, one prompt a row, with what the target generates to the end of the capacity."""
    rights = [
        [*prompt, *engine.generate(prompt, speculation=False, max_tokens=1000, ignore_eos=True).token_ids]
        for prompt in prompts
    ]
    for name, share in zip(("drafter", "vp_drafter"), accuracy, strict=True):
        session = getattr(engine, name)
        if session is not None:
            module = session.module
            module = module.module if isinstance(module, HintedModule) else module
            session.module = HintedModule(module, rights, share, name, confidences)


def engine_of(folder: Path, system: str, **options: Any) -> Engine:
    """The same small random engine each time it is asked."""
    if not (folder / "t").exists():
        make_target(folder / "t", tie=False, vocab_size=9, num_hidden_layers=2, seed=4)
        for name, size, kind, seed in (
            ("dflash", 5, "dflash", 6), ("dflare", 5, "dflare", 6), ("vp", 5, "dflash", 7), ("longer", 8, "dflash", 7),
        ):  # fmt: skip
            make_drafter(folder / name, folder / "t", [0, 1], size, layers=1, seed=seed, kind=kind)  # type: ignore[arg-type]
    own = {"d2sd": ["dflash", "vp"], "d2sd, longer": ["dflash", "longer"]}.get(system, [system])
    return torch_engine(folder / "t", *(folder / name for name in own), **{"max_seq_len": 64, **options})


@dataclass
class Seen:
    """Acceptance lengths of steps, sequences by why and how they ended, and numbers of rows."""

    lengths: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)


def both(engine: Engine, generate: Callable[[Engine], list[Generation]]) -> list[list[Generation]]:
    """The host loop's outputs, and the device steps'."""
    outputs = []
    for device in (False, True):
        engine.device_step = device
        outputs.append(generate(engine))
    return outputs


def check(engine: Engine, prompts: list[list[int]], seen: Seen | None = None, **request: Any) -> list[Generation]:
    """One batch by both loops; returns the device's outputs."""
    host, device = both(engine, lambda own: own.generate(prompts, **request))
    for expected, output in zip(host, device, strict=True):
        assert output.token_ids == expected.token_ids
        assert output.text == expected.text
        assert output.finish_reason == expected.finish_reason
        own, other = output.statistics, expected.statistics
        assert own.acceptance_lengths == other.acceptance_lengths
        assert own.accepted_drafts == other.accepted_drafts
        assert own.target_passes == other.target_passes
        if engine.vp_drafter is None:
            assert own.proposed_drafts == other.proposed_drafts
        else:  # equal siblings count each
            assert own.proposed_drafts >= other.proposed_drafts
        if seen is not None:
            seen.lengths.update(own.acceptance_lengths)
            cut = len(output.prompt_token_ids) + len(output.token_ids) == engine.limits.max_seq_len
            seen.ends["capacity" if cut else output.finish_reason] += 1
    if seen is not None:
        seen.rows[len({len(output.statistics.acceptance_lengths) for output in device})] += 1
    return device
