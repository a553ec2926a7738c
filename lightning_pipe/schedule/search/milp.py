"""Mixed-integer program of OptPipe: the order, and the copies to the host, of least time within memory, by HiGHS.

After OptPipe (2025), reconstructed from its abstract. A compute a starts at t_a and takes d_a seconds; y_ab
is 1 if a runs before b, where both are on one device; T is the end of all. The least T, such that

    t_b >= t_a + d_a + message              where b takes what a makes
    t_b >= t_a + d_a - M_ab (1 - y_ab)      one compute at a time
    t_a >= t_b + d_b - M_ba y_ab
    sum of bytes_c y_cb + bytes_b <= room   at every b that adds bytes: F, and I if more is kept for W than for I
    T >= t_a + d_a

Where a stage can offload, o_m is 1 if its micro-batch m does. `Vacate` V and `Fetch` P of m stand in the line of the
device like computes that take no time: V takes bytes away, P adds them. Copies begin at u_m and v_m, on one lane in
each direction, and take c_m seconds:

    u_m >= t_F + d_F,  t_V >= u_m + c_m o_m             `Vacate` waits for the end of the way out
    v_m >= t_P,        t_I >= v_m + c_m o_m             I waits for the end of the way back
    u_n >= u_m + c_m o_m - M (1 - y_FmFn)               one copy at a time, out in the order of the F
    v_n >= v_m + c_m o_m - M (1 - y_ImIn)               and back in that of the I
    y_VaVb >= y_FaFb + o_a + o_b - 2, y_PaPb likewise   places in the order of the copies
    y_ab + y_bc + y_ca <= 2                             of V and P, which may stand at one moment
    y_Vb - y_Pb <= o_m                                  what is not offloaded is never away

Ours, to make it small. Micro-batches ascend on every stage in every kind, so that most pairs have no choice. The time
of the best order that `greedy` knows (published ones among them) is the end of the horizon: it gives every compute a
window (`time_windows`), pairs of which only one order fits into their windows have no y, and M_ab is by how much
the windows let a end after b starts. Cuts that every order keeps, with h the first moment at which a device can start,
and g the least that comes after its last compute:

    y_ca <= y_cb and y_bc <= y_ac           where a comes directly before b on its stage
    t_b >= h + sum of d_a y_ab
    T >= t_a + d_a + sum of d_b y_ab + g

Left out: OptPipe's cache of solved schedules, and its objective, the span of each device (here all wait for the last
one, as the optimizer does). A micro-batch of a stage is offloaded with all that the stage can offload, or not at all.
Messages take their time, but neither wait for each other nor for a receiver. What is found is therefore run with all
that (`schedule.construct.chain_run`) before it is preferred.

Legend: s stage, m, n micro-batches of stages of one device, a, b, c computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.program import Compute, ComputeKind, CopyingOrder, Fetch, HostCopy, Layout, Options, Vacate
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.chain_run import chain_makespan
from lightning_pipe.schedule.construct.devices import (
    ROUNDING,
    bytes_of,
    fits,
    order_of_lines,
    room_of,
    stages_by_device,
)
from lightning_pipe.schedule.construct.layout_shapes import Device
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.search.copying import copying_orders
from lightning_pipe.schedule.search.greedy import greedy
from lightning_pipe.schedule.search.linear_sums import ONE, ZERO, LinearSum, sum_of
from lightning_pipe.schedule.search.time_windows import TimeWindows, computes_of, inputs_of, must_precede

GAIN = 1e-4  # share of the time by which an order must be better to be looked for
MOST_PAIRS = 10_000  # of computes on one device with a choice; to state more takes longer than to solve pays
Placed: TypeAlias = Compute | HostCopy
Work: TypeAlias = tuple[int, int]  # stage, micro-batch


def milp(layout: Layout, microbatches: int, options: Options, times: ChainTimes, /) -> CopyingOrder:
    """Order by the integer program; as `greedy` does where that finds nothing better.

    Four devices and four micro-batches, one unit for each of F, I and W, free messages, endless room (`greedy` is best
    then):

        0 | F0 F1 F2 F3  .  .  . I0 W0 I1 W1 I2 W2 I3 W3
        1 |  . F0 F1 F2 F3  . I0 W0 I1 W1 I2 W2 I3 W3
        2 |  .  . F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W2 W3
        3 |  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3

    Best is what takes least by `chain_makespan`, so it is never worse than `greedy` and the published orders that fit.
    The same problem gives the same order, unless time ran out. Some ten micro-batches on four devices are solved within
    seconds, small gains are found for twice as many; from 10,000 pairs of computes with a choice on (about 40
    micro-batches on four devices) the order is that of `greedy`, and so it is where there is less room than one
    micro-batch needs. Where stages can offload, the order says which micro-batches do, and where the copies stand; it
    is never worse than the best of `copying_orders` then. Half as many micro-batches are solved in the same time.

    Args:
        layout: ranks of each stage; any stages may share a device.
        microbatches: number of micro-batches, at least 1.
        options: `seconds`: how long to solve at most (default 10).
        times: of the pipeline, with the room of every rank.

    Raises:
        ConfigError: if an option is unknown or unreadable, there is no micro-batch, devices overlap, or there is
            something to solve and scipy is not installed.
    """
    read = read_options(options, schedule="milp", defaults={"seconds": 10})
    check_microbatches(microbatches)
    seconds = _seconds(read["seconds"])
    held = stages_by_device(layout, schedule="milp")
    known = _known(layout, microbatches, times)
    within = chain_makespan(known, layout, times) * (1 - GAIN)
    lines = {device: _line(stages, microbatches, times, room=room_of(device, times)) for device, stages in held.items()}
    windows = TimeWindows(layout, microbatches, times)
    if not fits(known, times) or windows.least() > within or _pairs(lines) > MOST_PAIRS:
        return known
    found = _Model(lines, windows, times, within=within).solved(seconds)
    if found is None or not fits(found, times) or chain_makespan(found, layout, times) > within:
        return known
    return _thrifty(found, layout, times)


def _known(layout: Layout, microbatches: int, times: ChainTimes) -> CopyingOrder:
    """Return the quickest order that fits of those that are known without the program."""
    orders = [greedy(layout, microbatches, {}, times), *copying_orders(layout, microbatches, times)]
    fitting = [order for order in orders if fits(order, times)]
    return min(fitting, key=lambda order: chain_makespan(order, layout, times), default=orders[0])


def _thrifty(order: CopyingOrder, layout: Layout, times: ChainTimes) -> CopyingOrder:
    """Return an order without copies that neither memory nor time asks for: the program does not count them."""
    least = chain_makespan(order, layout, times)
    for work in sorted({_work(one) for line in order for one in line if isinstance(one, Vacate)}):
        fewer = tuple(tuple(one for one in line if isinstance(one, Compute) or _work(one) != work) for line in order)
        if fits(fewer, times) and chain_makespan(fewer, layout, times) <= least:
            order = fewer
    return order


def _seconds(found: int | str) -> float:
    try:
        seconds = float(found)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ConfigError(f"schedule 'milp': found seconds {found!r}; expected a number of seconds, at least 0")
    return seconds


def _line(stages: Sequence[int], microbatches: int, times: ChainTimes, *, room: float) -> tuple[Placed, ...]:
    """Return what a device runs, and, if it cannot keep all, the places of the copies that it may make."""
    computes = computes_of(stages, microbatches)
    is_full = sum(max(0.0, bytes_of(c, times)) for c in computes) > room
    copying = [s for s in stages if is_full and times.copied_bytes and times.copied_bytes[s]]
    works = [(s, m) for s in copying for m in range(microbatches)]
    return (*computes, *(kind(*work) for work in works for kind in (Vacate, Fetch)))


def _precedes(a: Placed, b: Placed) -> bool:
    """Return whether a stands before b in every order."""
    if isinstance(a, Compute) and isinstance(b, Compute):
        return must_precede(a, b)
    if not isinstance(a, Compute) and not isinstance(b, Compute) and _work(a) == _work(b):
        return isinstance(a, Vacate) and isinstance(b, Fetch)
    last = a if isinstance(a, Compute) else _of(a, "I")
    first = b if isinstance(b, Compute) else _of(b, "F")
    return last == first or must_precede(last, first)


def _work(placed: Placed) -> Work:
    return placed.stage, placed.microbatch


def _of(placed: Placed, kind: ComputeKind) -> Compute:
    """Return a compute of the same stage and micro-batch."""
    return Compute(placed.stage, kind, placed.microbatch)


def _pairs(lines: Mapping[Device, Sequence[Placed]]) -> int:
    """Count the pairs that can stand in both orders."""
    pairs = itertools.chain.from_iterable(itertools.combinations(line, 2) for line in lines.values())
    return sum(not _precedes(a, b) and not _precedes(b, a) for a, b in pairs)


class _Model:
    """The integer program: columns T, all times, then y and o; time in units of the horizon, bytes in units of room."""

    def __init__(
        self, lines: Mapping[Device, Sequence[Placed]], windows: TimeWindows, times: ChainTimes, *, within: float
    ) -> None:
        self._lines, self._windows, self._times, self._unit = lines, windows, times, within
        self._bounds: list[tuple[float, float]] = []  # of the columns
        self._end = self._column(0.0, 1.0)
        copies = [one for line in lines.values() for one in line if not isinstance(one, Compute)]
        placed = [*windows.computes, *copies]
        self._start = {one: self._column(self._earliest(one), self._latest(one)) for one in placed}
        self._moved = {one: self._column(self._earliest(one), self._latest(one)) for one in copies}  # u and v
        self._times_end = len(self._bounds)
        self._leaves = {_work(one): self._column(0.0, 1.0) for one in copies}  # o
        self._before: dict[tuple[Placed, Placed], LinearSum] = {}  # y
        self._rows: list[LinearSum] = []  # each at least 0
        self._state_inputs()
        for device, line in lines.items():
            for a, b in itertools.combinations(line, 2):
                self._state_turns(a, b)
            self._state_loads(line)
            self._state_neighbours(line)
            self._state_memory(line, room_of(device, times))
            self._state_copies([one for one in line if not isinstance(one, Compute)], line)

    def _column(self, least: float, most: float) -> LinearSum:
        """Return a new column within bounds."""
        self._bounds.append((least, max(least, most)))
        return LinearSum({len(self._bounds) - 1: 1.0})

    def _state(self, *terms: tuple[float, LinearSum]) -> None:
        """State that a sum is at least 0."""
        row = sum_of(*terms)
        if row.weights:
            self._rows.append(row)

    def _seconds(self, one: Placed) -> float:
        return self._times.compute_s(one) / self._unit if isinstance(one, Compute) else 0.0

    def _earliest(self, one: Placed) -> float:
        if isinstance(one, Compute):
            return self._windows.head[one] / self._unit
        forward = _of(one, "F")
        return self._earliest(forward) + self._seconds(forward)

    def _latest(self, one: Placed) -> float:
        if isinstance(one, Compute):
            return 1.0 - self._tail(one) - self._seconds(one)
        return self._latest(_of(one, "I"))

    def _tail(self, one: Placed) -> float:
        if isinstance(one, Compute):
            return self._windows.tail[one] / self._unit
        return self._tail(_of(one, "I")) + self._seconds(_of(one, "I"))

    def _state_inputs(self) -> None:
        stages = len(self._times.forward_s)
        for compute, start in self._start.items():
            if not isinstance(compute, Compute):
                continue
            for source in inputs_of(compute, stages=stages):
                wait = self._seconds(source) + self._windows.delay_s(source, compute) / self._unit
                self._state((1, start), (-1, self._start[source]), (-wait, ONE))

    def _state_turns(self, a: Placed, b: Placed) -> None:
        """Let one of two computes of a device end before the other starts."""
        if _precedes(a, b) or not self._is_possible(b, a):
            y = ONE
        elif _precedes(b, a) or not self._is_possible(a, b):
            y = ZERO
        else:
            y = self._column(0.0, 1.0)
        self._before[a, b], self._before[b, a] = y, sum_of((1, ONE), (-1, y))
        for first, second in ((a, b), (b, a)):
            y = self._before[first, second]
            if y.weights or y.constant:
                most = max(0.0, self._latest(first) + self._seconds(first) - self._earliest(second))
                gap = ((1, self._start[second]), (-1, self._start[first]), (-self._seconds(first), ONE))
                self._state(*gap, (most, ONE), (-most, y))

    def _is_possible(self, a: Placed, b: Placed) -> bool:
        """Return whether the windows allow b after the end of a."""
        return self._earliest(a) + self._seconds(a) <= self._latest(b) + ROUNDING

    def _state_loads(self, line: Sequence[Placed]) -> None:
        first = min(self._earliest(c) for c in line)
        last = min(self._tail(c) for c in line)
        for c in line:
            others = [other for other in line if other != c]
            before = [(-self._seconds(other), self._before[other, c]) for other in others]
            after = [(-self._seconds(other), self._before[c, other]) for other in others]
            self._state((1, self._start[c]), (-first, ONE), *before)
            self._state((1, self._end), (-1, self._start[c]), (-last - self._seconds(c), ONE), *after)

    def _state_neighbours(self, line: Sequence[Placed]) -> None:
        for a, b in itertools.permutations(line, 2):
            if _is_next(a, b):
                for c in line:
                    if c not in (a, b):
                        self._state((1, self._before[c, b]), (-1, self._before[c, a]))

    def _state_memory(self, line: Sequence[Placed], room: float) -> None:
        if sum(max(0.0, bytes_of(c, self._times)) for c in line) <= room:
            return
        share = {c: bytes_of(c, self._times) / room for c in line}
        for c in line:
            if share[c] > 0:
                kept = [(-share[other], self._before[other, c]) for other in line if other != c]
                self._state((1 + ROUNDING - share[c], ONE), *kept)

    def _state_copies(self, copies: Sequence[HostCopy], line: Sequence[Placed]) -> None:
        for one in copies:
            start, moved, leaves = self._start[one], self._moved[one], (-self._copy_s(one), self._leaves[_work(one)])
            if isinstance(one, Vacate):
                forward = _of(one, "F")
                self._state((1, moved), (-1, self._start[forward]), (-self._seconds(forward), ONE))
                self._state((1, start), (-1, moved), leaves)
            else:
                self._state((1, moved), (-1, start))
                self._state((1, self._start[_of(one, "I")]), (-1, moved), leaves)
        for a, b in itertools.permutations(copies, 2):
            if type(a) is type(b):
                self._state_lane(a, b)
            elif isinstance(a, Vacate) and _work(a) == _work(b):
                for c in line:
                    if c not in (a, b):
                        away = ((-1, self._before[a, c]), (1, self._before[b, c]))
                        self._state((1, self._leaves[_work(a)]), *away)
        for a, b, c in itertools.combinations(copies, 3):
            for first, second in ((b, c), (c, b)):
                pairs = ((a, first), (first, second), (second, a))
                self._state((2, ONE), *((-1, self._before[pair]) for pair in pairs))

    def _state_lane(self, a: HostCopy, b: HostCopy) -> None:
        """Let two copies in one direction run one after the other, and have their places in this order."""
        kind: ComputeKind = "F" if isinstance(a, Vacate) else "I"
        y, leaves = self._before[_of(a, kind), _of(b, kind)], self._leaves[_work(a)]
        if not (y.weights or y.constant):
            return
        most = max(0.0, self._latest(a) + self._copy_s(a) - self._earliest(b))
        gap = ((1, self._moved[b]), (-1, self._moved[a]), (-self._copy_s(a), leaves))
        self._state(*gap, (most, ONE), (-most, y))
        self._state((1, self._before[a, b]), (-1, y), (-1, leaves), (-1, self._leaves[_work(b)]), (2, ONE))

    def _copy_s(self, copy: HostCopy) -> float:
        return self._times.copy_s[copy.stage] / self._unit

    def solved(self, seconds: float) -> CopyingOrder | None:
        """Return the best order that is found in this time; None if there is none.

        Raises:
            ConfigError: if scipy is not installed.
        """
        try:
            from scipy.optimize import Bounds, LinearConstraint
            from scipy.optimize import milp as solve
            from scipy.sparse import coo_array
        except ImportError:
            raise ConfigError(
                "Schedule 'milp' was asked for, but scipy is not installed. Run pip install 'lightning-pipe[planners]'."
            ) from None
        entries = [(i, column, w) for i, row in enumerate(self._rows) for column, w in row.weights.items()]
        rows, columns, weights = (np.array(part) for part in zip(*entries, strict=True))
        count = len(self._bounds)
        matrix = coo_array((weights, (rows, columns)), shape=(len(self._rows), count)).tocsr()
        target, integral = np.zeros(count), np.ones(count)
        target[0], integral[: self._times_end] = 1.0, 0.0
        least, most = np.array(self._bounds).T
        found = solve(
            target,
            constraints=LinearConstraint(matrix, lb=np.array([-row.constant for row in self._rows])),
            integrality=integral,
            bounds=Bounds(least, most),
            options={"time_limit": seconds, "mip_rel_gap": GAIN},
        )
        if found.x is None:
            return None
        return order_of_lines({device: self._sorted(line, found.x) for device, line in self._lines.items()})

    def _sorted(self, line: Sequence[Placed], x: NDArray[np.float64]) -> list[Placed]:
        """Return a line in the order of y, by the number of those before each, without copies that are not made."""

        def is_one(y: LinearSum) -> bool:
            return y.constant + sum(weight * float(x[column]) for column, weight in y.weights.items()) > HALF

        made = [one for one in line if isinstance(one, Compute) or is_one(self._leaves[_work(one)])]
        found = sorted(made, key=lambda c: sum(is_one(self._before[other, c]) for other in made if other != c))
        return list(_useful(found))


HALF = 0.5  # parts 0 from 1, whatever the rounding of the solver


def _useful(line: Sequence[Placed]) -> Iterator[Placed]:
    """Yield a line without copies that come back before anything is computed."""
    at_once = {
        _work(a)
        for a in line
        if isinstance(a, Vacate)
        and all(not isinstance(b, Compute) for b in line[line.index(a) : line.index(Fetch(*_work(a)))])
    }
    yield from (one for one in line if isinstance(one, Compute) or _work(one) not in at_once)


def _is_next(a: Placed, b: Placed) -> bool:
    """Return whether b comes directly after a on its stage, or would if there were no others."""
    if not isinstance(a, Compute) or not isinstance(b, Compute) or a.stage != b.stage:
        return False
    if a.kind == b.kind:
        return a.microbatch + 1 == b.microbatch
    return a.microbatch == b.microbatch and (a.kind, b.kind) in (("F", "I"), ("I", "W"))
