"""Predictions of the weights of one stage that are there, and when one has to be made.

Predictions depend on weights and the optimizer's state alone. So between two steps one serves F, I and W of all
micro-batches that read the same number of updates ahead. A rank keeps one: where F and I read different ones in turn,
each is made again. Where all F of a batch read one prediction, that outlives steps, and others lie beside it.

The runtime reads weights from it, and the planner counts with it what the runtime makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lightning_pipe.core.program import ComputeKind

T = TypeVar("T")


@dataclass
class PredictionCache(Generic[T]):
    """Predictions of one stage.

    Args:
        horizons: how many updates ahead F reads, and I and W; 0 is never made.
        once: whether all F of a batch read one prediction.
    """

    horizons: tuple[int, int]
    once: bool
    _present: dict[int, T] = field(default_factory=dict)  # made since the last step, by horizon
    _of_batch: dict[int, T] = field(default_factory=dict)  # that F reads, by number of the batch

    def read(
        self, kind: ComputeKind, batch: int, *, make: Callable[[int], T], keep: Callable[[T], T] = lambda made: made
    ) -> T | None:
        """Return the prediction that a pass of a batch reads; None for the weights of now.

        Args:
            kind: "F", or "I" for I and W.
            batch: its number.
            make: predicts, for a horizon; weights of now are asked for by 0.
            keep: makes of a prediction one that a step of the optimizer does not change.
        """
        horizon = self.horizons[kind != "F"]
        if not self.once or kind != "F":
            return self._at(horizon, make) if horizon else None
        if batch not in self._of_batch:
            self._of_batch.clear()  # so that its memory is free
            self._of_batch[batch] = keep(self._at(horizon, make) if horizon else make(0))
        return self._of_batch[batch]

    def _at(self, horizon: int, make: Callable[[int], T]) -> T:
        if horizon not in self._present:
            if not self.once:
                self._present.clear()
            self._present[horizon] = make(horizon)
        return self._present[horizon]

    def step(self) -> None:
        """Note that the optimizer steps."""
        self._present.clear()

    @property
    def there(self) -> list[T]:
        """Return all that later passes may read; one may be there twice."""
        return [*self._present.values(), *self._of_batch.values()]
