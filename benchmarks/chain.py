"""What is a linear chain of stages that sleep? Prices, stage programs and everything that is needed to run it.

Every stage sleeps for the price of its compute instead of computing, and hands on tensors of the edge's size. The
programs are those of the schedules, the executor is the real one.

Legend: s stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lightning_pipe.capture.stage_program import Half, RandomKey, Split, StageProgram, Value
from lightning_pipe.core.program import (
    Bucket,
    Compute,
    ComputeKind,
    Edge,
    Layout,
    Message,
    Options,
    Pass,
    Program,
    Traffic,
    VerifiedProgram,
)
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.job import Job
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verify import verify

CPU = torch.device("cpu")
ELEMENT_BYTES = 4  # float32
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
    """

    computes: tuple[tuple[float, float, float], ...]
    bytes_per_sample: int = 4096
    call_s: float = 0.0
    latency_s: float = 0.0

    def of(self, stage: int, kind: ComputeKind, samples: int) -> float:
        """Return the seconds of a compute of a stage on any rank."""
        forward, input_grad, weight_grad = self.computes[stage]
        seconds = {"F": forward, "I": input_grad, "W": weight_grad, "B": input_grad + weight_grad}
        return seconds[kind] * samples

    def compute_s(self, compute: Compute, rank: int, samples: int) -> float:
        return self.of(compute.stage, compute.kind, samples) + self.call_s

    def transfer_s(self, message: Message, sender: int, receiver: int) -> float:
        return self.latency_s

    def reduce_s(self, bucket: int, program: Program) -> float:
        return self.latency_s

    def step_s(self, rank: int) -> float:
        return 0.0

    def saved_bytes(self, stage: int, samples: int) -> int:
        return self.bytes_per_sample * samples

    def kept_bytes(self, stage: int, samples: int) -> int:
        return self.bytes_per_sample * samples

    def result_bytes(self, stage: int, samples: int) -> int:
        return 0

    def workspace_bytes(self, compute: Compute, samples: int) -> int:
        return 0

    def gradient_bytes(self, compute: Compute) -> int:
        return ELEMENT_BYTES

    def message_bytes(self, message: Message) -> int:
        return self.bytes_per_sample * len(message.samples)

    def state_bytes(self, rank: int) -> int:
        return 0


def chain_traffic(stages: int, bytes_per_sample: int) -> Traffic:
    """Return what crosses between the stages of a chain: activations, their gradients, and one bucket per stage."""
    between = range(stages - 1)
    forward = [Edge("F", s, s + 1, bytes_per_sample) for s in between]
    backward = [Edge("B", s + 1, s, bytes_per_sample) for s in between]
    return Traffic((*forward, *backward), tuple(Bucket((s,), ELEMENT_BYTES) for s in range(stages)))


def nap(seconds: float) -> None:
    """Sleep, and end on time: the system wakes a sleeper a tenth of a millisecond late."""
    end = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - LATE_S))
    while time.perf_counter() < end:
        pass


def chain_split(prices: ChainPrices, sleep: Callable[[float], None] = nap) -> Split:
    """Return the stages of a chain whose functions call `sleep` with their price and pass tensors on.

    Stage s makes `a<s>` from `a<s-1>` (stage 0 from the batch) and `g<s-1>`, the gradient of `a<s-1>`, from `g<s>`.
    Every stage has one parameter with one element.
    """
    count, width = len(prices.computes), prices.bytes_per_sample // ELEMENT_BYTES
    crossing = [f"{letter}{s}" for s in range(count - 1) for letter in "ag"]
    return Split(
        stages=tuple(_stage(s, count, prices, sleep) for s in range(count)),
        values={name: Value(name, torch.float32, partial(_size, width), batch_dim=0) for name in crossing},
        traffic=chain_traffic(count, prices.bytes_per_sample),
        bucket_parameters=tuple((f"w{s}",) for s in range(count)),
        owners={},
    )


def _size(width: int, samples: int) -> tuple[int, ...]:
    return (samples, width)


def _stage(s: int, count: int, prices: ChainPrices, sleep: Callable[[float], None]) -> StageProgram:
    first, last = s == 0, s == count - 1
    before, after = f"a{s - 1}", f"a{s}"
    receives: dict[tuple[Pass, int], tuple[str, ...]] = {} if first else {("F", s - 1): (before,)}
    sends: dict[tuple[Pass, int], tuple[str, ...]] = {} if first else {("B", s - 1): (f"g{s - 1}",)}
    if not last:
        receives["B", s + 1] = (f"g{s}",)
        sends["F", s + 1] = (after,)

    def half(kind: ComputeKind, inputs: tuple[str, ...], outputs: tuple[str, ...], *, like: int) -> Half:
        def run(samples: int, key: RandomKey, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            sleep(prices.of(s, kind, samples))
            return tuple(torch.zeros_like(given[like]) for _ in outputs)

        return Half(inputs, outputs, run)

    return StageProgram(
        stage=s,
        parameters={"w": f"w{s}"},
        buffers={},
        leaves={before: 0} if first else {},
        tangents=(),
        forward=half("F", (before,), (after,), like=0),
        input_grad=half("I", (before, after if last else f"g{s}"), (f"g{s - 1}",), like=0),
        weight_grad=half("W", (before, "w"), ("dw",), like=1),
        receives=receives,
        sends=sends,
        mutations={},
        gradients={"dw": f"w{s}"},
        results=(),
    )


def chain_program(
    layout: Layout, *, microbatches: int, schedule: str, options: Options, bytes_per_sample: int
) -> VerifiedProgram:
    """Return the verified program of a chain under a schedule."""
    order = order_of(schedule, layout=layout, microbatches=microbatches, options=options)
    traffic = chain_traffic(len(layout.stages), bytes_per_sample)
    return verify(lower(order, layout=layout, sizes=(SAMPLES,) * microbatches, traffic=traffic))


def chain_executor(layout: Layout, split: Split, transport: Transport) -> Executor:
    """Return the executor of one rank of a chain."""
    parameters = {f"w{s}": torch.zeros(1) for s in range(len(layout.stages))}
    return Executor(split, layout, state=State(parameters, {}, CPU), transport=transport)


def chain_job(program: Program, bytes_per_sample: int) -> Job:
    """Return a batch of zeros for a program."""
    sizes = program.sizes
    batch = torch.zeros(sum(sizes), bytes_per_sample // ELEMENT_BYTES)
    return Job((batch,), (True,), tuple(sum(sizes[:m]) for m in range(len(sizes))))
