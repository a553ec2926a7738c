"""Estimates of pipelines that are cut anywhere: one table of fine positions, and one of all positions around the cuts.

An estimator looks costs up in tables of all pairs of its positions, which grow with their square, so of a large graph
it has the fine positions only (`worthwhile`). A search may move its cuts to the positions between them.
Then a second estimator is made, which has every position near these cuts besides the fine ones; it serves until a cut
leaves its windows. Making one takes about as long as pricing the cuts for the judge.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.planner.candidates.cut_points import around, cuttable
from lightning_pipe.planner.estimates.recurrence import Estimator
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.problem import Problem

_WINDOWED = 100  # positions in all windows together


class CutWindows:
    """Estimators of one problem that together know every position.

    Args:
        problem: what is planned.
        fine: positions that are always known, rising.

    Attributes:
        fine: the estimator of these.
    """

    def __init__(self, problem: Problem, fine: Sequence[int]) -> None:
        self.fine = Estimator(StageCostTable(problem, fine))
        self._problem, self._positions = problem, fine
        self._near = self.fine

    def around(self, cuts: Sequence[int]) -> Estimator:
        """Return an estimator that knows these cuts, which may be at any positions of the graph."""
        for estimator in (self.fine, self._near):
            if estimator.knows(cuts):
                return estimator
        window = around(cuttable(self._problem.graph, sliced=False), cuts, most=_WINDOWED)
        self._near = Estimator(StageCostTable(self._problem, sorted({*self._positions, *window})))
        return self._near
