"""Laws of first steps with weight versions: rounds in the middle of many are recorded, beside a simulated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lightning_pipe.core.program import Layout
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report.account import step_seconds
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import POLICIES
from lightning_pipe.simulator import UnitPrices
from lightning_pipe.simulator.ahead import rounds_ahead
from lightning_pipe.strategy.plans.recording import Recording
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.steps.step_calls import StepResult
from ranks.world import World
from schedule.test_rounds import rounds_of
from strategy.fits import dapple, make_trainer
from strategy.small import Small

LAYOUT = Layout(((0,), (1,), (2,), (3,)))


class Alone:
    """A control plane of one rank."""

    rank, ranks = 0, 1

    def to_first(self, told: Any, *, source: int, what: str) -> Any:
        return told


@pytest.mark.parametrize(("batches", "compared"), [((1,) * 14, 4), ((4,) * 14, 4), ((1,) * 9, 3), ((4,) * 3, 1)])
def test_rounds_that_fill_or_empty_the_pipeline_are_not_compared(batches: tuple[int, ...], compared: int) -> None:
    """Of six that count, the first two warm up; memory is measured in one that counts. A short fit has fewer."""
    rounds = [verify(program) for program in rounds_of(POLICIES["pipedream"], LAYOUT, batches)]
    recording = Recording(6, wants_memory=True, device=torch.device("cpu"), optimizers=())
    for number, (program, whole) in enumerate(zip(rounds, rounds_ahead(rounds, UnitPrices()), strict=True)):
        if recording.active:
            peak = number if recording.measures_memory else None
            timeline = Timeline(tuple(event for event in whole.events if event.rank == 0))
            record = cast(Any, None)
            recording.add(StepResult(record, {}, 1, "graph", program, timeline, peak_bytes=peak))
    recorded = recording.finish(cast(ControlPlane, Alone()), host="here")
    assert recorded is not None and len(recorded.comparable) == compared
    middles = [k for k, x in enumerate(rounds) if x.seam is not None and x.seam.enters == x.seam.leaves]
    assert recorded.program == rounds[middles[0]] and recorded.program.is_ahead
    assert [peak.total_bytes in middles for peak in recorded.memory] == [True]
    assert all(step_seconds(step) == pytest.approx(3 * batches[0]) for step in recorded.comparable)


def fit_reported(folder: Path) -> str:
    """Fit with a report; a worker function."""
    module = Small()
    strategy = dapple(
        layout="1-1",
        microbatches=2,
        planner="uniform",
        versions="pipedream",
        costs="measured",
        timeline_steps=3,
        measure_memory=True,
        report=str(folder / "report"),
        trace=str(folder / "trace.json"),
        cache="off",
    )
    make_trainer(strategy, max_epochs=4).fit(module, module.data())
    return repr(strategy.comparison)


@pytest.mark.slow
def test_a_fit_with_versions_has_a_report_and_a_trace(tmp_path: Path) -> None:
    """Its first rounds are compared with a simulated one."""
    first, _ = World(2).run(fit_reported, tmp_path)
    assert first.startswith("Comparison(")
    assert "Predicted, and median of" in (tmp_path / "report" / "report.txt").read_text()
    assert (tmp_path / "trace.json").is_file()
