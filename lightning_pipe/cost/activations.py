"""Activation policies of a stage and their costs: with recompute, less is saved and I runs more.

    recompute   F drops a memory after its last use; I runs the forward operations again that make it, just before the
                first backward operation that reads it (as AOTAutograd's partitioners place recomputed operations)
    offload     what F saves leaves the device until I; work and saved bytes stay as they are (`core.prices`)

Running again goes back to what is there: what the stage keeps, what arrived for F (which then is kept for that), and
state. What nobody saved on the way is recomputed too. Random operations draw by key, so they give what they gave. Never
recomputed, so kept whatever is asked: what arrives from elsewhere, and what needs state that the step overwrites.

Operations of W that read what is recomputed run in I, in the order of the joint graph, with what they need, so that it
does not pile up until W. Those go along that then would be the only ones for which something waits: what reads nothing
but what these read or make, while nothing that stays in W reads it (the gradient of a bias beside that of its weight,
the transposition of that). All others stay in W.

Results of an operation with several are all made again where one is; those that were kept are dropped at once, and
read where they were kept. Memories are numbers of tensors, as in `StageWork.saved`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_pipe.core.graph import Graph
from lightning_pipe.cost.stage import HalfWork, StageWork
from lightning_pipe.cost.tables import GraphArrays


@dataclass(frozen=True)
class StagePolicy:
    """What a stage does not keep on its device.

    Attributes:
        recomputed: saved memories that F drops and I recomputes.
        offloaded: saved memories that are on the host between F and I.
    """

    recomputed: frozenset[int]
    offloaded: frozenset[int]


KEEP = StagePolicy(frozenset(), frozenset())


@dataclass(frozen=True)
class SavedMemory:
    """A memory that a stage saves.

    Attributes:
        memory: its tensor.
        bytes_per_sample, fixed_bytes: its bytes.
        is_remakeable: whether it can be recomputed.
    """

    memory: int
    bytes_per_sample: float
    fixed_bytes: int
    is_remakeable: bool


def candidates(graph: Graph, work: StageWork) -> tuple[SavedMemory, ...]:
    """Return what a stage saves, in order, and what can be recomputed of it.

    Args:
        graph: with its operations and tensors.
        work: the stage when all is kept.
    """
    remakeable = Memories(graph, work).remakeable
    found = ((m, graph.tensors[m]) for m in work.saved)
    return tuple(SavedMemory(m, t.bytes_per_sample, t.fixed_bytes, m in remakeable) for m, t in found)


def checkpointed(graph: Graph, work: StageWork) -> frozenset[int]:
    """Return what `torch.utils.checkpoint` in the module would not keep, of what a stage saves.

    That is what one of its calls makes and no operation outside of this call reads, forward or backward.

    Args:
        graph: with its operations and tensors.
        work: the stage when all is kept.
    """
    if not graph.has_checkpoints:
        return frozenset()
    memories = Memories(graph, work)
    seen: dict[int, set[int]] = {m: {graph.operations[graph.tensors[m].maker].checkpoint} for m in memories.remakeable}
    for o in memories.own:
        for t in graph.operations[o].reads:
            if (memory := memories.of(t)) in seen and not graph.operations[o].view:
                seen[memory].add(graph.operations[o].checkpoint)
    return frozenset(memory for memory, calls in seen.items() if len(calls) == 1 and calls != {-1})


def with_policy(tables: GraphArrays, work: StageWork, policy: StagePolicy) -> StageWork:
    """Return what a stage runs and holds when it recomputes; what cannot be recomputed stays kept.

    F runs what it ran; it drops more.

    Args:
        tables: of the graph.
        work: the stage when all is kept.
        policy: what it does not keep.
    """
    memories = Memories(tables.graph, work)
    return _WithPolicy(tables, memories, policy.recomputed & memories.remakeable).work()


class Memories:
    """In which memory lie the tensors of a stage, and which of what it saves can be recomputed?

    Args:
        graph: with its operations and tensors.
        work: the stage when all is kept.

    Attributes:
        forward: operations of F.
        own: operations of the stage.
        arrived: tensors that arrived for F.
        there: memories that are there after F.
    """

    def __init__(self, graph: Graph, work: StageWork) -> None:
        self.graph, self.work = graph, work
        self.forward = frozenset(work.forward.operations)
        self.own = self.forward.union(work.input_grad.operations, work.weight_grad.operations)
        self.arrived = frozenset(work.forward.given)
        self.there = frozenset((*work.saved, *work.results))  # after F, when all is kept
        self._memory: dict[int, int] = {}
        for t, tensor in enumerate(graph.tensors):
            if tensor.maker in self.own:
                self._memory[t] = t if tensor.base < 0 else self.of(tensor.base)

    def of(self, tensor: int) -> int:
        """Return the memory of a tensor; what comes from elsewhere has memory of its own."""
        return self._memory.get(tensor, tensor)

    def is_state(self, memory: int) -> bool:
        """Return whether a memory is that of a parameter, a buffer or a constant, which nobody needs to hold."""
        return self.graph.tensors[memory].of_state and memory in self._memory

    def is_repeated(self, tensor: int) -> bool:
        """Return whether every half that reads a tensor makes it for itself."""
        maker = self.graph.tensors[tensor].maker
        return maker >= 0 and self.graph.operations[maker].phase == "repeated"

    @cached_property
    def remakeable(self) -> frozenset[int]:
        """Return the saved memories of which everything that F makes in them can be recomputed."""
        tensors, unsound = self.graph.tensors, self.forward - self._sound()
        lost = {memory for t, memory in self._memory.items() if tensors[t].maker in unsound}
        made = (m for m in self.work.saved if tensors[m].maker in self.forward)
        return frozenset(made) - lost - self.graph.lasting

    def _sound(self) -> frozenset[int]:
        """Return the operations of F that can run again: not those that need state that the step overwrites."""
        overwritten = {state for _, state in self.graph.updates}
        tensors, sound = self.graph.tensors, set[int]()
        for o in self.work.forward.operations:
            operation = self.graph.operations[o]
            if overwritten.isdisjoint((*operation.buffers, *operation.parameters)) and all(
                t in self.arrived or tensors[t].maker in sound or self.of(t) in self.there for t in operation.reads
            ):
                sound.add(o)
        return frozenset(sound)


class _WithPolicy:
    """One stage that drops some memories, all of which can be recomputed."""

    def __init__(self, tables: GraphArrays, memories: Memories, dropped: frozenset[int]) -> None:
        self._tables, self._memories, self._dropped = tables, memories, dropped
        self._before, self._operations, self._tensors = memories.work, tables.graph.operations, tables.graph.tensors
        self._there = memories.there - dropped
        self._read_again: set[int] = set()  # what operations that run again read of what is there
        moved = self._moved()
        late = {o for o in self._placed(self._before.weight_grad) if o not in moved}
        self._late = self._with_repeated(late)
        self._early = self._lazily(self._with_repeated({*self._placed(self._before.input_grad), *moved}))
        self._terms = frozenset(t for t, _ in self._before.gradients)
        graph = tables.graph
        self._handed_out = self._terms.union(graph.results, (t for t, _ in graph.updates), graph.head_reads)

    def work(self) -> StageWork:
        held = {t for t in self._read_again if t in self._memories.arrived} - {*self._before.results}
        return replace(
            self._before,
            forward=replace(self._before.forward, outputs=self._forward_outputs()),
            input_grad=replace(
                self._before.input_grad, operations=self._early, outputs=self._backward_outputs(self._early)
            ),
            weight_grad=replace(
                self._before.weight_grad, operations=self._late, outputs=self._backward_outputs(self._late)
            ),
            saved=tuple(sorted({*self._before.saved} - self._dropped | held)),
            kept=self._kept(),
            kept_state=self._kept_state(),
        )

    def _placed(self, half: HalfWork) -> list[int]:
        return [o for o in half.operations if self._operations[o].phase != "repeated"]

    def _moved(self) -> set[int]:
        """Return the operations of W that run in I: those that read what is dropped, with what they need and take."""
        weight = self._placed(self._before.weight_grad)
        within, moved = set(weight), set[int]()
        for o in reversed(weight):
            reads = self._operations[o].reads
            if o in moved or any(self._memories.of(t) in self._dropped for t in reads):
                moved.update((o, *(self._tensors[t].maker for t in reads if self._tensors[t].maker in within)))
        return moved | self._along(weight, moved)

    def _along(self, weight: list[int], moved: set[int]) -> set[int]:
        """Return the operations of W that read only what those that moved, or these, read or make, and no other."""
        reads = {o: {t for t in self._operations[o].reads if not self._memories.is_repeated(t)} for o in weight}
        touched = {t for o in moved for t in (*reads[o], *self._tables.makes[o])}
        along: set[int] = set()
        for o in weight:
            if o not in moved and reads[o] and reads[o] <= touched:
                along.add(o)
                touched.update(self._tables.makes[o])
        while True:
            staying = [o for o in weight if o not in moved and o not in along]
            bound = {t for o in staying for t in (*reads[o], *self._tables.makes[o])}
            free = {o for o in along if reads[o].isdisjoint(bound)}
            if free == along:
                return along
            along = free

    def _with_repeated(self, operations: Iterable[int]) -> tuple[int, ...]:
        """Return operations in order, with the repeated ones that they need."""
        found = {*operations}
        pending = list(found)
        while pending:
            reads = self._operations[pending.pop()].reads
            needed = {self._tensors[t].maker for t in reads if self._memories.is_repeated(t)} - found
            found |= needed
            pending += needed
        return tuple(sorted(found))

    def _lazily(self, operations: tuple[int, ...]) -> tuple[int, ...]:
        """Return the operations of I, each after those that it needs to run again and that have not yet."""
        order: dict[int, None] = {}
        for o in operations:
            if self._operations[o].phase == "backward":
                order.update(dict.fromkeys(self._run_again(o, done=order)))
            order[o] = None
        return tuple(order)

    def _run_again(self, operation: int, *, done: Container[int]) -> list[int]:
        """Return what has to run again before a backward operation, in order."""
        reads = self._operations[operation].reads
        makers = (self._tensors[t].maker for t in reads if self._memories.of(t) in self._dropped)
        pending = [maker for maker in makers if maker in self._memories.forward]
        found: set[int] = set()
        while pending:
            again = pending.pop()
            if again in done or again in found:
                continue
            found.add(again)
            for t in self._operations[again].reads:
                if not self._memories.is_repeated(t) and (t in self._memories.arrived or self._is_there(t)):
                    self._read_again.add(t)
                else:
                    pending.append(self._tensors[t].maker)
        return sorted(found)

    def _is_there(self, tensor: int) -> bool:
        return self._memories.of(tensor) in self._there

    def _forward_outputs(self) -> tuple[int, ...]:
        """Return what F makes and leaves: what was left, without what nobody needs but I, which recomputes it."""
        own = self._memories.own
        left = (
            t
            for t in self._before.forward.outputs
            if self._memories.of(t) not in self._dropped
            or t in self._handed_out
            or any(reader not in own for reader in self._tables.readers[t])
        )
        needed = (t for t in self._read_again if self._tensors[t].maker in self._memories.forward)
        return tuple(sorted({*left, *needed}))

    def _backward_outputs(self, operations: tuple[int, ...]) -> tuple[int, ...]:
        within = set(operations)
        made = (t for o in operations if self._operations[o].phase == "backward" for t in self._tables.makes[o])
        return tuple(
            sorted(t for t in made if t in self._handed_out or any(r not in within for r in self._tables.readers[t]))
        )

    def _kept(self) -> tuple[int, ...]:
        """Return the memories that W reads and does not make, and those of gradients to which it adds."""
        late, early, memories = set(self._late), set(self._early), self._memories
        reads = {t for o in self._late for t in self._operations[o].reads if not memories.is_repeated(t)}
        found = {memories.of(t) for t in reads if self._tensors[t].maker not in late}
        later = {name for t, name in self._before.gradients if self._tensors[t].maker in late}
        terms = ((self._tensors[t].maker, t, name) for t, name in self._before.gradients)
        found |= {memories.of(t) for maker, t, name in terms if maker in early and name in later}
        return tuple(sorted(m for m in found - {*self._before.results} if not memories.is_state(m)))

    def _kept_state(self) -> int:
        late, graph = set(self._late), self._tables.graph
        states = {state for o, state in self._tables.overwritten if o in late}
        return sum(graph.buffer_bytes.get(state) or graph.parameter_bytes[state] for state in states)
