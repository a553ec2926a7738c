"""Room: the memory that one process may still take, and where the values of a module are for some runs of its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_pipe.lightning_names import pl
from lightning_pipe.profiler.devices import available_bytes
from lightning_pipe.runtime.memory import private_bytes
from lightning_pipe.strategy.start.mapped import MappedTensors
from lightning_pipe.units import format_bytes

_GRADIENTS = 2  # sets of them: of the plain and of the captured step
_MAKING = 3  # tensors of a parameter's size at once while its gradient is made and added


def room_bytes() -> int:
    """Return the bytes that this process can still take on its host, under its own limits, too."""
    try:
        import resource  # not on every platform
    except ImportError:
        return available_bytes()
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return available_bytes() if soft == resource.RLIM_INFINITY else min(available_bytes(), soft - private_bytes())


@dataclass(frozen=True)
class HostRoom:
    """Where the values and gradients of a module are on a host for some runs of its step.

    Attributes:
        refusal: why there is no room for them; "" if there is.
        files: where they are, if not in memory.
    """

    refusal: str = ""
    files: MappedTensors | None = None

    @property
    def placed(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return what puts a value there; None leaves it in memory."""
        return None if self.files is None else self.files.copied_if_possible


def room_for_runs(module: pl.LightningModule, *, absent: bool = False, made: int = 0) -> HostRoom:
    """Return where a whole module is for a plain run and one of its captured twin, forward and backward.

    Args:
        module: the module.
        absent: whether values of its parameters are not on this host yet.
        made: bytes that a forward makes.
    """
    sizes = [parameter.nbytes for parameter in module.parameters()]
    room, own = room_bytes(), sum(sizes)
    if (_GRADIENTS + 1 + absent) * own + made <= room:
        return HostRoom()
    files = MappedTensors.near(module)
    least, on_disk = _MAKING * max(sizes, default=0) + made, (_GRADIENTS + absent) * own
    if least <= room and on_disk <= files.free_bytes():
        return HostRoom(files=files)
    return HostRoom(
        f"its parameters take {format_bytes(own)}, so that two runs with gradients take {format_bytes(least)} of "
        f"memory and {format_bytes(on_disk)} of files; there is room for {format_bytes(max(0, room))} in memory, and "
        f"for {format_bytes(files.free_bytes())} in {files}"
    )
