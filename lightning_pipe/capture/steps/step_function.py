"""Step function: the step of a LightningModule as a plain function of parameters and batch.

`StepFunction` calls the user's method while everything that is not tensor arithmetic is lifted out: `self.log` and
torchmetrics calls are recorded (`call_recording`), counters, learning rates and other numbers that change are
tracked (`capture.tracked.tracked_number`), what the step's Python reads is noted (`capture.python.reads`), what it
leaves on the module is recorded and undone (`step_state`), and values read into Python become guards (`hazards`).
Its outputs are the loss, if there is one, and one detached tensor per recorded value.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from lightning_pipe.capture.output.late_texts import assumed_answer, said_text
from lightning_pipe.capture.output.text_uses import use_of_text
from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.python.reads import Reads
from lightning_pipe.capture.python.state_slots import optimizer_slots
from lightning_pipe.capture.python.step_identity import StepIdentity
from lightning_pipe.capture.python.users_code import assignment_line
from lightning_pipe.capture.steps.batch import Structure, with_numbers
from lightning_pipe.capture.steps.call_recording import StepRecording, recording_calls
from lightning_pipe.capture.steps.hazards import Observer, SizeDependentError, at, hazard, user_line
from lightning_pipe.capture.steps.metric_result import is_result, with_loss
from lightning_pipe.capture.steps.module_tables import ModuleTables, twin_buffers
from lightning_pipe.capture.steps.record import Computed
from lightning_pipe.capture.steps.step_state import CheckpointedChanges, DataWriter, StepState
from lightning_pipe.capture.torch_private import keeping_version
from lightning_pipe.capture.tracked.number_expressions import MOST_INPUTS, NumberGuards, Situation, Source, sources_in
from lightning_pipe.capture.tracked.tracked_number import tracked, tracking_mathematics
from lightning_pipe.errors import CaptureError, none_caught
from lightning_pipe.lightning_names import pl

NUMBERS = "(tracked numbers)"  # a buffer of the step function that no module can have


class StepFunction(nn.Module):
    """The user's step as a function of the batch's tensors; parameters are those of `model`.

    Args:
        module: the user's module; swapped parameters and buffers are seen through it.
        method: `training_step`, `validation_step`, ...
        structure: the batch without its tensors.
        arguments: positional arguments after the batch (batch index, loader index), as Lightning would give them.
        answers: truth values for the questions that the step asks of its tensors.
        context: entered again around every run (autocast; its cache of casts must not outlive a run).
        varying: places of numbers that are known to change from step to step, and are tracked therefore.
        may_skip: whether a training step may return None.

    Attributes:
        identity: writes down the first run; None where nobody asks.
        identified: called with it when that run has ended.
        has_python_backward: whether Python ran in a backward.
        checkpointed: what checkpointed regions change.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        method: str,
        structure: Structure,
        arguments: tuple[int, ...],
        answers: tuple[bool, ...],
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        varying: tuple[Place, ...] = (),
        may_skip: bool = False,
    ) -> None:
        super().__init__()
        self.model = module
        self.register_buffer(NUMBERS, torch.zeros(MOST_INPUTS, dtype=torch.float64))
        self.method = method
        self.structure = structure
        self.arguments = arguments
        self.answers = answers
        self.context = context
        self.varying = varying
        self.may_skip = may_skip
        self.runs = 0
        self.current: Observer | None = None
        self.reads = Reads(module, _refuse_read)
        self.numbers = NumberGuards()
        self.state = StepState(module, self.reads)
        self.checkpointed = CheckpointedChanges(module)
        self.has_loss = False
        self.observers: list[Observer] = []
        self.recordings: list[StepRecording] = []
        self.identity: StepIdentity | None = None
        self.identified: Callable[[StepIdentity], None] = _nothing
        self.has_python_backward = False
        self._twins = twin_buffers(module)
        self._assigned: frozenset[str] = frozenset()  # buffers that the last run has assigned
        self._vector: torch.Tensor | None = None  # of tracked numbers, as the last run has seen it
        self._buffer_names = frozenset({NUMBERS, *(f"model.{name}" for name, _ in module.named_buffers())})

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        """Yield every module once: what hangs in it is one input of the graph, whatever number of names it has."""
        yield from super().named_modules(memo, prefix, remove_duplicate=True)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every buffer once, by its first name, although fake ones hang in its places now."""
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate=False):
            if name.removeprefix(prefix).lstrip(".") in self._buffer_names:
                yield name, buffer

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the step; return the loss (if it has one) and the recorded tensors."""
        with self._state_in_place():
            return self._run(leaves)

    def _run(self, leaves: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        module = self.model
        self.runs += 1
        self.numbers = NumberGuards(output=_OutputOfNumbers())
        self._vector = self.get_buffer(NUMBERS)
        path = _ModulePath(module)
        observer = Observer(self.answers, path.current, numbers=self._vector)
        recording = StepRecording(is_graph=True)
        state = self.state = StepState(module, self.reads)
        self.current = observer
        identity = self.identity if self.runs == 1 else None
        trained = _trained(module)
        if identity is not None:
            identity.begin(self._inputs(leaves))
        with (
            self._varying_numbers(),
            state.around(),
            self.reads.recording(),
            self._float_sizes(),
            _symbolic_lengths(),
            tracking_mathematics(),
            recording_calls(module, recording),
            path.following(),
            self.context(),
            observer,
            contextlib.nullcontext() if identity is None else identity,
            DataWriter(),
            none_caught(),
        ):
            output = getattr(module, self.method)(self._batch(leaves), *self._arguments())
            output = with_loss(self.method, output)
        if turned := sorted(trained ^ _trained(module)):
            raise hazard(f"it turns requires_grad of {turned[0]} on or off", "")
        self.observers.append(observer)
        self.recordings.append(recording)
        loss = loss_of(module, self.method, output, may_skip=self.may_skip)
        self.has_loss = loss is not None
        recording.returned = recording.lift(output, loss)
        recording.kept = [replace(kept, value=recording.lift(kept.value, loss)) for kept in state.kept]
        guards = [wrong for wrong, _, _ in observer.guards]
        results = [*recording.results, *guards]
        if identity is not None:
            identity.end(results, loss)
            self.identified(identity)
        return (*([] if loss is None else [loss]), *(tensor.detach().clone() for tensor in results))

    def _inputs(self, leaves: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors that a run is given, by name; what hangs in several places by each of them."""
        yield from self.named_parameters(remove_duplicate=False)
        yield from super().named_buffers(remove_duplicate=False)
        yield from ((f"leaf {index}", leaf) for index, leaf in enumerate(leaves))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Track numbers, and note what is read of state and modules, while Python of the step runs in its backward."""
        with (
            self._varying_numbers(),
            self.state.left_in_place(),
            self.reads.recording(code=False),
            tracking_mathematics(),
        ):
            yield

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Watch the code and the torch calls of Python of the step that runs after it; inside of `reading`."""
        self.has_python_backward = True
        observer = Observer((), lambda: "", numbers=self._vector)
        if self.current is not None:
            observer.constants = self.current.constants
        with self.reads.following_code(), observer:
            yield

    def reads_nodes(self) -> bool:
        """Return whether the run has looked at a node of autograd."""
        return self.current is not None and self.current.reads_nodes

    def _batch(self, leaves: tuple[torch.Tensor, ...]) -> Any:
        """Return the batch with tracked numbers."""

        def track(index: int, number: Any) -> Any:
            return self._tracked(number, f"number {index} of the batch", lambda now: now.numbers[index])

        return replace(self.structure, template=with_numbers(self.structure.template, track)).fill(leaves)

    def _arguments(self) -> tuple[Any, ...]:
        """Return the arguments after the batch; the index of the batch is tracked."""
        first = [self._tracked(n, "batch_idx", lambda now: now.arguments[0]) for n in self.arguments[:1]]
        return (*first, *self.arguments[1:])

    def _tracked(self, value: Any, name: str, read: Callable[[Situation], Any]) -> Any:
        return tracked(value, Source(name, read), self.numbers, lambda: user_line(3))

    @contextlib.contextmanager
    def _state_in_place(self) -> Iterator[None]:
        """Hang one tensor in all places of a buffer, and write into it what the step assigns to it in the end.

        A step that assigns a buffer reads a copy of it. The backward of what it has read would otherwise find the new
        content, since autograd saves views of the buffer, and the tracer takes these again when it needs them.

        Raises:
            CaptureError: if the step leaves other state than it has found: of another name, form or kind.
        """
        shared = {name for first, twins in self._twins.items() for name in (first, *twins)}
        outside = ModuleTables(self.model)
        try:
            for first, twins in self._twins.items():
                for path, _, name in (twin.rpartition(".") for twin in twins):
                    self.model.get_submodule(path)._buffers[name] = self.model.get_buffer(first)
            tables = ModuleTables(self.model)
            for assigned in self._assigned:
                path, _, name = assigned.rpartition(".")
                self.model.get_submodule(path)._buffers[name] = self.model.get_buffer(assigned).clone()
            yield
            renamed = [(name, "registers or removes") for name in tables.renamed()]
            replaced = list(tables.replaced())
            for name, before, now in replaced:
                is_buffer = not isinstance(before, nn.Parameter | nn.Module) and name not in shared
                if not is_buffer or not _same_form(before, now):
                    renamed.append((name, "replaces"))
                else:
                    with torch.no_grad(), keeping_version(before):
                        before.copy_(now.detach())
            for buffer in self.model.buffers():  # the tracer would differentiate what is left in them like the loss
                if buffer.requires_grad:
                    buffer.detach_()
            for name, what in renamed:
                raise hazard(f"it {what} self.{name} (state)", assignment_line(self.model, name))
            self._assigned = frozenset(name for name, _, _ in replaced)
        finally:
            outside.restore()

    @contextlib.contextmanager
    def _float_sizes(self) -> Iterator[None]:
        """Refuse `float(x.numel())`: a graph with that number holds for one number of samples."""

        def read(size: torch.SymInt) -> float:
            raise SizeDependentError(f"The step reads a size as a Python float{at(user_line(2))}.")

        with mock.patch.object(torch.SymInt, "__float__", read, create=True):
            yield

    @contextlib.contextmanager
    def _varying_numbers(self) -> Iterator[None]:
        """Show the step tracked counters, hyper-parameters of optimizers, and numbers that are known to vary."""
        trainer = self.model._trainer
        slots = [*self.varying, *optimizer_slots(trainer)]
        with contextlib.ExitStack() as stack:
            for name in ("global_step", "current_epoch"):
                read = partial(_counter, trainer, name)
                counter = self._tracked_counter(name, read)
                for owner in (pl.LightningModule, pl.Trainer):
                    stack.enter_context(mock.patch.object(owner, name, counter))
            for slot in slots:
                value = slot.read()
                if type(value) in (int, float):
                    number = self._tracked(value, slot.name, partial(lambda slot, _: slot.read(), slot))
                    slot.write(number)
                    stack.callback(_put_back, slot, number, value)
            yield

    def _tracked_counter(self, name: str, read: Callable[..., int]) -> property:
        return property(lambda _: self._tracked(read(), f"self.{name}", read))


# Properties, as they are outside of a trace.
_GLOBAL_STEP: Any = pl.Trainer.global_step
_CURRENT_EPOCH: Any = pl.Trainer.current_epoch


def _counter(trainer: Any, name: str, situation: Situation | None = None) -> int:
    """Return the trainer's true counter, for a later batch as it will be then; 0 without a trainer."""
    if trainer is None:
        return 0
    own = _GLOBAL_STEP if name == "global_step" else _CURRENT_EPOCH
    later = situation.steps if situation is not None and name == "global_step" else 0
    return int(own.fget(trainer) if isinstance(trainer, pl.Trainer) else getattr(trainer, name)) + later


def _nothing(_: Any) -> None:
    """Do nothing."""


def _put_back(slot: Place, number: Any, value: Any) -> None:
    if slot.read() is number:
        slot.write(value)


def _refuse_read(what: str) -> None:
    raise hazard(what, user_line(3))


def _same_form(one: Any, two: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    return one.shape == two.shape and one.dtype == two.dtype and one.device == two.device


def loss_of(module: pl.LightningModule, method: str, output: Any, *, may_skip: bool = False) -> torch.Tensor | None:
    """Return the loss in what a step returned; None if the method has none, or if it skips this batch and may.

    Raises:
        CaptureError: if a training step returned no single number.
    """
    if method != "training_step" or (output is None and may_skip):
        return None
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"{type(module).__name__}.training_step returned {type(output).__name__}; expected a loss tensor "
            "or a dict with one under 'loss'."
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"The loss has {loss.dim()} dimension{'s' if loss.dim() > 1 else ''} (one value per sample, perhaps); "
            "expected a single number. Reduce it first, for example by mean()."
        )
    return loss


class _OutputOfNumbers:
    """Tracked numbers that a step only outputs: in texts, and in conditions of output."""

    def text(self, number: Any, form: Callable[..., str], *args: str) -> str | None:
        return said_text(number, form, *args)

    def answer(self, expression: Any) -> bool | None:
        return assumed_answer(sys._getframe(1), lambda: Computed(expression))

    def check(self, expression: Any) -> None:
        if _EVERY_BATCH.isdisjoint(source.name for source in sources_in(expression)):
            return  # a guard, then: one graph per epoch, say
        if use_of_text(sys._getframe(1)) == "said":
            raise hazard("it prints batch_idx or global_step by % or the like (an f-string is captured)", user_line(2))


_EVERY_BATCH = frozenset({"batch_idx", "self.global_step"})


@contextlib.contextmanager
def _symbolic_lengths() -> Iterator[None]:
    """Let `len(tensor)` be a symbol, as `tensor.size(0)` is; Python would turn it into a constant of the graph."""
    count = builtins.len

    def length(thing: Any) -> Any:
        is_tensor = isinstance(thing, torch.Tensor) and not is_result(thing)
        return thing.shape[0] if is_tensor and thing.ndim else count(thing)

    with mock.patch.object(builtins, "len", length):
        yield


class _ModulePath:
    """Follow which sub-module is being called."""

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(child): name for name, child in module.named_modules()}
        self._stack = [""]

    def current(self) -> str:
        return self._stack[-1]

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(self._names.get(id(module), self._stack[-1]))

        def leave(module: nn.Module, *_: Any) -> None:
            self._stack.pop()

        hooks = (
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            del self._stack[1:]


def _trained(module: nn.Module) -> set[str]:
    """Name the parameters that are to get gradients."""
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}
