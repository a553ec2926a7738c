"""Versions of a rank's weights, and forwards in flight between two rounds of a pipeline that is never flushed.

A version is nothing but tensors that a micro-batch holds: what is pinned is found among the values of a micro-batch
before the parameters are looked at. An optimizer writes parameters in place. So right before its step, the parameters
that micro-batches in flight hold are copied, once for all of them. What neither I nor W reads is never copied.

Which predictions are kept, and when one is made, says `schedule.predictions`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import ComputeKind, Program, Seam
from lightning_pipe.core.versions import Pin, PinEntry, PinOlder, Predict, PredictBack
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.handlers import RankParts, handles
from lightning_pipe.runtime.job import BatchInput, ResultSlice
from lightning_pipe.runtime.stage import Stage
from lightning_pipe.runtime.weights.corrections import Correction
from lightning_pipe.runtime.weights.prediction import Prediction
from lightning_pipe.schedule.predictions import PredictionCache

Contents = dict[str, torch.Tensor]
Buffers = dict[str, list[torch.Tensor]]  # of values that are read instead of parameters


class Versions:
    """What computes of a rank read instead of its parameters.

    Args:
        stages: of the rank.

    Attributes:
        prediction: predicts weights, or corrects those that backwards read, where a policy asks for that.
    """

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self._leaves_some = self._keeps_older = False
        self._older: dict[int, Contents] = {}
        self._entries = Entries()
        self._buffers: dict[int, Buffers] = defaultdict(lambda: defaultdict(list))
        self._predicted: dict[int, PredictionCache[Contents]] = {}  # by stage
        self._batch = 0  # micro-batches of the batch
        self._job: BatchInput | None = None
        self.prediction: Prediction | Correction | None = None

    def begin(self, program: Program, job: BatchInput) -> None:
        """Learn whether the program leaves forwards in flight, and whether later ones read an older version."""
        seam, self._job, self._batch = program.seam, job, program.batch
        if seam is None or seam.is_first:
            self._forget_predictions()
        self._leaves_some = seam is not None and any(seam.leaves)
        self._keeps_older = seam is not None and self._leaves_some and PinOlder.code in seam.work
        self._entries.begin(seam if seam is not None and PinEntry.code in seam.work else None)

    def pin(self, work: OwnWork, *, older: bool = False) -> None:
        """Let F, I and W of a micro-batch read the weights of now, or those before the last update."""
        stage = self._stages[work.stage]
        now = stage.parameters_now()
        stage.pin(work.microbatch, now | self._older.get(work.stage, {}) if older else now)

    def pin_entry(self, work: OwnWork) -> None:
        """Let F, I and W of a micro-batch read the weights that were current when it entered at stage 0."""
        stage = self._stages[work.stage]
        stage.pin(work.microbatch, self._entries.version(work.stage, work.microbatch) or stage.parameters_now())

    def predict(self, work: OwnWork, kind: ComputeKind) -> None:
        """Let F, or I and W, of a micro-batch read predicted weights.

        Raises:
            PipelineError: if there is nothing that predicts.
        """
        if self.prediction is None or self._job is None:
            raise PipelineError(f"{work} asks for predicted weights, and nobody was told to predict them.")
        stage, prediction = self._stages[work.stage], self.prediction
        if work.stage not in self._predicted:
            self._predicted[work.stage] = PredictionCache(prediction.horizons(work.stage), prediction.once)
        cache = self._predicted[work.stage]

        def make(horizon: int) -> Contents:
            now: Contents = {}
            for is_forward, ahead in zip((True, False), cache.horizons, strict=True):
                now |= stage.parameters_read(forward=is_forward) if ahead == horizon else {}
            free = self._free(stage)
            return prediction.predict(now, horizon, into=lambda name: free(name, now[name]))

        def keep(made: Contents) -> Contents:
            now = stage.parameters_now()
            same = {name: content for name, content in made.items() if content is now[name] and content.requires_grad}
            return made | self._copied(same, stage) if work.microbatch >= self._batch else made

        batch = self._job.of(work.microbatch)[0].step if cache.once else 0
        read = cache.read(kind, batch, make=make, keep=keep)
        if read is not None:
            stage.pin(work.microbatch, read, for_forward=kind == "F")

    def before_step(self) -> None:
        """Copy what micro-batches in flight hold of the parameters, which the optimizer is about to change."""
        if self.prediction is not None:
            for cache in self._predicted.values():
                cache.step()
            predicts = [x for n, x in self._stages.items() if any(self.prediction.horizons(n))]
            self.prediction.before_step(x for stage in predicts for x in stage.parameters_now().values())
        if not self._leaves_some:
            self._older.clear()
            self._entries = Entries()
            return
        for number, stage in self._stages.items():
            now = {name: x for name, x in stage.parameters_now().items() if x.requires_grad}  # others do not change
            readers = stage.readers_of(now)
            keeps = self._keeps_older or self._entries.awaits(number)
            wanted = set(now) if keeps else set().union(*readers.values())
            self._older.pop(number, None)
            self._entries.drop(number)
            copies = self._copied({name: now[name] for name in sorted(wanted)}, stage)
            for microbatch, names in readers.items():
                stage.pin(microbatch, {name: copies[name] for name in names})
            if self._keeps_older:
                self._older[number] = copies
            elif keeps:
                self._entries.keep(number, copies)
        self._entries.step()

    def _copied(self, contents: Contents, stage: Stage) -> Contents:
        """Copy tensors into buffers that no micro-batch holds any more."""
        free = self._free(stage)
        copies = {name: free(name, content) for name, content in contents.items()}
        with torch.no_grad():
            for name, content in contents.items():
                copies[name].copy_(content)
        return copies

    def _free(self, stage: Stage) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Return a function that returns a buffer which nothing reads any more, by name and what it is like."""
        cache = self._predicted.get(stage.program.stage)
        predicted = {id(content) for contents in (cache.there if cache else ()) for content in contents.values()}
        used = stage.held_tensors() | self._entries.tensors() | predicted
        buffers = self._buffers[stage.program.stage]

        def free(name: str, like: torch.Tensor) -> torch.Tensor:
            unused = [buffer for buffer in buffers[name] if id(buffer) not in used]
            if not unused:
                unused = [torch.empty_like(like, requires_grad=False)]
                buffers[name] += unused
            return unused[0]

        return free

    def forget(self) -> None:
        """Forget versions before this one: nothing is in flight, so the next batch reads that of now."""
        self._older.clear()
        self._entries = Entries()
        self._forget_predictions()

    def _forget_predictions(self) -> None:
        self._predicted.clear()
        if self.prediction is not None:
            self.prediction.forget()


class Entries:
    """Versions that were current when micro-batches entered at stage 0, of those whose turn on this rank comes later.

    A version is named by the number of updates before it, since the pipeline was empty.
    """

    def __init__(self) -> None:
        self._updates = self._batch = 0
        self._seam: Seam | None = None
        self._entered: dict[int, int] = {}  # version, by micro-batch
        self._versions: dict[int, dict[int, Contents]] = defaultdict(dict)  # by stage

    def begin(self, seam: Seam | None) -> None:
        """Note what enters in a round; None for one that does not ask."""
        self._seam = seam
        if seam is None:
            return
        self._entered = {m - self._batch: version for m, version in self._entered.items()}
        self._entered |= dict.fromkeys(range(seam.enters[0], seam.batch + seam.leaves[0]), self._updates)
        self._batch = seam.batch

    def version(self, stage: int, microbatch: int) -> Contents | None:
        """Return the version of a micro-batch; None for that of now."""
        return self._versions[stage].get(self._entered[microbatch])

    def _awaited(self, stage: int) -> set[int]:
        """Return the versions that forwards of later rounds will read."""
        if self._seam is None:
            return set()
        leaves, batch = self._seam.leaves, self._seam.batch
        return {self._entered[m] for m in range(batch + leaves[stage], batch + leaves[0])}

    def awaits(self, stage: int) -> bool:
        """Return whether a forward of a later round will read the version of now."""
        return self._updates in self._awaited(stage)

    def drop(self, stage: int) -> None:
        """Drop the versions that no later forward reads."""
        awaited = self._awaited(stage)
        self._versions[stage] = {k: contents for k, contents in self._versions[stage].items() if k in awaited}

    def keep(self, stage: int, contents: Contents) -> None:
        """Keep the version of now."""
        self._versions[stage][self._updates] = contents

    def step(self) -> None:
        """Count an update."""
        self._updates += 1

    def tensors(self) -> set[int]:
        """Return the identities of all that is kept."""
        return {id(x) for kept in self._versions.values() for contents in kept.values() for x in contents.values()}


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


@handles(PinEntry)
def _pin_entry(rank: RankParts, work: OwnWork) -> None:
    rank.versions.pin_entry(work)


@handles(Predict)
def _predict(rank: RankParts, work: OwnWork) -> None:
    rank.versions.predict(work, "F")


@handles(PredictBack)
def _predict_back(rank: RankParts, work: OwnWork) -> None:
    rank.versions.predict(work, "I")
