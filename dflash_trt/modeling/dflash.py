"""The DFlash drafter (arXiv 2602.06036, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from dflash_trt.checkpoint.spec import DrafterSpec, TargetSpec
from dflash_trt.modeling.drafter import BlockDrafter
from dflash_trt.modeling.layers import CacheRows, HiddenContext, Injection


class DFlashDrafter(BlockDrafter):
    """The context of all layers is one tensor, `hidden_norm(fc(features))`."""

    def __init__(self, spec: DrafterSpec, target: TargetSpec, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__(spec, target, cos, sin)
        self.fc = nn.Linear(len(spec.taps) * spec.target_hidden_size, spec.hidden_size, bias=False)

    def injections(self, features: torch.Tensor, rows: CacheRows) -> Sequence[Injection]:
        context = self.normed(F.linear(features.float(), self.fc.weight.float()))
        return (HiddenContext(rows, context),) * self.spec.num_layers
