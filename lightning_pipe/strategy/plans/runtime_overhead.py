"""Runtime overhead of a step besides its operations, measured by all ranks in a rehearsal.

Before there is a plan, the ranks run a chain of one small stage each, over the transport of the training: every compute
does what a layer of a network does, for a few milliseconds, so that caches and cores are as busy as in training, and
hands on a tensor. What is not work is the runtime:

    call_s      of a compute: its duration - its work + the gap between what it needed and its start, without sends
    message_s   of a message that a rank waited for: arrival - end of the compute that made it - its bytes / bandwidth

(`report.account` has the picture.) Work counts for what it takes when all ranks do nothing else, as operations are
timed: a core that has waited, or has moved a message, is slow at first, and that is the runtime's. Both are means of
all but the slowest tenth, as they are parts of sums. Left out: that stages with many tensors take a little longer to
hand them over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean

import torch

from lightning_pipe.capture.device_streams import finish_stream
from lightning_pipe.capture.steps.stage_program import Half, RandomKey, Split, StageProgram, Value
from lightning_pipe.core.program import AnyCompute, Bucket, ComputeKind, Edge, Layout, Pass, Send, Traffic
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report import accounts
from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.one_f_one_b import one_f_one_b
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.strategy.ranks.connections import Connections

Work = Callable[[int, ComputeKind, int], None]  # stage, kind, samples
_DTYPE = torch.float32  # whatever the default type is, which the user may have set
ELEMENT_BYTES = 4
_MICROBATCHES = 12
_RUNS = 4  # the first is not counted
_IMAGES, _KERNEL = (4, 64, 32, 32), (64, 64, 3, 3)  # of the work: every tensor that it makes has 1 MiB
_ROUNDS = 4  # of its operations on every element
_ALONE_S = 0.05  # of work in a row
_WIDTH = 2**16  # elements of a message, 256 KiB: small ones are handed over otherwise, and quicker
_SLOWEST = 0.1  # of what is measured, which does not count


@dataclass(frozen=True)
class Rehearsed:
    """Seconds of the runtime per compute, and those of a message of so many bytes."""

    call_s: float
    message_s: float
    message_bytes: int


def rehearse(links: Connections, device: torch.device) -> Rehearsed | None:
    """Run the chain on all ranks together; return what it says on rank 0, None elsewhere."""
    control = links.control
    layout = Layout(tuple((rank,) for rank in range(control.ranks)))
    work = _Layer(device)
    split = chain_split(control.ranks, width=_WIDTH, work=work)
    sizes = (1,) * _MICROBATCHES
    order = one_f_one_b(layout, _MICROBATCHES)
    lowered = lower(order, layout=layout, sizes=sizes, traffic=split.traffic)
    program = verify(lowered, launches=links.transport.launches)
    with links.watch.opening("the connections of a program"):
        connect(links.transport, [program])
    parameters = {f"w{s}": torch.zeros(1, dtype=_DTYPE, device=device) for s in range(control.ranks)}
    executor = Executor(split, layout, state=State(parameters, {}, device), transport=links.transport)
    job = BatchInput(
        (torch.zeros(_MICROBATCHES, _WIDTH, dtype=_DTYPE, device=device),), (True,), tuple(range(_MICROBATCHES))
    )
    own: list[tuple[Timeline, float]] = []
    for _ in range(_RUNS):
        control.sum(torch.zeros(1), what="the beginning of the rehearsal")
        work_s = work.alone_s()
        own.append((executor.run(program, job, record=True, watch=links.watch).timeline, work_s))
    told = [control.to_first(own[1:], source=rank, what="the rehearsal") for rank in range(control.ranks)]
    return _rehearsed([of_rank for of_rank in told if of_rank is not None]) if control.rank == 0 else None


def _rehearsed(told: Sequence[Sequence[tuple[Timeline, float]]]) -> Rehearsed:
    """Read the costs off the timelines of all ranks, by rank and run, with the seconds of the work of a compute."""
    calls: list[float] = []
    messages: list[float] = []
    for of_ranks in zip(*told, strict=True):
        merged = Timeline(tuple(chain.from_iterable(timeline.events for timeline, _ in of_ranks)))
        for account, (timeline, work_s) in zip(accounts(merged), of_ranks, strict=True):
            spent = {event.instruction: event.end - event.start for event in timeline.events}
            posts = _posts(timeline)
            for gap in account.gaps:
                if gap.first:
                    continue
                calls.append(spent[gap.compute] - work_s + max(0.0, gap.overhead - posts.get(gap.compute, 0.0)))
                if gap.link is not None and gap.late > 0:  # it was waited for
                    messages.append(gap.transfer)
    return Rehearsed(max(0.0, _typical(calls)), _typical(messages) if messages else 0.0, _WIDTH * ELEMENT_BYTES)


def _posts(timeline: Timeline) -> dict[AnyCompute, float]:
    """Return for how long the sends before a compute were posted, by the compute: that has a price of its own."""
    found: dict[AnyCompute, float] = {}
    posted = 0.0
    for event in sorted(timeline.events, key=lambda event: event.start):
        match event.instruction:
            case Send():
                posted += event.end - event.start
            case AnyCompute() as compute:
                found[compute], posted = posted, 0.0
            case _:
                pass
    return found


def _typical(seconds: Sequence[float]) -> float:
    return fmean(sorted(seconds)[: math.ceil(len(seconds) * (1 - _SLOWEST))])


class _Layer:
    """Work of a few milliseconds: a convolution, and operations on every element of what it makes."""

    def __init__(self, device: torch.device) -> None:
        self._images = torch.ones(_IMAGES, dtype=_DTYPE, device=device)
        self._kernel = torch.full(_KERNEL, 1 / math.prod(_KERNEL[1:]), dtype=_DTYPE, device=device)

    def __call__(self, stage: int, kind: ComputeKind, samples: int) -> None:
        self._run()

    def alone_s(self) -> float:
        """Return how long it takes when it is done again and again."""
        seconds: list[float] = []
        while sum(seconds) < _ALONE_S:
            started = time.perf_counter()
            self._run()
            seconds.append(time.perf_counter() - started)
        return _typical(seconds)

    @torch.no_grad()
    def _run(self) -> None:
        made = torch.nn.functional.conv2d(self._images, self._kernel, padding=1)
        for _ in range(_ROUNDS):
            made = torch.relu(made).add(self._images).mul(0.5)
        finish_stream(made.device)


def chain_traffic(stages: int, bytes_per_sample: int) -> Traffic:
    """Return what crosses between the stages of a chain: activations, their gradients, and one bucket per stage."""
    between = range(stages - 1)
    forward = [Edge("F", s, s + 1, bytes_per_sample) for s in between]
    backward = [Edge("B", s + 1, s, bytes_per_sample) for s in between]
    return Traffic((*forward, *backward), tuple(Bucket((s,), ELEMENT_BYTES) for s in range(stages)))


def chain_split(stages: int, *, width: int, work: Work) -> Split:
    """Return the stages of a chain whose functions call `work` and pass tensors of `width` elements per sample on.

    Stage s makes `a<s>` from `a<s-1>` (stage 0 from the batch) and `g<s-1>`, the gradient of `a<s-1>`, from `g<s>`.
    Every stage has one parameter with one element.
    """
    crossing = [f"{letter}{s}" for s in range(stages - 1) for letter in "ag"]
    return Split(
        stages=tuple(_stage(s, stages, work) for s in range(stages)),
        values={name: Value(name, _DTYPE, partial(_size, width), batch_dim=0) for name in crossing},
        traffic=chain_traffic(stages, width * ELEMENT_BYTES),
        bucket_parameters=tuple((f"w{s}",) for s in range(stages)),
        owners={},
    )


def _size(width: int, samples: int) -> tuple[int, ...]:
    return (samples, width)


def _stage(s: int, count: int, work: Work) -> StageProgram:
    first, last = s == 0, s == count - 1
    before, after = f"a{s - 1}", f"a{s}"
    receives: dict[tuple[Pass, int], tuple[str, ...]] = {} if first else {("F", s - 1): (before,)}
    sends: dict[tuple[Pass, int], tuple[str, ...]] = {} if first else {("B", s - 1): (f"g{s - 1}",)}
    if not last:
        receives["B", s + 1] = (f"g{s}",)
        sends["F", s + 1] = (after,)

    def half(kind: ComputeKind, inputs: tuple[str, ...], outputs: tuple[str, ...], *, like: int) -> Half:
        def run(samples: int, key: RandomKey, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            work(s, kind, samples)
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
