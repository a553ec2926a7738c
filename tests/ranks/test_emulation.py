"""What the executor records over gloo is what the simulator says, in the same order. Times are for the benchmark."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.chain import CPU, ChainPrices, chain_executor, chain_job, chain_program, sleeping_split
from lightning_pipe.core.program import Compute, Layout, Options, Recv, Send, Step
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report import accounts, step_seconds
from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.transport.process_group import process_group_transport
from lightning_pipe.simulator import simulate
from ranks.world import World

PRICES = ChainPrices(((1.0, 1.2, 0.8), (1.0, 1.2, 0.8), (1.0, 1.2, 0.8)), bytes_per_sample=64)
LAYOUTS = {"1-1-1": Layout(((0,), (1,), (2,))), "2-1-1": Layout(((0, 1), (2,), (3,)))}
SCHEDULES: dict[str, tuple[str, Options]] = {
    "gpipe": ("gpipe", {}),
    "1f1b pa": ("1f1b", {"warmup": "pa"}),
    "1f1b pb": ("1f1b", {"warmup": "pb"}),
}


def program_of(layout: Layout, schedule: str):
    name, options = SCHEDULES[schedule]
    return chain_program(layout, microbatches=5, schedule=name, options=options, bytes_per_sample=64)


def no_sleep(seconds: float) -> None:
    pass


def recorded(layout: Layout, schedule: str) -> Timeline:
    """Run a program of stages that do nothing on this rank, and return its timeline."""
    program = program_of(layout, schedule)
    transport = process_group_transport(CPU, deadline_s=20)
    connect(transport, [program])
    executor = chain_executor(layout, sleeping_split(PRICES, no_sleep), transport)
    timeline = executor.run(program, chain_job(program, 64), record=True).timeline
    transport.close()
    return timeline


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_recorded_and_simulated_runs_are_the_same_events(layout: Layout, schedule: str) -> None:
    simulated = simulate(program_of(layout, schedule), PRICES)
    parts = World(layout.ranks).run(recorded, layout, schedule)
    run = Timeline(tuple(event for part in parts for event in part.events))
    for rank in range(layout.ranks):
        events = [[e for e in timeline.events if e.rank == rank] for timeline in (run, simulated)]
        instructions = [Counter(str(event.instruction) for event in line) for line in events]
        assert instructions[0] == instructions[1]
        orders = [[e.instruction for e in line if isinstance(e.instruction, (Compute, Step))] for line in events]
        assert orders[0] == orders[1]
        assert all(a.end <= b.start for a, b in pairwise(run.computes(rank)))
    sent = {(e.rank, e.instruction.message): e.start for e in run.events if isinstance(e.instruction, Send)}
    for event in run.events:
        if isinstance(event.instruction, Recv):
            assert sent[event.instruction.peer, event.instruction.message] <= event.end, event
    for account in accounts(run):
        gaps = sum(gap.late + gap.transfer + gap.overhead for gap in account.gaps)
        rest = account.reduction + account.optimizer + account.drain
        assert sum(account.computes.values()) + gaps + rest == pytest.approx(step_seconds(run), abs=1e-5)
