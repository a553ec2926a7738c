"""Let torchvision be imported where its compiled operators do not load, as with a torch without CUDA.

The wheel of the package index is built for torch with CUDA; with another torch, its import ends at the operator that it
describes without having it. Nothing here calls one.
"""

from __future__ import annotations

import torch

for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
