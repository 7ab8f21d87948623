"""Telling drafter kinds apart, by their tensors alone.

Config names do not tell: training codes write the same `architectures` for different drafters, and use
`num_target_layers` for different things.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from dflash_trt.errors import CheckpointError

FC = "fc.weight"
FUSION_WEIGHTS = "layer_fusion_weights"
TARGET_PROJECTIONS = ("k_proj_target", "v_proj_target")

_SUPPORTED = "Supported: DFlash as z-lab publishes it, and DFlare as AngelSlim and AngelSpec publish it"

# Kind and the parts of tensor names (between dots, exact) that only it has, of those that are not supported.
# The order matters where a kind has another's parts too: a DSpark drafter has an embedding of its own.
_MARKS: tuple[tuple[str, frozenset[str]], ...] = (
    ("a DFly drafter", frozenset({"hidden_correction"})),
    ("a DFlash2 drafter", frozenset({"attention_conv", "mlp_conv", "candidate_selector"})),
    ("a DSpark drafter", frozenset({"markov_head", "confidence_head"})),
    ("a Domino drafter", frozenset({"prefix_gru"})),
    ("a drafter with the names AngelSpec trains under", frozenset({"context_proj", "context_norm", "final_norm"})),
    ("a drafter with a mask embedding of its own", frozenset({"mask_embedding"})),
    ("a drafter with an embedding or LM head of its own", frozenset({"embed_tokens", "lm_head"})),
)


def drafter_kind(names: Iterable[str], where: Path) -> Literal["dflash", "dflare"]:
    """Which drafter has tensors of these names.

    DFlash has `fc.weight`; DFlare has `layer_fusion_weights` in its place, and `k_proj_target`, `v_proj_target` in each
    layer (arXiv 2606.02091).

    Raises:
        CheckpointError: another kind, a mixture or part of the two, or no drafter; naming the tensors that show it.
    """
    found = list(names)
    if any(name.startswith("model.layers.") for name in found) and FC not in found:
        mend = "Give the drafter's folder, and this one as the target"
        raise CheckpointError("this is a whole language model, not a drafter", where=str(where), mend=mend)
    for kind, marks in _MARKS:
        shown = [name for name in found if not marks.isdisjoint(name.split("."))]
        if shown:
            what = f"this is {kind} (tensor {shown[0]}), which this version does not support"
            raise CheckpointError(what, where=str(where), mend=_SUPPORTED)
    # exact parts: `k_proj` is no `k_proj_target`
    projections = [name for name in found if not set(TARGET_PROJECTIONS).isdisjoint(name.split("."))]
    match (FC in found, FUSION_WEIGHTS in found, bool(projections)):
        case True, False, False:
            return "dflash"
        case False, True, True:
            return "dflare"
        case False, False, False:
            what, mend = f"this is no drafter: it has neither {FC} (DFlash) nor {FUSION_WEIGHTS} (DFlare)", _SUPPORTED
        case True, _, _:
            dflare = FUSION_WEIGHTS if FUSION_WEIGHTS in found else projections[0]
            what = f"{FC} is DFlash's and {dflare} DFlare's: which of the two this is, is not clear"
            mend = f"{_SUPPORTED}; mixtures of the two are not"
        case False, False, True:
            what = f"this is a DFlare drafter without its fusion weights: it has {projections[0]}"
            what += f", but no {FUSION_WEIGHTS}"
            mend = "Download or export the whole checkpoint again"
        case _:
            what = f"this is a DFlare drafter without projections for the context: it has {FUSION_WEIGHTS}"
            what += f", but no tensor has {' or '.join(TARGET_PROJECTIONS)} in its name"
            mend = f"Download or export the whole checkpoint again. {_SUPPORTED}"
    raise CheckpointError(what, where=str(where), mend=mend)
