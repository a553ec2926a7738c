"""Mixed-integer program of OptPipe: the order of least time within memory, solved by HiGHS.

After OptPipe (2025), reconstructed from what its abstract says. A compute a starts at t_a and takes d_a seconds; y_ab
is 1 if a runs before b, where both are on one device; T is the end of all. The least T, such that

    t_b >= t_a + d_a + message              where b takes what a makes
    t_b >= t_a + d_a - M_ab (1 - y_ab)      one compute at a time
    t_a >= t_b + d_b - M_ba y_ab
    sum of bytes_c y_cb + bytes_b <= room   at every b that adds bytes: F, and I if more is kept for W than for I
    T >= t_a + d_a

Ours, to make it small. Micro-batches ascend on every stage in every kind, so that most pairs have no choice. The time
of the best order that `greedy` knows (published ones among them) is the end of the horizon: it gives every compute a
window (`time_windows`), pairs of which only one order fits into their windows have no y, and M_ab is by how much
the windows let a end after b starts. Cuts that every order keeps, with h the first moment at which a device can start,
and g the least that comes after its last compute:

    y_ca <= y_cb and y_bc <= y_ac           where a comes directly before b on its stage
    t_b >= h + sum of d_a y_ab
    T >= t_a + d_a + sum of d_b y_ab + g

Left out: OptPipe's offload and reload, its cache of solved schedules, and its objective, the span of each device (here
all wait for the last one, as the optimizer does). Messages take their time, but neither wait for each other nor for
a receiver. What is found is therefore run with all that (`schedule.construct.chain_run`) before it is preferred.

Legend: s stage, a, b, c computes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.program import Compute, Layout, Options, Order
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
from lightning_pipe.schedule.search.greedy import greedy
from lightning_pipe.schedule.search.time_windows import TimeWindows, computes_of, inputs_of, must_precede

GAIN = 1e-4  # share of the time by which an order must be better to be looked for
MOST_PAIRS = 10_000  # of computes on one device with a choice; to state more takes longer than to solve pays


def milp(layout: Layout, microbatches: int, options: Options, times: ChainTimes, /) -> Order:
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
    micro-batch needs.

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
    known = greedy(layout, microbatches, {}, times)
    within = chain_makespan(known, layout, times) * (1 - GAIN)
    lines = {device: computes_of(stages, microbatches) for device, stages in held.items()}
    windows = TimeWindows(layout, microbatches, times)
    if not fits(known, times) or windows.least() > within or _pairs(lines) > MOST_PAIRS:
        return known
    found = _Model(lines, windows, times, within=within).solved(seconds)
    if found is None or not fits(found, times) or chain_makespan(found, layout, times) > within:
        return known
    return found


def _seconds(found: int | str) -> float:
    try:
        seconds = float(found)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ConfigError(f"schedule 'milp': found seconds {found!r}; expected a number of seconds, at least 0")
    return seconds


def _pairs(lines: Mapping[Device, Sequence[Compute]]) -> int:
    """Count the pairs of computes that can run in both orders."""
    pairs = itertools.chain.from_iterable(itertools.combinations(line, 2) for line in lines.values())
    return sum(not must_precede(a, b) and not must_precede(b, a) for a, b in pairs)


@dataclass(frozen=True)
class _Sum:
    """A linear expression: weights of columns, and a constant."""

    weights: Mapping[int, float] = field(default_factory=dict)
    constant: float = 0.0


ONE = _Sum(constant=1.0)
ZERO = _Sum()


def _sum_of(*terms: tuple[float, _Sum]) -> _Sum:
    """Add up expressions, each with a factor."""
    weights: dict[int, float] = defaultdict(float)
    for factor, term in terms:
        for column, weight in term.weights.items():
            weights[column] += factor * weight
    return _Sum(weights, sum(factor * term.constant for factor, term in terms))


class _Model:
    """The integer program: columns T, then all t, then all y; time in units of the horizon, bytes in units of room."""

    def __init__(
        self, lines: Mapping[Device, Sequence[Compute]], windows: TimeWindows, times: ChainTimes, *, within: float
    ) -> None:
        self._lines, self._windows, self._times, self._unit = lines, windows, times, within
        self._columns = 1 + len(windows.computes)
        self._end = _Sum({0: 1.0})
        self._start = {compute: _Sum({1 + i: 1.0}) for i, compute in enumerate(windows.computes)}
        self._before: dict[tuple[Compute, Compute], _Sum] = {}  # y
        self._rows: list[_Sum] = []  # each at least 0
        self._state_inputs()
        for device, line in lines.items():
            for a, b in itertools.combinations(line, 2):
                self._state_turns(a, b)
            self._state_loads(line)
            self._state_neighbours(line)
            self._state_memory(line, room_of(device, times))

    def _state(self, *terms: tuple[float, _Sum]) -> None:
        """State that a sum is at least 0."""
        row = _sum_of(*terms)
        if row.weights:
            self._rows.append(row)

    def _seconds(self, compute: Compute) -> float:
        return self._times.compute_s(compute) / self._unit

    def _earliest(self, compute: Compute) -> float:
        return self._windows.head[compute] / self._unit

    def _latest(self, compute: Compute) -> float:
        return 1.0 - self._windows.tail[compute] / self._unit - self._seconds(compute)

    def _state_inputs(self) -> None:
        stages = len(self._times.forward_s)
        for compute, start in self._start.items():
            for source in inputs_of(compute, stages=stages):
                wait = self._seconds(source) + self._windows.delay_s(source, compute) / self._unit
                self._state((1, start), (-1, self._start[source]), (-wait, ONE))

    def _state_turns(self, a: Compute, b: Compute) -> None:
        """Let one of two computes of a device end before the other starts."""
        if must_precede(a, b) or not self._is_possible(b, a):
            y = ONE
        elif must_precede(b, a) or not self._is_possible(a, b):
            y = ZERO
        else:
            y = _Sum({self._columns: 1.0})
            self._columns += 1
        self._before[a, b], self._before[b, a] = y, _sum_of((1, ONE), (-1, y))
        for first, second in ((a, b), (b, a)):
            y = self._before[first, second]
            if y.weights or y.constant:
                most = max(0.0, self._latest(first) + self._seconds(first) - self._earliest(second))
                gap = ((1, self._start[second]), (-1, self._start[first]), (-self._seconds(first), ONE))
                self._state(*gap, (most, ONE), (-most, y))

    def _is_possible(self, a: Compute, b: Compute) -> bool:
        """Return whether the windows allow b after the end of a."""
        return self._earliest(a) + self._seconds(a) <= self._latest(b) + ROUNDING

    def _state_loads(self, line: Sequence[Compute]) -> None:
        first = min(self._earliest(c) for c in line)
        last = min(self._windows.tail[c] for c in line) / self._unit
        for c in line:
            others = [other for other in line if other != c]
            before = [(-self._seconds(other), self._before[other, c]) for other in others]
            after = [(-self._seconds(other), self._before[c, other]) for other in others]
            self._state((1, self._start[c]), (-first, ONE), *before)
            self._state((1, self._end), (-1, self._start[c]), (-last - self._seconds(c), ONE), *after)

    def _state_neighbours(self, line: Sequence[Compute]) -> None:
        for a, b in itertools.permutations(line, 2):
            if _is_next(a, b):
                for c in line:
                    if c not in (a, b):
                        self._state((1, self._before[c, b]), (-1, self._before[c, a]))

    def _state_memory(self, line: Sequence[Compute], room: float) -> None:
        if sum(max(0.0, bytes_of(c, self._times)) for c in line) <= room:
            return
        share = {c: bytes_of(c, self._times) / room for c in line}
        for c in line:
            if share[c] > 0:
                kept = [(-share[other], self._before[other, c]) for other in line if other != c]
                self._state((1 + ROUNDING - share[c], ONE), *kept)

    def solved(self, seconds: float) -> Order | None:
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
        matrix = coo_array((weights, (rows, columns)), shape=(len(self._rows), self._columns)).tocsr()
        target, integral = np.zeros(self._columns), np.ones(self._columns)
        target[0], integral[: 1 + len(self._start)] = 1.0, 0.0
        least, most = np.zeros(self._columns), np.ones(self._columns)
        for i, compute in enumerate(self._start, start=1):
            least[i], most[i] = self._earliest(compute), max(self._earliest(compute), self._latest(compute))
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

    def _sorted(self, line: Sequence[Compute], x: NDArray[np.float64]) -> list[Compute]:
        """Return a line in the order of y: by the number of computes before each."""

        def is_before(a: Compute, b: Compute) -> bool:
            y = self._before[a, b]
            return y.constant + sum(weight * float(x[column]) for column, weight in y.weights.items()) > HALF

        return sorted(line, key=lambda c: sum(is_before(other, c) for other in line if other != c))


HALF = 0.5  # parts 0 from 1, whatever the rounding of the solver


def _is_next(a: Compute, b: Compute) -> bool:
    """Return whether b comes directly after a on its stage, or would if there were no others."""
    if a.stage != b.stage:
        return False
    if a.kind == b.kind:
        return a.microbatch + 1 == b.microbatch
    return a.microbatch == b.microbatch and (a.kind, b.kind) in (("F", "I"), ("I", "W"))
