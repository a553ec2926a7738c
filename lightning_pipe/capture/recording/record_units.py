"""Recording of one run of a step that is cut into units: `UnitRecorder` runs it, `Run` holds what was seen."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_pipe.capture.device_streams import finish_stream
from lightning_pipe.capture.graphs.joint_graph import without_gradient
from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.python.places import Path
from lightning_pipe.capture.recording.backward_law import WEIGHTS, gradient_norms, nonlinear
from lightning_pipe.capture.recording.no_randomness import NoRandomness
from lightning_pipe.capture.recording.replay_state import is_inside
from lightning_pipe.capture.recording.unit_calls import Seen, UnitCalls, generator_states
from lightning_pipe.capture.recording.unit_choice import UnitCall, recording_tree
from lightning_pipe.capture.recording.unit_flow import EscapeReader
from lightning_pipe.capture.recording.unit_loss import Reductions, reductions
from lightning_pipe.capture.recording.unit_state import ModuleSnapshot, PlaceWatch, StateWatch, tensors_in
from lightning_pipe.capture.recording.units import Escape, KeptChange, Source, Sources, WrittenPlace
from lightning_pipe.capture.steps.backward_hooks import tensor_hooks_in_units
from lightning_pipe.capture.steps.call_recording import StepRecording, recording_calls
from lightning_pipe.capture.steps.hazards import noticing_seeding, restored_generators
from lightning_pipe.capture.steps.metric_result import with_loss
from lightning_pipe.capture.steps.numbers import Place, numbers_said, output_leaves, sizes_said
from lightning_pipe.capture.steps.other_ranks import layers_in_python, no_collectives, no_training_state
from lightning_pipe.capture.steps.record import KeptState as LeftBehind
from lightning_pipe.capture.steps.step_function import loss_of
from lightning_pipe.capture.steps.step_state import DataWriter
from lightning_pipe.capture.torch_private import checkpoints_replaced
from lightning_pipe.errors import CaptureError, FewSamplesError, none_caught

HALF = 2  # the run that has half of the samples: its longest sequence, say, may be another one


@dataclass(frozen=True)
class Run:
    """What one run has seen.

    Attributes:
        samples: their number.
        seen: the units.
        read_past: paths of units past which glue reads.
        mutated: parameters and buffers that each unit changed.
        overwritten: outputs that are changed in place, as (unit, number of the output).
        flops: of each unit.
        tail, escapes, changes, trained, loss, is_random, draws: as in `UnitTrace`.
        left: what it has left behind in Python state.
        buffers: content of the buffers that it has changed.
        of_samples: names of those whose content is made of samples.
        seeds: whether it has seeded torch's generators itself.
        reductions: of the loss; None without one.
        backward_s: seconds of the whole backward.
        numbers: that it has returned and logged.
        sizes: of the tensors and lists that it has returned and logged.
        outputs: what it has output, and the shapes of tensors there.
        outputting: units that have output something.
        repeatable: units that return the same when they are called again after the step.
        first_draw: how many units had begun when glue drew random numbers first; None if it has not.
        checkpointed: state that checkpointed regions around units change, as the user would write it.
    """

    samples: int
    seen: tuple[Seen, ...]
    read_past: frozenset[str]
    mutated: Mapping[int, Sequence[str]]
    overwritten: frozenset[tuple[int, int]]
    flops: Mapping[int, int]
    tail: Sources
    escapes: tuple[Escape, ...]
    changes: tuple[KeptChange, ...]
    trained: frozenset[str]
    loss: torch.dtype | None
    is_random: bool
    reductions: Reductions | None
    backward_s: float
    left: tuple[LeftBehind, ...]
    buffers: Mapping[str, torch.Tensor]
    of_samples: frozenset[str]
    seeds: bool
    numbers: Mapping[Place, float]
    sizes: Mapping[Place, tuple[int, ...]]
    outputs: Mapping[Place, Any] = field(default_factory=dict)
    outputting: frozenset[int] = frozenset()
    repeatable: frozenset[int] = frozenset()
    first_draw: int | None = None
    draws: tuple[str, ...] = ()
    checkpointed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Play:
    """A forward that was followed: its units, what it said and returned, its draws of random numbers.

    Attributes:
        detached: the last line at which a tensor with a gradient is detached; "" if there is none.
        is_random: whether torch's generator was drawn from.
        seeds: whether it has seeded torch's generators itself.
    """

    units: UnitCalls
    recording: StepRecording
    output: Any
    detached: str
    is_random: bool
    seeds: bool


class UnitRecorder:
    """Run a step on slices of a batch.

    Args:
        request: the step.
        tensors: leaves of the whole batch.
    """

    def __init__(self, request: Request, tensors: Sequence[torch.Tensor]) -> None:
        self.request, self._gave_nothing = request, False
        self._tensors = tensors
        whole = request.samples is None
        self._cut = (False,) * len(tensors) if whole else request.structure.cut(request.batch_dim)

    def timed(self) -> UnitCall:
        """Run the step and record its calls of sub-modules, and their time.

        Raises:
            FewSamplesError: if it raises an error that the whole batch does not raise; says so in words after "since".
        """
        try:
            with self._scene(StepRecording()), recording_tree(self.request.module, self._finish) as tree:
                self._call(self._leaves(0))
        except CaptureError:
            raise
        except Exception as error:
            if not self._runs_whole():
                raise
            raise FewSamplesError(
                f"with the first {self._count(0)} of their samples, {self.request.method} raises "
                f"{type(error).__name__}: {str(error).rstrip('.')}"
            ) from error
        return tree

    def _runs_whole(self) -> bool:
        """Return whether the step runs on the batch as it is."""
        try:
            with self._scene(StepRecording()):
                self._call([tensor.clone() for tensor in self._tensors])
        except Exception:  # what a part of the batch raises is no matter of micro-batches then
            return False
        return True

    def followed(self, chosen: frozenset[str], kept: ModuleSnapshot, *, other: int = 0) -> Run:
        """Run the step and follow what its units are made of.

        Args:
            chosen: paths of the units.
            kept: content of the module that the run begins with.
            other: 0 for the samples of the request, with a backward; another number of samples for other slices.

        Raises:
            CaptureError: if the step fails with another number of samples.
        """
        play = self._play(chosen, kept, other)
        units, follower = play.units, play.units.follower
        units.look_at_state()
        self.refuse_nothing()
        loss = loss_of(self.request.module, self.request.method, play.output)
        left = kept.left()
        results = [*tensors_in(play.output, objects=True), *play.recording.results]
        results += tensors_in([one.value for one in left])
        changes = units.changes()
        state: set[Source] = {("state", change.name) for change in changes if change.is_tensor}
        of_units = units.made_outputs - {None}
        ends = None if loss is None else reductions(loss, units=of_units, samples=self._count(other))
        backward_s, trained = 0.0, frozenset[str]()
        if loss is not None and not other:
            backward_s, trained = self._differentiate(loss, detached=play.detached)
        run = Run(
            samples=self._count(other),
            seen=tuple(units.seen),
            read_past=frozenset(units.seen[k].path for k in follower.read_past),
            mutated=follower.mutated_names(),
            overwritten=frozenset(follower.overwritten),
            flops=follower.flops,
            tail=follower.reads(results) | state,
            escapes=tuple(follower.escapes),
            changes=changes,
            trained=trained,
            loss=None if loss is None else loss.dtype,
            is_random=play.is_random,
            reductions=ends,
            backward_s=backward_s,
            left=left,
            buffers=units.buffers(),
            of_samples=units.buffers_of_samples(),
            seeds=play.seeds,
            numbers=numbers_said(play.output, play.recording.calls),
            sizes=sizes_said(play.output, play.recording.calls, play.recording.results),
            outputs=output_leaves(play.recording.outputs, play.recording.results),
            outputting=frozenset(call.position // 2 for call in play.recording.outputs if call.position % 2),
            first_draw=follower.first_draw,
            draws=tuple(follower.drawn),
            checkpointed=units.checkpointed.names,
        )
        return run if loss is None or other else replace(run, repeatable=self._repeatable(units, kept))

    def outcome(self) -> list[torch.Tensor]:
        """Run the step and its backward; return what it computes: what it says, the loss, and norms of gradients."""
        recording, loss = self._forward()
        results = [result.detach() for result in recording.results]
        if loss is None:
            return results
        loss.backward()
        norms = [torch.zeros(()) if p.grad is None else p.grad.norm() for p in self.request.module.parameters()]
        self.request.module.zero_grad()
        return [loss.detach(), *results, *norms]

    def _forward(self) -> tuple[StepRecording, torch.Tensor | None]:
        """Run the step; return what it says, and its loss."""
        recording = StepRecording()
        with self._scene(recording):
            output = self._call(self._leaves(0))
            loss = loss_of(self.request.module, self.request.method, output)
            recording.returned = recording.lift(output, loss)
        return recording, loss

    def nonlinear(self, kept: ModuleSnapshot) -> str:
        """Name a parameter whose gradient is no linear function of the loss's gradient; "" if there is none.

        Args:
            kept: content of the module that runs begin with.
        """
        parameters, device = dict(self.request.module.named_parameters()), self.request.device
        norms, eps = [], 0.0
        for weight in WEIGHTS:
            kept.restore()
            with torch.random.fork_rng([device] if device.type == "cuda" else []), restored_generators(), kept.keeper:
                _, loss = self._forward()
                if loss is None:
                    return ""
                norms.append(gradient_norms(loss, parameters, weight))
                eps = torch.finfo(loss.dtype).eps
        return nonlinear(*norms, eps=eps)

    def refuse_nothing(self) -> None:
        """Refuse a training step whose last run has returned None.

        Raises:
            FewSamplesError: if the whole batch gives a loss; says so in words after "since".
            CaptureError: if none does.
        """
        if self._gave_nothing and self.request.method == "training_step":
            if self._runs_whole() and not self._gave_nothing:
                raise FewSamplesError(f"with the first {self._count(0)} of their samples, training_step returns None")
            raise CaptureError(
                f"{type(self.request.module).__name__}.training_step returns None for the batch by which is found what "
                "it computes: the first batch, or the first one for which it is replayed. Let that give a loss: leave "
                "such batches out in the data set or the collate function, or put them later; a later one may be "
                "skipped with capture='replay'."
            )

    def _repeatable(self, units: UnitCalls, kept: ModuleSnapshot) -> frozenset[int]:
        """Return the units that return the same when they are called again with what the step has left of their inputs.

        That is what a backward does that recomputes them: glue or the unit itself may have written to what it was
        given, and the state of the module is that which the step has left, or that before it.
        """
        left = ModuleSnapshot(self.request.module)
        with kept.keeper, self._scene(StepRecording()):
            return units.repeatable(left) & units.repeatable(kept)

    def writers(self, runs: Sequence[Run], chosen: frozenset[str], kept: ModuleSnapshot) -> tuple[WrittenPlace, ...]:
        """Return the Python state that runs have left outside of units, with the units that write to it.

        Args:
            runs: of the step.
            chosen: paths of the units.
            kept: content of the module before all runs, with which nothing that the step writes is there already.
        """
        changed = (one for run in runs for one in run.left if one.path)
        left = {one.path: one.name for one in changed if not any(is_inside(one, path) for path in chosen)}
        if not left:
            return ()
        units = self._play(chosen, kept, 0, places=left).units
        units.note_writer(None)
        return tuple(
            WrittenPlace(left[path], path, frozenset(len(units.seen) if unit is None else unit for unit in by))
            for path, by in units.writers.items()
        )

    def _play(self, chosen: frozenset[str], kept: ModuleSnapshot, other: int, *, places: Iterable[Path] = ()) -> _Play:
        """Run the forward of the step within all that follows it."""
        kept.restore()
        leaves = self._leaves(other)
        module, recording, seeded = self.request.module, StepRecording(), list[str]()
        units = UnitCalls(module, chosen, watch=StateWatch(module), places=PlaceWatch(module, places))
        follower = units.follower
        units.untouched.note(leaves)
        for constant in tensors_in(self.request.structure.template, objects=True):
            follower.made_of.add(constant, frozenset())  # no unit has made it
        for number, leaf in enumerate(leaves):
            follower.made_of.add(leaf, frozenset({("leaf", number)}))
            if self._cut[number]:
                follower.of_samples.add(leaf, frozenset({("leaf", number)}))
        recording.position = lambda: 2 * follower.begun - (follower.inside is not None)
        before, reader = generator_states(), EscapeReader(follower)
        try:
            hooks = tensor_hooks_in_units(module, lambda: follower.inside is not None)
            once = checkpoints_replaced(units.checkpoints.entered, where=lambda: follower.inside is not None)
            seeding = noticing_seeding(seeded.append)
            with kept.keeper, self._scene(recording), hooks, once, seeding, units.intercepted(), reader, follower:
                output = self._call(leaves)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(self._why_it_failed(error, other)) from error
        is_random = not all(map(torch.equal, before, generator_states()))
        return _Play(units, recording, output, reader.detached, is_random, bool(seeded))

    def _why_it_failed(self, error: Exception, other: int) -> str:
        what = type(error).__name__
        if not other:
            return (
                f"{self.request.method} runs, but raises {what} when calls of its sub-modules are followed: {error}. "
                "It cannot be replayed."
            )
        return f"it runs with {self._count(0)} samples and raises {what}: {error} with {self._count(other)}"

    @contextlib.contextmanager
    def quietly(self, rows: torch.Tensor, kept: ModuleSnapshot) -> Iterator[Callable[[], Any]]:
        """Give what runs the step without randomness on some samples, inside.

        Args:
            rows: indices of the samples.
            kept: content of the module that the run begins with.
        """
        kept.restore()
        dim = self.request.batch_dim
        leaves = [
            t.index_select(dim, rows.to(t.device)) if c else t.clone()
            for t, c in zip(self._tensors, self._cut, strict=True)
        ]
        no_randomness = NoRandomness()  # type: ignore[no-untyped-call]  # torch's constructor has no types
        with kept.keeper, self._scene(StepRecording()), no_randomness, _dice_alike():
            yield partial(self._call, leaves)

    @property
    def total(self) -> int:
        """Return the number of samples of the whole batch, 1 if it cannot be cut."""
        dim = self.request.batch_dim
        return next((t.shape[dim] for t, c in zip(self._tensors, self._cut, strict=True) if c), 1)

    def _differentiate(self, loss: torch.Tensor, *, detached: str) -> tuple[float, frozenset[str]]:
        """Return the seconds of the backward, and the names of the parameters that got a gradient.

        Raises:
            CaptureError: if there is nothing to differentiate, naming the line that detaches the loss.
        """
        if not loss.requires_grad:
            raise without_gradient(detached)
        trained: set[int] = set()

        def note(parameter: torch.Tensor) -> None:  # and let the gradient go
            trained.add(id(parameter))
            parameter.grad = None

        named = dict(self.request.module.named_parameters())
        hooks = [p.register_post_accumulate_grad_hook(note) for p in named.values() if p.requires_grad]
        self._finish()
        begin = time.perf_counter()
        try:
            loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        self._finish()
        return time.perf_counter() - begin, frozenset(name for name, p in named.items() if id(p) in trained)

    def _finish(self) -> None:
        """Wait until the device has run what the step has queued."""
        finish_stream(self.request.device)

    @contextlib.contextmanager
    def _scene(self, recording: StepRecording) -> Iterator[None]:
        with (
            no_collectives(),
            no_training_state(self.request.module),
            layers_in_python(),
            recording_calls(self.request.module, recording),
            torch.set_grad_enabled(self.request.method == "training_step"),
            self.request.context(),
            DataWriter(),
        ):
            yield

    def _call(self, leaves: Sequence[torch.Tensor]) -> Any:
        step: Callable[..., Any] = getattr(self.request.module, self.request.method)
        batch = self.request.structure.fill_part(leaves, self.request.batch_dim)
        with none_caught():
            output = with_loss(self.request.method, step(batch, *self.request.arguments))
        self._gave_nothing = output is None
        return output

    def _count(self, other: int) -> int:
        """Return the number of samples: as wanted; half as many; else one less, or one more if a single one is left."""
        count = self.request.count
        if not other:
            return count
        if other == HALF and count > 3:
            return count // 2
        return count - 1 if count > 2 else count + 1

    def _leaves(self, other: int) -> list[torch.Tensor]:
        """Return copies of some samples: the first of the batch, or some before its end, from the front if too few."""
        dim, count = self.request.batch_dim, self._count(other)
        rows = ((torch.arange(count) - other * count) % self.total).sort().values  # they may be in an order of lengths
        return [
            t.index_select(dim, rows.to(t.device)) if c else t.clone()
            for t, c in zip(self._tensors, self._cut, strict=True)
        ]


@contextlib.contextmanager
def _dice_alike() -> Iterator[None]:
    """Let generators of Python and NumPy draw the same numbers every time, inside."""
    states = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
