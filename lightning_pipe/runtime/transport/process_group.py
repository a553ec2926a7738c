"""Process group transport: NCCL where the default process group has it for the device, else gloo.

With NCCL, the first run of each program goes over gloo all the same (`staged`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.transport.gloo import GlooTransport
from lightning_pipe.runtime.transport.nccl import NcclTransport
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.transport.staged import StagedTransport

MARGIN_S = 60.0  # by which torch's own time-out comes after ours, so that our message is the one that is seen


def process_group_transport(device: torch.device, *, deadline_s: float = 300.0) -> Transport:
    """Return the transport between the ranks of the default process group, for tensors on `device`.

    Raises:
        PipelineError: if torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise PipelineError("torch.distributed is not initialised; call init_process_group before making a transport.")
    rank, timeout_s = dist.get_rank(), deadline_s + MARGIN_S
    over_host = GlooTransport(rank=rank, ranks=dist.get_world_size(), timeout_s=timeout_s)
    if device.type == "cuda" and "nccl" in dist.get_backend_config():
        return StagedTransport(NcclTransport(rank=rank, device=device, timeout_s=timeout_s), over_host)
    return over_host
