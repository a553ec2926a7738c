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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe.capture.recording.replay_state import speaks
from lightning_pipe.capture.recording.units import UnitTrace
from lightning_pipe.capture.replayed.denominator_watch import Denominator, Denominators
from lightning_pipe.capture.replayed.module_scope import Slot, hung, keyed, seed, slots_of
from lightning_pipe.capture.replayed.replay_values import filled, finish, leaf_size, replaced, size_of, tensors_in
from lightning_pipe.capture.steps.batch import Structure
from lightning_pipe.capture.steps.collectives import no_collectives
from lightning_pipe.capture.steps.hazards import Answerer
from lightning_pipe.capture.steps.metric_result import with_loss
from lightning_pipe.capture.steps.module_tables import twin_buffers
from lightning_pipe.capture.steps.record import KeptState
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.steps.step_function import StepRecording, metrics_in, recording_calls
from lightning_pipe.capture.steps.step_state import ModuleState
from lightning_pipe.capture.steps.training_state import no_training_state
from lightning_pipe.capture.torch_private import FakeTensor, FakeTensorMode, answered_calls, checkpoints_replaced
from lightning_pipe.errors import PipelineError
from lightning_pipe.lightning_names import pl

Tensors: TypeAlias = tuple[torch.Tensor, ...]
_HANDLES = itertools.count()


class _TheRestIsOthers(BaseException):
    """End a play: the next unit belongs to a later stage. No `except Exception` of the user's catches it."""


@dataclass
class BatchContext:
    """What changes from batch to batch, the same for all stages of a rank.

    Attributes:
        arguments: positional arguments of the step after the batch.
        template: the batch without its tensors.
        state: Python state as it was before the batch; None before the first.
        speakers: stages whose plays say something.
        said: (micro-batch, first sample, samples, what the step said) of every such play.
        denominators: what these plays divided losses by.
    """

    arguments: tuple[int, ...]
    template: Any
    state: ModuleState | None = None
    speakers: tuple[int, ...] = ()
    said: list[tuple[int, int, int, StepRecording]] = field(default_factory=list)
    denominators: list[Denominator] = field(default_factory=list)


@dataclass(frozen=True)
class StageSpec:
    """What one stage plays.

    Attributes:
        begin, end: its units; there may be none.
        is_last: whether it runs the step to its end.
        given: units whose outputs it is given.
        leaves: tensors of the batch that it is given.
        sent: own units whose outputs others are given.
        parameters: canonical name -> names of the parameters that it has.
        absent: names of parameters that glue reads, and of buffers that it writes to, but this stage does not need.
        buffers: names of the buffers that it has.
        mutations: buffers that it changes.
        trained: canonical names of the parameters whose gradients it makes, in batches that use them.
        spare: canonical names of the parameters that no stage uses.
        receivers: (unit, stage that is given it) whose gradients come back.
    """

    begin: int
    end: int
    is_last: bool
    given: tuple[int, ...]
    leaves: tuple[int, ...]
    sent: tuple[int, ...]
    parameters: Mapping[str, tuple[str, ...]]
    absent: tuple[str, ...]
    buffers: tuple[str, ...]
    mutations: tuple[str, ...]
    trained: tuple[str, ...]
    spare: tuple[str, ...]
    receivers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PlayedStep:
    """The step that is played.

    Attributes:
        module: the user's module, on the rank that plays.
        method: name of the step.
        structure: the batch without its tensors.
        batch_dim: dimension of the samples in these; None if batches are not cut.
        context: entered around every play.
        trace: its units.
        device: where it runs.
        has_backward: whether gradients are made.
    """

    module: pl.LightningModule
    method: str
    structure: Structure
    batch_dim: int | None
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    trace: UnitTrace
    device: torch.device
    has_backward: bool


@dataclass(frozen=True)
class _Tape:
    """A play that waits for its backward: what was sent and given, the loss, its parameters, and those of no stage."""

    sent: Mapping[int, Tensors]
    given: Mapping[int, Tensors]
    loss: torch.Tensor | None
    parameters: dict[str, torch.Tensor]
    spare: dict[str, torch.Tensor]


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
        self._fakes: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._fake_leaves: dict[tuple[int, int], torch.Tensor] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        called = {unit.path for unit in self._units}
        self._modules = [child for path, child in step.module.named_modules() if path in called]
        self._paths = {id(child): path for path, child in step.module.named_modules() if path in called}
        self.metrics = metrics_in(step.module)
        self._absent = self._fake_parameters()
        self._twins = {name: twins for name, twins in twin_buffers(step.module).items() if name in part.buffers}

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
    ) -> tuple[int, dict[int, Tensors], torch.Tensor, dict[str, torch.Tensor]]:
        """Play the step on some samples.

        Args:
            samples: their number.
            key: key of the random numbers.
            state: parameters and buffers of the stage by name.
            leaves: tensors of the batch that the stage is given, by number.
            given: outputs of the given units.

        Returns:
            Handle of the tape, outputs of the sent units, the loss (zero where there is none), and changed buffers.

        Raises:
            PipelineError: if the step calls other units than it was traced with, or a unit returns something else.
        """
        play = _Play(self, samples, key, given)
        python = self._now.state = self._now.state or ModuleState(self._step.module, copies=True)
        apart = {name: state[name].clone() for name in self._part.mutations}  # as backwards of others wait for these
        twins = {twin: (state | apart)[name] for name, own in self._twins.items() for twin in own}
        recording = StepRecording()
        answerer = Answerer()
        with contextlib.ExitStack() as stack:
            stack.callback(python.restore)
            for entered in (
                hung(self._slots, {**state, **apart, **twins, **self._absent}),
                checkpoints_replaced(play.in_checkpoint, where=lambda: play.is_inside),
                no_collectives(),
                no_training_state(),
                keyed(key, self._step.device),
                recording_calls(self._step.module, recording, self.metrics),
                torch.set_grad_enabled(self._step.has_backward),
                self._step.context(),
                answered_calls(self._modules, play.answer),
            ):
                stack.enter_context(entered)
            if self._part.is_last and self._step.has_backward:
                stack.enter_context(Denominators(samples, self._now.denominators.append))
            if self._step.trace.escapes:
                stack.enter_context(answerer)
            output = play.run(lambda: self._call(samples, leaves))
            loss = self._loss(output)
            recording.kept = self._left(python, recording)
            changed = {name: self._step.module.get_buffer(name) for name in self._part.mutations}
        if self._part.is_last:
            recording.is_whole, recording.answers = True, answerer.answers
            finish(recording, output, loss)
        if self._part.is_last or recording.kept:
            self._now.said.append((key.microbatch, key.first_sample, samples, recording))
        sent = {k: tuple(tensor.detach() for tensor in tensors) for k, tensors in play.sent.items()}
        told = torch.zeros((), dtype=self._step.trace.loss, device=self._step.device) if loss is None else loss.detach()
        return self._keep(play, loss, state), sent, told, changed

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
                if tensor.requires_grad:
                    made.append(tensor)
                    towards.append(sum((one[i] for one in back[1:]), start=back[0][i]))
        leaves = {k: self._differentiated(k, tensors) for k, tensors in tape.given.items()}
        parameters = {name: p for name, p in (tape.parameters | tape.spare).items() if p.requires_grad}
        given = [*itertools.chain(*leaves.values())]
        detached = {k: self._detached(k, tensors) for k, tensors in tape.given.items()}
        wanted = [*given, *parameters.values(), *itertools.chain(*detached.values())]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if made and wanted:
            with torch.enable_grad():
                found = torch.autograd.grad(made, wanted, towards, allow_unused=True)
        complete = iter([torch.zeros_like(w) if g is None else g for g, w in zip(found, given, strict=False)])
        returned = {k: tuple(itertools.islice(complete, len(tensors))) for k, tensors in leaves.items()}
        trained = dict(zip(parameters, found[len(given) :], strict=False))
        surprising = iter(found[len(given) + len(parameters) :])
        self._refuse_attached(k for k, tensors in detached.items() for _ in tensors if next(surprising) is not None)
        self._refuse_spare(name for name in tape.spare if trained.get(name) is not None)
        return returned, {name: trained.get(name) for name in tape.parameters}

    def _refuse_attached(self, units: Iterable[int]) -> None:
        for k in units:
            raise PipelineError(
                f"{self._step.method} differentiates what {self._units[k].path} returns in this batch, and took its "
                "values only (detached) when it was traced on the first one, so no gradient is sent back to its stage. "
                "Differentiate it in every batch, multiplied by zero where that is not wanted, or in none."
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
        left = [one for one in python.kept() if speaks(one, own=own, others=others, is_last=self._part.is_last)]
        if any(isinstance(tensor, FakeTensor) for one in left for tensor in tensors_in(one.value)):
            raise PipelineError(f"{left[0].name} keeps something that it did not keep when the step was traced.")
        return [replace(one, value=recording.lift(one.value)) for one in left]

    def _call(self, samples: int, leaves: Mapping[int, torch.Tensor]) -> Any:
        every = range(len(self._step.structure.leaves))
        structure = replace(self._step.structure, template=self._now.template)
        batch = structure.fill(
            # the step may write to its batch, which others read: its own copy
            [leaves[i].clone() if i in leaves else self._fake_leaf(i, samples) for i in every]
        )
        step = getattr(self._step.module, self._step.method)
        return with_loss(self._step.method, step(batch, *self._now.arguments))

    def _keep(self, play: _Play, loss: torch.Tensor | None, state: Mapping[str, torch.Tensor]) -> int:
        handle = next(_HANDLES)
        if self._step.has_backward:
            trained = {name: state[self._part.parameters[name][0]] for name in self._part.trained}
            spare: dict[str, torch.Tensor] = {name: self._step.module.get_parameter(name) for name in self._part.spare}
            self._tapes[handle] = _Tape(play.sent, play.leaves, loss, trained, spare)
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

    def _fake_parameters(self) -> dict[str, torch.Tensor]:
        module, device = self._step.module, self._step.device
        parameters = dict(module.named_parameters(remove_duplicate=False))
        forms = {**dict(module.named_buffers()), **parameters}
        with self._mode:
            fakes = {n: torch.empty(forms[n].shape, dtype=forms[n].dtype, device=device) for n in self._part.absent}
            return {n: nn.Parameter(fake, False) if n in parameters else fake for n, fake in fakes.items()}

    def _fake_leaf(self, i: int, samples: int) -> torch.Tensor:
        if (i, samples) not in self._fake_leaves:
            leaf = self._step.structure.leaves[i]
            size = leaf_size(leaf, samples, self._step.batch_dim)
            with self._mode:
                self._fake_leaves[i, samples] = torch.empty(size, dtype=leaf.dtype, device=self._step.device)
        return self._fake_leaves[i, samples]

    def fake(self, k: int, samples: int) -> Any:
        """Return what a unit that nobody here needs returns: its template with fake tensors.

        They require gradients where the unit's own do: the step may ask, as the reentrant form of a checkpoint does,
        which runs all that is inside without gradients where it is given none that does.
        """
        unit = self._units[k]
        if (k, samples) not in self._fakes:
            with self._mode:
                self._fakes[k, samples] = [
                    torch.empty(size_of(output, samples), dtype=output.dtype, device=self._step.device)
                    for output in unit.outputs
                ]
        tensors = self.handed(k, self._fakes[k, samples])
        return filled(
            unit.template, [t.clone() if o.is_overwritten else t for t, o in zip(tensors, unit.outputs, strict=True)]
        )

    def handed(self, k: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs of a unit that another stage runs as the step gets them: leaves of autograd."""
        outputs = self._units[k].outputs
        return [
            tensor.detach().requires_grad_((output.has_gradient or output.is_detached) and self._step.has_backward)
            for tensor, output in zip(tensors, outputs, strict=True)
        ]

    def number(self, module: nn.Module, called: int) -> int:
        """Return the number of the unit that a call of a module is.

        Raises:
            PipelineError: if another unit comes next.
        """
        path = self._paths[id(module)]
        if called < len(self._units) and self._units[called].path == path:
            return called
        expected = self._units[called].path if called < len(self._units) else "the end of the step"
        raise PipelineError(
            f"{self._step.method} calls {path} where it called {expected} when it was traced. A step that calls its "
            "modules in another order from time to time cannot be a pipeline: let it call all of them every time, and "
            "multiply by zero what is not wanted."
        )

    @property
    def part(self) -> StageSpec:
        """Return what the stage plays."""
        return self._part

    @property
    def step(self) -> PlayedStep:
        """Return the step."""
        return self._step


class _Play:
    """One run of the step: how far it is, whether inside a unit, what it has sent and was given."""

    def __init__(self, player: StageReplayer, samples: int, key: RandomKey, given: Mapping[int, Tensors]) -> None:
        self._player, self._samples, self._key, self._given = player, samples, key, given
        self._called = 0
        self._checkpoints = 0  # calls of `torch.utils.checkpoint.checkpoint` that run, outside of units
        self.is_inside = False
        self.sent: dict[int, Tensors] = {}
        self.leaves: dict[int, Tensors] = {}

    def answer(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Answer a call of a unit's module."""
        if self.is_inside:
            return call(*args, **kwargs)
        part, number = self._player.part, self._player.number(module, self._called)
        if number >= part.end:
            raise _TheRestIsOthers
        self._called += 1
        own = partial(self._own, number, partial(call, *args, **kwargs))
        result = self._of_others(number) if number < part.begin else own()
        self._seed(2 * number + 2)
        return result

    @contextlib.contextmanager
    def in_checkpoint(self) -> Iterator[None]:
        """Run units inside so that they keep nothing but their inputs; glue between them keeps what it saves."""
        self._checkpoints += 1
        try:
            yield
        finally:
            self._checkpoints -= 1

    def run(self, step: Callable[[], Any]) -> Any:
        """Run the step as far as this stage does; return its result, None before its end."""
        try:
            output = step()
        except _TheRestIsOthers:
            return None
        if self._called != len(self._player.step.trace.units):
            if output is None and self._player.step.has_backward:
                self._send_nothing()
                return None
            missing = self._player.step.trace.units[self._called].path
            raise PipelineError(
                f"{self._player.step.method} ended where it called {missing} when it was traced. A step of a pipeline "
                "must call the same modules every time."
            )
        return output

    def _send_nothing(self) -> None:
        """Send zeros in the place of what the step did not compute, as it skips this batch, and zeros back."""
        part, step = self._player.part, self._player.step
        for k in (k for k in part.sent if k not in self.sent):
            outputs = step.trace.units[k].outputs
            self.sent[k] = tuple(
                torch.zeros(size_of(output, self._samples), dtype=output.dtype, device=step.device)
                for output in outputs
            )
        for k in (k for k in part.given if k not in self.leaves):
            self.leaves[k] = tuple(tensor.detach() for tensor in self._given[k])

    def _own(self, number: int, call: Callable[[], Any]) -> Any:
        self._seed(2 * number + 1)
        self.is_inside = True
        try:
            result = self._checkpointed(call) if self._is_checkpointed(number) else call()
        finally:
            self.is_inside = False
        if number not in self._player.part.sent:
            return result
        tensors = self._checked(number, tensors_in(result))
        self.sent[number] = tensors
        outputs = self._player.step.trace.units[number].outputs
        handed = [t.clone() if o.is_overwritten else t for t, o in zip(tensors, outputs, strict=True)]
        return replaced(result, handed)

    def _is_checkpointed(self, number: int) -> bool:
        """Return whether a unit runs again in the backward; not one that would change state, or the dice, once more."""
        trace = self._player.step.trace
        return self._checkpoints > 0 and not trace.units[number].mutations and not trace.is_random_in_python

    def _checkpointed(self, call: Callable[[], Any]) -> Any:
        """Call a unit whose activations are recomputed; what it logs then is what it has logged."""
        module, metrics, runs = self._player.step.module, self._player.metrics, itertools.count()

        def run() -> Any:
            if next(runs) == 0:
                return call()
            with recording_calls(module, StepRecording(), metrics), no_collectives():
                return call()

        return checkpoint(run, use_reentrant=False)

    def _seed(self, number: int) -> None:
        step = self._player.step
        seed(self._key, number, step.device, all_generators=step.trace.is_random_in_python)

    def _checked(self, number: int, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        unit = self._player.step.trace.units[number]
        found = [(tuple(t.shape), t.dtype) for t in tensors]
        expected = [(size_of(output, self._samples), output.dtype) for output in unit.outputs]
        if any(isinstance(t, FakeTensor) for t in tensors) or found != expected:
            raise PipelineError(
                f"{unit.path} returned {found}; expected {expected} for {self._samples} samples, as when it was "
                "traced. What crosses stages must have shapes that depend on the number of samples only."
            )
        return tuple(tensors)

    def _of_others(self, number: int) -> Any:
        if number not in self._given:
            return self._player.fake(number, self._samples)
        unit = self._player.step.trace.units[number]
        leaves = tuple(self._player.handed(number, self._given[number]))
        self.leaves[number] = leaves
        handed = [t.clone() if o.is_overwritten else t for t, o in zip(leaves, unit.outputs, strict=True)]
        return filled(unit.template, handed)
