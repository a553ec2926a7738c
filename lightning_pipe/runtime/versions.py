"""Versions of a rank's weights, and forwards in flight between two rounds of a pipeline that is never flushed.

A version is nothing but tensors that a micro-batch holds: what is pinned is found among the values of a micro-batch
before the parameters are looked at. An optimizer writes parameters in place. So right before its step, the parameters
that micro-batches in flight hold are copied, once for all of them. What neither I nor W reads is never copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import Program
from lightning_pipe.core.versions import Pin, PinOlder, Predict, PredictBack
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.handlers import RankParts, handles
from lightning_pipe.runtime.job import ResultSlice
from lightning_pipe.runtime.stage import Stage

Predictor = Callable[[Stage, str], Mapping[str, torch.Tensor]]
Contents = dict[str, torch.Tensor]


class Versions:
    """What computes of a rank read instead of its parameters.

    Args:
        stages: of the rank.
    """

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self._leaves_some = self._keeps_older = False
        self._older: dict[int, Contents] = {}
        self._buffers: dict[int, dict[str, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))
        self.predicted: Predictor | None = None

    def begin(self, program: Program) -> None:
        """Learn whether the program leaves forwards in flight, and whether later ones read an older version."""
        seam = program.seam
        self._leaves_some = seam is not None and any(seam.leaves)
        self._keeps_older = seam is not None and self._leaves_some and PinOlder.code in seam.work

    def pin(self, work: OwnWork, *, older: bool = False) -> None:
        """Let F, I and W of a micro-batch read the weights of now, or those before the last update."""
        stage = self._stages[work.stage]
        now = stage.parameters_now()
        stage.pin(work.microbatch, now | self._older.get(work.stage, {}) if older else now)

    def predict(self, work: OwnWork, kind: str) -> None:
        """Let F, or I and W, of a micro-batch read predicted weights."""
        if self.predicted is None:
            raise PipelineError(f"{work} asks for predicted weights, and nobody was told to predict them.")
        stage = self._stages[work.stage]
        stage.pin(work.microbatch, self.predicted(stage, kind), for_forward=kind == "F")

    def before_step(self) -> None:
        """Copy what micro-batches in flight hold of the parameters, which the optimizer is about to change."""
        if not self._leaves_some:
            self._older.clear()
            return
        for number, stage in self._stages.items():
            now = {name: x for name, x in stage.parameters_now().items() if x.requires_grad}  # others do not change
            readers = stage.readers_of(now)
            wanted = set(now) if self._keeps_older else set().union(*readers.values())
            self._older.pop(number, None)
            copies = self._copied({name: now[name] for name in sorted(wanted)}, self._buffers[number], stage)
            for microbatch, names in readers.items():
                stage.pin(microbatch, {name: copies[name] for name in names})
            if self._keeps_older:
                self._older[number] = copies

    def _copied(self, contents: Contents, buffers: dict[str, list[torch.Tensor]], stage: Stage) -> Contents:
        """Copy tensors into buffers that no micro-batch holds any more."""
        held = stage.held_tensors()
        copies: Contents = {}
        for name, content in contents.items():
            free = [buffer for buffer in buffers[name] if id(buffer) not in held]
            if not free:
                free = [torch.empty_like(content, requires_grad=False)]
                buffers[name] += free
            copies[name] = free[0]
        with torch.no_grad():
            for name, content in contents.items():
                copies[name].copy_(content)
        return copies

    def forget(self) -> None:
        """Forget the version before the last update: nothing is in flight, so the next batch reads that of now."""
        self._older.clear()


class InFlight:
    """Forwards that ran ahead of their batch, between two rounds.

    Attributes:
        leaves: forwards of each stage that the last round ran beyond its batch; () if none are in flight.
    """

    def __init__(self) -> None:
        self.leaves: tuple[int, ...] = ()
        self._batch = 0
        self._early: dict[str, list[ResultSlice]] = defaultdict(list)

    def begin(self, program: Program) -> int | None:
        """Return how many micro-batches have passed since the numbers of what is in flight; None if nothing is.

        Raises:
            PipelineError: if the program takes over other forwards than are in flight.
        """
        enters = () if program.seam is None or program.seam.is_first else program.seam.enters
        if enters != self.leaves:
            raise PipelineError(
                f"The program takes over forwards {enters} by stage, but {self.leaves} are in flight: give them up."
            )
        passed = self._batch if enters else None
        if passed is None:
            self._early.clear()
        self._batch, self.leaves = program.batch, ()
        return passed

    def results(self, passed: int | None) -> dict[str, list[ResultSlice]]:
        """Return the results of the round's batch that earlier rounds made, and number all others anew."""
        early, self._early = self._early, defaultdict(list)
        results: dict[str, list[ResultSlice]] = defaultdict(list)
        for name, pieces in early.items():
            for piece in pieces:
                self.put(results, name, replace(piece, microbatch=piece.microbatch - (passed or 0)))
        return results

    def put(self, results: dict[str, list[ResultSlice]], name: str, piece: ResultSlice) -> None:
        """Add a result to those of the batch, or keep it for the round of its batch."""
        (results if piece.microbatch < self._batch else self._early)[name].append(piece)

    def end(self, program: Program) -> None:
        """Note what a round has left, once it has ended."""
        leaves = () if program.seam is None else program.seam.leaves
        self.leaves = leaves if any(leaves) else ()

    def forget(self) -> None:
        """Forget what is in flight."""
        self.leaves = ()
        self._early.clear()


@handles(Pin)
def _pin(rank: RankParts, work: OwnWork) -> None:
    rank.versions.pin(work)


@handles(PinOlder)
def _pin_older(rank: RankParts, work: OwnWork) -> None:
    rank.versions.pin(work, older=True)


@handles(Predict)
def _predict(rank: RankParts, work: OwnWork) -> None:
    rank.versions.predict(work, "F")


@handles(PredictBack)
def _predict_back(rank: RankParts, work: OwnWork) -> None:
    rank.versions.predict(work, "I")
