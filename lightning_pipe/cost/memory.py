"""Memory of a stage: the bytes that it holds, and those that a compute needs besides.

The code of a half frees every value after its last use; what is given to it stays until it ends. So, with the memory
of a view counted once, under its base:

    peak       max over the operations of a half of (what it was given + what it has made and still needs + scratch)
    scratch    what the operation that runs holds for itself, as profiled; of counted profiles there is none
    F          peak - saved - results - for the head: what F needs beside what it leaves
    I          peak, with the gradients that arrived: all of `saved` is there as well until I ends
    W          peak: all of `kept` is there as well
    gradients  that of a parameter is there from its first term until its last is made: then it is added to those that
               are there, or becomes the first of them, which are counted with the state

    joined W   W on all samples, and beside it one copy of each input with samples, made in their order; its pieces are
               dropped then (the memory that several are views of, with the last of them)

Left out: fragmentation, and the pieces of a value that is joined from several messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_never

from lightning_pipe.core.graph import Graph, Tensor
from lightning_pipe.core.profile import Profile
from lightning_pipe.core.program import ComputeKind
from lightning_pipe.cost.lifetimes import NOTHING_DUE, Lifetimes, Lives
from lightning_pipe.cost.stage import HalfWork, StageWork
from lightning_pipe.cost.tables import GraphArrays


@dataclass(frozen=True)
class Amount:
    """Bytes as a function of the samples."""

    per_sample: float = 0.0
    fixed: int = 0

    def __call__(self, samples: int) -> int:
        """Return the bytes for this many samples."""
        return round(self.per_sample * samples) + self.fixed

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.per_sample + other.per_sample, self.fixed + other.fixed)


@dataclass(frozen=True)
class Scratch:
    """Bytes that some operations hold for themselves while they run, as a function of the samples.

    Attributes:
        profile: where they were measured.
        measured: for each operation, at each of `profile.samples`.
    """

    profile: Profile
    measured: NDArray[np.float64]

    def __call__(self, samples: int) -> NDArray[np.float64]:
        """Return the bytes of each operation for this many samples."""
        found = np.zeros(len(self.measured))
        for i, weight in self.profile.weights(samples):
            found += weight * self.measured[:, i]
        return found.clip(min=0.0)


@dataclass(frozen=True)
class Live:
    """Bytes needed while each operation of a half runs, and at its end.

    Attributes:
        per_sample, fixed: bytes made and still needed, per sample and besides.
        scratch: bytes of the operations themselves; None where they are not known.
        begin: where the operations begin.
    """

    per_sample: NDArray[np.float64]
    fixed: NDArray[np.float64]
    scratch: Scratch | None
    begin: int = 0

    def peak(self, samples: int) -> int:
        """Return the most bytes at once."""
        needed = self.per_sample * samples + self.fixed
        if self.scratch is not None:
            own = self.scratch(samples)
            needed[self.begin : self.begin + len(own)] += own
        return round(float(needed.max(initial=0.0)))


class MemoryModel:
    """Work out the bytes of stages of one graph.

    Args:
        graph: with its operations and tensors.
        profile: with the scratch of its operations; without one, or if it has none, they are taken to need none.
        tables: the graph as arrays, if they are there already.
    """

    def __init__(self, graph: Graph, *, profile: Profile | None = None, tables: GraphArrays | None = None) -> None:
        self._graph = graph
        self._scratch: Scratch | None = None
        if profile is not None and profile.scratch_bytes:
            self._scratch = Scratch(profile, np.array(profile.scratch_bytes, dtype=float))
        self._tables = tables or GraphArrays(graph)
        self._lifetimes = Lifetimes(self._tables)

    def amount(self, tensors: Iterable[int]) -> Amount:
        """Return the bytes of tensors together, each with memory of its own."""
        found = [self._graph.tensors[t] for t in tensors]
        return Amount(sum(t.bytes_per_sample for t in found), sum(t.fixed_bytes for t in found))

    def _live(
        self, half: HalfWork, lives: Lives, due: Mapping[str, list[int]] = NOTHING_DUE, taken_over: Container[str] = ()
    ) -> Live:
        """Follow the values that a half makes from operation to operation.

        Args:
            half: one half of a stage.
            lives: of what it makes.
            due: by parameter, the terms of the gradients that are complete with it.
            taken_over: parameters whose gradients are counted elsewhere.
        """
        count = len(half.operations)
        elsewhere = {lives.memory[t] for name in due if name in taken_over for t in due[name]}
        here = np.isin(lives.memories, list(elsewhere), invert=True) if elsewhere else slice(None)
        memories, begins, ends = lives.memories[here], lives.begins[here], lives.ends[here] + 1
        change = np.zeros((2, count + 2))
        for row, size in zip(change, (self._tables.per_sample[memories], self._tables.fixed[memories]), strict=True):
            row += np.bincount(begins, weights=size, minlength=count + 2)
            row -= np.bincount(ends, weights=size, minlength=count + 2)
        for name, terms in due.items():
            if len(terms) > 1:  # a sum of two while a third is added
                adding = self._graph.parameter_bytes[name] * min(len(terms) - 1, 2)
                at = lives.complete.get(name, count)
                change[1, at : at + 2] += (adding, -adding)
        per_sample, fixed = np.cumsum(change, axis=1)
        return Live(per_sample, fixed, self._scratch_of(half.operations))

    def _scratch_of(self, operations: Sequence[int]) -> Scratch | None:
        if self._scratch is None:
            return None
        return Scratch(self._scratch.profile, self._scratch.measured[list(operations)])

    def stage(self, work: StageWork, *, shared: frozenset[str] = frozenset()) -> StageMemory:
        """Return the bytes of a stage.

        Args:
            work: the stage.
            shared: parameters that other stages hold too.
        """
        early, late = self._due(work)
        taken = frozenset(name for name in {**early, **late} if name not in shared)
        kept = {*work.saved, *work.results}
        forward, input_grad, weight_grad = work.forward, work.input_grad, work.weight_grad
        early_lives = self._lifetimes.of(input_grad, kept=kept, due=early)
        late_lives = self._lifetimes.of(weight_grad, due=late)
        return StageMemory(
            saved=self.amount(work.saved) + Amount(fixed=work.saved_state),
            kept=self.amount(work.kept) + Amount(fixed=work.kept_state),
            results=self.amount(work.results),
            given=(self.amount(forward.given), self.amount(input_grad.given)),
            live=(
                self._live(forward, self._lifetimes.of(forward)),
                self._live(input_grad, early_lives, early),
                self._live(weight_grad, late_lives, late),
            ),
            first=(
                self._live(input_grad, early_lives, early, taken & self._of_own_memory(early)),
                self._live(weight_grad, late_lives, late, taken & self._of_own_memory(late)),
            ),
            copied_bytes=work.saved_state,
            for_head=self.amount(sorted({*work.head_reads} - kept)),
        )

    def joined(self, work: StageWork, live: Live) -> Live:
        """Follow the copies that a joined W makes of its inputs, without the pieces that are dropped, then W itself.

        Args:
            work: the stage.
            live: its weight half.
        """
        tensors, made = self._graph.tensors, {t for o in work.weight_grad.operations for t in self._tables.makes[o]}
        reads = sorted({t for o in work.weight_grad.operations for t in self._graph.operations[o].reads} - made)
        copied = [t for t in reads if tensors[t].bytes_per_sample]
        kept = frozenset(work.kept)
        lasts = {memory: i for i, t in enumerate(copied) if (memory := self._behind(t, kept)) >= 0}
        copies = np.zeros(len(copied) + 1)
        pieces = np.zeros(len(copied) + 1)
        for i, t in enumerate(copied):
            copies[i:] += tensors[t].bytes_per_sample
        for memory, i in lasts.items():
            pieces[i + 1 :] += tensors[memory].bytes_per_sample
        beside = copies - pieces
        per_sample = np.concatenate([beside[:-1], live.per_sample + beside[-1]])
        fixed = np.concatenate([np.zeros(len(copied)), live.fixed])
        return Live(per_sample, fixed, live.scratch, begin=len(copied))

    def _behind(self, tensor: int, kept: frozenset[int]) -> int:
        """Return the memory behind a tensor among what a stage keeps for W; -1 if something else holds it too."""
        while tensor >= 0 and tensor not in kept:
            tensor = self._graph.tensors[tensor].base
        return tensor

    def _due(self, work: StageWork) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Return the terms of the gradients that are complete after I, and after W, by parameter."""
        terms: dict[str, list[int]] = defaultdict(list)
        for t, name in work.gradients:
            terms[name].append(t)
        early = set(work.input_grad.outputs)
        first = {name: found for name, found in terms.items() if early.issuperset(found)}
        return first, {name: found for name, found in terms.items() if name not in first}

    def _of_own_memory(self, due: Mapping[str, list[int]]) -> frozenset[str]:
        """Return the parameters whose gradient has memory of just its size, which `.grad` can take over."""
        single = ((name, self._graph.tensors[terms[0]]) for name, terms in due.items() if len(terms) == 1)
        return frozenset(
            name
            for name, tensor in single
            if self._memory_of(tensor).fixed_bytes == tensor.fixed_bytes and not self._memory_of(tensor).of_state
        )

    def _memory_of(self, tensor: Tensor) -> Tensor:
        while tensor.base >= 0:
            tensor = self._graph.tensors[tensor.base]
        return tensor


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage.

    Attributes:
        saved: from F to I or W, without results.
        kept: from I to W, without results.
        results: what the step hands out.
        given: what arrives for F, and for I.
        live: what F, I and W have made and still need.
        first: the same of the first I and W of a batch, without gradients of parameters that `.grad` takes over.
        copied_bytes: bytes of state that F copies.
        for_head: from F to the head of the step, without what is saved, and results.
    """

    saved: Amount
    kept: Amount
    results: Amount
    given: tuple[Amount, Amount]
    live: tuple[Live, Live, Live]
    first: tuple[Live, Live]
    copied_bytes: int
    for_head: Amount = Amount()

    def workspace(self, kind: ComputeKind, samples: int) -> int:
        """Return the most bytes that a compute needs beyond what is held while it runs and what it leaves."""
        match kind:
            case "F":
                peak = self.given[0](samples) + self.live[0].peak(samples) + self.copied_bytes
                return max(0, peak - self.saved(samples) - self.results(samples) - self.for_head(samples))
            case "I" | "W" | "B":
                return self._backward(kind, samples, *self.live[1:])
            case _:
                assert_never(kind)

    def _backward(self, kind: Literal["I", "W", "B"], samples: int, input_grad: Live, weight_grad: Live) -> int:
        early, late = self.given[1](samples) + input_grad.peak(samples), weight_grad.peak(samples)
        match kind:
            case "I":
                return early
            case "W":
                return late
            case "B":
                return max(early, late + self.kept(samples) - self.saved(samples))
            case _:
                assert_never(kind)

    def gradient_bytes(self, kind: ComputeKind, samples: int) -> int:
        """Return the part of the workspace that the first compute of a batch does not need: `.grad` takes it."""
        if kind == "F":
            return 0
        return self.workspace(kind, samples) - self._backward(kind, samples, *self.first)


class StateBytes(NamedTuple):
    """Bytes that a rank holds whatever it computes; gradients are as big as the trained parameters."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    versions: int = 0  # of the weights, beside the present one (`cost.versions`)
