"""Runner of a captured step on one batch: a verified program, whose results every rank gets.

Where ranks run ahead (`post_validation`), a program may be given up because the optimizer step before was wrong; then
that is taken again, and the batch begun again.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from lightning_pipe.capture.replayed.head_words import head_words
from lightning_pipe.capture.replayed.output_words import merged_outputs
from lightning_pipe.capture.replayed.replay_values import LOSS
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.core.milestones import Confirm, Publish, Rollback
from lightning_pipe.core.program import Layout, VerifiedProgram
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.runtime.exchanges.results import Collected
from lightning_pipe.runtime.job import BatchInput, ProgramResult
from lightning_pipe.runtime.memory import PeakMemory, state_bytes
from lightning_pipe.runtime.milestones import MilestoneHandlers, Pieces, at_once
from lightning_pipe.runtime.waiting import Walk, drive
from lightning_pipe.schedule.weights import WeightPolicy
from lightning_pipe.strategy.gradients.post_validation import PostValidation
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.connections import Connections
from lightning_pipe.strategy.steps.merge_logs import combined, gathered, uneven
from lightning_pipe.strategy.steps.rounds import Rounds, chained
from lightning_pipe.strategy.steps.state_snapshot import StateSnapshot
from lightning_pipe.strategy.steps.step_calls import TRAINING, FollowingBatch, RunOptions, StepRequest, StepResult
from lightning_pipe.strategy.steps.step_runtime import RankStep


class Runner:
    """Run the captured steps of one module on one rank.

    Args:
        links: to the other ranks.
        weights: where parameters live.
        later: looks whether optimizer steps were right; None where ranks wait for each other.
        versions: name of the policy of weight versions.
        policy: that policy; None for pipelines that are flushed.
        batch_dim: dimension of the batch's tensors along which samples lie.
        device: where this rank computes.

    Attributes:
        rounds: what runs ahead of its batch.
        seed: seed of random numbers.
        reduced: whether the gradients of the last training step are sums over ranks.
    """

    def __init__(
        self,
        links: Connections,
        *,
        weights: Weights,
        later: PostValidation | None,
        versions: str = "sync",
        policy: WeightPolicy | None = None,
        batch_dim: int,
        device: torch.device,
    ) -> None:
        self._links, self._weights, self._later = links, weights, later
        self._batch_dim, self._device = batch_dim, device
        self.rounds = Rounds(versions, links, policy)
        self.seed = 0
        self._trained = 0
        self.reduced = False
        self._unknown: set[str] = set()
        self._late: set[str] = set()
        self._leaving: RankStep | None = None  # whose sums may be under way

    def run(
        self, step: RankStep, call: StepRequest, turn: RunOptions, *, sizes: tuple[int, ...], cut: tuple[bool, ...]
    ) -> StepResult:
        """Run a captured step on a batch.

        Args:
            step: the step.
            call: the call.
            turn: the batch.
            sizes: samples of its micro-batches.
            cut: which leaves of the batch are cut into samples.
        """
        training = call.method == TRAINING and step.has_loss
        numbers = step.prepare(call)
        round_ = self.rounds.begin(step, call, sizes, turn, training=training, numbers=numbers)
        program = step.program(
            round_.sizes,
            synchronise=turn.synchronise,
            training=training,
            seam=round_.seam,
            policy=self.rounds.policy,
        )
        has_entered = round_.seam is not None and any(round_.seam.enters)
        gradients = self._gradients() if has_entered else {}
        if self._later is not None and not step.early:
            self._later.settle()
        step.refresh(self._trained)
        if training and self.reduced:
            step.keep_sums_once()
        key = RandomKey(self.seed, turn.number, 0)
        leaves, cut = step.capture.with_totals(turn.tensors, cut=cut, sizes=sizes, buffers=step.buffers, key=key)
        job = BatchInput(
            leaves=leaves,
            cut=cut,
            offsets=tuple(sum(sizes[:m]) for m in range(len(sizes))),
            weight=turn.weight,
            seed=self.seed,
            step=turn.number,
            batch_dim=self._batch_dim,
            is_skipped=call.method == TRAINING and not training,
            samples=sum(sizes),
            buffers=step.held_numbers(() if round_.seam is None else numbers),
            following=self._following(step, round_.following),
        )
        peak = PeakMemory(self._device) if turn.measure_memory else None
        before = self._state_bytes() if turn.measure_memory else 0
        if step.capture.plays is not None:
            step.capture.plays.cut(sizes)
        with peak or contextlib.nullcontext(), self._weights.buffers_known(step.split, program.layout):
            outcome, results = self._follow(step, program, job, turn)
        turn.confirm()
        collected = drive(results, wait=self._links.watch.wait)
        if training:
            is_outdated = collected.votes["outdated"] > 0
            self.rounds.end(step, has_entered=has_entered, is_outdated=is_outdated)
            if is_outdated:  # so that the batch begins again, with nothing in flight
                self.land(lambda: None, among=())
                for parameter, gradient in gradients.items():
                    parameter.grad = gradient
                return self.run(step, call, turn, sizes=sizes, cut=cut)
        record, values, differing = step.capture.record, collected.values, ""
        if (plays := step.capture.plays) is not None:
            speakers = dict.fromkeys(rank for s in plays.speakers for rank in program.layout.stages[s])
            words = gathered(plays.said(), tuple(speakers), self._links.control)
            plays.turn({name: flag for *_, one in words if one.is_whole for name, flag in one.turned.items()})
            if (headed := head_words(words)) is not None:
                differing = headed.unlike(values[LOSS]) if LOSS in values else headed.unlike(None)
                record, said_values = headed.record(self._device)
                values = {**values, **said_values}
            else:
                differing = uneven(words, rows=plays.rows)
                differing = differing or plays.unlike_law([(n, one) for *_, n, one in words if one.is_whole])
            if headed is None and (not differing or len(sizes) == 1):
                record, said, unknown = combined(
                    words, device=self._device, proportional=plays.proportional, rows=plays.rows
                )
                values = {**values, **said}
                self._warn_of_unknown(unknown)
            if not differing or len(sizes) == 1:
                outputs, printed, untold = merged_outputs(words, plays.output, self._device)
                record, values = replace(record, outputs=outputs), {**values, **printed}
                self._warn_of_untold(untold, call.method)
            if not training:  # else the step is traced again
                self._warn_of_late_changes(plays.late_changes(), call.method, program.layout)
        made = {one.name: one.of(values, sum(sizes)) for one in step.capture.late_values}
        with torch.no_grad():
            for one in step.capture.late_values:
                if one.state:
                    self._weights.write(one.state, made[one.name])
        values = {**values, **made}
        return StepResult(
            record,
            values,
            sum(sizes),
            step.capture.graph.fingerprint,
            program,
            outcome.timeline,
            outcome.memory,
            peak.bytes if peak is not None else None,
            before,
            collected.votes["stop"] > 0,
            differing,
            collected.votes["late"] > 0,
        )

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor | None]:
        """Return the gradients of this rank as they are, by parameter."""
        held = (parameter for name, parameter in self._weights.parameters.items() if self._weights.holds(name))
        return {parameter: None if parameter.grad is None else parameter.grad.clone() for parameter in held}

    def _following(self, step: RankStep, batches: Sequence[FollowingBatch]) -> BatchInput | None:
        """Return the jobs of batches whose forwards begin in this round, one behind the other."""
        jobs = []
        for batch in batches:
            numbers = step.held_numbers(batch.numbers)
            leaves, cut = step.capture.with_totals(
                batch.tensors,
                cut=batch.cut,
                sizes=batch.sizes,
                buffers={**step.buffers, **numbers},
                key=RandomKey(self.seed, batch.number, 0),
            )
            offsets = tuple(sum(batch.sizes[:m]) for m in range(len(batch.sizes)))
            job = BatchInput(leaves, cut, offsets, batch.weight, self.seed, batch.number, self._batch_dim)
            jobs.append(replace(job, samples=sum(batch.sizes), buffers=numbers))
        return chained(jobs)

    def _warn_of_late_changes(self, late: Mapping[str, int], method: str, layout: Layout) -> None:
        """Warn once where plays change a buffer as one device does not: once each, or every replica its own."""
        new = {name: plays for name, plays in late.items() if name not in self._late}
        self._late |= {*new}
        is_replicated = any(len(ranks) > 1 for ranks in layout.stages if self._links.control.rank in ranks)
        for is_so, how, avoided in (
            (
                max(new.values(), default=0) > 1,
                "once for every micro-batch, as with gradient accumulation",
                "microbatches=1",
            ),
            (bool(new) and is_replicated, "every replica its own, by its samples", "One rank per stage"),
        ):
            if is_so:
                warnings.warn(
                    f"{method} changes {', '.join(sorted(new))} in this batch, which it did not do when it was traced "
                    f"on the first one: {how}, and not once as on one device. {avoided} has no such difference.",
                    stacklevel=2,
                )

    def _warn_of_unknown(self, unknown: Sequence[str]) -> None:
        """Warn once of every result that differs between micro-batches, and of which nothing is known."""
        if new := [place for place in unknown if place not in self._unknown]:
            self._unknown.update(new)
            rank_zero_warn(
                f"Micro-batches say different values of {'; '.join(new)}, and nothing has told yet how these make that "
                "of the batch: their mean is taken, or what reduce_fx says. microbatches=1 has that of the batch, as "
                "does a torchmetrics object that is given the samples."
            )

    def _warn_of_untold(self, lines: Sequence[str], method: str) -> None:
        """Warn once of every line whose output is not shown."""
        if new := [line for line in lines if line not in self._unknown]:
            self._unknown.update(new)
            rank_zero_warn(
                f"{'; '.join(new)} is not shown: {method} is replayed for micro-batches, of whose values nothing tells "
                "what they are of the batch. microbatches=1 shows it."
            )

    def note_trained(self, *, synchronised: bool) -> None:
        """Remember that a training step has run."""
        self._trained += 1
        self.reduced = synchronised

    def _follow(
        self, step: RankStep, program: VerifiedProgram, job: BatchInput, turn: RunOptions
    ) -> tuple[ProgramResult, Walk[Collected]]:
        """Run a program; return what this rank has then, and the coroutine that gives what all have."""
        results = list[Walk[Collected]]()
        outdated = self.rounds.is_outdated if program.training else 0.0

        def collect(pieces: Pieces) -> None:
            plays = step.capture.plays
            late = plays is not None and bool(plays.late_changes())
            votes = {"stop": float(turn.stop()), "late": float(late), "outdated": outdated}
            results.append(step.results.collect(program, pieces, step.names, votes=votes))

        run = partial(
            step.executor.run,
            program,
            job,
            record=turn.record,
            record_memory=turn.measure_memory,
            watch=self._links.watch,
            before_waiting=turn.confirm,
            leave_sums=turn.leave_sums,
            milestones={Publish: at_once(collect), **self._rolling_back(step)},
            most_messages=step.most_messages(program),
        )
        self._leaving = step if turn.leave_sums else None
        with torch.no_grad():  # once, instead of in every compute
            outcome = run()
            if outcome.given_up:  # and the step before taken again, so that this one holds
                outcome = run()
        if not results:
            collect(outcome.results)
        return outcome, results[0]

    def land(self, step: Callable[[], None], *, among: Iterable[torch.Tensor]) -> None:
        """Wait for the sums that the last run has left; arguments as of `Executor.land`."""
        leaving, self._leaving = self._leaving, None
        watch = self._links.watch

        def look_and_step() -> None:
            watch.raise_failure()
            step()

        if leaving is not None:
            with watch.limited("the sums of gradients"):
                leaving.executor.land(look_and_step, among=among, wait=watch.wait)

    def _rolling_back(self, step: RankStep) -> MilestoneHandlers:
        """Return what confirms the optimizer step before, and what takes it and the state of this one back."""
        later = self._later
        if later is None:
            return {}
        before = StateSnapshot(self._weights, step.split) if later.pending else None
        with_gradients = torch.is_grad_enabled()

        def roll_back(pieces: Pieces) -> None:
            assert before is not None, "only a step that is pending can be wrong"
            with torch.set_grad_enabled(with_gradients):
                later.redo()
                before.restore()

        return {Confirm: lambda pieces: later.holds(), Rollback: at_once(roll_back)}

    def _state_bytes(self) -> int:
        kept = 0 if self._later is None else self._later.bytes
        here = [parameter for name, parameter in self._weights.parameters.items() if self._weights.holds(name)]
        return kept + state_bytes([*here, *self._weights.buffers.values()])
