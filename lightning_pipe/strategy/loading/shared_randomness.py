"""Random numbers of ranks that load nothing: those that one device draws, so that hooks draw alike on all ranks.

Loading draws some (an order, what augments a sample), and so do hooks of the transfer. Ranks that load begin every
iteration of a loader with the same state of all generators; the others take over what the first of them has then, and
whatever loading makes of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lightning_pipe.capture.steps.keyed_random import Randomness
from lightning_pipe.strategy.ranks.control_plane import ControlPlane


class SharedRandomness:
    """The state of the generators of one rank, and that of the first rank that loads.

    Args:
        control: to the other ranks.
        device: where this rank computes.

    Attributes:
        loading: ranks that load; the first leads.
        are_drawn: whether loading, or hooks of the transfer, were seen to draw numbers.
    """

    def __init__(self, control: ControlPlane, device: torch.device) -> None:
        self._control, self._device = control, device
        self.loading = tuple(range(control.ranks))
        self.are_drawn = False
        self._later: Randomness | None = None

    @property
    def _leads(self) -> bool:
        return self._control.rank == self.loading[0]

    @property
    def _is_followed(self) -> bool:
        return len(self.loading) < self._control.ranks

    @contextlib.contextmanager
    def put_by(self) -> Iterator[None]:
        """Take numbers that are drawn inside back until `resume`, when the other ranks hear of them."""
        before = self.now()
        yield
        self._later = self.since(before)
        if before is not None and self._later is not None:
            before.restore(self._device)

    def resume(self) -> None:
        """Go on with what was put by."""
        later, self._later = self._later, None
        if later is not None:
            later.restore(self._device)

    def share(self) -> None:
        """Give all ranks the state of the first that loads; on all ranks together."""
        if self._control.ranks > 1:
            self._tell(Randomness.now(self._device) if self._leads else None)

    def now(self) -> Randomness | None:
        """Return the state before something is loaded, where ranks that follow need to know whether that draws."""
        loads = self._control.rank in self.loading
        return Randomness.now(self._device) if loads and self._is_followed else None

    def since(self, before: Randomness | None) -> Randomness | None:
        """Return the state of now if numbers were drawn since."""
        now = None if before is None else Randomness.now(self._device)
        return None if now == before else now

    def tell_since(self, before: Randomness | None) -> None:
        """Let ranks that follow go on with what loading has left; on all ranks together."""
        if self._is_followed:
            self._tell(self.since(before) if self._leads else None)

    def _tell(self, left: Randomness | None) -> None:
        source = self.loading[0]
        self.follow(self._control.broadcast(left, source=source, what="the random numbers of the rank that loads"))

    def follow(self, left: Randomness | None) -> None:
        """Go on with the state of the first rank that loads, if it has drawn numbers."""
        if left is not None and not self._leads:
            left.restore(self._device)
