"""PE: computes and messages advance in cycles, one micro-batch per step and cycle.

After the pipeline execution of SPP (Luo, Yi, Long, Fan, Wu, Yang and Lin, "Efficient Pipeline Planning for Expedited
Distributed DNN Training", INFOCOM 2022), reconstructed from its abstract and from recollection. Links are resources
like devices, so a micro-batch goes through J = 4 S - 3 steps: S forwards with S - 1 messages between them, then as many
messages and backwards, the last stage's F and B being one step. In cycle t step j works on micro-batch t - j. Every
device and every link works by cycles, and starts each piece as soon as its inputs are there.

Where no device and no link has more than C to do for one micro-batch, every cycle takes at most C, since what a block
waits for belongs to earlier cycles:

    T <= (M + J - 1) C = (M + 4 S - 4) C

(own proof by induction over the cycles; sums of gradients come on top; a device that holds several stages has their sum
to do). Links between stages on one device, and those that take no time, are no steps here; then J is smaller.

Legend: s stage, S number of stages, m, M micro-batches.
"""

from __future__ import annotations

import itertools

from lightning_pipe.core.program import Compute, Layout, Options, Order
from lightning_pipe.schedule.construct.devices import order_of_lines, stages_by_device
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.construct.stage_times import ChainTimes


def pe(layout: Layout, microbatches: int, options: Options, times: ChainTimes, /) -> Order:
    """Order the computes of every device by cycles, forwards first in each.

    Four stages and six micro-batches, one unit for each of F, I and W, free messages:

        0 | F0 F1 F2 F3 F4 F5  . I0 W0  . I1 W1  . I2 W2  . I3 W3  . I4 W4  . I5 W5
        1 |  . F0 F1 F2 F3 F4 I0 W0 F5 I1 W1  . I2 W2  . I3 W3  . I4 W4  . I5 W5
        2 |  .  . F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3  . I4 W4  . I5 W5
        3 |  .  .  . F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 F4 I4 W4 F5 I5 W5

    With one stage per device this is 1F1B with 4 (S - 1 - s) + 1 forwards before the first backward of stage s, or
    2 (S - 1 - s) + 1 where messages take no time (as in the drawing), and so many micro-batches are kept. Memory is not
    looked at.

    Args:
        layout: ranks of each stage; any stages may share a device.
        microbatches: number of micro-batches, at least 1.
        options: none are known.
        times: of the pipeline; only which messages take time matters.

    Raises:
        ConfigError: if an option is unknown, there is no micro-batch, or devices overlap.
    """
    read_options(options, schedule="pe", defaults={})
    check_microbatches(microbatches)
    forward, backward = steps(times)
    lines = {}
    for device, stages in stages_by_device(layout, schedule="pe").items():
        blocks = [
            block
            for s in stages
            for m in range(microbatches)
            for block in ((forward[s] + m, 0, Compute(s, "F", m)), (backward[s] + m, 1, Compute(s, "B", m)))
        ]
        lines[device] = [compute for *_, compute in sorted(blocks)]
    return order_of_lines(lines)


def steps(times: ChainTimes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the step of every stage's forward, and of its backward."""
    forward = tuple(itertools.accumulate((1 + (seconds > 0) for seconds in times.ahead_s), initial=0))
    back = itertools.accumulate((1 + (seconds > 0) for seconds in reversed(times.back_s)), initial=forward[-1])
    return forward, tuple(back)[::-1]
