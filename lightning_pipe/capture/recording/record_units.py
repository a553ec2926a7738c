"""Recording of one run of a step that is cut into units: `UnitRecorder` runs it, `Run` holds what was seen."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipe.capture.graphs.joint_graph import without_gradient
from lightning_pipe.capture.graphs.trace import Request
from lightning_pipe.capture.recording.no_randomness import NoRandomness
from lightning_pipe.capture.recording.unit_choice import UnitCall, call_paths, recording_tree
from lightning_pipe.capture.recording.unit_flow import EscapeReader, Follower
from lightning_pipe.capture.recording.unit_loss import Reductions, reductions
from lightning_pipe.capture.recording.unit_state import ModuleSnapshot, StateWatch, tensors_in
from lightning_pipe.capture.recording.units import Escape, KeptChange, Source, Sources
from lightning_pipe.capture.steps.backward_hooks import tensor_hooks_in_units
from lightning_pipe.capture.steps.batch import flatten, sorted_samples
from lightning_pipe.capture.steps.collectives import no_collectives
from lightning_pipe.capture.steps.hazards import assignment_line, noticing_seeding
from lightning_pipe.capture.steps.metric_result import with_loss
from lightning_pipe.capture.steps.module_tables import buffers_inside, canonical_names
from lightning_pipe.capture.steps.numbers import Place, numbers_said
from lightning_pipe.capture.steps.record import KeptState as LeftBehind
from lightning_pipe.capture.steps.step_function import StepRecording, loss_of, recording_calls
from lightning_pipe.capture.steps.training_state import no_training_state
from lightning_pipe.capture.steps.trees import mapped
from lightning_pipe.capture.torch_private import checkpoints_replaced, has_hooks_on_saved_tensors, has_storage
from lightning_pipe.errors import CaptureError
from lightning_pipe.lightning_names import pl

Form: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]  # type, shape, order in memory


@dataclass
class Seen:
    """What one run has seen of a unit.

    Attributes:
        path: of the sub-module.
        reads: sources of its inputs.
        template: what it returned, with slots for tensors.
        outputs: forms of these tensors.
        is_understood: whether all tensors that it returned have slots.
        differentiable: numbers of the outputs that a gradient could flow through.
        differentiated: numbers of those that got one.
        saved: bytes of what autograd keeps, by memory.
    """

    path: str
    reads: Sources
    template: Any = None
    outputs: list[Form] = field(default_factory=list)
    is_understood: bool = False
    differentiable: set[int] = field(default_factory=set)
    differentiated: set[int] = field(default_factory=set)
    saved: dict[Any, int] = field(default_factory=dict)


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
        tail, escapes, changes, trained, loss, is_random: as in `UnitTrace`.
        left: what it has left behind in Python state.
        buffers: content of the buffers that it has changed.
        seeds: whether it has seeded torch's generators itself.
        reductions: of the loss; None without one.
        backward_s: seconds of the whole backward.
        numbers: that it has returned and logged.
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
    seeds: bool
    numbers: Mapping[Place, float]


class UnitRecorder:
    """Run a step on slices of a batch.

    Args:
        request: the step.
        tensors: leaves of the whole batch.
    """

    def __init__(self, request: Request, tensors: Sequence[torch.Tensor]) -> None:
        self.request = request
        self._tensors = tensors
        whole = request.samples is None
        self._cut = (False,) * len(tensors) if whole else request.structure.cut(request.batch_dim)

    def timed(self) -> UnitCall:
        """Run the step and record its calls of sub-modules, and their time.

        Raises:
            CaptureError: if it raises an error that the whole batch does not raise.
        """
        try:
            with self._scene(StepRecording()), recording_tree(self.request.module) as tree:
                self._call(self._leaves(0))
        except CaptureError:
            raise
        except Exception as error:
            if not self._runs_whole():
                raise
            raise CaptureError(
                f"{self.request.method} runs with a whole batch and raises {type(error).__name__} with its first "
                f"{self._count(0)} samples: {error}. Of a batch only tensors are cut into micro-batches; a list with "
                "an item per sample is not. Put such items into a tensor, or set microbatches=1."
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
        kept.restore()
        leaves = self._leaves(other)
        module, seeded = self.request.module, list[str]()
        units, recording = _Units(module, chosen, watch=StateWatch(module)), StepRecording()
        follower = units.follower
        for number, leaf in enumerate(leaves):
            follower.made_of.add(leaf, frozenset({("leaf", number)}))
        before, reader = torch.get_rng_state(), EscapeReader(follower)
        try:
            hooks = tensor_hooks_in_units(module, lambda: follower.inside is not None)
            once = checkpoints_replaced(units.in_checkpoint, where=lambda: follower.inside is not None)
            seeding = noticing_seeding(seeded.append)
            with kept.keeper, self._scene(recording), hooks, once, seeding, units.intercepted(), reader, follower:
                output = self._call(leaves)
        except CaptureError:
            raise
        except Exception as error:
            if not other:
                raise CaptureError(
                    f"{self.request.method} runs, but raises {type(error).__name__} when calls of its sub-modules are "
                    f"followed: {error}. It cannot be replayed."
                ) from error
            raise CaptureError(
                f"The step runs with {self._count(0)} samples and raises {type(error).__name__}: {error} with "
                f"{self._count(other)}. Let micro-batches have more samples, or all the same number."
            ) from error
        units.look_at_state()
        loss = loss_of(module, self.request.method, output)
        left = kept.left()
        results = [*tensors_in(output, objects=True), *recording.results, *tensors_in([one.value for one in left])]
        changes = units.changes()
        state: set[Source] = {("state", change.name) for change in changes if change.is_tensor}
        is_random = not torch.equal(before, torch.get_rng_state())
        ends = None if loss is None else reductions(loss)
        backward_s, trained = (
            (0.0, frozenset[str]()) if other or loss is None else self._differentiate(loss, detached=reader.detached)
        )
        return Run(
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
            is_random=is_random,
            reductions=ends,
            backward_s=backward_s,
            left=left,
            buffers=units.buffers(),
            seeds=bool(seeded),
            numbers=numbers_said(output, recording.calls),
        )

    def said(self, rows: torch.Tensor, kept: ModuleSnapshot) -> StepRecording:
        """Run the step without randomness on some of the sorted samples, and return what it says.

        Args:
            rows: indices of the samples.
            kept: content of the module that the run begins with.
        """
        kept.restore()
        dim, recording = self.request.batch_dim, StepRecording()
        tensors = sorted_samples(self._tensors, self._cut, dim) or self._tensors
        leaves = [
            t.index_select(dim, rows.to(t.device)) if c else t.clone() for t, c in zip(tensors, self._cut, strict=True)
        ]
        no_randomness = NoRandomness()  # type: ignore[no-untyped-call]  # torch's constructor has no types
        with kept.keeper, self._scene(recording), no_randomness:
            output = self._call(leaves)
            recording.returned = recording.lift(output, loss_of(self.request.module, self.request.method, output))
        return recording

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
        begin = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - begin
        trained = frozenset(name for name, p in self.request.module.named_parameters() if p.grad is not None)
        for p in self.request.module.parameters():
            p.grad = None
        return seconds, trained

    @contextlib.contextmanager
    def _scene(self, recording: StepRecording) -> Iterator[None]:
        with (
            no_collectives(),
            no_training_state(),
            recording_calls(self.request.module, recording),
            torch.set_grad_enabled(self.request.method == "training_step"),
            self.request.context(),
        ):
            yield

    def _call(self, leaves: Sequence[torch.Tensor]) -> Any:
        step: Callable[..., Any] = getattr(self.request.module, self.request.method)
        return with_loss(self.request.method, step(self.request.structure.fill(leaves), *self.request.arguments))

    def _count(self, other: int) -> int:
        """Return the number of samples: one less than wanted, or one more where that would leave a single one."""
        count = self.request.count
        if not other:
            return count
        return count - 1 if count > 2 else count + 1

    def _leaves(self, other: int) -> list[torch.Tensor]:
        """Return copies of some samples: the first of the batch, or some before its end, from the front if too few."""
        dim, count = self.request.batch_dim, self._count(other)
        rows = (torch.arange(count) - other * count) % self.total
        return [
            t.index_select(dim, rows.to(t.device)) if c else t.clone()
            for t, c in zip(self._tensors, self._cut, strict=True)
        ]


class _Units:
    """Intercept the calls of units, and note what they are given, return and (with a watch) change."""

    def __init__(self, module: pl.LightningModule, chosen: frozenset[str], *, watch: StateWatch | None) -> None:
        self._module = module
        self._paths = {identity: path for identity, path in call_paths(module).items() if path in chosen}
        self._parameters = frozenset(canonical_names(module))
        self._tensors = self._parameters | {name for name, _ in module.named_buffers(remove_duplicate=False)}
        self._watch = watch
        self._changes: list[KeptChange] = []
        self._call = nn.Module.__call__
        self.follower = Follower(module)
        self.seen: list[Seen] = []
        self._checkpoints = 0  # calls of `torch.utils.checkpoint.checkpoint` that run, outside of units

    @contextlib.contextmanager
    def in_checkpoint(self) -> Iterator[None]:
        """Run what a checkpoint outside of units is given once: the reentrant form hides where gradients flow."""
        self._checkpoints += 1
        try:
            yield
        finally:
            self._checkpoints -= 1

    def intercepted(self) -> Any:
        """Return the context within which calls are intercepted."""

        def call(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(called)) if self.follower.inside is None else None
            if path is None:
                return self._call(called, *args, **kwargs)
            return self._run(path, called, args, kwargs)

        return mock.patch.object(nn.Module, "__call__", call)

    def _run(self, path: str, called: nn.Module, args: Any, kwargs: Any) -> Any:
        self.look_at_state()
        follower, unit = self.follower, len(self.seen)
        given = list(tensors_in((args, kwargs), objects=True))
        seen = Seen(path, follower.reads(given))
        self.seen.append(seen)
        follower.begun, follower.inside = unit + 1, unit
        if called._forward_hooks or called._forward_pre_hooks:  # may keep what they see: see `_mark`
            args, kwargs = mapped((args, kwargs), torch.Tensor, torch.Tensor.clone)
            given = list(tensors_in((args, kwargs), objects=True))
        own = {follower.made_of.memory(tensor) for tensor in given}
        try:
            with contextlib.ExitStack() as stack:
                if not self._checkpoints and not has_hooks_on_saved_tensors():  # else nothing of the unit is kept
                    stack.enter_context(saved_tensors_hooks(partial(self._note_saved, seen, own), _as_it_is))
                output = self._call(called, *args, **kwargs)
            output = self._mark(output, unit, seen)
        finally:
            follower.inside = None
        for name, value in self._changed():
            self._note_change_inside(name, value, unit)
        return output

    def _changed(self) -> list[tuple[str, Any]]:
        """List parameters and buffers that have changed; other state is put back before every play."""
        found = {} if self._watch is None else self._watch.changed()
        return [(name, value) for name, value in found.items() if name in self._tensors]

    def _note_saved(self, seen: Seen, own: set[Any], tensor: torch.Tensor) -> torch.Tensor:
        """Count what autograd keeps, but for inputs and state; a detached tensor holds no circle of references."""
        memory = self.follower.made_of.memory(tensor)
        if memory not in own and not self.follower.is_state(tensor):
            strided = has_storage(tensor)
            seen.saved[memory] = tensor.untyped_storage().nbytes() if strided else tensor.numel()
        return tensor.detach()

    def _mark(self, output: Any, unit: int, seen: Seen) -> Any:
        """Mark what a unit returns, and return copies: what it keeps besides (an attribute, a hook's list) is not them.

        Copies are no views, either: gradients arrive at them even if glue writes to them.
        """
        found = list(tensors_in(output, objects=True))
        try:
            tensors, structure = flatten(output)
        except Exception:  # a collection that cannot be built from slots, such as a packed sequence
            tensors, structure = [], None
        seen.is_understood = structure is not None and len(tensors) == len(found)
        if not seen.is_understood or structure is None:
            for tensor in found:
                self.follower.made_of.add(tensor, frozenset({("unit", unit)}))
            return output
        output = mapped(output, torch.Tensor, torch.Tensor.clone)
        tensors = flatten(output)[0]
        seen.template = structure.template
        for number, tensor in enumerate(tensors):
            seen.outputs.append((tensor.dtype, tuple(tensor.shape), _order(tensor)))
            self.follower.returned(tensor, unit, number)
            if tensor.requires_grad:
                seen.differentiable.add(number)
                tensor.register_hook(partial(_note_gradient, seen.differentiated, number))
        return output

    def look_at_state(self) -> None:
        """Note what glue has changed since the last unit."""
        for name, value in self._changed():
            tensors = list(tensors_in(value, objects=True))
            followed = bool(tensors) and name not in self._parameters and _is_tensors(value)
            reads = self.follower.reads(tensors)
            if not followed:
                reads = reads.union(*(escape.reads for escape in self.follower.escapes))
            self._changes.append(KeptChange(name, len(self.seen), reads, followed, ""))

    def _note_change_inside(self, name: str, value: Any, unit: int) -> None:
        """Note what a unit has changed: its own buffers, or what lies outside of it."""
        path = self.seen[unit].path
        if name in buffers_inside(self._module, path):
            self.follower.mutated.setdefault(unit, {})[name] = None
        elif not name.startswith(f"{path}."):
            self._changes.append(KeptChange(name, unit + 1, frozenset({("unit", unit)}), _is_tensors(value), ""))

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the content of the buffers that have changed."""
        names = {name for own in self.follower.mutated.values() for name in own}
        names |= {change.name for change in (*self.follower.writes, *self._changes)}
        return {name: b.detach().clone() for name, b in self._module.named_buffers() if name in names}

    def changes(self) -> tuple[KeptChange, ...]:
        """Return all changes in their order, with their lines."""
        found: dict[tuple[str, int], KeptChange] = {}
        for change in sorted([*self.follower.writes, *self._changes], key=lambda change: change.before):
            line = change.line or assignment_line(self._module, change.name)
            known = found.get((change.name, change.before))
            reads = change.reads if known is None else change.reads | known.reads
            found[change.name, change.before] = KeptChange(change.name, change.before, reads, change.is_tensor, line)
        return tuple(found.values())


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _note_gradient(differentiated: set[int], number: int, _: torch.Tensor) -> None:
    differentiated.add(number)


def _is_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or a collection of nothing else."""
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_tensors, value))
    return isinstance(value, torch.Tensor)


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest; () for row-major."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: -strides[dim]))
    return () if order == tuple(range(tensor.ndim)) else order
