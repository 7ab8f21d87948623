"""The torch ops of the domain: defined where their references are, dispatched by the device of their tensors.

References serve the CPU; `ops/cuda.py` registers the kernels. A device without an implementation is torch's
NotImplementedError, never another device's.
"""

from __future__ import annotations

import torch

from dflash_trt.ops import DOMAIN

LIBRARY = torch.library.Library(DOMAIN, "FRAGMENT")
