"""Optimizer step of a rank: its seconds, and the size of its state.

    seconds = (fixed + bytes x seconds per byte + tensors x seconds per tensor) / speed of the device
    state   = bytes x held bytes per byte
    beside  = bytes x workspace per byte + bytes of the largest x workspace per byte of the largest

over the trained parameters that the rank holds, each once. Affine, as measured (`core.profile.OptimizerProfile`).

Left out: what callbacks do in the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.core.profile import OptimizerProfile


def step_s(profile: OptimizerProfile, parameter_bytes: Sequence[int], *, speed: float = 1.0) -> float:
    """Return the seconds of a step.

    Args:
        profile: measured on a device of speed 1.
        parameter_bytes: bytes of every trained parameter of the rank.
        speed: speed of the rank's device.
    """
    bytes_s = sum(parameter_bytes) * profile.seconds_per_byte
    return (profile.fixed_s + bytes_s + len(parameter_bytes) * profile.seconds_per_tensor) / speed


def optimizer_state_bytes(profile: OptimizerProfile, parameter_bytes: Sequence[int]) -> int:
    """Return the bytes of the optimizer's state."""
    return round(sum(parameter_bytes) * profile.held_bytes_per_byte)


def optimizer_workspace_bytes(profile: OptimizerProfile, parameter_bytes: Sequence[int]) -> int:
    """Return the bytes that a step needs while it runs, beside parameters, gradients and state."""
    largest = max(parameter_bytes, default=0)
    return round(sum(parameter_bytes) * profile.workspace_per_byte + largest * profile.workspace_per_largest_byte)
