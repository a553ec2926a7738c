"""V-Half and V-Min: a half and a third of the memory of 1F1B, at the price of some idle time at both ends.

Source: Qi, Wan, Amar and Lin, Pipeline Parallelism with Controllable Memory (2024); the offsets of the blocks are those
of its published program. The stages go along the devices and back. Every micro-batch runs the same block of F and I,
one period of six units after the previous one. The time for which a block keeps a stage's activations decides the
memory. Free units go to W. The ends of the pipeline are then squeezed:

    1. place the blocks, and W in free units, first come first served; the most that a device now keeps is the peak
    2. move every compute, first to last, to the earliest free unit in which it can run without raising the peak
    3. run F and I of each device in the order found, as soon as they can and the peak allows, and W when they cannot
    4. try also with every I after the last F of device 0 moved to units of W, and take the shorter of the two

Unlike in the published squeeze, step 2 also moves in the steady part, and two orders are tried. They are for equal
times of F, I and W. It is published that V-Half waits for nothing in its steady part if W + 2I >= 2F and W + 2F >= 2I;
here that holds for up to four devices. With more, these orders, in which W has the places that are free in unit time,
may lose some time in every period; "zb_v_greedy" with a lower `peak` moves W.

Legend: p devices, d device, s stage, m micro-batch. A unit is the time of F, I or W of a stage; slots count units.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TypeAlias

from lightning_pipe.core.program import Compute, ComputeKind, Layout, Options, Order
from lightning_pipe.schedule.construct.device_orders import order_of_devices
from lightning_pipe.schedule.construct.layout_shapes import row_of, zigzag
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS

PERIOD = 6  # F, I and W of two stages
Block: TypeAlias = Callable[[int, int], tuple[int, int, int, int]]  # of p and d: F forth, F back, I back, I forth
Slots: TypeAlias = dict[Compute, int]
Lines: TypeAlias = list[list[Compute]]


def v_half(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order two stages per device such that each keeps about half of what 1F1B does.

    Every device keeps min(2m, 2 floor((p + 2) / 2)) micro-batches of its stages, that is (p + 2) // 2 shares of the p
    of 1F1B. With p or more micro-batches it takes 6m + 3p - 7 units for even p, 6m + 3p - 4 for odd, and 6m + 1 for
    p = 2. Two devices, four micro-batches:

        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 0F3 3I2 0I1 3W2 0W1 3F3 3I3 0I2 3W3 0I3 0W2 0W3
        1 |   . 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3

    Args:
        layout: ranks of each stage, along the devices and back; two stages per device.
        microbatches: number of micro-batches, at least 1.
        options: none are known.

    Raises:
        ConfigError: if an option is unknown, there is no micro-batch, or the layout has another shape.
    """
    return _blocks("v_half", _half, layout, microbatches, options)


def v_min(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order two stages per device such that each keeps about a third of what 1F1B does.

    Every device keeps min(2m, 2 floor((p + 4) / 3)) micro-batches of its stages, that is (p + 4) // 3 shares of the p
    of 1F1B. With more than p micro-batches it takes 6m + 4p - 7, - 5 or - 6 units if p modulo 3 is 0, 1 or 2, and
    6m + 1 for p = 2. Two devices, four micro-batches:

        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 0F3 0I1 3W1 3F2 3I2 0W1 3W2 0I2 0W2 3F3 3I3 3W3   . 0I3 0W3
        1 |   . 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2I1 1I1 1W0 2F2 2W1 1F3 2I2 1I2 1W1 2F3 2W2 1W2 2I3 1I3 2W3 1W3

    Args:
        layout: ranks of each stage, along the devices and back; two stages per device.
        microbatches: number of micro-batches, at least 1.
        options: none are known.

    Raises:
        ConfigError: if an option is unknown, there is no micro-batch, or the layout has another shape.
    """
    return _blocks("v_min", _min, layout, microbatches, options)


def _half(p: int, d: int) -> tuple[int, int, int, int]:
    gap = 0 if p % 2 else 3  # so that no two computes of a device meet modulo the period
    return 2 * d, 3 * p - d - 2, 3 * p + gap + 2 * d - 1, 6 * p + gap - d - 2


def _min(p: int, d: int) -> tuple[int, int, int, int]:
    gap = 0 if p % 3 else 2
    return d, 2 * p - d - 1, 2 * p + gap + d, 4 * p + gap - d - 1


def _blocks(name: str, block: Block, layout: Layout, microbatches: int, options: Options) -> Order:
    """Return the order that repeats a block, squeezed."""
    read_options(options, schedule=name, defaults={})
    check_microbatches(microbatches)
    row = row_of(layout, zigzag, schedule=name, stages_per_device=2)
    p = len(row.devices)
    placed = _with_weights(_placed(block, p, microbatches), p)
    peak = max(map(max, _kept(placed, p)))
    squeezed = _squeezed(placed, p, moving="FIW")
    passes = {compute: slot for compute, slot in squeezed.items() if compute.kind != "W"}
    last = passes[Compute(0, "F", microbatches - 1)]
    tried = [_run(each, p, peak) for each in (passes, _squeezed(passes, p, moving="I", after=last))]
    _, lines = min(tried, key=lambda one: one[0])
    return order_of_devices(lines, row=row)


def _placed(block: Block, p: int, microbatches: int) -> Slots:
    """Return F and I of every micro-batch, one block per period."""
    kinds: list[list[tuple[int, ComputeKind]]] = [
        [(d, "F"), (2 * p - 1 - d, "F"), (2 * p - 1 - d, "I"), (d, "I")] for d in range(p)
    ]
    return {
        Compute(stage, kind, m): offset + PERIOD * m
        for d in range(p)
        for (stage, kind), offset in zip(kinds[d], block(p, d), strict=True)
        for m in range(microbatches)
    }


def _with_weights(slots: Slots, p: int) -> Slots:
    """Add every W in a free slot after its I, first come first served."""
    filled = dict(slots)
    for line in _by_device(slots, p):
        at = {slots[compute]: compute for compute in line}
        pending = deque[Compute]()
        slot = 0
        while slot <= max(at) or pending:
            if slot in at:
                pending.extend(_weights(at[slot]))
            elif pending:
                filled[pending.popleft()] = slot
            slot += 1
    return filled


def _weights(compute: Compute) -> Iterator[Compute]:
    if compute.kind == "I":
        yield Compute(compute.stage, "W", compute.microbatch)


def _by_device(slots: Slots, p: int) -> Lines:
    """Return the computes of every device in the order of their slots."""
    lines: Lines = [[] for _ in range(p)]
    for compute in sorted(slots, key=slots.__getitem__):
        lines[_device(compute, p)].append(compute)
    return lines


def _device(compute: Compute, p: int) -> int:
    return min(compute.stage, 2 * p - 1 - compute.stage)


def _kept(slots: Slots, p: int) -> list[list[int]]:
    """Return by device and slot how many micro-batches of its stages are kept after it."""
    changes = [[0] * (1 + max(slots.values())) for _ in range(p)]
    for compute, slot in slots.items():
        changes[_device(compute, p)][slot] += (compute.kind == "F") - (compute.kind == "W")
    return [list(accumulate(line)) for line in changes]


def _needs(compute: Compute, p: int) -> Iterator[Compute]:
    """Yield what a compute waits for; order within a kind and stage stays that of the micro-batches."""
    s, m = compute.stage, compute.microbatch
    if m > 0:
        yield Compute(s, compute.kind, m - 1)
    if compute.kind == "W":
        yield Compute(s, "I", m)
    else:
        yield from _inputs(compute, p)


def _inputs(compute: Compute, p: int) -> Iterator[Compute]:
    s, m = compute.stage, compute.microbatch
    match compute.kind:
        case "F" if s > 0:
            yield Compute(s - 1, "F", m)
        case "I":
            yield Compute(s + 1, "I", m) if s < 2 * p - 1 else Compute(s, "F", m)


def _squeezed(slots: Slots, p: int, *, moving: str, after: int = -1) -> Slots:
    """Move some computes, first to last, to the earliest free slots in which they can run without raising the peak.

    Args:
        slots: of all computes, or of F and I.
        p: devices.
        moving: kinds that move.
        after: slot after which they move.
    """
    moved = dict(slots)
    taken = {(_device(compute, p), slot) for compute, slot in slots.items()}
    kept = _kept(slots, p)
    peak = max(map(max, kept))
    for compute in sorted(slots, key=lambda one: (slots[one], one)):
        if compute.kind not in moving or slots[compute] <= after:
            continue
        d, old = _device(compute, p), slots[compute]
        earliest = 1 + max((moved[needed] for needed in _needs(compute, p)), default=-1)
        if compute.kind == "F":
            earliest = next((t + 1 for t in range(old - 1, earliest - 1, -1) if kept[d][t] >= peak), earliest)
        new = next((t for t in range(earliest, old) if (d, t) not in taken), old)
        taken.remove((d, old))
        taken.add((d, new))
        moved[compute] = new
        for t in range(new, old):
            kept[d][t] += (compute.kind == "F") - (compute.kind == "W")
    return moved


def _run(slots: Slots, p: int, peak: int) -> tuple[int, Lines]:
    """Run F and I in the order of their slots as early as they can, W in between; return the units that it takes.

    A device that may keep no more runs W; in this order there always is one then, since the slots kept to the peak.
    """
    waiting = [deque(line) for line in _by_device(slots, p)]
    pending = [deque[Compute]() for _ in range(p)]
    lines: Lines = [[] for _ in range(p)]
    kept, ends, now = [0] * p, dict[Compute, int](), 0
    while any(waiting) or any(pending):
        for d in range(p):
            head = waiting[d][0] if waiting[d] else None
            if head and _ready(_inputs(head, p), ends, now) and not (head.kind == "F" and kept[d] >= peak):
                compute = waiting[d].popleft()
                pending[d].extend(_weights(compute))
            elif pending[d]:
                compute = pending[d].popleft()
            else:
                continue
            kept[d] += (compute.kind == "F") - (compute.kind == "W")
            ends[compute] = now + 1
            lines[d].append(compute)
        now += 1
    return now, lines


def _ready(inputs: Iterable[Compute], ends: Slots, now: int) -> bool:
    return all(needed in ends and ends[needed] <= now for needed in inputs)
