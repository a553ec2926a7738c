"""Stage costs of a cut: operations of each half, messages, gradient buckets, and tensors held.

The same question as `capture.stages.split`, answered from `Graph.operations` without torch, for many cuts quickly:

    F, I, W    a forward operation runs in the stage of its position; a backward operation in I if its result flows to
               an earlier stage, else in W; a repeated operation in every half that reads its result
    crosses    a tensor that an operation of another stage reads; it travels straight to each such stage
    saved      what F makes or is given and I or W read: the memory behind it, once
    kept       what W reads, and gradients of I that wait for another term from W

A tensor that is a view shares the memory of its base where both are in one stage, so a saved view keeps all of its
base. Gradients of a parameter that several stages use are terms that are added once per step. Indices are those of
`Graph.operations` and `Graph.tensors`.

Legend: s stage; arrays over operations or tensors are named after what they hold; a pair is two arrays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile
from lightning_pipe.core.program import Bucket, Edge, HeadTraffic, Pass, Traffic
from lightning_pipe.cost.tables import GraphArrays, Mask, Numbers, Pairs, different, listed, pairs

_FORWARD, _INPUT, _WEIGHT = 0, 1, 2  # halves
_NOWHERE = -1  # stage of a repeated operation


@dataclass(frozen=True)
class HalfWork:
    """One half of a stage.

    Attributes:
        operations: what it runs, in order.
        given: tensors that arrive for it (fields of the batch too), each with memory of its own.
        outputs: tensors that it makes and that outlive it.
    """

    operations: tuple[int, ...]
    given: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class StageWork:
    """What one stage runs and holds.

    Attributes:
        forward, input_grad, weight_grad: its halves.
        saved: one tensor for each memory that stays from F to I or W, except for those of `results`.
        kept: the same from I to W.
        results: one tensor for each memory that the step hands out.
        parameters: canonical names of the parameters that it reads or has a gradient of.
        gradients: (tensor, canonical name) of the terms of gradients that it makes.
        saved_state: bytes of state that F overwrites and I or W read as it was before, so that F copies it.
        kept_state: the part of it that W reads.
        head_reads: one tensor for each memory of which the head of the step reads, so that it stays from F to the head.
    """

    forward: HalfWork
    input_grad: HalfWork
    weight_grad: HalfWork
    saved: tuple[int, ...]
    kept: tuple[int, ...]
    results: tuple[int, ...]
    parameters: tuple[str, ...]
    gradients: tuple[tuple[int, str], ...]
    saved_state: int
    kept_state: int
    head_reads: tuple[int, ...] = ()


def stage_works(graph: Graph, cuts: Sequence[int]) -> tuple[StageWork, ...]:
    """Return what every stage runs and holds; `Cutter` is quicker for several cuts of one graph."""
    return Cutter(graph).works(cuts)


def traffic(graph: Graph, cuts: Sequence[int]) -> Traffic:
    """Return what crosses between the stages; `Cutter` is quicker for several cuts of one graph."""
    return Cutter(graph).traffic(cuts)


def position_seconds(
    graph: Graph, profile: Profile, samples: int, *, tables: GraphArrays | None = None
) -> tuple[tuple[float, float], ...]:
    """Return (forward, backward) seconds of every position, so that sums over an interval price a stage.

    Exact but for repeated operations: they are charged once forward and once backward, where they are read first,
    although every stage that reads them runs them.
    """
    tables = tables or GraphArrays(graph)
    times = np.array([profile.operation_s(o, samples) for o in range(len(graph.operations))])
    found = np.zeros((len(graph.nodes), 2))
    placed = np.flatnonzero(~tables.repeated)
    np.add.at(found, (np.maximum(tables.at[placed], 0), tables.backward[placed].astype(int)), times[placed])
    first: dict[tuple[int, int], int] = {}
    for o, r in listed(tables.repeats):
        key = (r, int(tables.backward[o]))
        at = max(0, int(tables.at[o]))
        first[key] = min(at, first.get(key, at))
    for (r, phase), at in first.items():
        found[at, phase] += times[r]
    return tuple((float(forward), float(backward)) for forward, backward in found)


class Cutter:
    """Cut one graph at many positions.

    Args:
        graph: with its operations and tensors.

    Attributes:
        tables: the graph as arrays.
    """

    def __init__(self, graph: Graph) -> None:
        self.tables = GraphArrays(graph)
        self._latest: tuple[tuple[int, ...], _Cut] | None = None

    def works(self, cuts: Sequence[int]) -> tuple[StageWork, ...]:
        """Return what every stage runs and holds; two equal positions make an empty stage."""
        return self._cut(cuts).works()

    def traffic(self, cuts: Sequence[int]) -> Traffic:
        """Return what crosses between the stages."""
        return self._cut(cuts).traffic()

    def sent(self, cuts: Sequence[int]) -> dict[tuple[int, Pass], tuple[int, ...]]:
        """Return the tensors that every stage sends in each direction, each once."""
        return self._cut(cuts).sent()

    def _cut(self, cuts: Sequence[int]) -> _Cut:
        key = tuple(cuts)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, _Cut(self.tables, key)
        return self._latest[1]


class _Cut:
    """One cut: the stage and half of every operation, the home of every tensor."""

    def __init__(self, tables: GraphArrays, cuts: Sequence[int]) -> None:
        self._tables, self._count = tables, len(cuts) + 1
        graph = tables.graph
        self._stage = np.searchsorted(np.array(cuts, dtype=np.int64), tables.at, side="right").astype(np.int64)
        self._stage[tables.repeated] = _NOWHERE
        begins = np.array([np.iinfo(np.int64).min, *cuts], dtype=np.int64)  # nothing flows out of stage 0
        sends = tables.reach < begins[self._stage]
        self._half = np.where(tables.backward, np.where(sends, _INPUT, _WEIGHT), _FORWARD)
        self._runs = np.ones(len(graph.operations), dtype=bool)
        self._runs[self._scattered_sums()] = False
        self._home = np.where(tables.maker < 0, 0, self._stage[tables.maker])
        self._made_in = np.where(tables.maker < 0, _FORWARD, self._half[tables.maker])
        self._home[tables.of_head], self._made_in[tables.of_head] = self._count - 1, _INPUT  # it is there for I
        self._memory = self._memories()
        readers, read = tables.reads
        running = self._runs[readers]
        self._readers, self._read = readers[running], read[running]
        self._head_reads = np.array(graph.head_reads, dtype=np.int64)
        self._arrivals = self._crossing()
        self._terms = [(t, name) for tensor, name in graph.gradients for t in self._terms_of(tensor)]
        terms = np.array([t for t, _ in self._terms], dtype=np.int64)
        self._term_homes, self._terms_made_in = self._home[terms].tolist(), self._made_in[terms].tolist()

    def _scattered_sums(self) -> list[int]:
        """Return the additions whose terms are made in several stages; in the order of operations, inner ones first."""
        found: dict[int, set[int]] = {}
        for o in self._tables.sums:
            stages: set[int] = set()
            for t in self._tables.graph.operations[o].reads:
                maker = int(self._tables.maker[t])
                stages |= found.get(maker, {int(self._stage[maker])})
            found[o] = stages
        return [o for o, stages in found.items() if len(stages) > 1]

    def _terms_of(self, tensor: int) -> Iterator[int]:
        maker = int(self._tables.maker[tensor])
        if maker >= 0 and not self._runs[maker]:
            for term in self._tables.graph.operations[maker].reads:
                yield from self._terms_of(term)
        else:
            yield tensor

    def _memories(self) -> Numbers:
        """Return the tensor whose memory a tensor uses in its own stage: its furthest base there.

        The furthest base may have come from elsewhere. A repeated base is recomputed where its view is made.
        """
        base, home = self._tables.base, self._home
        has_base = base >= 0
        together = has_base & ((home[base] == home) | (home[base] == _NOWHERE))
        top = np.where(together, base, np.arange(len(base)))
        while not np.array_equal(top, top[top]):
            top = top[top]
        return np.where(has_base[top], base[top], top)

    def _crossing(self) -> Pairs:
        """Return (tensor, stage) of everything that a stage reads and does not make, each once, in order."""
        home, stage = self._home[self._read], self._stage[self._readers]
        apart = home != stage
        fields = (t for t in self._tables.graph.results if self._tables.maker[t] < 0)
        last = self._count - 1
        more = pairs((t, last) for t in (*fields, *self._head_reads.tolist()) if self._home[t] != last)
        tensors = np.concatenate([self._read[apart], more[0]])
        stages = np.concatenate([stage[apart], more[1]])
        return different(tensors, stages)

    def traffic(self) -> Traffic:
        crossing: dict[tuple[int, Pass, int], list[int]] = defaultdict(list)
        for t, target in listed(self._arrivals):
            source = int(self._home[t])
            crossing[source, "F" if source < target else "B", target].append(t)
        edges = tuple(
            Edge(
                direction,
                source,
                target,
                float(self._tables.per_sample[tensors].sum()),
                int(self._tables.fixed[tensors].sum()),
            )
            for (source, direction, target), tensors in sorted(crossing.items())
        )
        return Traffic(edges, self._buckets(), joinable=self._joinable(), head=self._head())

    def _head(self) -> HeadTraffic | None:
        head = self._tables.graph.head
        if head is None:
            return None
        return HeadTraffic(head.bytes_per_sample, head.fixed_bytes, head.holds_backwards)

    def _read_by_head(self) -> tuple[int, ...]:
        """Return the memory behind what the head reads, as the last stage has it, without its state."""
        t, last = self._head_reads, self._count - 1
        memory = np.where(self._home[t] == last, self._memory[t], t)
        found: list[int] = np.unique(memory[~self._is_state(memory, np.full(len(t), last))]).tolist()
        return tuple(found)

    def _joinable(self) -> tuple[int, ...]:
        """Return the stages whose weight halves of several micro-batches can run as one (`batched_weight_grad`)."""
        operations, tensors = self._tables.unjoined
        weight = self._runs & (self._half == _WEIGHT) & (self._stage != _NOWHERE)
        users, repeats = self._tables.repeats
        made_there = (self._home[self._read] == self._stage[self._readers]) & weight[self._tables.maker[self._read]]
        made_there &= self._tables.maker[self._read] >= 0
        apart = [
            self._stage[weight & operations],
            self._stage[users[weight[users] & operations[repeats]]],
            self._stage[self._readers[weight[self._readers] & ~made_there & tensors[self._read]]],
            np.array([self._home[t] for t in self._waiting()], dtype=np.int64),
        ]
        return tuple(sorted({*self._stage[weight].tolist()}.difference(*(found.tolist() for found in apart))))

    def sent(self) -> dict[tuple[int, Pass], tuple[int, ...]]:
        found: dict[tuple[int, Pass], dict[int, None]] = defaultdict(dict)
        for t, target in listed(self._arrivals):
            source = int(self._home[t])
            found[source, "F" if source < target else "B"][t] = None
        return {key: tuple(tensors) for key, tensors in found.items()}

    def _buckets(self) -> tuple[Bucket, ...]:
        trained = {name for _, name in self._terms}
        holders: dict[str, list[int]] = {name: [] for name in self._tables.names if name in trained}
        for s, names in enumerate(self._parameters()):
            for name in names & trained:
                holders[name].append(s)
        sizes: dict[tuple[int, ...], int] = defaultdict(int)
        for name, stages in holders.items():
            sizes[tuple(stages)] += self._tables.graph.parameter_bytes[name]
        return tuple(Bucket(stages, size) for stages, size in sizes.items())

    def _parameters(self) -> list[set[str]]:
        """Return, for every stage, the parameters that it reads or has a gradient of."""
        names = self._tables.names
        found: list[set[str]] = [set() for _ in range(self._count)]
        operations, parameters = self._tables.parameters
        running = self._runs[operations]
        for p, s in listed(different(parameters[running], self._stage[operations[running]])):
            found[s].add(names[p])
        for (_, name), home in zip(self._terms, self._term_homes, strict=True):
            found[home].add(name)
        for r in self._tables.repeated_results:
            found[-1].update(self._tables.graph.operations[r].parameters)
        return found

    def works(self) -> tuple[StageWork, ...]:
        halves = self._halves()
        saved, kept = self._held(_INPUT), self._held(_WEIGHT)
        results = self._results()
        saved_state, kept_state = self._copied(_INPUT), self._copied(_WEIGHT)
        names = self._parameters()
        gradients: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for term, home in zip(self._terms, self._term_homes, strict=True):
            gradients[home].append(term)
        return tuple(
            StageWork(
                forward=halves[s, _FORWARD],
                input_grad=halves[s, _INPUT],
                weight_grad=halves[s, _WEIGHT],
                saved=tuple(sorted(saved[s] - results[s])),
                kept=tuple(sorted(kept[s] - results[s])),
                results=tuple(sorted(results[s])),
                parameters=tuple(name for name in self._tables.names if name in names[s]),
                gradients=tuple(gradients[s]),
                saved_state=saved_state[s],
                kept_state=kept_state[s],
                head_reads=self._read_by_head() if s == self._count - 1 else (),
            )
            for s in range(self._count)
        )

    def _halves(self) -> dict[tuple[int, int], HalfWork]:
        operations = self._operations()
        given: dict[tuple[int, int], list[int]] = defaultdict(list)
        for t, s in listed(self._arrivals):
            given[s, _FORWARD if self._made_in[t] == _FORWARD else _INPUT].append(t)
        read = np.concatenate([self._read, self._head_reads if self._count == 1 else self._head_reads[:0]])
        given[0, _FORWARD] += np.unique(read[self._tables.of_batch[read]]).tolist()
        outputs: dict[tuple[int, int], list[int]] = defaultdict(list)
        outliving = self._outliving()
        places = self._home[outliving].tolist(), self._made_in[outliving].tolist()
        for t, place in zip(outliving, zip(*places, strict=True), strict=True):
            outputs[place].append(t)
        return {
            (s, half): HalfWork(tuple(operations[s, half]), tuple(given[s, half]), tuple(outputs[s, half]))
            for s in range(self._count)
            for half in (_FORWARD, _INPUT, _WEIGHT)
        }

    def _operations(self) -> dict[tuple[int, int], list[int]]:
        """Return the operations of every half in order, repeated ones included."""
        own = np.flatnonzero(self._runs & (self._stage != _NOWHERE))
        users, repeats = self._tables.repeats
        running = self._runs[users]
        runs = np.concatenate([own, repeats[running]])
        halves = np.concatenate([own, users[running]])
        keys, operations = different(self._stage[halves] * 3 + self._half[halves], runs)
        begins = np.flatnonzero(np.diff(keys, prepend=-1))
        groups = np.split(operations, begins[1:])
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        found.update((divmod(int(key), 3), group.tolist()) for key, group in zip(keys[begins], groups, strict=False))
        last = (self._count - 1, _FORWARD)
        found[last] = sorted({*found[last], *self._tables.repeated_results})
        return found

    def _outliving(self) -> list[int]:
        """Return the tensors that outlive the half that makes them: read in another, results, gradients, updates."""
        home, stage = self._home[self._read], self._stage[self._readers]
        away = (home != stage) | (self._made_in[self._read] != self._half[self._readers])
        outputs = [*self._tables.graph.results, *(t for t, _ in (*self._terms, *self._tables.graph.updates))]
        found = np.unique(np.concatenate([self._read[away], self._head_reads, np.array(outputs, dtype=np.int64)]))
        placed: list[int] = found[(self._tables.maker[found] >= 0) & (self._home[found] >= 0)].tolist()
        return placed

    def _held(self, first: int) -> list[set[int]]:
        """Return, for every stage, the memory behind what its halves from `first` on read and earlier ones have."""
        half, stage, made_in = self._half[self._readers], self._stage[self._readers], self._made_in[self._read]
        own = self._home[self._read] == stage
        memory = np.where(own, self._memory[self._read], self._read)
        arrived = ~own & ((made_in == _FORWARD) | (first == _WEIGHT))  # gradients arrive for I
        held = (half >= first) & ((own & (made_in < first)) | arrived) & ~self._is_state(memory, stage)
        found: list[set[int]] = [set() for _ in range(self._count)]
        for t, s in listed(different(memory[held], stage[held])):
            found[s].add(t)
        if first == _WEIGHT:
            for t in self._waiting():
                found[self._home[t]].add(int(self._memory[t]))
        return found

    def _is_state(self, memory: Numbers, stage: Numbers) -> Mask:
        """Return whether the memory behind tensors of these stages is that of a parameter, a buffer or a constant."""
        home = self._home[memory]
        is_state: Mask = self._tables.of_state[memory] & ((home == stage) | (home == _NOWHERE))
        return is_state

    def _waiting(self) -> Iterator[int]:
        """Yield the terms that I makes of gradients to which W adds another term."""
        places = [*zip(self._terms, self._term_homes, self._terms_made_in, strict=True)]
        late = {(home, name) for (_, name), home, half in places if half == _WEIGHT}
        yield from (t for (t, name), home, half in places if half == _INPUT and (home, name) in late)

    def _results(self) -> list[set[int]]:
        found: list[set[int]] = [set() for _ in range(self._count)]
        for t in self._tables.graph.results:
            is_placed = self._tables.maker[t] >= 0 and self._home[t] >= 0
            memory = int(self._memory[t]) if is_placed and not self._tables.of_state[self._memory[t]] else t
            found[self._home[t] if is_placed else -1].add(memory)
        return found

    def _copied(self, first: int) -> list[int]:
        graph = self._tables.graph
        copies = {(int(self._stage[o]), state) for o, state in self._tables.overwritten if self._half[o] >= first}
        found = [0] * self._count
        for s, state in copies:
            found[s] += graph.buffer_bytes.get(state) or graph.parameter_bytes[state]
        return found
