"""Laws of memory where the host queues a whole step before it sees a message land: handles keep what is planned."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lightning_pipe.core.program import ComputeKind, Message, Pass, VerifiedProgram
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import drive_together
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import SCHEDULES, order_of
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator.memory import memory_curves
from lightning_pipe.simulator.simulate import simulate
from lightning_pipe.simulator.unit_prices import UnitPrices
from lightning_pipe.strategy.plans.runtime_overhead import chain_split, chain_traffic
from lightning_pipe.strategy.steps.message_bounds import message_bounds
from runtime.late_transport import LateTransport

RANKS, WIDTH = 4, 16
MESSAGE_BYTES = WIDTH * 4


@dataclass(frozen=True)
class MessagePrices(UnitPrices):
    """Computes and messages take as long; only messages need memory."""

    latency: float = 1.0
    saved: int = 0

    def message_bytes(self, message: Message) -> int:
        return MESSAGE_BYTES

    def sent_bytes(self, stage: int, direction: Pass, samples: int) -> int:
        return MESSAGE_BYTES


def program_of(schedule: str, microbatches: int, stages: int) -> VerifiedProgram:
    known = SCHEDULES[schedule]
    layout = known.layout([(rank,) for rank in range(RANKS)], stages // RANKS)
    order = order_of(schedule, layout=layout, microbatches=microbatches)
    traffic = chain_traffic(stages, MESSAGE_BYTES)
    return verify(lower(order, layout=layout, sizes=(1,) * microbatches, traffic=traffic), launches="late")


def peaks(program: VerifiedProgram, *, bounds: tuple[int | None, ...]) -> list[int]:
    """Run a program; return the most bytes that handles of each rank have kept beside a compute."""
    stages, microbatches = len(program.layout.stages), len(program.sizes)
    hub, most = Hub(), [0] * RANKS
    transports = [LateTransport(hub, rank) for rank in range(RANKS)]

    def look(stage: int, kind: ComputeKind, samples: int) -> None:
        for rank in program.layout.stages[stage]:
            most[rank] = max(most[rank], transports[rank].bytes)

    split = chain_split(stages, width=WIDTH, work=look)
    parameters = {f"w{s}": torch.zeros(1) for s in range(stages)}
    state = State(parameters, {}, torch.device("cpu"))
    executors = [Executor(split, program.layout, state=state, transport=t) for t in transports]
    job = BatchInput((torch.zeros(microbatches, WIDTH),), (True,), tuple(range(microbatches)))
    drive_together([e.walk(program, job, most_messages=bound) for e, bound in zip(executors, bounds, strict=True)])
    assert all(transport.bytes == 0 for transport in transports)
    return most


@pytest.mark.parametrize("microbatches", [4, 16, 64])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 4), ("gpipe", 4), ("interleaved", 8), ("zb_h1", 4)])
def test_handles_keep_no_more_than_the_simulator_counts(schedule: str, stages: int, microbatches: int) -> None:
    program, prices = program_of(schedule, microbatches, stages), MessagePrices()
    curves = memory_curves(simulate(program, prices), program=program, prices=prices)
    counted = [max(curve.buffer_bytes) for curve in curves]
    kept = peaks(program, bounds=message_bounds(program))
    assert all(most <= planned for most, planned in zip(kept, counted, strict=True)), (kept, counted)


@pytest.mark.parametrize("microbatches", [16, 64])
def test_without_a_bound_a_rank_keeps_what_it_has_sent_until_its_step(microbatches: int) -> None:
    kept = peaks(program_of("gpipe", microbatches, 4), bounds=(None,) * RANKS)
    assert kept[0] >= microbatches * MESSAGE_BYTES
