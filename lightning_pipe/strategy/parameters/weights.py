"""Weights of a rank: parameters live where stages use them; elsewhere they are stand-ins without memory.

    share()      every rank gets the values of rank 0, so that no seed is needed, or makes what rank 0 would
    place()      parameters that this rank does not need lose their memory and become stand-ins (`stand_ins`)
    whole()      on rank 0, for the time of a checkpoint, all current values are in the module
    everywhere() the same on every rank, for hooks that all ranks run
    restore()    ranks get all parameters back, with their current values

A parameter has one canonical name, the first of its names. The parameter objects of the user are the same all the time,
so whoever holds them sees the trained values, or a stand-in.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture import canonical_names
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.capture.torchmetrics_objects import is_metric
from lightning_pipe.core.program import Layout
from lightning_pipe.core.sharding import owners
from lightning_pipe.lightning_names import pl, rank_zero_warn
from lightning_pipe.strategy.parameters import initial_values as values
from lightning_pipe.strategy.parameters.gradient_stand_ins import show_gradient
from lightning_pipe.strategy.parameters.pending import Pending
from lightning_pipe.strategy.parameters.stand_ins import (
    Guarded,
    StandIn,
    absent_buffer,
    form_of,
    occupy,
    unguarded,
    vacate,
)
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.start.room import HostRoom, room_for_runs


@dataclass(frozen=True)
class TensorPlace:
    """A place in the module where a parameter or buffer hangs."""

    owner: nn.Module
    attribute: str


@dataclass(frozen=True, eq=False)
class Placement:
    """Which ranks have which values: another object as soon as that changes, so that what follows from it can be kept.

    Attributes:
        holders: ranks that hold a parameter, by its canonical name; every rank holds the others.
        moving: ranks that change a buffer, by name; training changes no others.
        whole_on: ranks that have all values.
    """

    holders: Mapping[str, tuple[int, ...]]
    moving: Mapping[str, tuple[int, ...]]
    whole_on: frozenset[int]


class Weights:
    """Parameters and buffers of one rank.

    Args:
        module: the user's module, whole.
        control: to the other ranks.

    Attributes:
        buffers: the module's present buffers by name.
        placement: which ranks have which values.
    """

    def __init__(self, module: pl.LightningModule, control: ControlPlane) -> None:
        self._module = module
        self._control = control
        self._aliases = canonical_names(module)
        self._real = {name: module.get_parameter(name) for name in dict.fromkeys(self._aliases.values())}
        self._names = {id(parameter): name for name, parameter in self._real.items()}
        self.buffers = _Buffers(module)
        self.placement = Placement({}, {}, whole_on=frozenset(range(control.ranks)))
        self._partial_in, self._partial = self.placement, frozenset[int]()  # parameters that some rank lacks, by id
        self._absent_in, self._absent = self.placement, tuple[str, ...]()  # parameters that this rank lacks
        self._owners: dict[str, int] = {}  # of parameters that several ranks hold, where these share optimizer state
        self._is_filled = False  # every rank has all values for a while
        self._device = torch.device("cpu")

    def share(self) -> None:
        """Copy parameters and buffers of rank 0 to every rank."""
        if self._control.ranks == 1:
            return
        values.agree(self._real, self._control)
        present = {name: parameter for name, parameter in self._real.items() if not isinstance(parameter, Pending)}
        holders = values.holders(self._real, self._control)
        self.placement = replace(self.placement, holders=holders)
        if holders:  # as the last fit has left them
            self.placement = replace(self.placement, whole_on=frozenset())
            present = {name: parameter for name, parameter in present.items() if name not in self._holders}
        held = self._found_buffers()
        tensors: dict[str, torch.Tensor] = {**present, **dict(self._module.named_buffers())}
        for name, tensor in tensors.items():
            source = held.get(name, (0,))[0]
            _assign(tensor, self._control.copy(_on_host(tensor), source=source, what=f"the initial value of {name}"))

    def _found_buffers(self) -> dict[str, tuple[int, ...]]:
        """Have memory for buffers that a failed fit has left on other ranks; return the ranks that have these."""
        buffers = {name: self.buffers[name] for name in self.buffers}
        held = values.holders(buffers, self._control)
        for name in held:
            if isinstance(buffers[name], Guarded):
                self.buffers.put(name, torch.empty_like(form_of(buffers[name]), device="cpu"))
        if any(isinstance(one, Guarded) and one.absence.is_left for one in (*self._real.values(), *buffers.values())):
            rank_zero_warn(
                "The fit before this one has failed, and ranks go on with the weights that each of them had then. If "
                "they did not fail between two steps, some are a step ahead of others: resume from a checkpoint."
            )
        return held

    def place(self, split: Split, layout: Layout, *, device: torch.device, shard_optimizer: bool = False) -> None:
        """Keep what the stages of this rank need, and give up the memory of parameters that other ranks hold.

        Parameters that no stage uses stay everywhere, or come back there. What other ranks held before is fetched.

        Args:
            split: the stages.
            layout: their ranks.
            device: where this rank computes.
            shard_optimizer: whether ranks that hold the same parameters share their optimizer state.
        """
        self._gather_buffers()
        self._owners = {}
        holders: dict[str, set[int]] = {}
        moving: dict[str, tuple[int, ...]] = {}
        for program in split.stages:
            for name in {*program.parameters.values(), *program.gradients.values()}:
                holders.setdefault(name, set()).update(layout.stages[program.stage])
            for name in program.mutations:
                if name in self.buffers:
                    moving[name] = tuple(sorted(layout.stages[program.stage]))
        before = self._holders
        # in model order, since values are exchanged in this order; a set's order differs from process to process
        ordered = {name: tuple(sorted(holders[name])) for name in self._real if name in holders}
        self.placement = Placement(ordered, moving, whole_on=frozenset())
        if shard_optimizer:
            trained = {name for program in split.stages for name in program.gradients.values()}
            sizes = {name: self._real[name].nbytes * (name in trained) for name in self._holders}
            self._owners = owners(sizes, self._holders)
        self._device = device
        self._fetch(before)
        self._vacate(self._elsewhere())
        self._hide_buffers()

    def adopt(self, split: Split, layout: Layout) -> None:
        """Let the stages of a step that was captured later hold what no stage has held so far, and it trains.

        All ranks have the values until then; the others give them up, since only these stages get its gradients.
        """
        if self._whole_on:
            return
        found: dict[str, set[int]] = {}
        for program in split.stages:
            for name in {*program.parameters.values(), *program.gradients.values()} - self._holders.keys():
                found.setdefault(name, set()).update(layout.stages[program.stage])
        holders = {**self._holders, **{name: tuple(sorted(ranks)) for name, ranks in found.items()}}
        ordered = {name: holders[name] for name in self._real if name in holders}
        self.placement = replace(self.placement, holders=ordered)
        self._vacate(name for name in self._elsewhere() if name in found)

    def hold_too(self, split: Split, layout: Layout) -> None:
        """Let the stages of a step that was captured later hold what they use and other stages hold."""
        before, holders = self._holders, dict(self._holders)
        for program in split.stages:
            for name in {*program.parameters.values(), *program.gradients.values()} & holders.keys():
                holders[name] = tuple(sorted({*holders[name], *layout.stages[program.stage]}))
        self.placement = replace(self.placement, holders=holders)
        if self._owners:
            sizes = {name: self._real[name].nbytes * (name in self._owners) for name in self._holders}
            self._owners = owners(sizes, self._holders)
        self._fetch(before)

    @contextlib.contextmanager
    def buffers_known(self, split: Split, layout: Layout) -> Iterator[None]:
        """Run stages inside that may write to buffers on other ranks than the stages that were placed; on all ranks.

        A step that was captured later may change a buffer that none did before, or in another stage. All ranks have its
        value before, and what became of it afterwards.
        """
        written: dict[str, tuple[int, ...]] = {}
        for program in split.stages:
            ranks = tuple(sorted(layout.stages[program.stage]))
            names = (name for name in program.mutations if self._moving.get(name) != ranks and name in self.buffers)
            written.update(dict.fromkeys(names, ranks))
        self._spread({name: self._moving[name][0] for name in written if name in self._moving})
        yield
        self._spread({name: ranks[0] for name, ranks in written.items()})

    def _spread(self, sources: Mapping[str, int]) -> None:
        """Give every rank the values that buffers have on one."""
        if self._control.ranks > 1:
            for name, source in sources.items():
                value = _on_host(self.buffers[name])
                _assign(self.buffers[name], self._control.copy(value, source=source, what=f"the value of {name}"))

    def follow(self, other: Weights, *, device: torch.device) -> None:
        """Keep on this rank what it keeps of another module with the same names, on a device."""
        self._gather_buffers()
        before, self.placement, self._device = self._holders, replace(other.placement), device
        self._fetch(before)
        self._vacate(self._elsewhere())
        self.move(device)

    def reach(self, control: ControlPlane) -> None:
        """Ask other ranks by these connections from now on."""
        self._control = control

    @property
    def module(self) -> pl.LightningModule:
        """Return the module whose weights these are."""
        return self._module

    @property
    def device(self) -> torch.device:
        """Return where this rank computes."""
        return self._device

    @property
    def control(self) -> ControlPlane:
        """Return the connections to the other ranks."""
        return self._control

    @property
    def _holders(self) -> Mapping[str, tuple[int, ...]]:
        return self.placement.holders

    @property
    def _moving(self) -> Mapping[str, tuple[int, ...]]:
        return self.placement.moving

    @property
    def _whole_on(self) -> frozenset[int]:
        return self.placement.whole_on

    @property
    def _is_whole(self) -> bool:
        return self._control.rank in self._whole_on

    def room(self) -> HostRoom:
        """Return where all values are on this rank while the step runs here on the whole module."""
        if self._is_whole and not values.pending_in(self._real):
            return HostRoom()
        return room_for_runs(self._module, absent=True)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters by canonical name; those of other ranks have no memory."""
        return self._real

    def held_by(self, name: str, ranks: tuple[int, ...]) -> bool:
        """Return whether all these ranks have the current value of a parameter or buffer."""
        known = self._holders.get(name) or self._moving.get(name)
        return known is None or set(ranks) <= set(known)

    def has(self, name: str) -> bool:
        """Return whether this rank has the current value of a parameter or buffer."""
        return self.held_by(name, (self._control.rank,))

    def is_everywhere(self, name: str) -> bool:
        """Return whether every rank holds a parameter, by its canonical name."""
        return name not in self._holders or len(self._holders[name]) == self._control.ranks

    def copied(self, name: str) -> torch.Tensor:
        """Return the current value of a parameter or buffer on the host of every rank."""
        known = self._holders.get(name) or self._moving[name]
        current = self._real[name] if name in self._real else self.buffers[name]
        value = _on_host(current) if self.has(name) else torch.empty(current.shape, dtype=current.dtype)
        return self._control.copy(value, source=known[0], what=f"the value of {name}")

    def write(self, name: str, value: torch.Tensor) -> None:
        """Give a buffer, or a parameter that this rank holds, the value that every rank has made of it."""
        if name in self.buffers:
            self.buffers[name].copy_(value)
        elif self.holds(first := self.first_name(name)):
            self._real[first].copy_(value)

    def holds(self, name: str) -> bool:
        """Return whether this rank holds a parameter, by its canonical name."""
        return self._is_whole or name not in self._holders or self._control.rank in self._holders[name]

    def speaker(self, name: str) -> int:
        """Return the rank whose value of a parameter counts."""
        return self._holders[name][0] if name in self._holders else 0

    def first_name(self, name: str) -> str:
        """Return the canonical name of what hangs under a name."""
        return self._aliases.get(name, name)

    def saver(self, name: str) -> int:
        """Return the rank that writes what hangs under a name, of a parameter, a buffer or something else."""
        return self._moving[name][0] if name in self._moving else self.speaker(self.first_name(name))

    def owner(self, name: str) -> int:
        """Return the rank whose gradient and optimizer state of a parameter count."""
        return self._owners.get(name, self.speaker(name))

    def steps(self, name: str) -> bool:
        """Return whether the optimizer of this rank steps a parameter."""
        return self.holds(name) and (self._is_whole or self._owners.get(name, self._control.rank) == self._control.rank)

    def steppers(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks whose optimizers step a parameter, by name."""
        everyone = tuple(range(self._control.ranks))
        held = {name: self._holders.get(name, everyone) for name in self._real}
        return held | {name: (owner,) for name, owner in self._owners.items()}

    def sharing(self) -> Mapping[str, tuple[int, ...]]:
        """Return the holders of every parameter whose optimizer state only one of several keeps, in model order."""
        return {name: self._holders[name] for name in self._owners if len(self._holders[name]) > 1}

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Return the canonical name of a parameter; None if the module does not have it."""
        return self._names.get(id(parameter))

    @contextlib.contextmanager
    def whole(self, *, placed: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Iterator[None]:
        """Have every current value in the module of rank 0 inside; called on all ranks.

        Args:
            placed: on rank 0, returns what it keeps of a value that it did not have; None for the value itself.
        """
        if self._is_whole and self._control.rank == 0:
            with values.made(self._real, placed=placed):
                yield
            return
        if 0 in self._whole_on or self._is_filled:
            yield
            return
        found: dict[str, torch.Tensor] = {}
        for name in self._real:
            if self.speaker(name) != 0:
                value = self._brought(name, self._real[name], self.speaker(name))
                found[name] = value if placed is None else placed(value)
        buffers = self.buffers
        moved = {name: self._brought(name, buffers[name], ranks[0]) for name, ranks in self._moving.items()}
        if self._control.rank != 0:
            yield
            return
        before = {name: buffers[name].data for name in moved}
        for name, value in found.items():
            occupy(self._real[name], value)
        buffers.show()
        for name, value in moved.items():  # not copied into what is there: a state_dict outlives this context
            buffers[name].data = value.to(before[name].device)
        try:
            yield
        finally:
            self._vacate(found)
            self._hide_buffers()
            for name, value in before.items():
                buffers[name].data = value

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Have every current value in the module of every rank inside; on all ranks together.

        What is held here is itself, the rest are copies. So what all ranks write inside stays, where it is held.
        """
        is_whole = len(self._whole_on) == self._control.ranks
        if is_whole:
            values.make(self._real.values(), device=self._device)
        if is_whole or self._is_filled:
            yield
            return
        absent = self._elsewhere()
        for name, ranks in self._holders.items():
            if len(ranks) < self._control.ranks:
                value = self.copied(name)
                if name in absent:
                    occupy(self._real[name], value.to(self._device))
        self._share_moving()
        self.buffers.show()
        self._is_filled = True
        try:
            yield
        finally:
            self._is_filled = False
            self._vacate(absent)
            self._hide_buffers()

    def restore(self, ranks: Collection[int]) -> None:
        """Give these ranks (all of them, the first, or none) the current values of all parameters; on all together.

        Every rank gets the buffers. Other ranks keep what they hold.
        """
        if len(self._whole_on) == self._control.ranks:
            return
        for name, holders in self._holders.items():
            if len(holders) == self._control.ranks or not ranks:
                continue
            is_one = len(ranks) == 1
            value = self._brought(name, self._real[name], self.speaker(name)) if is_one else self.copied(name)
            if not self.holds(name) and self._control.rank in ranks:
                occupy(self._real[name], value)
        self._share_moving()
        self.buffers.show()
        self.placement = replace(self.placement, moving={}, whole_on=frozenset(ranks))  # owners stay, to be saved

    def partial(self) -> frozenset[int]:
        """Return the ids of the parameters and buffers whose current values some rank lacks."""
        ranks = self._control.ranks
        if len(self._whole_on) == ranks:
            return frozenset()
        if self._partial_in is not self.placement:
            self._partial_in, held = self.placement, self._holders
            self._partial = frozenset(id(self._real[name]) for name in held if len(held[name]) < ranks)
        moving = [name for name, on in self._moving.items() if len(on) < ranks]
        if not moving:
            return self._partial
        return self._partial.union(id(one) for name in moving for one in self.buffers.either(name))

    def all_bytes(self) -> int:
        """Return the size of all parameters."""
        return sum(form_of(parameter).nbytes for parameter in self._real.values())

    def missing_bytes(self) -> int:
        """Return the size of the parameters whose values are on other ranks."""
        return sum(self._real[name].nbytes for name in self._elsewhere())

    def leave(self) -> None:
        """Leave values where they are: whatever reads others on this rank is told so."""
        self.hide_gradients()
        everything = (*self._real.values(), *self._module.buffers())
        for one in everything:
            if isinstance(one, Guarded) and not isinstance(one, Pending):
                one.absence = replace(one.absence, is_left=True)

    def move(self, device: torch.device) -> None:
        """Move what is here to a device; what has no values yet gets them."""
        for name, parameter in self._real.items():
            if self.holds(name):
                values.make([parameter], device=device)
                parameter.data = parameter.data.to(device)
        self.buffers.show()
        moved = {id(buffer): buffer.to(device) for buffer in self._module.buffers()}
        for module in self._module.modules():
            if is_metric(module):
                module.to(device)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = moved.get(id(buffer), buffer)
        self._hide_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the module, with meta tensors in the place of what is not here."""
        with unguarded():
            state: dict[str, Any] = self._module.state_dict()
        named = (self._module.named_parameters, self._module.named_buffers)
        for name, tensor in itertools.chain.from_iterable(list_(remove_duplicate=False) for list_ in named):
            if name in state:
                state[name] = form_of(tensor) if isinstance(tensor, Guarded) else state[name]
        return state

    def show_gradients(self, norms: Mapping[torch.Tensor, torch.Tensor | None] | None = None) -> None:
        """Let the user's hooks see that other ranks have gradients.

        Args:
            norms: by parameter the norm of its gradient, None where there is none.
        """
        with unguarded():  # stand-ins would be asked one by one
            trained = [p for p in map(self._real.__getitem__, self._elsewhere()) if p.requires_grad]
        for parameter in trained:
            is_told = norms is not None and parameter in norms
            norm = norms[parameter] if norms is not None and is_told else None
            if norm is not None or not is_told:
                assert isinstance(parameter, StandIn), "it was vacated"
                show_gradient(parameter, norm)

    def hide_gradients(self) -> None:
        """Let the user's hooks see that no rank has gradients."""
        for name in self._elsewhere():
            parameter = self._real[name]
            if isinstance(parameter, StandIn):
                parameter.gradient = None
            else:
                parameter.grad = None

    def _fetch(self, before: Mapping[str, tuple[int, ...]]) -> None:
        """Get what this rank holds now, and what others held before."""
        everyone = tuple(range(self._control.ranks))
        for name, ranks in before.items():
            wanted = self._holders.get(name, everyone)
            if set(wanted) <= set(ranks):
                continue
            here = self._real[name]
            value = _on_host(here) if self._control.rank in ranks else torch.empty(here.shape, dtype=here.dtype)
            self._control.copy(value, source=ranks[0], what=f"the value of {name}")
            if self._control.rank in wanted and self._control.rank not in ranks:
                occupy(here, value)

    def _elsewhere(self) -> tuple[str, ...]:
        """Return the parameters that this rank does not hold, in model order."""
        if self._absent_in is not self.placement:
            self._absent_in = self.placement
            self._absent = tuple(name for name in self._real if not self.holds(name))
        return self._absent

    def _vacate(self, names: Iterable[str]) -> None:
        for name in names:
            ranks, rank = self._holders[name], self._control.rank
            vacate(self._real[name], name, ranks=ranks, rank=rank, device=self._device)

    def _hide_buffers(self) -> None:
        """Put stand-ins into the places of buffers that other ranks change."""
        rank = self._control.rank
        for name, ranks in self._moving.items():
            if rank not in ranks and not self._is_whole:
                stand_in = absent_buffer(self.buffers[name], name, ranks=ranks, rank=rank, device=self._device)
                self.buffers.hide(name, stand_in)

    def _gather_buffers(self) -> None:
        """Have all buffers on every rank, where the ranks that change them may become others."""
        self._share_moving()
        self.buffers.show()
        self.placement = replace(self.placement, moving={})

    def _share_moving(self) -> None:
        """Give every rank the buffers that training changes."""
        self._spread({name: ranks[0] for name, ranks in self._moving.items()})

    def _brought(self, name: str, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Bring a value to rank 0; elsewhere return what is there."""
        value = self._control.to_first(_on_host(tensor), source=source, what=f"the value of {name}")
        return tensor if value is None else value


class _Buffers(Mapping[str, torch.Tensor]):
    """The buffers of a module as they are when they are asked for; moving a module replaces them, hooks add some."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hidden: dict[str, torch.Tensor] = {}
        self._slots: dict[str, TensorPlace] = {}
        self._look()

    def _look(self) -> None:
        """Find buffers that were not there before."""
        for name, _ in self._module.named_buffers(remove_duplicate=False):
            self._slots.setdefault(name, _slot(self._module, name))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._hidden:
            return self._hidden[name]
        if name not in self:
            raise KeyError(name)
        slot = self._slots[name]
        buffer = slot.owner._buffers[slot.attribute]
        assert buffer is not None, f"{name} was a buffer when it was found"
        return buffer

    def __contains__(self, name: object) -> bool:
        if name not in self._slots:
            self._look()
        return name in self._slots

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def either(self, name: str) -> tuple[torch.Tensor | None, ...]:
        """Return a buffer, and what stands in its place."""
        slot = self._slots[name]
        return self[name], slot.owner._buffers[slot.attribute]

    def hide(self, name: str, stand_in: torch.Tensor) -> None:
        """Let the module have a stand-in; the buffer itself is kept here."""
        slot = self._slots[name]
        self._hidden[name] = self[name]
        slot.owner._buffers[slot.attribute] = stand_in

    def put(self, name: str, buffer: torch.Tensor) -> None:
        """Let the module have another buffer in the place of one."""
        slot = self._slots[name]
        slot.owner._buffers[slot.attribute] = buffer

    def show(self) -> None:
        """Let the module have all buffers."""
        for name, buffer in self._hidden.items():
            slot = self._slots[name]
            slot.owner._buffers[slot.attribute] = buffer
        self._hidden.clear()


def _slot(module: nn.Module, name: str) -> TensorPlace:
    path, _, attribute = name.rpartition(".")
    return TensorPlace(module.get_submodule(path), attribute)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the host (of a stand-in: its meta tensor, which is never sent)."""
    detached = form_of(tensor).detach()
    return detached if detached.is_meta else detached.to("cpu", copy=True).contiguous()


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value)
