"""2BP: a known order whose weight gradients wait until the end, or until the device would wait.

Source: Rae, Lee and Richings 2024, "2BP: 2-Stage Backpropagation" (W is its backward-p2). A device keeps the inputs of
W of all micro-batches whose I has run: with "end" of all micro-batches, whatever the base order keeps. `lower` sends
input gradients before W in every order, so the time is the base order's; "idle" uses the remaining idle time. As in the
paper, W of up to `join` consecutive micro-batches can be one product of their concatenated samples. That takes less
time if micro-batches are small. A stage whose W mixes samples (batch statistics), or needs a number made of one
micro-batch, computes them one by one; the table of the plan names these stages.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from lightning_pipe.core.program import Compute, Layout, Options, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.options import read_options
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS, gpipe
from lightning_pipe.schedule.orders.one_f_one_b import one_f_one_b

Line: TypeAlias = Sequence[Compute]  # of one rank, F and I only

BASES = {"gpipe": gpipe, "1f1b": one_f_one_b}


def two_bp(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order forwards and input gradients as the base schedule does, and weight gradients late.

    Four stages and four micro-batches with the default options, one unit for each of F, I and W:

        0 | F0 F1 F2 F3  .  .  . I0  . I1  . I2  . I3 W0 W1 W2 W3
        1 |  . F0 F1 F2  .  . I0 F3 I1  . I2  . I3 W0 W1 W2 W3
        2 |  .  . F0 F1  . I0 F2 I1 F3 I2  . I3 W0 W1 W2 W3
        3 |  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

    Any layout that the base schedule takes. The paper runs 1F1B with as many micro-batches as devices, and with twice
    as many, and computes W of all of them at once.

    Args:
        layout: ranks of each stage.
        microbatches: number of micro-batches, at least 1.
        options: `base`: "1f1b" (default) or "gpipe". `delay`: "end" (default) runs all W after all else; "idle" runs
            one whenever the rank would wait if F, I and W took equally long and messages no time, the rest at the end.
            `join`: most micro-batches whose W is one product, 1 (default) for none. It does not change the order; see
            `schedule.lower.join`.

    Raises:
        ConfigError: if an option is unknown or unreadable, or there is no micro-batch.
    """
    read = _read(options)
    delays = {"end": _at_the_end, "idle": _while_waiting}
    most_joined(options)
    base, delay = _choice("base", read["base"], BASES), _choice("delay", read["delay"], delays)
    lines = [
        [Compute(c.stage, "I", c.microbatch) if c.kind == "B" else c for c in line]
        for line in BASES[base](layout, microbatches)
    ]
    return delays[delay](lines, layout)


def most_joined(options: Options) -> int:
    """Return how many micro-batches' W may be one product.

    Raises:
        ConfigError: if an option is unknown or unreadable.
    """
    join = _read(options)["join"]
    if not isinstance(join, int) or join < 1:
        raise ConfigError(f"schedule '2bp': found join {join!r}; expected a number of micro-batches from 1")
    return join


def _read(options: Options) -> dict[str, int | str]:
    return read_options(options, schedule="2bp", defaults={"base": "1f1b", "delay": "end", "join": 1})


def _choice(option: str, found: int | str, known: Mapping[str, object]) -> str:
    if found not in known:
        expected = " or ".join(f'"{name}"' for name in known)
        raise ConfigError(f"schedule '2bp': found {option} {found!r}; expected {expected}")
    return str(found)


def _weight_half(compute: Compute) -> Compute:
    return Compute(compute.stage, "W", compute.microbatch)


def _at_the_end(lines: Sequence[Line], layout: Layout) -> Order:
    return tuple((*line, *(_weight_half(compute) for compute in line if compute.kind == "I")) for line in lines)


def _while_waiting(lines: Sequence[Line], layout: Layout) -> Order:
    """Run the lines in unit time; a rank whose next compute cannot start runs a W if it has one."""
    rests = [deque(line) for line in lines]
    late: list[deque[Compute]] = [deque() for _ in lines]
    order: list[list[Compute]] = [[] for _ in lines]
    replicas_done: Counter[Compute] = Counter()
    while any(rests) or any(late):
        started = []
        for rank, rest in enumerate(rests):
            if rest and _is_ready(rest[0], replicas_done, layout):
                compute = rest.popleft()
                late[rank].extend([_weight_half(compute)] if compute.kind == "I" else [])
            elif late[rank]:
                compute = late[rank].popleft()
            else:
                continue
            order[rank].append(compute)
            started.append(compute)
        replicas_done.update(started)
    return tuple(map(tuple, order))


def _is_ready(compute: Compute, replicas_done: Mapping[Compute, int], layout: Layout) -> bool:
    """Return whether all replicas of the stage before (of F) or after (of I) in the chain have run the micro-batch."""
    source = compute.stage + (-1 if compute.kind == "F" else 1)
    if not 0 <= source < len(layout.stages):
        return True
    return replicas_done[Compute(source, compute.kind, compute.microbatch)] == len(layout.stages[source])
