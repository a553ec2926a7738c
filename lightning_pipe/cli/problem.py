"""Planning problem of the command line: a profile or captured model, on devices that may not exist.

With post_validation it is supposed that gradients are clipped by norm, so that ranks keep what takes a step back.

Only ranks that exist can measure the runtime overhead of computes and messages. Here it is what the cluster states for
its devices, or what two ranks of a CPU were measured to need (`runtime=0` leaves it out). Left out are the seconds of
the optimizer step (its state counts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_pipe.cli.options import StepOptions
from lightning_pipe.cli.priced_step import PricedStep
from lightning_pipe.config import conf_dir
from lightning_pipe.core.cluster import Cluster, RuntimeOverhead, limited
from lightning_pipe.core.cluster_file import find_cluster
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import OptimizerProfile, Profile
from lightning_pipe.cost.counted import counted_on
from lightning_pipe.planner.problem import Problem, nominal_cluster
from lightning_pipe.profiles.published import load_published
from lightning_pipe.units import format_seconds


def problem_of(options: StepOptions, *, model: Callable[..., Any] | None = None, batch: Any = None) -> Problem:
    """Return the problem that the options describe.

    Args:
        options: of a command.
        model: a module, or what makes one, in the place of the model that they name.
        batch: in the place of the batch that they name.

    Raises:
        PipeError: if cluster, profile or model cannot be found or read, or the step cannot be captured.
    """
    cluster = _cluster(options)
    step = _step(options, cluster, model, batch)
    graph, profile = step.graph, step.profile
    if profile.source == "counted":
        profile, cluster = _by_rates(graph, profile, cluster)
    cluster, profile = _faster(cluster, options.speed), _with_runtime(profile, cluster, options)
    samples, tokens = options.samples or step.samples, options.tokens or step.tokens
    problem = Problem(
        graph,
        profile,
        cluster,
        samples,
        constraints=options.constraints,
        tokens=tokens,
        module=step.module,
        parameters=step.parameters,
    )
    return problem.ahead(takes_back=True) if options.config.post_validation else problem


def _step(options: StepOptions, cluster: Cluster, model: Callable[..., Any] | None, batch: Any) -> PricedStep:
    """Return the step with its costs."""
    if options.model is not None:
        from lightning_pipe.cli.model import captured  # needs torch and Lightning, which published profiles do not

        step = captured(options, ranks=cluster.ranks, model=model, batch=batch)
        optimizer = OptimizerProfile(state_bytes_per_byte=options.optimizer_state)
        return step._replace(profile=replace(step.profile, optimizer=optimizer))
    assert options.profile is not None
    graph, profile = load_published(
        options.profile,
        batch=options.profile_samples,
        saved_bytes_per_sample=options.saved_bytes_per_sample,
        optimizer_state=options.optimizer_state,
        layers=options.profile_layers,
    )
    return PricedStep(graph, profile, graph.samples, module=options.profile)


def _cluster(options: StepOptions) -> Cluster:
    if options.ranks is not None:
        found = nominal_cluster(options.ranks)
    else:
        assert options.cluster is not None
        found = find_cluster(options.cluster, presets=conf_dir() / "cluster")
    return limited(found, options.config.memory_limits)


def _by_rates(graph: Graph, profile: Profile, cluster: Cluster) -> tuple[Profile, Cluster]:
    """Return costs counted by the rates of the devices, as far as they are known, and the speeds that follow."""
    counted, cluster = counted_on(graph, cluster)
    return replace(counted, optimizer=profile.optimizer), cluster


# beyond operations and links, of four rehearsals of two gloo ranks on a busy 2-core CPU: the middle, the least and the
# middle one (2026-11-22, torch 2.13)
_ON_CPU, _POST_S = RuntimeOverhead(compute_s=190e-6, message_s=640e-6), 26e-6


def _with_runtime(profile: Profile, cluster: Cluster, options: StepOptions) -> Profile:
    """Return the costs with the runtime overhead; faster devices do not run Python faster, and GPUs post on streams."""
    overhead, post_s = (_ON_CPU, _POST_S) if cluster.runtime is None else (cluster.runtime, 0.0)
    return replace(
        profile,
        call_s=options.runtime * options.speed * overhead.compute_s,
        message_s=options.runtime * overhead.message_s,
        post_s=options.runtime * post_s,
    )


def overhead_sentence(problem: Problem, options: StepOptions) -> str:
    """Return which runtime overhead is part of a problem, and where it comes from."""
    if not options.runtime:
        return "Runtime overhead is left out (runtime=0)."
    profile, cluster = problem.profile, problem.cluster
    call, message = (format_seconds(seconds) for seconds in (profile.call_s / options.speed, profile.message_s))
    kinds = dict.fromkeys(device.kind for host in cluster.hosts for device in host.devices)
    source = "measured with two gloo ranks on a CPU" if cluster.runtime is None else f"assumed for {', '.join(kinds)}"
    return f"Runtime overhead: {call} per compute and {message} per message, {source} (runtime=0 leaves it out)."


def _faster(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with devices that are so many times faster."""
    hosts = (
        replace(host, devices=tuple(replace(device, speed=device.speed * factor) for device in host.devices))
        for host in cluster.hosts
    )
    return replace(cluster, hosts=tuple(hosts))
