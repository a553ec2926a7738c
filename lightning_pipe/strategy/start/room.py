"""Room: the memory that one process may still take."""

from __future__ import annotations

from lightning_pipe.profiler.devices import available_bytes
from lightning_pipe.runtime.memory import private_bytes
from lightning_pipe.units import format_bytes

_OF_A_RUN = 4  # times the parameters: they themselves, two sets of gradients, and what a run makes in between


def room_bytes() -> int:
    """Return the bytes that this process can still take on its host, under its own limits, too."""
    try:
        import resource  # not on every platform
    except ImportError:
        return available_bytes()
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return available_bytes() if soft == resource.RLIM_INFINITY else min(available_bytes(), soft - private_bytes())


def too_large_to_run(parameter_bytes: int) -> str:
    """Return why a whole module of this size is not run on this host, beside its captured twin; "" if it may be."""
    needed, room = _OF_A_RUN * parameter_bytes, room_bytes()
    if needed <= room:
        return ""
    return (
        f"its parameters take {format_bytes(parameter_bytes)}, so that two runs with gradients take about "
        f"{format_bytes(needed)}, and this process has room for {format_bytes(max(0, room))}"
    )
