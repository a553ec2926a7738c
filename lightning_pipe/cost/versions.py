"""Weight versions of a rank: the bytes that it holds beside its parameters, and the seconds of making them at a step.

    versions   weights of older versions: those that I or W reads, or all where forwards read them too (PipeDream-2BW,
               vertical sync)
    scratch    copies that are made for computes to read, such as predicted weights
    seconds    (bytes that a step copies x seconds per byte of a copy
               + bytes that a round's predictions and corrections pass over x seconds per byte of an optimizer step)
               / speed of the device

In the steady state both are there all the time, so they belong to the state of a rank. A step copies each of these
parameters once, whatever the number of versions (`runtime.versions`). A prediction passes over parameters and state,
as the optimizer's step does, and a round may make several (`schedule.predictions`). Left out: seconds of a copy that do
not depend on its bytes, and the weights that are kept where an optimizer that has no velocity is predicted.

Legend: one stage per rank, as rounds have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import OptimizerProfile
from lightning_pipe.cost.stage import StageWork


class WeightCounts(NamedTuple):
    """Weights of a stage, counted: copies of them, or passes over them.

    Attributes:
        everything: of all trained parameters.
        read_back: of those alone that I or W reads.
    """

    everything: int = 0
    read_back: int = 0


@dataclass(frozen=True)
class StageVersions:
    """Versions of the weights of one stage.

    Attributes:
        copies: versions beside the present one.
        scratch: copies that computes read for a moment, or corrections need.
        passes: that predictions and corrections of a round make.
    """

    copies: WeightCounts
    scratch: WeightCounts
    passes: WeightCounts


@dataclass(frozen=True)
class VersionBytes:
    """Bytes of the versions of a rank.

    Attributes:
        copied: that one step copies.
        copies: of all versions but the present one.
        scratch: of copies that computes read for a moment.
        passed: that predictions and corrections of a round pass over.
    """

    copied: int = 0
    copies: int = 0
    scratch: int = 0
    passed: int = 0

    def step_s(self, profile: OptimizerProfile, *, speed: float) -> float:
        """Return the seconds by which they make a step longer.

        Args:
            profile: measured on a device of speed 1.
            speed: speed of the rank's device.
        """
        return (self.copied * profile.copy_s_per_byte + self.passed * profile.seconds_per_byte) / speed


def version_bytes(
    work: StageWork, versions: StageVersions, *, graph: Graph, trained: Mapping[str, int]
) -> VersionBytes:
    """Return what a rank holds of the versions of its stage.

    Args:
        work: what the stage runs.
        versions: which there are.
        graph: with its operations.
        trained: bytes of the trained parameters of the rank, by name.
    """
    names, everything = read_by_backward(work, graph), sum(trained.values())
    read = sum(size for name, size in trained.items() if name in names)

    def size_of(weights: WeightCounts) -> int:
        return everything * weights.everything + read * weights.read_back

    copied = everything if versions.copies.everything else read if versions.copies.read_back else 0
    return VersionBytes(copied, *map(size_of, (versions.copies, versions.scratch, versions.passes)))


def read_by_backward(work: StageWork, graph: Graph) -> frozenset[str]:
    """Return the parameters that I or W of a stage reads."""
    operations = (*work.input_grad.operations, *work.weight_grad.operations)
    return frozenset(name for o in operations for name in graph.operations[o].parameters)
