"""SPP planner beside those of PipeDream and DAPPLE: simulated times of their plans on DAPPLE's profiles.

    python -m benchmarks.planners spp
    python -m benchmarks.planners spp --only vgg-19,bert-48 --on b,c

SPP's own tables could not be read, so nothing published stands here. The cases are those of DAPPLE's Table 4 (see
`benchmarks/planners/dapple.py`). `bound` is the promise of SPP's first outline, `first` what the simulator says of that
outline, `best` of the best of its outlines; the others' columns are the best of theirs. Seconds of a batch; everything
within memory, or in brackets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.planners.dapple import CONFIGURATIONS, MODELS, problem
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.estimates.block_costs import BlockCosts, DeviceRow
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.memory.settle import fitted
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.systems.dapple.dapple_planner import dapple
from lightning_pipe.planner.systems.pipedream import pipedream
from lightning_pipe.planner.systems.spp.spp_planner import pe_bound, spp

OTHERS: dict[str, Callable[[Problem], list[Candidate]]] = {"pipedream": pipedream, "dapple": dapple}


def lines(names: Sequence[str], configurations: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table."""
    for model in MODELS:
        if model.name not in names:
            continue
        for configuration in configurations:
            asked = problem(model, configuration)
            judge, outlines = Judge(asked), spp(asked)
            judged = [fitted(asked, outline, judge=judge) for outline in outlines]
            cells = [model.name, configuration.upper(), f"{bound_s(asked, outlines[0]):.3f}"]
            cells += [_seconds(judged[0], asked), _seconds(_best(judged, asked), asked), _replicas(judged, asked)]
            for planner in OTHERS.values():
                rival = _best([fitted(asked, outline, judge=judge) for outline in planner(asked)], asked)
                cells.append(_seconds(rival, asked))
            yield tuple(cells)


def bound_s(asked: Problem, outline: Candidate) -> float:
    """Return PE's bound of an outline."""
    row = DeviceRow(asked.cluster, [rank for group in outline.ranks for rank in group], most=asked.cluster.ranks)
    blocks = BlockCosts(StageCostTable(asked, outline.cuts), row, samples=asked.samples / outline.microbatches)
    pipeline = blocks.pipeline(range(1, len(outline.ranks)), [len(group) for group in outline.ranks])
    return pe_bound(pipeline, microbatches=outline.microbatches)


def _best(judged: Sequence[Judged], asked: Problem) -> Judged:
    return min(judged, key=lambda found: found.rank(asked.cluster))


def _seconds(judged: Judged, asked: Problem) -> str:
    return f"{judged.step_s:.3f}" if judged.overflow(asked.cluster) <= 0 else f"({judged.step_s:.3f})"


def _replicas(judged: Sequence[Judged], asked: Problem) -> str:
    return ":".join(str(len(stage.ranks)) for stage in _best(judged, asked).plan.stages)


def main(arguments: Sequence[str] = ()) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planners spp")
    parser.add_argument("--only", default=",".join(model.name for model in MODELS), help="models")
    parser.add_argument("--on", default=",".join(CONFIGURATIONS), help="configurations")
    chosen = parser.parse_args(arguments)
    table = Table("model", "on", "bound", "first", "best", "replicas of the best", *OTHERS)
    for cells in lines(chosen.only.split(","), chosen.on.split(",")):
        table.add_row(*cells)
    Console(width=120).print(table)
