"""The host of a device: where its offloaded tensors go."""

from __future__ import annotations

import torch

from lightning_pipe.runtime.activations.cuda import PinnedHost
from lightning_pipe.runtime.activations.plain import FileHost
from lightning_pipe.runtime.activations.protocol import HostStore


def host_of(device: torch.device) -> HostStore:
    """Return the host of a device: pinned memory for CUDA, a file for the CPU, whose memory is the host's already."""
    return PinnedHost(device) if device.type == "cuda" else FileHost()
