"""Costs that plans are evaluated with: seconds and bytes of operations, of links and of the optimizer.

Measured on all ranks together, once per fit, and once for validate, test or predict outside of one: ranks with the same
kind of device share the operations among them, and measure at the same time, so that what they have in common (caches,
memory bandwidth) is as busy as in training. Rank 0 puts the problem together. Where nothing is to be measured, costs
are counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch.optim import Optimizer

from lightning_pipe.capture import Capture, Route
from lightning_pipe.config import DappleConfig
from lightning_pipe.core.plan import Plan, microbatch_sizes
from lightning_pipe.core.profile import Profile
from lightning_pipe.core.program import Layout
from lightning_pipe.cost.counted import counted_on
from lightning_pipe.freed_memory import freed_memory_kept
from lightning_pipe.planner.problem import Problem, counted_problem, nominal_cluster
from lightning_pipe.profiler.cache import Timing, folder_under_load, load_timings, store_timings
from lightning_pipe.profiler.devices import DeviceFacts, build_cluster
from lightning_pipe.profiler.network.link_probe import LinkFacts, computing
from lightning_pipe.profiler.optimizer import counted_optimizer
from lightning_pipe.profiler.processor_time import ProcessorTime
from lightning_pipe.profiler.timing.operators import Operators
from lightning_pipe.runtime.activations.protocol import HostStore
from lightning_pipe.schedule.registry import planned_join
from lightning_pipe.strategy.plans.planning import given_cluster
from lightning_pipe.strategy.plans.surroundings import Surroundings, SurroundingsProbe
from lightning_pipe.strategy.ranks.connections import Connections
from lightning_pipe.strategy.steps.step_runtime import slices
from lightning_pipe.units import format_seconds

T = TypeVar("T")
log = logging.getLogger(__name__)

_MOST_PER_STAGE = 8  # micro-batches per stage up to which planners go


def reproducible(config: DappleConfig, *, ranks: int) -> DappleConfig:
    """Return options that make the same plan at every start, where deterministic algorithms are asked for."""
    if not torch.are_deterministic_algorithms_enabled() or ranks == 1 or config.costs == "counted":
        return config
    if config.plan is None:
        log.info(
            "Trainer(deterministic=True) fixes the plan: costs='counted' instead of measured times, and replan=false. "
            "So every start draws the same random numbers and cuts batches alike."
        )
    return replace(config, costs="counted", replan=False)


class PlanCosts:
    """Find out, on all ranks together, what plans of this module cost.

    Args:
        config: options.
        links: to the other ranks.
        device: where this rank computes.
        host: where it offloads to.

    Attributes:
        is_disturbed: on rank 0, whether other work took a part of the processor while operations were timed.
    """

    def __init__(self, config: DappleConfig, links: Connections, *, device: torch.device, host: HostStore) -> None:
        self._config, self._links, self._device = config, links, device
        self._surroundings = SurroundingsProbe(config.cache_dir, links, device=device, host=host)
        self.is_disturbed = False

    def problem(
        self,
        capture: Route,
        *,
        samples: int,
        given: Plan | None,
        optimizers: Sequence[Optimizer],
        training: bool,
        takes_back: bool = False,
    ) -> Problem | None:
        """Return what a planner is asked, on rank 0; None elsewhere.

        Args:
            capture: the step.
            samples: samples of a batch.
            given: the plan, if the user has given one.
            optimizers: what will step.
            training: whether the step has a backward.
            takes_back: whether an optimizer step may have to be taken back, if ranks run ahead.

        Raises:
            ClusterError: if the cluster file is wrong or has another number of devices.
        """
        control = self._links.control
        problem = counted_problem(capture.graph, ranks=control.ranks, samples=samples, training=training)
        described = control.agreed(
            lambda: given_cluster(self._config, control.ranks), source=0, what="the cluster file"
        )
        if described is None and self._config.costs == "counted" and control.ranks > 1:
            problem = replace(problem, cluster=nominal_cluster(control.ranks, self._surroundings.memory_bytes()))
        if described is not None:
            problem = replace(problem, cluster=described)
            if not self._measures():
                counted, cluster = counted_on(capture.graph, described)
                problem = replace(problem, profile=counted, cluster=cluster)
        is_ahead = self._config.post_validation and training and control.ranks > 1 and capture.plays is None

        def asked(problem: Problem) -> Problem:
            return problem.ahead(takes_back=takes_back) if is_ahead else problem

        if not self._measures():
            return asked(self._with_state(problem, optimizers)) if control.rank == 0 else None
        with freed_memory_kept(wanted=self._config.keeps_freed_memory and self._device.type == "cpu"):
            measured = self._measured(capture, problem, samples=samples, given=given, optimizers=optimizers)
        return None if measured is None else asked(measured)

    def _measured(
        self, capture: Route, problem: Problem, *, samples: int, given: Plan | None, optimizers: Sequence[Optimizer]
    ) -> Problem | None:
        """Return a problem with measured costs, on rank 0; None elsewhere."""
        control = self._links.control
        started = time.perf_counter()
        around = self._surroundings.measure(optimizers)
        if self._config.cluster is None:
            problem = replace(problem, cluster=build_cluster(around.facts, around.links))
        profile: Profile | None
        match capture.timing:
            case Capture() as graph:
                profile = self._profile(graph, self._sizes(graph, samples, given), around.facts)
            case timed:
                profile = timed
        if control.rank > 0 or profile is None:
            return None
        self._surroundings.keep(around, optimizers, is_disturbed=self.is_disturbed)
        log.info(
            "Measured %d operations on %s, and the links of %d ranks, in %s.",
            len(profile.seconds), profile.device, control.ranks, format_seconds(time.perf_counter() - started),
        )  # fmt: skip
        return replace(problem, profile=_in_surroundings(profile, around))

    def _with_state(self, problem: Problem, optimizers: Sequence[Optimizer]) -> Problem:
        """Return a problem of counted costs with the state of the optimizer, if anything will step."""
        if not (problem.training and optimizers):
            return problem
        optimizer = counted_optimizer(optimizers[0], device=self._device)
        return replace(problem, profile=replace(problem.profile, optimizer=optimizer))

    def _measures(self) -> bool:
        """Return whether anything is measured: not where there is nothing to plan."""
        config = self._config
        wanted = self._links.control.ranks > 1 or config.report is not None
        return wanted and config.costs == "measured"

    def _profile(self, capture: Capture, sizes: tuple[int, ...], facts: Sequence[DeviceFacts]) -> Profile | None:
        """Return the seconds of operations on rank 0's kind of device, on rank 0; None elsewhere."""
        control, cache = self._links.control, self._config.cache_dir
        sharers = [rank for rank, fact in enumerate(facts) if fact.kind == facts[0].kind]
        operators = Operators(capture, device=self._device, sizes=sizes, compiled=self._config.compile)
        stored: dict[str, Timing] = {}
        mine: dict[str, Timing] = {}
        is_disturbed = False
        if cache is not None and control.rank == 0:
            stored = load_timings(folder_under_load(cache), self._device) if self._surroundings.is_loaded else {}
            stored |= load_timings(cache, self._device)
        known = control.broadcast(stored, source=0, what="operations that were timed before")
        if known and control.rank == 0:
            log.info("Times of %d of %d calls come from %s.", *operators.found(known), cache)
        if control.rank in sharers:
            share = (sharers.index(control.rank), len(sharers))
            used = ProcessorTime()
            mine = operators.measure(known, share=share, progress=control.rank == 0)
            here = sum(fact.host == facts[control.rank].host for fact in facts)
            is_disturbed = bool(mine) and used.is_short(ranks=here, device=self._device)
            mine |= operators.measure_compiled(known, share=share)
        with computing(self._device):  # until the last rank has measured, as cores and caches are busy in training
            told = [
                control.to_first((mine, is_disturbed), source=rank, what="the times of operations") for rank in sharers
            ]
            control.sum(torch.zeros(1), what="the end of the measurements")
        if control.rank > 0:
            return None
        said = [one for one in told if one is not None]
        found = {name: timing for timings, _ in said for name, timing in timings.items()}
        self.is_disturbed = any(is_disturbed for _, is_disturbed in said)
        if self.is_disturbed:
            log.info(
                "Other work took a part of the processor while operations were timed. The next start without it "
                "measures again."
            )
        if cache is not None and found:
            store_timings(folder_under_load(cache) if self.is_disturbed else cache, self._device, found)
        return operators.assemble({**known, **found})

    def _sizes(self, capture: Capture, samples: int, given: Plan | None) -> tuple[int, ...]:
        """Return the numbers of samples at which operations are timed, rising: those that plans will ask for."""
        config, ranks = self._config, self._links.control.ranks
        if given is not None:
            sizes = microbatch_sizes(samples, given.microbatches)
            joined = sum(sizes[: planned_join(given)])
            asked = slices(given.layout, sizes) | slices(given.layout, (joined,))
        else:
            replicas = config.replicas or (1,) * ranks
            counts = (config.microbatches,) if config.microbatches is not None else (len(replicas), len(replicas) * 8)
            layout = Layout(tuple(tuple(range(count)) for count in replicas))
            asked = frozenset().union(*(slices(layout, microbatch_sizes(samples, count)) for count in counts))
        fitting = sorted(size for size in asked if not capture.misfit(size)) or [capture.graph.samples]
        return tuple(sorted({fitting[0], fitting[len(fitting) // 2], fitting[-1]}))


def _in_surroundings(profile: Profile, around: Surroundings) -> Profile:
    """Return a profile of operations with what else was measured."""
    runtime, links = around.runtime, around.links
    return replace(
        profile,
        optimizer=around.optimizer,
        call_s=runtime.call_s,
        message_s=max(0.0, runtime.message_s - runtime.message_bytes / _slowest_link(links)),
        post_s=links.post_s,
        post_s_per_byte=links.post_s_per_byte,
        sum_busy_share=links.sum_busy_share,
    )


def _slowest_link(measured: LinkFacts) -> float:
    """Return the bytes per second of the slowest measured link."""
    return min((pair.link.bytes_per_s for pair in measured.links), default=float("inf"))
