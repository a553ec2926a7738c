"""Throughput of a step: tokens per second, and the model's own operations per second with their share of the peak."""

from __future__ import annotations

from typing import NamedTuple

from lightning_pipe.cost import utilization
from lightning_pipe.planner.problem import Problem
from lightning_pipe.units import format_share


class ModelFlops(NamedTuple):
    """Floating point operations per second and device, and their share of the peak (MFU); None if that is unknown."""

    per_device: float
    utilization: float | None

    def __str__(self) -> str:
        """Return both for people."""
        share = "" if self.utilization is None else f" (MFU {format_share(self.utilization, 0)})"
        return f"{self.per_device / 1e12:.3g} TFLOP/s per device{share}"


def tokens_text(problem: Problem, step_s: float) -> str:
    """Return the tokens per second over all ranks; "" if samples have none."""
    if not problem.tokens or not step_s:
        return ""
    rate = problem.samples * problem.tokens / step_s
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def model_flops(problem: Problem, step_s: float) -> ModelFlops | None:
    """Return the model's own operations per second and device, and what share of the peak that is.

    None where they, or the devices, are not known.

    Args:
        problem: graph, samples and devices.
        step_s: seconds of the step, predicted or measured.
    """
    flops = utilization.model_flops(problem.graph, problem.samples)
    devices = [problem.cluster.device(rank) for rank in range(problem.cluster.ranks)]
    rates = [device.rates for device in devices if device.rates is not None]
    if not flops or not step_s or len(rates) < len(devices):
        return None
    seconds = utilization.seconds_at_peak(problem.graph, problem.samples, [rate.peak_of for rate in rates])
    return ModelFlops(flops / step_s / len(devices), seconds / step_s or None)
