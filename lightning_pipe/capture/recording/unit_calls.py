"""Interception of the calls of units in one run of a step: what each is given, returns, keeps and changes."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipe.capture.python.places import Path
from lightning_pipe.capture.python.users_code import assignment_line
from lightning_pipe.capture.recording.checkpoint_depth import CheckpointDepth
from lightning_pipe.capture.recording.replay_state import same_content
from lightning_pipe.capture.recording.unit_choice import call_paths
from lightning_pipe.capture.recording.unit_flow import Follower
from lightning_pipe.capture.recording.unit_inputs import Untouched
from lightning_pipe.capture.recording.unit_state import ModuleSnapshot, PlaceWatch, StateWatch, tensors_in
from lightning_pipe.capture.recording.units import KeptChange, Sources
from lightning_pipe.capture.steps.batch import flatten
from lightning_pipe.capture.steps.module_tables import buffers_inside, canonical_names
from lightning_pipe.capture.steps.stage_program import memory_order
from lightning_pipe.capture.steps.step_state import CheckpointedChanges
from lightning_pipe.capture.steps.trees import mapped
from lightning_pipe.capture.torch_private import has_global_hooks, has_hooks_on_saved_tensors, has_storage
from lightning_pipe.lightning_names import pl

Form: TypeAlias = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]  # type, shape, order in memory


@dataclass
class Seen:
    """What one run has seen of a unit.

    Attributes:
        path: of the sub-module.
        reads: sources of its inputs.
        is_given_as_is: whether its inputs are tensors of the batch, or what units returned, and nothing else.
        template: what it returned, with slots for tensors.
        outputs: forms of these tensors.
        is_understood: whether all tensors that it returned have slots.
        differentiable: numbers of the outputs that a gradient could flow through.
        differentiated: numbers of those that got one.
        saved: bytes of what autograd keeps, by memory.
        is_hooked: whether hooks ran with it, which may take what they see elsewhere.
    """

    path: str
    reads: Sources
    is_given_as_is: bool = False
    template: Any = None
    outputs: list[Form] = field(default_factory=list)
    is_understood: bool = False
    differentiable: set[int] = field(default_factory=set)
    differentiated: set[int] = field(default_factory=set)
    saved: dict[Any, int] = field(default_factory=dict)
    is_hooked: bool = False


@dataclass(frozen=True)
class _Call:
    """A call of a unit: what it was given, the state of torch's generators, and what it returned."""

    called: nn.Module
    args: Any
    kwargs: Any
    generators: tuple[torch.Tensor, ...]
    output: Any

    def again(self, call: Callable[..., Any]) -> bool:
        """Return whether the same comes back when it is made again."""
        _set_generators(self.generators)
        try:
            return same_content(self.output, call(self.called, *self.args, **self.kwargs))
        except Exception:  # whatever a module raises that is not made to run twice
            return False


class UnitCalls:
    """Intercept the calls of units, and note what they are given, return and change.

    Args:
        module: the user's module.
        chosen: paths of the units.
        watch: of the module's state.
        places: of Python state, of which it is noted who writes to them.

    Attributes:
        follower: knows what tensors are made of.
        seen: what was seen of the units, in the order of their calls.
        checkpoints: knows whether a checkpoint runs, outside of units.
        checkpointed: what it changes.
        writers: of each place that has changed: the units inside which it has; None where glue has changed it.
        untouched: tensors that glue has not made.
        made_outputs: nodes of autograd's graph that made what units returned.
    """

    def __init__(
        self, module: pl.LightningModule, chosen: frozenset[str], *, watch: StateWatch, places: PlaceWatch
    ) -> None:
        self._module = module
        self._paths = {identity: path for identity, path in call_paths(module).items() if path in chosen}
        self._parameters = frozenset(canonical_names(module))
        self._tensors = self._parameters | {name for name, _ in module.named_buffers(remove_duplicate=False)}
        self._watch, self._places = watch, places
        self.writers: dict[Path, set[int | None]] = defaultdict(set)
        self._changes: list[KeptChange] = []
        self._call = nn.Module.__call__
        self.follower = Follower(module)
        self.seen: list[Seen] = []
        self._calls: dict[int, _Call] = {}  # of units that keep something for a backward
        self.checkpointed = CheckpointedChanges(module)
        self.checkpoints = CheckpointDepth(self.checkpointed.noted)
        self.made_outputs: set[Any] = set()
        self.untouched = Untouched()

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
        self.note_writer(None)
        follower, unit = self.follower, len(self.seen)
        given = list(tensors_in((args, kwargs), objects=True))
        seen = Seen(path, follower.reads(given), self.untouched.are((args, kwargs)))
        self.seen.append(seen)
        follower.begun, follower.inside = unit + 1, unit
        if called._forward_hooks or called._forward_pre_hooks:  # may keep what they see: see `_mark`
            args, kwargs = mapped((args, kwargs), torch.Tensor, torch.Tensor.clone)
            given = list(tensors_in((args, kwargs), objects=True))
        own, generators = {follower.made_of.memory(tensor) for tensor in given}, generator_states()
        try:
            with contextlib.ExitStack() as stack:
                if not self.checkpoints.count and not has_hooks_on_saved_tensors():  # else nothing of the unit is kept
                    stack.enter_context(saved_tensors_hooks(partial(self._note_saved, seen, own), _as_it_is))
                output = self._call(called, *args, **kwargs)
            if torch.is_grad_enabled():
                self._calls[unit] = _Call(called, args, kwargs, generators, output)
            output = self._mark(output, unit, seen)
        finally:
            follower.inside = None
        seen.is_hooked = any(map(_hooks, called.modules()))
        self.note_writer(unit)
        for name, value in self._changed():
            self._note_change_inside(name, value, unit)
        return output

    def note_writer(self, unit: int | None) -> None:
        """Note that a unit, or glue, has changed places since the last question."""
        for path in self._places.changed():
            self.writers[path].add(unit)

    def repeatable(self, kept: ModuleSnapshot) -> frozenset[int]:
        """Return the units that return the same when they are called again, and leave nothing; not those with hooks.

        Args:
            kept: content of the module that every call begins with.
        """
        found = set[int]()
        kept.restore()
        for unit, call in self._calls.items():
            if any(_hooks(child) for child in call.called.modules()):
                continue
            is_same = call.again(self._call)
            if kept.left():
                kept.restore()
            elif is_same:
                found.add(unit)
        return frozenset(found)

    def _changed(self) -> list[tuple[str, Any]]:
        """List parameters and buffers that have changed; other state is put back before every play."""
        return [(name, value) for name, value in self._watch.changed().items() if name in self._tensors]

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
        self.untouched.note(tensors)
        for number, tensor in enumerate(tensors):
            seen.outputs.append((tensor.dtype, tuple(tensor.shape), _order(tensor)))
            self.follower.returned(tensor, unit, number)
            self.made_outputs.add(tensor.grad_fn)
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

    def buffers_of_samples(self) -> frozenset[str]:
        """Name the buffers whose content is made of samples now."""
        return frozenset(name for name, b in self._module.named_buffers() if self.follower.of_samples.of([b]))

    def changes(self) -> tuple[KeptChange, ...]:
        """Return all changes in their order, with their lines."""
        found: dict[tuple[str, int], KeptChange] = {}
        for change in sorted([*self.follower.writes, *self._changes], key=lambda change: change.before):
            line = change.line or assignment_line(self._module, change.name)
            known = found.get((change.name, change.before))
            reads = change.reads if known is None else change.reads | known.reads
            found[change.name, change.before] = KeptChange(change.name, change.before, reads, change.is_tensor, line)
        return tuple(found.values())


def _hooks(module: nn.Module) -> bool:
    """Return whether something besides its forward runs when a module is called."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return bool(own) or has_global_hooks()


def generator_states() -> tuple[torch.Tensor, ...]:
    """Return the state of torch's generators: of the host, and of the present accelerator."""
    host = torch.get_rng_state()
    return (host, torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else (host,)


def _set_generators(states: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


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
    return memory_order(tensor.stride())
