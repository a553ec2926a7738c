"""Shapes of batches: which of their sizes should be symbols of a graph, and a word where every shape takes time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightning_pipe.capture.graphs.lengths import Lengths, changed_sizes
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.strategy.steps.captured import Captured
from lightning_pipe.strategy.steps.step_calls import StepRequest
from lightning_pipe.strategy.steps.step_runtime import RankStep

_MANY = 8  # shapes of batches of one step
_TRIES = 3  # graphs with symbols for lengths that do not hold for the next lengths


def symbolic_lengths(relatives: Sequence[Captured], call: StepRequest, *, batch_dim: int) -> Lengths:
    """Return the sizes that have changed since a step was captured, so that a graph should have symbols for them.

    Args:
        relatives: captured steps that differ in the shapes of their batches only, and do not hold for this one.
        call: the step with a new batch.
        batch_dim: dimension of the samples.
    """
    captures = [one.capture for one in relatives if one.request.lengths]
    traces = {id(capture.general) for capture in captures if capture.general is not None}
    if len(traces) >= _TRIES or any(capture.general is None for capture in captures):
        return frozenset()
    changes = [changed_sizes(one.request.structure, call.structure, batch_dim=batch_dim) for one in relatives]
    return frozenset().union(*(change for change in changes if change))


def different_traces(steps: Sequence[RankStep]) -> list[RankStep]:
    """Return one step for every graph with symbols for lengths that steps come from; the youngest first."""
    return [*{id(s.capture.general): s for s in steps if s.capture.general is not None}.values()][::-1]


class ShapesCaptured:
    """Shapes of batches that steps were captured for while they were run, with the seconds that it took."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[object, float]] = defaultdict(dict)

    def note(self, call: StepRequest, seconds: float) -> None:
        """Note a capture, and warn where there have been many."""
        known = self._seconds[call.method]
        if call.structure.leaves in known:
            return
        known[call.structure.leaves] = seconds
        if len(known) == _MANY:
            rank_zero_warn(
                f"{call.method} was captured for {_MANY} more shapes of batches, {sum(known.values()) / _MANY:.1f} s "
                "each, and every other shape takes as long: its Python turns sizes into constants (range(x.size(1)), "
                "say). Compute from tensors instead, or pad sequences to a few lengths (to the next multiple of 64)."
            )
