"""Telling drafter kinds apart, by their tensors alone.

Config names do not tell: training codes write the same `architectures` for different drafters, and use
`num_target_layers` for different things.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dflash_trt.errors import CheckpointError

# Kind and the parts of tensor names (between dots, exact: `k_proj` is no `k_proj_target`) that only it has.
# The order matters where a kind has another's parts too: DFly has DFlare's fusion, DSpark an embedding of its own.
_MARKS: tuple[tuple[str, frozenset[str]], ...] = (
    ("a DFly drafter", frozenset({"hidden_correction"})),
    ("a DFlash2 drafter", frozenset({"attention_conv", "mlp_conv", "candidate_selector"})),
    ("a DSpark drafter", frozenset({"markov_head", "confidence_head"})),
    ("a Domino drafter", frozenset({"prefix_gru"})),
    ("a DFlare drafter", frozenset({"layer_fusion_weights", "k_proj_target", "v_proj_target"})),
    ("a drafter with a mask embedding of its own", frozenset({"mask_embedding"})),
    ("a drafter with an embedding or LM head of its own", frozenset({"embed_tokens", "lm_head"})),
)


def check_is_dflash(names: Iterable[str], where: Path) -> None:
    """Pass DFlash: `fc.weight`, and none of the other kinds' tensors.

    Raises:
        CheckpointError: naming the kind it is, and the tensor that shows it.
    """
    found = list(names)
    if any(name.startswith("model.layers.") for name in found) and "fc.weight" not in found:
        mend = "Give the drafter's folder, and this one as the target"
        raise CheckpointError("this is a whole language model, not a drafter", where=str(where), mend=mend)
    for kind, marks in _MARKS:
        shown = [name for name in found if not marks.isdisjoint(name.split("."))]
        if shown:
            what = f"this is {kind} (tensor {shown[0]}), which this version does not support"
            raise CheckpointError(what, where=str(where), mend="Supported: DFlash as z-lab publishes it")
    if "fc.weight" not in found:
        what = "this is no DFlash drafter: it has no tensor fc.weight"
        raise CheckpointError(what, where=str(where), mend="Supported: DFlash as z-lab publishes it")
