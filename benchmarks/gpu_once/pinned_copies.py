"""Section `offload`: the rate of copies to pinned memory and back, and how much of them hides behind computing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_once.findings import Assignment
from lightning_pipe.runtime.activations.cuda import PinnedHost
from lightning_pipe.runtime.activations.protocol import StorageRange

PARCEL_BYTES = 512 << 20
TRIPS, PRODUCTS = 5, 8


class Trips:
    """Send a parcel to the host and fetch it back, with matrix products between or without."""

    def __init__(self) -> None:
        self._host = PinnedHost(torch.device("cuda", 0))
        self._content = torch.randint(255, (PARCEL_BYTES,), dtype=torch.uint8, device="cuda")
        self._matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def trip(self, products: int = 0) -> Any:
        """Launch a trip with so many products beside it."""
        parcel = self._host.take([StorageRange(self._content.untyped_storage(), 0, PARCEL_BYTES)])
        self.compute(products)
        parcel.fetch()
        parcel.left.wait(0)
        return parcel

    def compute(self, products: int) -> None:
        """Launch products."""
        for _ in range(products):
            torch.mm(self._matrix, self._matrix)

    def check(self, parcel: Any) -> None:
        """Compare what came back with what went away.

        Raises:
            RuntimeError: if they differ.
        """
        parcel.returned.wait(0)
        (storage,) = parcel.hand_over()
        if not torch.equal(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage), self._content):
            raise RuntimeError("a parcel came back with other bytes")

    def seconds(self, products: int = 0) -> tuple[float, float]:
        """Return the seconds until a trip is launched, and until it has ended."""
        parcels = list[Any]()
        launched_s, ended_s = _timed(lambda: parcels.append(self.trip(products)))
        self.check(parcels.pop())
        return launched_s, ended_s


def offload(assignment: Assignment) -> None:
    """Report rates, and the seconds of copies and products together beside those of either alone."""
    trips = Trips()
    for _ in range(2):
        trips.seconds()
    launched_s, alone_s = map(statistics.median, zip(*(trips.seconds() for _ in range(TRIPS)), strict=True))
    trips.compute(3)
    product_s = statistics.median(_timed(lambda: trips.compute(PRODUCTS))[1] for _ in range(3)) / PRODUCTS
    products = max(1, round(alone_s / product_s))
    together_s, computing_s = statistics.median(trips.seconds(products)[1] for _ in range(TRIPS)), products * product_s
    assignment.report(
        f"{PARCEL_BYTES >> 20} MiB out and back {alone_s * 1e3:.1f} ms = {2 * PARCEL_BYTES / alone_s / 1e9:.1f} GB/s; "
        f"products {computing_s * 1e3:.1f} ms; together {together_s * 1e3:.1f} ms = "
        f"{together_s / max(alone_s, computing_s):.2f} of the longer, "
        f"{together_s / (alone_s + computing_s):.2f} of the sum; "
        f"the host launches a trip in {launched_s * 1e3:.2f} ms"
    )


def _timed(launch: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds until a launch came back, and until the device has done it."""
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    launch()
    launched_s = time.perf_counter() - begin_s
    torch.cuda.synchronize()
    return launched_s, time.perf_counter() - begin_s
