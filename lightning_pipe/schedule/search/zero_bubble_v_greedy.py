"""ZB-V for unequal times: W runs where the device would otherwise wait.

After the greedy form of ZB-V (Qi, Wan, Huang and Lin, Zero Bubble Pipeline Parallelism, 2023, section 6). F and I of a
device keep the order of a schedule in V shape; the places of W, which no other device waits for, come of an execution
in time:

    full      a device that keeps as many micro-batches as it may runs W before the next F
    waiting   a device whose next input is not there runs W; `patient` only if W ends before the input arrives, as far
              as that is known by then; `overtaking` it first looks whether the next I can run before an F

Left out: that messages of a channel wait for each other, and what a micro-batch takes in bytes. The first is in
`chain_makespan`, which judges.

Legend: s stage, m micro-batch, d device, p devices.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lightning_pipe.core.program import Compute, ComputeKind, Layout, Options, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.chain_run import chain_makespan
from lightning_pipe.schedule.construct.device_orders import order_of_devices
from lightning_pipe.schedule.construct.layout_shapes import row_of, zigzag
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.orders.controllable_memory import v_half, v_min
from lightning_pipe.schedule.orders.zero_bubble_v import zb_v

V_SCHEDULES = (zb_v, v_half, v_min)


@dataclass(frozen=True)
class FillingSwitches:
    """What a device does while it waits, as described above."""

    patient: bool
    overtaking: bool


SWITCHES = tuple(FillingSwitches(*on) for on in itertools.product((True, False), repeat=2))


def zb_v_greedy(layout: Layout, microbatches: int, options: Options, times: ChainTimes, /) -> Order:
    """Order as the fastest of ZB-V, V-Half and V-Min, each as it is and with W where devices would wait.

    Fastest by `chain_makespan`, so never slower than any of the three that keeps to the peak. With equal times it is
    ZB-V; two devices, four micro-batches:

        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        1 |   . 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Args:
        layout: ranks of each stage, along the devices and back; two stages per device.
        microbatches: number of micro-batches, at least 1.
        options: `peak`: most micro-batches of its two stages that a device keeps from F to W, by default "zb_v": 2p.
        times: of the pipeline; bytes are not looked at.

    Raises:
        ConfigError: if an option is unknown or unreadable, there is no micro-batch, the layout has another shape, or
            the peak is below that of V-Min.
    """
    read = read_options(options, schedule="zb_v_greedy", defaults={"peak": "zb_v"})
    check_microbatches(microbatches)
    row = row_of(layout, zigzag, schedule="zb_v_greedy", stages_per_device=2)
    peak = _read_peak(read["peak"], devices=len(row.devices))
    orders = [schedule(layout, microbatches) for schedule in V_SCHEDULES]
    tried = [order for order in orders if _most(order, until="W") <= peak]
    for order in orders:
        if _most(order, until="I") <= peak:
            lines = [[c for c in order[device[0]] if c.kind != "W"] for device in row.devices]
            fillings = (_Filling(lines, times, peak=peak, switches=switches) for switches in SWITCHES)
            tried.extend(order_of_devices(filling.run(), row=row) for filling in fillings)
    if not tried:
        least = min(_most(order, until="W") for order in orders)
        raise ConfigError(
            f"schedule 'zb_v_greedy': found peak {peak}; {len(row.devices)} devices need at least {least}, which is "
            "what v_min keeps"
        )
    return min(tried, key=lambda order: chain_makespan(order, layout, times))


def _read_peak(peak: int | str, *, devices: int) -> int:
    if peak == "zb_v":
        return 2 * devices
    try:
        return int(peak)
    except ValueError:
        raise ConfigError(f"schedule 'zb_v_greedy': found peak {peak!r}; expected a number or \"zb_v\"") from None


def _most(order: Order, *, until: ComputeKind) -> int:
    """Return the most micro-batches that a rank keeps from F until I or W."""
    return max(max(accumulate((c.kind == "F") - (c.kind == until) for c in line), default=0) for line in order)


@dataclass
class _Device:
    """How far a device is: what F and I it runs next, what W it could run, what it keeps, what it ran, until when."""

    heads: list[Compute]
    pending: deque[Compute] = field(default_factory=deque)
    kept: int = 0
    line: list[Compute] = field(default_factory=list)
    free: float = 0.0


class _Filling:
    """Run F and I of the devices in time, in their order, and W in between."""

    def __init__(
        self, lines: Sequence[Sequence[Compute]], times: ChainTimes, *, peak: int, switches: FillingSwitches
    ) -> None:
        self._devices = [_Device(list(line)) for line in lines]
        self._times = times
        self._peak = peak
        self._on = switches
        self._last = len(times.forward_s) - 1
        self._arrivals: dict[Compute, float] = {}  # of the inputs that are there or under way
        self._events = [(0.0, d) for d in range(len(lines))]  # when a device may find something to do

    def run(self) -> list[list[Compute]]:
        """Return the line of every device."""
        while self._events:
            now, d = heapq.heappop(self._events)
            compute = self._choice(self._devices[d], now) if self._devices[d].free <= now else None
            if compute:
                self._begin(compute, now, d)
        assert not any(device.heads or device.pending for device in self._devices), "the order has no circle"
        return [device.line for device in self._devices]

    def _choice(self, device: _Device, now: float) -> Compute | None:
        """Take what a free device runs now, or nothing if it waits for the next event."""
        ready = next((c for c in self._nexts(device) if self._arrival(c) <= now and not self._is_full(c, device)), None)
        if ready:
            device.heads.remove(ready)
            return ready
        arrival = min((self._arrival(c) for c in device.heads[:1]), default=math.inf)
        is_full = bool(device.heads) and self._is_full(device.heads[0], device)
        if device.pending and (is_full or self._may_fill(device.pending[0], now, arrival)):
            return device.pending.popleft()
        return None

    def _nexts(self, device: _Device) -> Iterator[Compute]:
        """Yield the next F or I, then the next I if it may overtake."""
        yield from device.heads[:1]
        if self._on.overtaking:
            yield from itertools.islice((c for c in device.heads[1:] if c.kind == "I"), 1)

    def _is_full(self, compute: Compute, device: _Device) -> bool:
        return compute.kind == "F" and device.kept >= self._peak

    def _may_fill(self, weight: Compute, now: float, arrival: float) -> bool:
        return not self._on.patient or math.isinf(arrival) or now + self._times.compute_s(weight) <= arrival

    def _arrival(self, compute: Compute) -> float:
        """Return when the input of a pass arrives; infinite if what makes it has not begun."""
        return 0.0 if compute.kind == "F" and compute.stage == 0 else self._arrivals.get(compute, math.inf)

    def _begin(self, compute: Compute, now: float, d: int) -> None:
        device, m = self._devices[d], compute.microbatch
        end = device.free = now + self._times.compute_s(compute)
        device.line.append(compute)
        device.kept += (compute.kind == "F") - (compute.kind == "W")
        heapq.heappush(self._events, (end, d))
        if compute.kind == "I":
            device.pending.append(Compute(compute.stage, "W", m))
        taker = self._taker(compute)
        if taker:
            message = self._times.message_s(compute.stage, taker.stage) if taker.stage != compute.stage else 0.0
            self._arrivals[taker] = end + message
            heapq.heappush(self._events, (end + message, min(taker.stage, self._last - taker.stage)))

    def _taker(self, compute: Compute) -> Compute | None:
        """Return the pass that waits for a compute."""
        s, m = compute.stage, compute.microbatch
        match compute.kind:
            case "F":
                return Compute(s + 1, "F", m) if s < self._last else Compute(s, "I", m)
            case "I" if s > 0:
                return Compute(s - 1, "I", m)
        return None
