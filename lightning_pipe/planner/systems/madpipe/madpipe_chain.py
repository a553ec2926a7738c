"""Chain model of MadPipe: a row of processors, the cost of every stage on each, and the links between.

After Beaumont, Eyraud-Dubois and Shilova, MadPipe: Memory Aware Dynamic Programming Algorithm for Pipelined Model
Parallelism (ScaDL at IPDPS 2022). A stage on a processor keeps what it saves for g micro-batches at once:

    published    3 W + g (outputs of its layers) + 2 a at either end that it shares with another stage:
                 two versions of its weights and a gradient, buffers to send and to receive (`published_chain`)
    ours         parameters, gradients, optimizer state, workspace, messages + g (what autograd saves): one version of
                 the weights, since a batch ends before they change (`chain_of`)

Ours beside the paper: a processor may be a group of equal replicas that share every micro-batch; processors differ in
speed, memory and links; a stage may drop a share phi of what it saves and recompute it, as if that were a fluid:

    load     U + phi F
    bytes    fixed + g saved - phi max((g - 1) droppable, g spread)

Droppable is what has not arrived for the stage; the micro-batch in backward has all of it again. Or what is kept is
spread: of n nodes every sqrt(n)-th, so that sqrt(n) are recomputed at once (Chen et al., Training Deep Nets with
Sublinear Memory Cost, 2016), which leaves 2/sqrt(n) of what is saved. Left out: that nodes differ, and offload.

Legend: s processor or stage in the order of the pipeline, a, b bounds as in `stage_costs`, g micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.graph import Graph
from lightning_pipe.planner.candidates.candidate import weights_of
from lightning_pipe.planner.candidates.cut_points import cuttable
from lightning_pipe.planner.estimates.recurrence import Estimator, PipelineTimes
from lightning_pipe.planner.estimates.stage_costs import Matrix, StageCostTable
from lightning_pipe.planner.problem import Problem

Bytes = NDArray[np.float64]  # [bound] or [unit]
GRADIENT = 1  # copy of the weights beside their versions
BUFFERS = 2  # per end of a stage and direction: one is used while the other is sent or received


@dataclass(frozen=True)
class Processor:
    """What every stage would cost one processor.

    Attributes:
        load_s: seconds of F and B for one micro-batch.
        forward_s: seconds of F alone, which is also what recomputing all that may be dropped adds.
        fixed_bytes: bytes whatever is in flight.
        saved_bytes: bytes of a micro-batch in flight.
        droppable_bytes: how many of these may be dropped until backward; none where plans may not recompute.
        spread_bytes: how many may be dropped in backward too, where what is kept is spread.
        memory_bytes: what it has.
    """

    load_s: Matrix
    forward_s: Matrix
    fixed_bytes: Matrix
    saved_bytes: Matrix
    droppable_bytes: Matrix
    spread_bytes: Matrix
    memory_bytes: float

    def bytes(self, a: int, b: int, *, held: int, dropped: float = 0.0) -> float:
        """Return the bytes of a stage that holds so many micro-batches and drops a share of what it may."""
        kept = float(self.fixed_bytes[a, b] + held * self.saved_bytes[a, b])
        return kept - dropped * self.freed_bytes(a, b, held=held) if dropped else kept

    def freed_bytes(self, a: int, b: int, *, held: int) -> float:
        """Return the bytes that a stage saves less if it drops all that it may."""
        return max((held - 1) * float(self.droppable_bytes[a, b]), held * float(self.spread_bytes[a, b]))


@dataclass(frozen=True)
class Chain:
    """A row of processors, one stage on each.

    Attributes:
        processors: in the order of the pipeline.
        links: for every processor but the last, per bound, the seconds of both messages of a micro-batch to the next.
        microbatches: micro-batches that there are, so that no stage ever holds more.
        depths: micro-batches that each stage holds, if that is decided already; None leaves it to the period.
    """

    processors: tuple[Processor, ...]
    links: tuple[Bytes, ...]
    microbatches: int
    depths: tuple[int, ...] | None = None

    @property
    def bounds(self) -> int:
        """Count the bounds, start and end included."""
        return len(self.processors[0].load_s)

    def held(self, s: int, group: int) -> int:
        """Return the micro-batches that a stage holds which needs `group` of them."""
        return min(self.depths[s] if self.depths else group, self.microbatches)

    def fits(self, cuts: Sequence[int], held: Sequence[int]) -> bool:
        """Return whether stages that hold so many micro-batches fit, if they drop all that they may."""
        stages = zip(self.processors, itertools.pairwise((0, *cuts, self.bounds - 1)), held, strict=True)
        return all(p.bytes(a, b, held=count, dropped=1.0) <= p.memory_bytes for p, (a, b), count in stages)

    def most_groups(self, s: int) -> float:
        """Return the largest group of 1F1B* that a stage can sustain with what it may hold."""
        if self.depths is None or self.depths[s] >= self.microbatches:
            return math.inf
        return self.depths[s]

    def with_memory(self, count: float, *, more: bool = False) -> Chain:
        """Return the chain with so many bytes on every processor, or so many more than it has."""
        changed = {id(p): replace(p, memory_bytes=count + (p.memory_bytes if more else 0.0)) for p in self.processors}
        return replace(self, processors=tuple(changed[id(p)] for p in self.processors))


def chain_of(estimator: Estimator, groups: Sequence[tuple[int, ...]], microbatches: int) -> Chain:
    """Return the chain of groups of ranks that share every micro-batch of `samples / microbatches`.

    Args:
        estimator: costs.
        groups: ranks of every processor.
        microbatches: micro-batches per batch.
    """
    problem = estimator.problem
    samples = problem.samples / microbatches
    known: dict[tuple[tuple[tuple[float, float], ...], int], Processor] = {}
    processors = []
    for group in groups:
        weights = weights_of(problem.cluster, group) or (1,) * len(group)
        devices = [problem.cluster.device(rank) for rank in group]
        shares = {(samples * w / sum(weights), device.speed) for w, device in zip(weights, devices, strict=True)}
        key = (tuple(sorted(shares)), min(device.memory_bytes for device in devices))
        if key not in known:
            known[key] = _processor(estimator.segments, key[0], float(key[1]), is_replicated=len(group) > 1)
        processors.append(known[key])
    links = tuple(_link_s(estimator, here, there, samples) for here, there in itertools.pairwise(groups))
    return Chain(tuple(processors), links, microbatches, _wished_depths(estimator, len(groups), microbatches))


def _processor(
    segments: StageCostTable, shares: Sequence[tuple[float, float]], memory_bytes: float, *, is_replicated: bool
) -> Processor:
    """Return the costs of stages on replicas with these (samples, speed)."""
    training, most = segments.problem.training, max(samples for samples, _ in shares)
    forward = np.maximum.reduce([segments.forward_s.all(samples) / speed for samples, speed in shares])
    backward = saved = droppable = spread = np.zeros_like(forward)
    if training:
        backward = np.maximum.reduce([segments.backward_s.all(samples) / speed for samples, speed in shares])
        saved = segments.saved_bytes.all(most)
    crossing = {direction: found.bytes(most) for direction, found in segments.crossing.items()}
    ends = np.maximum.reduce([np.maximum(found[:, None], found[None, :]) for found in crossing.values()])
    fixed = segments.state_bytes + _workspace_bytes(segments, most) + ends
    if is_replicated and training:
        fixed = fixed + segments.trained_bytes
    if "recompute" in segments.problem.constraints.memory_policies:
        arriving = crossing["F"].copy()
        arriving[0] = _batch_bytes(segments.problem.graph, most)
        droppable = np.maximum(0.0, saved - arriving[:, None])
        nodes = np.maximum(1, segments.bounds[None, :] - segments.bounds[:, None])
        spread = np.maximum(0.0, droppable - 2 / np.sqrt(nodes) * saved)
    return Processor(forward + backward, forward, fixed, saved, droppable, spread, memory_bytes)


def _batch_bytes(graph: Graph, samples: float) -> float:
    fields = (t for i, t in enumerate(graph.tensors) if t.maker < 0 and i not in graph.head_makes)
    return sum(t.bytes_per_sample * samples + t.fixed_bytes for t in fields)


def _workspace_bytes(segments: StageCostTable, samples: float) -> Matrix:
    """Return for every stage the most that one of its operations reads and makes."""
    units = np.array([segments.workspace_bytes(u, u + 1, samples) for u in range(segments.units)])
    largest = np.zeros((len(units) + 1, len(units) + 1))
    largest[:-1, 1:] = np.maximum.accumulate(np.triu(np.broadcast_to(units, (len(units), len(units)))), axis=1)
    return largest


_MUCH = 1e9  # bytes


def _link_s(estimator: Estimator, here: tuple[int, ...], there: tuple[int, ...], samples: float) -> Bytes:
    """Return, per bound, the seconds of both messages between two groups.

    An exchange takes the longest of straight lines in its bytes; here it is the line through nothing and much.
    """
    crossing = estimator.segments.crossing
    ways = [(crossing["F"], here, there)]
    if estimator.problem.training:
        ways.append((crossing["B"], there, here))
    total = np.zeros(len(estimator.segments.bounds))
    for found, senders, receivers in ways:
        none_s, much_s = (estimator.exchange_s(senders, receivers, count) for count in (0.0, _MUCH))
        total += none_s + (much_s - none_s) / _MUCH * found.bytes(samples)
    return total


def _wished_depths(estimator: Estimator, stages: int, microbatches: int) -> tuple[int, ...] | None:
    """Return the depths that the user has decided, None if they may follow from the period."""
    constraints = estimator.problem.constraints
    if constraints.schedule != "gpipe" and constraints.warmup in (None, "1f1b*"):
        return None
    ones, zeros = (1.0,) * stages, (0.0,) * (stages - 1)
    row = PipelineTimes(
        ones, ones, zeros, zeros, (0.0,) * stages, (0.0,) * stages
    )  # such depths do not depend on times
    return next(estimator.depth_choices(row, most=(microbatches,) * stages, microbatches=microbatches))


def published_chain(problem: Problem, *, versions: int = 2) -> Chain:
    """Return the chain of the published memory model, one stage per rank, over the units of `sole_positions`.

    Layers keep what they make; nothing says how many micro-batches there are.

    Args:
        problem: graph and profile, equal devices with equal links; `samples` is those of one micro-batch.
        versions: versions of the weights that a stage holds.
    """
    graph, samples, ranks = problem.graph, problem.samples, problem.cluster.ranks
    segments = StageCostTable(problem, sole_positions(graph))
    forward = segments.forward_s.all(samples)
    load = forward + segments.backward_s.all(samples)
    made = _made_bytes(graph, segments, samples)
    ahead = segments.crossing["F"].bytes(samples)
    buffers = BUFFERS * (ahead[:, None] + ahead[None, :])
    fixed = (versions + GRADIENT) * segments.parameter_bytes + np.triu(buffers, k=1)
    link = problem.cluster.link(0, 1) if ranks > 1 else None
    crossing = [ahead, segments.crossing["B"].bytes(samples)]
    seconds = np.sum([link.latency_s + b / link.bytes_per_s for b in crossing], axis=0) if link else np.zeros(0)
    none = np.zeros_like(load)
    processor = Processor(load, forward, fixed, made, none, none, problem.cluster.device(0).memory_bytes)
    return Chain((processor,) * ranks, (seconds,) * (ranks - 1), microbatches=1 << 30)


def sole_positions(graph: Graph) -> list[int]:
    """Return the positions that just one tensor of forward crosses, and not one of the batch."""
    last: dict[int, int] = {}
    for operation in graph.operations:
        if operation.phase == "forward":
            last.update({t: max(operation.at, last.get(t, 0)) for t in operation.reads})
    changes = np.zeros((2, len(graph.nodes) + 2), dtype=int)
    for t, reader in last.items():
        tensor = graph.tensors[t]
        root = graph.tensors[tensor.base] if tensor.base >= 0 else tensor
        begin = graph.operations[tensor.maker].at + 1 if tensor.maker >= 0 else 1
        changes[int(root.maker < 0), begin] += 1
        changes[int(root.maker < 0), max(begin, reader + 1)] -= 1
    made, given = np.cumsum(changes, axis=1)
    return [k for k in cuttable(graph, sliced=False) if (made[k], given[k]) == (1, 0)]


def _made_bytes(graph: Graph, segments: StageCostTable, samples: int) -> Matrix:
    """Return the bytes of all outputs of forward operations in every stage, views not counted."""
    per_node = np.zeros(len(graph.nodes))
    for tensor in graph.tensors:
        if tensor.maker >= 0 and graph.operations[tensor.maker].phase == "forward" and tensor.base < 0:
            per_node[graph.operations[tensor.maker].at] += tensor.bytes_per_sample * samples + tensor.fixed_bytes
    done = np.concatenate([[0.0], np.cumsum(per_node)])[segments.bounds]
    return np.triu(done[None, :] - done[:, None])
