"""Replay of a step on one rank: the Python of the whole step runs, with only the rank's own units.

Calls of sub-modules are intercepted. Of the units of the trace, in the order in which the step calls them,

    an own one           runs, with autograd
    a given one          returns what arrived from the stage that owns it, as a leaf of autograd
    another earlier one  returns fake tensors of the right shapes, which flow through glue that nobody here needs
    the first later one  ends the play; the last stage goes on to the end

The backward differentiates what was sent (and the loss) by what was given and by the parameters. One play is a *tape*
until then.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from lightning_pipe.capture.recording.replay_state import speaks
from lightning_pipe.capture.recording.unit_inputs import Untouched
from lightning_pipe.capture.recording.unit_loss import reductions
from lightning_pipe.capture.replayed.module_scope import Slot, TrainedParameters, hung, keyed, slots_of
from lightning_pipe.capture.replayed.other_stages import OtherStages, absent_values_printed
from lightning_pipe.capture.replayed.output_words import inside_units
from lightning_pipe.capture.replayed.replay_values import UnitSizes, finish, sizes_of_tensor, tensors_in
from lightning_pipe.capture.replayed.stage_spec import BatchContext, PlayedStep, StageSpec, Tensors
from lightning_pipe.capture.replayed.step_run import StepRun
from lightning_pipe.capture.steps.batch import with_rows
from lightning_pipe.capture.steps.call_recording import StepRecording, recording_calls
from lightning_pipe.capture.steps.hazards import Answerer
from lightning_pipe.capture.steps.metric_result import with_loss
from lightning_pipe.capture.steps.module_tables import HookTables, twin_buffers
from lightning_pipe.capture.steps.other_ranks import layers_in_python, no_collectives, no_training_state
from lightning_pipe.capture.steps.record import KeptState, OutputCall
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.steps.step_state import ModuleState
from lightning_pipe.capture.torch_private import FakeTensor, answered_calls, checkpoints_replaced, version_of
from lightning_pipe.errors import PipelineError, none_caught

_HANDLES = itertools.count()


@dataclass(frozen=True)
class _Tape:
    """A play that waits for its backward: what was sent and given, the loss, its parameters, and those of no stage.

    `left` is the Python state at its end, which its backward reads; None where that is the state before the batch.
    """

    sent: Mapping[int, Tensors]
    given: Mapping[int, Tensors]
    loss: torch.Tensor | None
    parameters: dict[str, torch.Tensor]
    spare: dict[str, torch.Tensor]
    left: ModuleState | None


@dataclass(frozen=True)
class Played:
    """A play.

    Attributes:
        tape: handle of its tape.
        sent: outputs of the sent units.
        asked: sums of the rows of what units were given whose inputs are compared.
        loss: the loss; zero where there is none.
        changed: buffers that it has changed.
        recording: what it has said.
        sizes: of what the units up to its end return.
    """

    tape: int
    sent: Mapping[int, Tensors]
    asked: Mapping[int, torch.Tensor]
    loss: torch.Tensor
    changed: Mapping[str, torch.Tensor]
    recording: StepRecording
    sizes: UnitSizes


class StageReplayer:
    """Play the forward and the backward of one stage.

    Args:
        step: the step.
        part: what the stage plays.
        now: what changes from batch to batch.
    """

    def __init__(self, step: PlayedStep, part: StageSpec, now: BatchContext) -> None:
        self._step, self._part, self._now = step, part, now
        self._units = step.trace.units
        self._tapes: dict[int, _Tape] = {}
        self._others = OtherStages(step, part)
        self._twins = {name: twins for name, twins in twin_buffers(step.module).items() if name in part.buffers}
        changed = itertools.chain(*(unit.mutations for unit in self._units), (one.name for one in step.trace.changes))
        self._changed = {*changed}  # of buffers, by the traced run

    @cached_property
    def _slots(self) -> dict[str, Slot]:
        own = itertools.chain(*self._part.parameters.values())
        twins = itertools.chain(*self._twins.values())
        return slots_of(self._step.module, (*own, *self._part.buffers, *twins, *self._part.absent))

    def forward(
        self,
        samples: int,
        key: RandomKey,
        *,
        state: dict[str, torch.Tensor],
        leaves: Mapping[int, torch.Tensor],
        given: Mapping[int, Tensors],
        sizes: torch.Tensor | None = None,
    ) -> Played:
        """Play the step on some samples; on all of them, if this is a head.

        Args:
            samples: their number.
            key: key of the random numbers.
            state: parameters and buffers of the stage by name.
            leaves: tensors of the batch that the stage is given, by number.
            given: outputs of the given units.
            sizes: of what earlier units return, as their stages tell them.

        Returns:
            What the play has made.

        Raises:
            PipelineError: if the step calls other units than it was traced with, or a unit returns something else.
        """
        python = self._now.state = self._now.state or ModuleState(self._step.module, copies=True)
        apart = {name: state[name].clone() for name in self._part.mutations}  # as backwards of others wait for these
        twins = {twin: (state | apart)[name] for name, own in self._twins.items() for twin in own}
        hang = partial(hung, self._slots, {**state, **apart, **twins, **self._others.parameters})
        metrics = self._now.metrics_of(self._step.module)
        earlier = {} if sizes is None else sizes_of_tensor(self._units, sizes)
        run = StepRun(self._others, metrics, samples=samples, key=key, given=given, sizes=earlier, hang=hang)
        recording = StepRecording(is_play=True, position=run.position)
        answerer = Answerer()
        with contextlib.ExitStack() as stack:
            stack.callback(python.restore)
            stack.callback(self._put_hooks_aside)
            stack.enter_context(absent_values_printed())
            for entered in (
                hang(),
                self._late_buffers_counted(),
                checkpoints_replaced(run.checkpoints.entered, where=lambda: run.is_inside),
                no_collectives(),
                layers_in_python(),
                no_training_state(self._step.module),
                keyed(key, self._step.device),
                recording_calls(self._step.module, recording, metrics),
                torch.set_grad_enabled(self._step.has_backward),
                self._step.context(),
                answered_calls(self._step.modules.values(), run.answer),
            ):
                stack.enter_context(entered)
            if self._step.trace.escapes:
                stack.enter_context(answerer)
            self._trained.put(self._now.trained)
            output = run.run(lambda: self._call(samples, key, leaves, run.untouched))
            trained = self._trained.now()
            loss = self._loss(output)
            recording.kept = self._left(python, recording)
            if self._part.number not in self._now.speakers:  # so nobody would hear of it
                self._now.late.update(left.name for left in recording.kept)
            is_read = self._step.has_backward and any(True for _ in python.changes())
            left = python.now() if is_read else None
            changed = {name: self._step.module.get_buffer(name) for name in self._part.mutations}
        if loss is not None and self._step.trace.law is not None and not self._step.head:
            recording.law = reductions(loss, units=run.made, samples=samples)
        recording.called, recording.answers = tuple(run.called), answerer.answers
        recording.unlike = (
            run.touched and f"what it gives {run.touched} is made by it now, and was not when it was traced"
        )
        if self._part.is_last:
            recording.is_whole = True
            recording.turned = {n: flag for n, flag in trained.items() if flag != self._now.trained.get(n, flag)}
            finish(recording, output, loss)
            self._refuse_absent([*recording.results, *([] if loss is None else [loss])])
        else:
            recording.outputs = self._heard(inside_units(recording))
        recording.position, recording.printed_tensors = int, {}  # which other ranks cannot be told
        if recording.outputs and not (self._part.is_last or recording.kept):
            output = StepRecording(outputs=recording.outputs, results=recording.results)
            self._now.said.append((key.microbatch, key.first_sample, samples, output))
        elif self._part.is_last or self._part.stops or recording.kept:
            self._now.said.append((key.microbatch, key.first_sample, samples, recording))
        sent = {k: tuple(tensor.detach() for tensor in tensors) for k, tensors in run.sent.items()}
        told = torch.zeros((), dtype=self._step.trace.loss, device=self._step.device) if loss is None else loss.detach()
        return Played(self._keep(run, loss, state, left), sent, run.asked, told, changed, recording, run.sizes)

    def _heard(self, outputs: list[OutputCall]) -> list[OutputCall]:
        """Return what others hear of the output of this stage's sub-modules: none where they do not listen."""
        if outputs and self._part.number not in self._now.speakers:
            warnings.warn(  # once, as the text is the same
                f"{outputs[0].name}() at {outputs[0].line} is not shown: it is in a sub-module of stage "
                f"{self._part.number}, and was not called when {self._step.method} was traced.",
                stacklevel=2,
            )
            return []
        return outputs

    def backward(
        self,
        handle: int,
        *,
        tangent: torch.Tensor | None,
        gradients: Mapping[tuple[int, int], Tensors],
    ) -> tuple[dict[int, Tensors], dict[str, torch.Tensor | None]]:
        """Differentiate a play.

        Args:
            handle: that of its tape, which ends here.
            tangent: weight of the loss; None in stages without one.
            gradients: what came back for sent units, by unit and receiving stage; of tensors with a gradient only.

        Returns:
            Gradients of the given units (of tensors with a gradient only), and of the parameters: None of those that
            this micro-batch does not use (an expert without a token, a parameter that is frozen now).

        Raises:
            PipelineError: if it trains a parameter that the step did not use when it was traced.
        """
        tape = self._tapes.pop(handle)
        made: list[torch.Tensor] = [] if tape.loss is None or tangent is None else [tape.loss]
        towards: list[torch.Tensor] = (
            [] if not made or tangent is None else [tangent.reshape(made[0].shape).to(made[0].dtype)]
        )
        for k, tensors in tape.sent.items():
            back = [found for (unit, _), found in sorted(gradients.items()) if unit == k]
            for i, tensor in enumerate(self._differentiated(k, tensors)):
                if tensor.requires_grad and back:  # a head that only speaks gives none
                    made.append(tensor)
                    towards.append(sum((one[i] for one in back[1:]), start=back[0][i]))
        leaves = {k: self._differentiated(k, tensors) for k, tensors in tape.given.items()}
        parameters = {name: p for name, p in (tape.parameters | tape.spare).items() if p.requires_grad}
        given = [*itertools.chain(*leaves.values())]
        detached = {k: self._detached(k, tensors) for k, tensors in tape.given.items()}
        wanted = [*given, *parameters.values(), *itertools.chain(*detached.values())]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if made and wanted:
            with torch.enable_grad(), contextlib.nullcontext() if tape.left is None else tape.left.in_place():
                found = torch.autograd.grad(made, wanted, towards, allow_unused=True)
        complete = iter([torch.zeros_like(w) if g is None else g for g, w in zip(found, given, strict=False)])
        returned = {k: tuple(itertools.islice(complete, len(tensors))) for k, tensors in leaves.items()}
        trained = dict(zip(parameters, found[len(given) :], strict=False))
        surprising = iter(found[len(given) + len(parameters) :])
        self._refuse_attached(k for k, tensors in detached.items() for _ in tensors if next(surprising) is not None)
        self._refuse_spare(name for name in tape.spare if trained.get(name) is not None)
        return returned, {name: trained.get(name) for name in tape.parameters}

    def forget(self, handle: int) -> None:
        """Forget a play that is not differentiated."""
        self._tapes.pop(handle, None)

    def _refuse_attached(self, units: Iterable[int]) -> None:
        for k in units:
            raise PipelineError(
                f"{self._step.method} differentiates what {self._units[k].path} returns in this batch, and took its "
                "values only (detached) when it was traced on the first one, so no gradient is sent back to its stage. "
                "Differentiate it in every batch, multiplied by zero where that is not wanted, or in none."
            )

    def _put_hooks_aside(self) -> None:
        """Take away hooks that a play has installed, so that those of the batch's last play stay, as on one device."""
        if self._now.hooks is not None and not self._now.hooks.is_same():
            self._now.left_hooks = HookTables(self._step.module)
            self._now.hooks.restore()

    @cached_property
    def _trained(self) -> TrainedParameters:
        return TrainedParameters(self._step.module)

    @cached_property
    def _buffer_places(self) -> list[tuple[str, dict[str, torch.Tensor | None], str]]:
        """List the buffers: name, table and key; once, as looking through a module takes long."""
        owners = self._step.module.named_modules()
        return [(f"{path}.{key}".removeprefix("."), one._buffers, key) for path, one in owners for key in one._buffers]

    def _versions(self) -> dict[str, tuple[torch.Tensor, int]]:
        found = ((name, table.get(key)) for name, table, key in self._buffer_places)
        return {name: (buffer, version_of(buffer)) for name, buffer in found if buffer is not None}

    @contextlib.contextmanager
    def _late_buffers_counted(self) -> Iterator[None]:
        """Note buffers that a play changes inside and the traced run has not changed."""
        before = self._versions()
        yield
        now = self._versions()
        changed = {name for name in before.keys() & now.keys() if _differs(before[name], now[name])}
        self._now.late.update(changed - self._changed)

    def _refuse_absent(self, results: Iterable[torch.Tensor]) -> None:
        if any(isinstance(result, FakeTensor) for result in results):
            raise PipelineError(
                f"What {self._step.method} returns or logs for this batch is made of what had no part in it when the "
                "step was traced, so its stage was not given it. Use it in every batch, multiplied by zero where it is "
                "not wanted."
            )

    def _refuse_spare(self, names: Iterable[str]) -> None:
        for name in names:
            raise PipelineError(
                f"{self._step.method} trains {name} in this batch, and did not use it when it was traced on the first "
                "one, so no stage has it. Use it in every batch, multiplied by zero where it is not wanted."
            )

    def _left(self, python: ModuleState, recording: StepRecording) -> list[KeptState]:
        """List what a play has left behind in Python state, as far as this stage knows it."""
        own = [unit.path for unit in self._units[self._part.begin : self._part.end]]
        others = [unit.path for unit in (*self._units[: self._part.begin], *self._units[self._part.end :])]
        knowing, number = self._now.knowing, self._part.number
        left = [
            one
            for one in python.kept()
            if (
                knowing[one.path] == number and self._is_whose(one)
                if one.path in knowing
                else speaks(one, own=own, others=others, is_last=self._part.is_last and self._is_whose(one))
            )
        ]
        if any(isinstance(tensor, FakeTensor) for one in left for tensor in tensors_in(one.value)):
            raise PipelineError(f"{left[0].name} keeps something that it did not keep when the step was traced.")
        return [replace(one, value=recording.lift(one.value)) for one in left]

    def _is_whose(self, left: KeptState) -> bool:
        """Return whether a play notes what glue has left, or, where a head does, what units have."""
        by_glue = left.path in self._now.written_by_glue or left.path not in self._now.knowing
        return not self._step.head or by_glue == self._part.is_head

    def _call(self, samples: int, key: RandomKey, leaves: Mapping[int, torch.Tensor], untouched: Untouched) -> Any:
        every, sizes = range(len(self._step.structure.leaves)), self._now.sizes
        begin = sum(sizes[: max(key.microbatch, 0)]) + key.first_sample
        template = with_rows(self._now.template, sum(sizes), range(begin, begin + samples))
        structure = replace(self._step.structure, template=template)
        # the step may write to its batch, which others read: its own copy
        tensors = [leaves[i].clone() if i in leaves else self._others.leaf(i, samples) for i in every]
        untouched.note(tensors)
        batch = structure.fill(tensors)
        step = getattr(self._step.module, self._step.method)
        with none_caught():
            return with_loss(self._step.method, step(batch, *self._now.arguments))

    def _keep(
        self, run: StepRun, loss: torch.Tensor | None, state: Mapping[str, torch.Tensor], left: ModuleState | None
    ) -> int:
        handle = next(_HANDLES)
        if self._step.has_backward:
            trained = {name: state[self._part.parameters[name][0]] for name in self._part.trained}
            spare: dict[str, torch.Tensor] = {name: self._step.module.get_parameter(name) for name in self._part.spare}
            self._tapes[handle] = _Tape(run.sent, run.leaves, loss, trained, spare, left)
        return handle

    def _differentiated(self, k: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t for t, output in zip(tensors, self._units[k].outputs, strict=True) if output.has_gradient]

    def _detached(self, k: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t for t, output in zip(tensors, self._units[k].outputs, strict=True) if output.is_detached]

    def _loss(self, output: Any) -> torch.Tensor | None:
        if not self._part.is_last or self._step.trace.loss is None:
            return None
        if output is None:  # it skips this batch
            return None
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise PipelineError(
                f"{self._step.method} returned {type(loss).__name__} where the first batch gave a loss of one number. "
                "Return a loss, or None to skip a batch."
            )
        return loss.reshape(())

    @property
    def part(self) -> StageSpec:
        """Return what the stage plays."""
        return self._part


def _differs(one: tuple[torch.Tensor, int], other: tuple[torch.Tensor, int]) -> bool:
    return one[0] is not other[0] or one[1] != other[1]
