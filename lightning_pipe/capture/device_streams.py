"""Waits of the host for a device: for the work of its current stream, never for that of all streams.

On another stream a message may be under way that a peer sends later (a receive of NCCL is a kernel that runs until
then), and the peer may need what this rank has not sent yet. Whoever waits for the whole device waits for that too.
"""

from __future__ import annotations

import torch


def finish_stream(device: torch.device) -> None:
    """Wait until a device has done what was queued on its current stream; a CPU queues nothing."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
