"""Profile: seconds and memory of every operation on one kind of device, and the cost of an optimizer step.

A profile belongs to one graph (`Graph.operations`, same order) and one kind of device. Seconds and bytes are measured
for few numbers of samples and read between them along straight lines, so slices of replicas and any number of
micro-batches have a price.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class OptimizerProfile:
    """What one optimizer step costs, as measured on the user's optimizer.

    Attributes:
        seconds_per_byte: seconds per byte of parameters.
        seconds_per_tensor: seconds per parameter tensor.
        fixed_s: seconds of a step without parameters.
        state_bytes_per_byte: bytes of state per byte of parameters (2.0 for Adam in the parameters' own type).
        workspace_per_byte: bytes that a step needs beside the state, per byte of all parameters that it steps (as
            implementations that step all at once do).
        workspace_per_largest_byte: the same, per byte of the largest of them (as those that step one by one do).
        takes_back: whether the last step can be taken back: parameters, state and gradients before it are kept too.
        copy_s_per_byte: seconds per byte of copying parameters, as weight versions are copied before a step.
    """

    seconds_per_byte: float = 0.0
    seconds_per_tensor: float = 0.0
    fixed_s: float = 0.0
    state_bytes_per_byte: float = 0.0
    workspace_per_byte: float = 0.0
    workspace_per_largest_byte: float = 0.0
    takes_back: bool = False
    copy_s_per_byte: float = 0.0

    @property
    def held_bytes_per_byte(self) -> float:
        """Return the bytes of state, and of what is kept to take a step back, per byte of parameters."""
        state = self.state_bytes_per_byte
        return 2 * state + 2 if self.takes_back else state


@dataclass(frozen=True)
class Profile:
    """Measured (or counted) seconds of the operations of a graph.

    Attributes:
        graph: fingerprint of the graph.
        device: kind of device, with what decides its speed, e.g. `cpu, 1 thread`.
        samples: numbers of samples at which times were taken, rising, at least one.
        seconds: for every operation its seconds at each of `samples`, glue (Python between operations) included.
        call_s: seconds that a compute takes beyond its operations: hand-over of inputs, bookkeeping.
        message_s: seconds until a message without bytes has arrived, from the end of the compute that made it.
        post_s, post_s_per_byte: seconds for which posting a message keeps the sender from computing.
        sum_busy_share: share of the seconds of sums in which they keep their ranks from computing.
        spread: median over the operations of (upper quartile - lower quartile) / median of the repeated measurements.
        source: `measured`, `counted` or `published`.
        optimizer: cost of the optimizer step.
        scratch_bytes: for every operation, at each of `samples`, the most bytes that it holds at once while it runs
            besides what it reads and the tensors that it makes; () if it was not measured, which counts as none.
    """

    graph: str
    device: str
    samples: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    call_s: float = 0.0
    message_s: float = 0.0
    post_s: float = 0.0
    post_s_per_byte: float = 0.0
    sum_busy_share: float = 0.0
    spread: float = 0.0
    source: str = "measured"
    optimizer: OptimizerProfile = OptimizerProfile()
    scratch_bytes: tuple[tuple[int, ...], ...] = ()

    def weights(self, samples: float) -> tuple[tuple[int, float], ...]:
        """Return (index into `samples`, weight): seconds at this number are the weighted sum of the measured ones.

        Between two measured numbers and beyond the largest the line through the two nearest is taken; below the
        smallest too, but at least half of the smallest measured time is kept. What was measured once only is taken to
        be in proportion.
        """
        known = self.samples
        if len(known) == 1:
            return ((0, samples / known[0]),)
        if samples in self._index:
            return ((self._index[samples], 1.0),)
        right = min(max(bisect.bisect_left(known, samples), 1), len(known) - 1)
        share = (samples - known[right - 1]) / (known[right] - known[right - 1])
        return ((right - 1, 1.0 - share), (right, share))

    def operation_s(self, operation: int, samples: int) -> float:
        """Return the seconds of one operation on this many samples."""
        return self.between(self.seconds[operation], samples)

    def between(self, times: Sequence[float], samples: float) -> float:
        """Return the seconds on this many samples of what takes `times` on the measured ones."""
        seconds = sum(times[i] * weight for i, weight in self.weights(samples))
        return seconds if len(self.samples) == 1 else max(seconds, LEAST_SHARE * min(times))

    @cached_property
    def _index(self) -> dict[float, int]:
        return {samples: i for i, samples in enumerate(self.samples)}


LEAST_SHARE = 0.5  # of the smallest measured time: a line through noisy points may cross zero
