"""One copy to the host and back, timed."""

from __future__ import annotations

import time

import torch

from lightning_pipe.capture.device_streams import finish_stream
from lightning_pipe.runtime.activations.protocol import HostStore, StorageRange

_PATIENCE_S = 1.0  # of one wait for a copy, which will end


def trip_s(host: HostStore, count: int, *, device: torch.device) -> float:
    """Return the seconds in which so many bytes of a device are copied to its host and back."""
    content = torch.zeros(count, dtype=torch.uint8, device=device)
    finish_stream(device)
    start = time.perf_counter()
    parcel = host.take([StorageRange(content.untyped_storage(), 0, count)])
    parcel.fetch()
    while not parcel.returned.wait(_PATIENCE_S):
        pass
    finish_stream(device)
    return time.perf_counter() - start
