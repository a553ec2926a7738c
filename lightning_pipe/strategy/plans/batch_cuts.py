"""Cutting of batches into micro-batches: as the plan says; before there is one, as the plan file or the options say."""

from __future__ import annotations

from lightning_pipe.capture import Route, Structure
from lightning_pipe.config import DappleConfig
from lightning_pipe.core.plan import Plan, microbatch_sizes
from lightning_pipe.errors import BatchError
from lightning_pipe.strategy.steps.step_runtime import pieces, slices


class BatchCuts:
    """Know how many samples a batch has, and how it is cut.

    Args:
        config: options.

    Attributes:
        given: the plan of the user's file; None without one.
        plan: the plan; None until there is one.
    """

    def __init__(self, config: DappleConfig) -> None:
        self._config = config
        self.given: Plan | None = None
        self.plan: Plan | None = None

    @property
    def planned(self) -> Plan:
        """Return the plan, once there is one."""
        assert self.plan is not None, "planned before anything is run"
        return self.plan

    @property
    def wanted_microbatches(self) -> int:
        """Return how many micro-batches the user wants, in the plan's file or else as an option; 1 if that is open."""
        wanted = self.given.microbatches if self.given is not None else self._config.microbatches
        return wanted or 1

    def samples(self, structure: Structure) -> int:
        """Return the number of samples of a batch; that of its first tensor if it cannot be cut.

        Raises:
            BatchError: if its tensors disagree, or it is empty.
        """
        dim = self._config.batch_dim
        if self.can_cut(structure):
            if samples := structure.samples(dim):
                return samples
            raise BatchError("The batch has no samples. Set drop_last, or let the sampler skip empty batches.")
        return next((leaf.shape[dim] for leaf in structure.leaves if len(leaf.shape) > dim), 1)

    def can_cut(self, structure: Structure) -> bool:
        """Return whether batches like this are cut; others are left whole where the user does not ask to cut them."""
        return self.wanted_microbatches > 1 or not self.uncut(structure)

    def uncut(self, structure: Structure) -> str:
        """Return why batches like this cannot be cut, in words after "since"; "" if they can."""
        try:
            structure.samples(self._config.batch_dim)
        except BatchError as error:
            said = str(error).partition(". ")[0]
            return said[:1].lower() + said[1:]
        return ""

    def leaves_cut(self, structure: Structure) -> tuple[bool, ...]:
        """Return which tensors of a batch are cut into samples."""
        return structure.cut(self._config.batch_dim) if self.can_cut(structure) else (False,) * len(structure.leaves)

    def sizes(self, capture: Route, samples: int) -> tuple[int, ...]:
        """Return the micro-batches of a batch: as many as planned, fewer where the graph needs it; () if none fit."""
        plan = self.planned
        for count in range(min(samples, 1 if capture.whole else plan.microbatches), 0, -1):
            sizes = microbatch_sizes(samples, count)
            parts = slices(plan.layout, sizes) if capture.is_sliceable else sizes  # else replicas take turns
            if not any(capture.misfit(size) for size in parts):
                return sizes
        return ()

    def parts(self, capture: Route, samples: int) -> tuple[int, ...]:
        """Return the samples of the smallest parts in which a batch is computed."""
        sizes = self.sizes(capture, samples)
        return pieces(self.planned.layout, sizes) if capture.is_sliceable and sizes else sizes

    def largest_slice(self, samples: int) -> int:
        """Return the most samples that a compute has of a batch."""
        plan = self.planned
        return max(slices(plan.layout, microbatch_sizes(samples, plan.microbatches)))

    def first_slice(self, samples: int) -> int:
        """Guess the size of a micro-batch before there is a plan."""
        return max(microbatch_sizes(samples, self.wanted_microbatches))
