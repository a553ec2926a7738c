"""Linear chain of stages that sleep: prices, stage programs and everything needed to run it.

Every stage sleeps for the price of its compute instead of computing, and hands on tensors of the edge's size. The
programs are those of the schedules, the executor is the real one.

Legend: s stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_pipe.capture.steps.stage_program import BatchHead, Half, RandomKey, Split, StageProgram
from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import (
    Bucket,
    Compute,
    ComputeKind,
    HeadTraffic,
    Layout,
    Message,
    Options,
    Pass,
    Program,
    VerifiedProgram,
)
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import join_of
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.strategy.plans.runtime_overhead import ELEMENT_BYTES, chain_split, chain_traffic

CPU = torch.device("cpu")
SAMPLES = 4  # per micro-batch
LATE_S = 0.0001  # by which a nap wakes early and looks at the clock


@dataclass(frozen=True)
class ChainPrices:
    """Prices of a linear chain of stages, in proportion to samples.

    Attributes:
        computes: seconds per sample of F, I and W, by stage.
        bytes_per_sample: size of every edge.
        call_s: seconds that the runtime adds to every compute.
        latency_s: seconds of every message and every sum.
        posting_s: seconds for which the posting of a message keeps its sender.
        head: seconds per sample of the head of the last stage, which makes its gradients for all micro-batches at once;
            None if it has none.
    """

    computes: tuple[tuple[float, float, float], ...]
    bytes_per_sample: int = 4096
    call_s: float = 0.0
    latency_s: float = 0.0
    posting_s: float = 0.0
    head: float | None = None

    def of(self, stage: int, kind: ComputeKind, samples: int) -> float:
        """Return the seconds of a compute of a stage on any rank."""
        forward, input_grad, weight_grad = self.computes[stage]
        seconds = {"F": forward, "I": input_grad, "W": weight_grad, "B": input_grad + weight_grad}
        return seconds[kind] * samples

    def compute_s(self, compute: Compute, rank: int, samples: int) -> float:
        return self.of(compute.stage, compute.kind, samples) + self.call_s

    def transfer_s(self, message: Message, sender: int, receiver: int) -> float:
        return self.latency_s

    def sum_busy_share(self) -> float:
        """Return nothing."""
        return 0.0

    def post_s(self, message: Message) -> float:
        return self.posting_s

    def reduce_s(self, bucket: int, program: Program) -> float:
        return self.latency_s

    def piece_shares(self, bucket: Bucket) -> list[tuple[float, float]]:
        return [(1.0, 1.0)]

    def piece_bytes(self, bucket: Bucket) -> int:
        return bucket.bytes

    def head_s(self, rank: int, samples: int) -> float:
        """Return the seconds of the head of a batch."""
        return (self.head or 0.0) * samples

    def head_bytes(self, samples: int) -> tuple[int, int]:
        """Return the bytes that the head reads and makes."""
        return (0, 0) if self.head is None else (self.bytes_per_sample * samples, self.bytes_per_sample * samples)

    def head_workspace_bytes(self, samples: int) -> int:
        """Return the bytes of the gradients that the head makes."""
        return 0 if self.head is None else self.bytes_per_sample * samples

    def step_s(self, rank: int) -> float:
        return 0.0

    def step_bytes(self, rank: int) -> int:
        """Return nothing: the step needs no memory."""
        return 0

    def saved_bytes(self, stage: int, samples: int) -> int:
        return self.bytes_per_sample * samples

    def offloaded_bytes(self, stage: int, samples: int) -> int:
        return 0

    def own_work_s(self, work: OwnWork, rank: int, samples: int) -> float:
        return 0.0

    def own_work_bytes(self, work: OwnWork, rank: int, samples: int) -> int:
        return self.offloaded_bytes(work.stage, samples)

    def kept_bytes(self, stage: int, samples: int) -> int:
        return self.bytes_per_sample * samples

    def result_bytes(self, stage: int, samples: int) -> int:
        return 0

    def workspace_bytes(self, compute: Compute, samples: int) -> int:
        return 0

    def gradient_bytes(self, compute: Compute, samples: int) -> int:
        return ELEMENT_BYTES

    def message_bytes(self, message: Message) -> int:
        return self.bytes_per_sample * len(message.samples)

    def sent_bytes(self, stage: int, direction: Pass, samples: int) -> int:
        return self.bytes_per_sample * samples

    def state_bytes(self, rank: int) -> int:
        return 0


def burn(seconds: float) -> None:
    """Keep a core busy, as computing does: a core that slept takes some tenths of a millisecond to be as fast again."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def nap(seconds: float) -> None:
    """Sleep, and end on time: the system wakes a sleeper a tenth of a millisecond late."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - LATE_S))
    while time.perf_counter() < end:
        pass


def sleeping_split(prices: ChainPrices, sleep: Callable[[float], None] = nap) -> Split:
    """Return the stages of a chain whose functions sleep for what is left of their price, and pass tensors on."""
    width = prices.bytes_per_sample // ELEMENT_BYTES
    idle = chain_split(len(prices.computes), width=width, work=lambda stage, kind, samples: None)
    split = replace(idle, stages=tuple(_sleeping(program, prices, sleep) for program in idle.stages))
    return split if prices.head is None else _with_head(split, prices, prices.head, sleep)


def _with_head(split: Split, prices: ChainPrices, seconds: float, sleep: Callable[[float], None]) -> Split:
    """Return stages of which the last one's gradients are made by a head that sleeps for its price."""
    *others, last = split.stages
    assert last.input_grad is not None, "a chain trains"
    before, rows = last.input_grad.inputs
    gradients = f"g{last.stage}"

    def head(samples: int, key: RandomKey, given: torch.Tensor) -> Sequence[Any]:
        sleep(seconds * samples)
        return (torch.zeros_like(given),)

    headed = replace(
        last,
        input_grad=replace(last.input_grad, inputs=(before, gradients)),
        head=BatchHead(Half((rows,), (gradients,), head)),
    )
    made = split.values[f"a{last.stage - 1}"]
    values = {**split.values, **{name: replace(made, name=name) for name in (rows, gradients)}}
    traffic = replace(split.traffic, head=HeadTraffic(prices.bytes_per_sample))
    return replace(split, stages=(*others, headed), values=values, traffic=traffic)


def _sleeping(program: StageProgram, prices: ChainPrices, sleep: Callable[[float], None]) -> StageProgram:
    """Return a stage whose functions take what they are priced at, with what it takes to make their outputs."""

    def slow(kind: ComputeKind, half: Half) -> Half:
        def run(samples: int, key: RandomKey, *given: Any) -> Sequence[Any]:
            end = time.perf_counter() + prices.of(program.stage, kind, samples)
            made = half.run(samples, key, *given)
            sleep(end - time.perf_counter())
            return made

        return replace(half, run=run)

    assert program.input_grad is not None and program.weight_grad is not None, "a chain trains"
    return replace(
        program,
        forward=slow("F", program.forward),
        input_grad=slow("I", program.input_grad),
        weight_grad=slow("W", program.weight_grad),
    )


def chain_program(
    layout: Layout,
    *,
    microbatches: int,
    schedule: str,
    options: Options,
    bytes_per_sample: int,
    samples: int = SAMPLES,
    has_head: bool = False,
) -> VerifiedProgram:
    """Return the verified program of a chain under a schedule, for micro-batches of so many samples."""
    order = order_of(schedule, layout=layout, microbatches=microbatches, options=options)
    traffic = chain_traffic(len(layout.stages), bytes_per_sample)
    traffic = replace(traffic, head=HeadTraffic(bytes_per_sample) if has_head else None)
    join = join_of(schedule, options)
    return verify(lower(order, layout=layout, sizes=(samples,) * microbatches, traffic=traffic, join=join))


def chain_executor(layout: Layout, split: Split, transport: Transport) -> Executor:
    """Return the executor of one rank of a chain."""
    parameters = {f"w{s}": torch.zeros(1) for s in range(len(layout.stages))}
    return Executor(split, layout, state=State(parameters, {}, CPU), transport=transport)


def chain_job(program: Program, bytes_per_sample: int) -> BatchInput:
    """Return a batch of zeros for a program."""
    sizes = program.sizes
    batch = torch.zeros(sum(sizes), bytes_per_sample // ELEMENT_BYTES)
    return BatchInput((batch,), (True,), tuple(sum(sizes[:m]) for m in range(len(sizes))))
