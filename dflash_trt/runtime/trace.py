"""What each step of a generation drafted, verified and accepted: written by `run --trace`, drawn by `inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dflash_trt.checkpoint.spec import Frozen

System = Literal["dflash", "dflare", "d2sd"]
Branches = int | Literal["auto"]
Drafts = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class BranchTrace(Frozen):
    """One re-drafted candidate.

    Attributes:
        kept: drafts of the trunk it keeps, behind the anchor; all of them: the extension of the trunk.
        probability: that the trunk is right so far and no further, by the first drafter's confidences: r(kept).
        tokens: the re-drafted tail.
        confidence: of each of them.
    """

    kept: int
    probability: float
    tokens: tuple[int, ...]
    confidence: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StepTrace(Frozen):
    """One draft-verify step.

    Attributes:
        anchor_position: of the anchor in the sequence, the prompt counted.
        draft: the trunk: drafted tokens, without the anchor; of a token-by-token step none.
        confidence: of each of them.
        branches: none but in D2SD.
        tokens, parents, depths: the verified tree; node 0 is the anchor, its parent -1.
        path: nodes of the accepted path, the anchor first.
        emitted: tokens the step put out: those of the path behind the anchor, then the bonus token, less what a stop
            token or the length limit cut off.
    """

    anchor_position: int
    draft: tuple[int, ...]
    confidence: tuple[float, ...]
    branches: tuple[BranchTrace, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    path: tuple[int, ...]
    emitted: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Trace(Frozen):
    """All steps of one generation; `texts` has the text of each token id that occurs in them.

    Without speculation, steps have no drafts, and branches is 0.
    """

    kind: Literal["dflash-trt trace"] = "dflash-trt trace"
    version: Literal[1] = 1
    system: System
    speculation: bool
    block_size: int
    vp_block_size: int
    branches: Branches
    sampling: dict[str, Any]
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    steps: tuple[StepTrace, ...]
    texts: dict[int, str]
