"""Predicted and measured are the same quantities, and what differs most is named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lightning_pipe.core.program import Layout
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.errors import PlanError
from lightning_pipe.report import comparison_table
from lightning_pipe.report.account import step_seconds
from lightning_pipe.report.comparison import Comparison, Figure, RankPeak, compare
from lightning_pipe.report.comparison_table import verdict
from report.runs import LAYOUTS, Shaped, as_recorded, run_of

STAGES = ((0, 1), (2,), (3,))
PRICES = {"forward": 1.0, "input_grad": 1.3, "weight_grad": 0.7, "latency": 0.4, "reduction": 0.5, "step": 0.5}


def compared(*measured: Shaped, stages=STAGES, **memory) -> Comparison:
    runs = [as_recorded(run_of(stages, prices)) for prices in measured]
    return compare(run_of(stages, Shaped(**PRICES)), runs, layout=Layout(stages), **memory)


def figures_of(comparison: Comparison) -> list[Figure]:
    stages = [f for s in comparison.stages for f in (*s.computes.values(), s.waiting, s.transfer, s.overhead)]
    ranks = [f for r in comparison.ranks for f in (r.reduction, r.optimizer, r.bubble)]
    links = [link.transfer for link in comparison.links]
    return [*stages, *ranks, *links, comparison.step, comparison.bubble]


@pytest.mark.parametrize("stages", LAYOUTS)
def test_a_step_that_runs_as_predicted_differs_in_nothing(stages):
    comparison = compared(Shaped(**PRICES), stages=stages)
    assert [figure.difference for figure in figures_of(comparison)] == pytest.approx(
        [0.0] * len(figures_of(comparison))
    )
    assert verdict(comparison) == []


def test_figures_are_seconds_per_step_of_every_stage_on_every_rank():
    comparison = compared(Shaped(**{**PRICES, "forward": 1.5}))
    assert [(s.stage, s.rank) for s in comparison.stages] == [(0, 0), (0, 1), (1, 2), (2, 3)]
    for stage in comparison.stages:
        assert stage.computes["F"] == Figure(4 * 1.0, pytest.approx(4 * 1.5))
        assert stage.computes["F"].ratio == pytest.approx(1.5)
        assert stage.computes["I"].difference == pytest.approx(0.0)
    assert [(link.source, link.target) for link in comparison.links] == [(0, 1), (1, 0), (1, 2), (2, 1)]


def test_waiting_is_the_idle_part_of_a_ranks_own_span():
    comparison = compared(Shaped(**PRICES))
    run = run_of(STAGES, Shaped(**PRICES))
    for stage in comparison.stages:
        assert stage.waiting.measured == pytest.approx(run.span(stage.rank) - run.busy(stage.rank))


def test_of_several_steps_the_median_counts():
    speeds = [Shaped(**{**PRICES, "forward": forward}) for forward in (1.1, 9.0, 1.2)]
    comparison = compared(*speeds)
    assert comparison.steps == 3
    assert comparison.stages[0].computes["F"].measured == pytest.approx(4 * 1.2)
    assert comparison.step.measured == pytest.approx(step_seconds(run_of(STAGES, speeds[2])))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"factors": {(1, "I"): 3.0}},
            r"the input-gradient pass of stage 1 on rank 2 took 10.4 s longer than predicted. Is the device",
        ),
        ({"factors": {(0, "F"): 6.0}}, r"the forward pass of stage 0 on rank 0 took 20 s longer"),
        ({"links": {(2, 3): 3.0, (3, 2): 0.5}}, r"messages from stage 1 to stage 2 took .* Is the link"),
        (
            {"reduction": 9.0},
            r"rank 0's last backward and its optimizer step \(gradient all-reduce\) took .* not predicted",
        ),
        ({"step": 9.0}, r"the optimizer step of rank 0 took 8.5 s longer"),
        (
            {"factors": {(s, k): 0.3 for s in range(3) for k in "FIW"}},
            r"0\.\d\dx the predicted time.* 3.64 s less than predicted",
        ),
    ],
)
def test_what_differs_most_is_named(changes, named):
    (sentence,) = verdict(compared(Shaped(**{**PRICES, **changes})))
    assert sentence.startswith("Measured: ") and re.search(named, sentence), sentence


def test_late_work_of_the_host_is_named():
    events = run_of(((0,),), Shaped(**PRICES)).events
    late = Timeline(
        tuple(type(e)(e.rank, e.instruction, 1.5 * e.start, 1.5 * e.start + e.end - e.start) for e in events)
    )
    comparison = compare(Timeline(events), [late], layout=Layout(((0,),)))
    (sentence,) = verdict(comparison)
    assert "overhead of stage 0 on rank 0" in sentence and "host" in sentence


def test_ranks_that_start_at_other_times_are_nobodys_fault():
    run = run_of(((0,), (0,)), Shaped(**PRICES))
    equal = compare(run, [run], layout=Layout(((0,), (0,))))
    (sentence,) = verdict(replace(equal, step=Figure(1.0, 2.0)))
    assert "No stage or link is the cause" in sentence


def test_memory_beyond_the_threshold_is_named():
    more = {
        "predicted_memory": [RankPeak(10, 100)] * 4,
        "measured_memory": [RankPeak(10, 100)] * 3 + [RankPeak(20, 130)],
    }
    comparison = compared(Shaped(**PRICES), **more)
    assert comparison.memory[3].saved.ratio == 2.0
    assert verdict(comparison) == [
        "Measured: rank 3 holds 130 B at its peak; predicted: 100 B. The plan's limits are too optimistic."
    ]
    assert verdict(comparison, threshold=0.4) == []


def test_a_table_shows_predicted_measured_and_ratio():
    memory = [RankPeak(2**20, 2**30)] * 4
    comparison = compared(
        Shaped(**{**PRICES, "forward": 1.5}), predicted_memory=memory, measured_memory=[RankPeak(2**21, 2**30)] * 4
    )
    lines = comparison_table(comparison).splitlines()
    assert lines[0] == "Predicted, and median of 1 step measured"
    headings = re.split(r"\s{2,}", lines[2].strip())
    assert headings == [*"stage rank F I W waiting transfer reduction step saved memory".split()], "no overhead, no B"
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines[4:7]]
    told = [["predicted", "4 s"], ["measured", "6 s"], ["ratio", "1.50"]]
    assert [line[1 - len(headings) :][:2] for line in cells] == told
    assert [line[-2:] for line in cells] == [["1 MiB", "1 GiB"], ["2 MiB", "1 GiB"], ["2.00", "1.00"]]
    step = comparison.step
    (total,) = [line for line in lines if line.startswith("step ")]
    assert total == f"step    predicted {step.predicted:.3g} s, measured {step.measured:.3g} s, ratio {step.ratio:.2f}"


def test_what_belongs_to_a_rank_stands_in_the_line_of_its_first_stage():
    stages = ((0,), (1,), (0,))
    memory = [RankPeak(1, 2)] * 2
    table = comparison_table(compared(Shaped(**PRICES), stages=stages, predicted_memory=memory, measured_memory=memory))
    lines = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines() if re.match(r"\s+\d+\s+\d+", line)]
    assert [(line[0], line[1], line[-1]) for line in lines[:2]] == [("0", "0", "2 B"), ("1", "1", "2 B")]
    assert lines[2][-1] != "2 B"


def test_ratios_of_next_to_nothing_are_left_out():
    """31.54 of half a millisecond looked alarming."""
    comparison = compared(Shaped(**{**PRICES, "latency": 0.4}))
    step = comparison.step.measured
    tiny = replace(comparison.ranks[0], optimizer=Figure(step / 10_000, step / 300))
    large = replace(comparison.ranks[0], optimizer=Figure(step / 10_000, step / 50))
    for rank, is_shown in ((tiny, False), (large, True)):
        table = comparison_table(replace(comparison, ranks=(rank, *comparison.ranks[1:])))
        assert (f"{rank.optimizer.ratio:.2f}" in table) == is_shown


def test_a_brief_table_has_a_row_per_rank_with_the_sum_of_its_stages():
    """Eight stages on two ranks had sixteen rows."""
    stages = tuple((s % 2,) for s in range(8))
    comparison = compared(Shaped(**PRICES), stages=stages)
    brief = comparison_table(comparison, brief=True)
    lines = [re.split(r"\s{2,}", line.strip()) for line in brief.splitlines() if re.match(r"\s+[\d,]+\s+\d+", line)]
    assert [line[:2] for line in lines] == [["0,2,4,6", "0"], ["1,3,5,7", "1"]]
    assert lines[0][3] == f"{sum(s.computes['F'].predicted for s in comparison.stages if s.rank == 0):.3g} s"
    assert len(comparison_table(comparison).splitlines()) > 2 * len(brief.splitlines())


def test_timelines_of_other_ranks_are_refused():
    run = run_of(STAGES, Shaped(**PRICES))
    with pytest.raises(PlanError, match=r"found events of ranks \(0, 1, 2, 3\); expected those of all 3 ranks"):
        compare(run, [run], layout=Layout(((0,), (1,), (2,))))
    with pytest.raises(PlanError, match="found no recorded step"):
        compare(run, [], layout=Layout(STAGES))
