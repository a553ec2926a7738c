"""Planning problem: a step, its costs, devices and links, and what the user has decided already."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile
from lightning_pipe.cost.counted import counted
from lightning_pipe.cost.stage import position_seconds
from lightning_pipe.cost.tables import GraphArrays
from lightning_pipe.errors import PlanError
from lightning_pipe.schedule.weights import POLICIES, WeightPolicy

MemoryPolicy = Literal["recompute", "offload"]
Sharding = Literal["auto", "on", "off"]

EXECUTED: frozenset[MemoryPolicy] = frozenset(("recompute", "offload"))
"""What a run of a captured step can do with saved tensors beside keeping them: its plans may do so by default."""


@dataclass(frozen=True)
class Constraints:
    """What a plan must keep to; a planner decides whatever is left open.

    Attributes:
        microbatches: micro-batches per batch; None leaves it open.
        replicas: ranks per stage, stages in the order of the ranks; None leaves it open.
        schedule: name of the schedule; None leaves it open.
        warmup: warm-up of 1F1B, as `schedule.orders.one_f_one_b` reads it; None leaves it open.
        least_samples: fewest samples of a micro-batch for which a replica may be used, unless a batch has fewer in all.
        memory_policies: what a plan may do with saved tensors instead of keeping them.
        stages_per_device: stages per device (in each of its pipes); None leaves it open.
        order: computes of every rank, as text, that decide layout, number of micro-batches and schedule; () leaves
            these open.
        shard_optimizer: whether holders of the same parameters share their optimizer state; "auto" where a plan does
            not fit into memory without.
        versions: policy of weight versions (`schedule.weights.POLICIES`); "sync" for a pipeline that is flushed after
            every batch. It changes what is trained, so no plan says it and no planner chooses it.
    """

    microbatches: int | None = None
    replicas: tuple[int, ...] | None = None
    schedule: str | None = None
    warmup: str | None = None
    least_samples: int = 1
    memory_policies: frozenset[MemoryPolicy] = frozenset()
    stages_per_device: int | None = None
    order: tuple[str, ...] = ()
    shard_optimizer: Sharding = "off"
    versions: str = "sync"


ANYTHING = Constraints()


@dataclass(frozen=True)
class Problem:
    """One batch of `samples` samples of this graph, on these devices.

    Attributes:
        graph: the step.
        profile: seconds of its operations.
        cluster: devices and links; every rank is used.
        samples: samples of a batch.
        training: whether the step has a backward and ends with an optimizer step.
        constraints: what is decided already.
        runs_ahead: whether ranks go on to the next batch without waiting for each other.
        tokens: of a sample, for what is reported only, as the next two; 0 if it is not known.
        module: class of the module, or the profile in its place.
        parameters: number of its parameters; 0 if it is not known.
        steps_together: whether no rank steps before all have their gradients, as clipping by norm asks for, although
            forwards run ahead.
    """

    graph: Graph
    profile: Profile
    cluster: Cluster
    samples: int
    training: bool = True
    constraints: Constraints = ANYTHING
    runs_ahead: bool = False
    tokens: int = 0
    module: str = ""
    parameters: int = 0
    steps_together: bool = False

    @property
    def policy(self) -> WeightPolicy | None:
        """Return the policy of weight versions; None for a pipeline that is flushed, and without training."""
        versions = self.constraints.versions
        return POLICIES[versions] if self.training and versions != "sync" else None

    @property
    def copies(self) -> int:
        """Return how many copies of its trained parameters a rank holds, if its forwards run ahead by one at least."""
        return 0 if self.policy is None else self.policy.live(1, 1) - 1 - self.policy.predicted + self.policy.scratch

    @cached_property
    def tables(self) -> GraphArrays:
        """Return the graph as arrays."""
        return GraphArrays(self.graph)

    @cached_property
    def position_seconds(self) -> tuple[float, ...]:
        """Return the seconds of every position, forward and backward, on as many samples as were captured."""
        found = position_seconds(self.graph, self.profile, self.graph.samples, tables=self.tables)
        return tuple(forward + backward for forward, backward in found)

    def with_versions(self, versions: str) -> Problem:
        """Return the same problem with another policy of weight versions."""
        return replace(self, constraints=replace(self.constraints, versions=versions))

    @property
    def waiting(self) -> Problem:
        """Return the problem of ranks that wait for each other after every batch."""
        optimizer = replace(self.profile.optimizer, takes_back=False)
        problem = replace(self, profile=replace(self.profile, optimizer=optimizer), runs_ahead=False)
        return problem.with_versions("sync")

    def check_samples(self, microbatches: int) -> None:
        """Check that every one of so many micro-batches has a sample.

        Raises:
            PlanError: if a batch has fewer samples.
        """
        if microbatches > self.samples:
            raise PlanError(
                f"A batch has {self.samples} samples, too few for {microbatches} micro-batches. Set microbatches to at "
                f"most {self.samples}, or increase the batch size."
            )

    def ahead(self, *, takes_back: bool) -> Problem:
        """Return the problem of ranks that run ahead, and may have to take optimizer steps back."""
        optimizer = replace(self.profile.optimizer, takes_back=takes_back)
        return replace(self, profile=replace(self.profile, optimizer=optimizer), runs_ahead=True)


_NOMINAL_MEMORY = 1 << 62  # nothing is known, so nothing is too big
_NOMINAL_LINK = Link(latency_s=20e-6, bytes_per_s=5e9)  # a process on the same host


def nominal_cluster(ranks: int, memory_bytes: int = _NOMINAL_MEMORY) -> Cluster:
    """Return equal nominal devices on one host, for when nothing is to be measured."""
    device = Device("nominal", memory_bytes)
    host = Host("nominal", (device,) * ranks, inside=_NOMINAL_LINK, network=_NOMINAL_LINK, swap=_NOMINAL_LINK)
    return Cluster((host,))


def counted_problem(graph: Graph, *, ranks: int, samples: int, training: bool = True) -> Problem:
    """Return the problem of counted costs on nominal devices."""
    return Problem(graph, counted(graph), nominal_cluster(ranks), samples, training)
