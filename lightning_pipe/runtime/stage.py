"""Stage at run time: the values that a rank holds of it, and for how long.

Live values are kept by name per micro-batch. A value is dropped at its last use:

    after F    what HEAD, I and W read, what is still to be sent, and the results stay
    after HEAD what I and W read, of what it made too, and what is still to be sent stays
    after I    what W reads and what is still to be sent stay
    after W    what is still to be sent stays

    Stage(program, values, state=State(...), loss="loss")
    stage.begin(sends, training)                            which messages will be fetched by `outgoing`
    stage.pin(m, contents)                                  what computes of a micro-batch read instead of parameters
    stage.load(m, leaves) / stage.receive(m, contents)      inputs of F or of the backward, for the stage's samples
    stage.compute(kind, m, slice)                           F, I, W, or B = I then W; results and gradients follow
    stage.join(ms, slice)                                   W of several micro-batches as one, on all their samples
    stage.give_to_head(), stage.run_head(contents, slice)   what it reads of all micro-batches, and what it makes
    stage.evict(m, host, slices), stage.vacate(m)          what is offloaded goes to the host, its memory is given up
    stage.fetch(m)                                          it comes back
    stage.awaited_parcel(m)                                 what has to be back before I or B
    stage.outgoing(direction, target, m)                    contents to be sent
    stage.results(m), stage.free(m)
    stage.finish()                                          after the batch: state that changes once per batch

Gradients of one parameter are added within the micro-batch, then to `parameter.grad`, as autograd does.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeGuard

import torch

from lightning_pipe.capture.steps.stage_program import Half, RandomKey, StageProgram, Value
from lightning_pipe.capture.torch_private import is_profiling
from lightning_pipe.core.program import ComputeKind, Pass
from lightning_pipe.runtime.activations.away import Away, send_away
from lightning_pipe.runtime.activations.protocol import HostStore, Parcel
from lightning_pipe.runtime.exchanges.gradient_sums import Sums, add_to, storage_of, storages_of
from lightning_pipe.runtime.exchanges.slicing import Content

Sends = Counter[tuple[Pass, int, int]]  # (direction, target, microbatch) -> number of messages
Slices = dict[int, tuple[int, int]]  # storage of the batch -> address and bytes of a slice
_UNNAMED = contextlib.nullcontext()
NO_SLICES: Mapping[int, Slices] = {}


@dataclass(frozen=True)
class State:
    """Parameters and buffers that a rank owns, by canonical name, and the device they live on.

    A parameter that several stages of the rank use is one tensor, so that their gradients meet in its `.grad`.
    `sparse` names the parameters whose gradients are sparse tensors of some of their rows, alike on all ranks.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    device: torch.device
    sparse: frozenset[str] = frozenset()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a buffer or parameter by name."""
        return self.parameters[name] if name in self.parameters else self.buffers[name]


@dataclass(frozen=True)
class Slice:
    """The samples of one compute.

    Attributes:
        samples: their number.
        key: key of the random numbers.
        mean_weight: share of the batch's loss that a loss over these samples has if losses are means.
        sum_weight: the same if losses are sums.
    """

    samples: int
    key: RandomKey
    mean_weight: float
    sum_weight: float


@dataclass(frozen=True)
class Ahead:
    """What a stage is told of a round whose forwards run ahead of their batch.

    Attributes:
        step: number of the round's batch.
        batch: micro-batches of it; forwards of those behind them belong to later batches.
        passed: micro-batches of the round before; what is held of those behind them stays. None: nothing stays.
    """

    step: int
    batch: int
    passed: int | None


class Stage:
    """Run the functions of one stage and hold its live values.

    Args:
        program: the functions of the stage.
        values: what is known of values that cross stages or are results (`Split.values`).
        state: parameters and buffers of the rank; those of the stage must be among them.
        loss: value name of the loss, whose type and combination decide the tangents; None without a loss.
        apart: names of state that another stage of the rank changes, too: while a program runs this one has a copy, as
            stages on two ranks have, since both see every micro-batch.

    Attributes:
        made: told of a parameter as soon as a half that gives its gradients away has added one.
    """

    def __init__(
        self,
        program: StageProgram,
        values: Mapping[str, Value],
        *,
        state: State,
        loss: str | None = None,
        apart: AbstractSet[str] = frozenset(),
    ) -> None:
        self.program = program
        self._state, self._apart = state, apart
        self._copies: dict[str, torch.Tensor] = {}
        self._loss = values[loss] if loss is not None else None
        self._held: dict[int, dict[str, Content]] = defaultdict(dict)
        self._results: dict[int, dict[str, Content]] = {}
        self._pending: dict[int, tuple[Half, ...]] = {}
        self._for_forward: dict[int, AbstractSet[str]] = {}  # pinned for F alone
        self._ahead: Ahead | None = None
        self._later: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)  # state that is not in place, by batch
        self._averaged: dict[tuple[int, str], int] = {}  # samples that are in the mean so far
        self._away: dict[int, Away] = {}
        self._handed_out: set[int] = set()  # memory of results, which stays to the end of the batch
        self._sends: dict[tuple[Pass, int, int], int] = {}
        self._to_send: dict[tuple[tuple[Pass, int], ...], frozenset[str]] = {}  # by the edges of messages to be posted
        self._training = True
        self._due = {half: gradients_due(program, half) for half in ("I", "W")}
        self._head = None if program.head is None else program.head.half
        self._tangent_names = {
            id(half): [name for name in program.tangents if name in half.inputs]
            for half in (program.input_grad, program.weight_grad, self._head)
            if half is not None
        }
        of_head = () if self._head is None else self._head.outputs
        self._results_of_forward = tuple(name for name in program.results if name not in of_head)
        self._waiting_for_weights = frozenset(name for due in self._due["W"].values() for name in due)
        self._state_names = {*program.buffers.values(), *program.mutations}
        self._written_at_end = program.once | program.averaged
        inputs = {**program.parameters, **program.buffers}.items()
        self._written_inputs = [(value, name) for value, name in inputs if name in program.mutations]
        self._reads: dict[tuple[int, ...], frozenset[str]] = {}  # by the halves that are pending
        self.made: Callable[[str], None] = lambda name: None

    def begin(self, sends: Sends, *, training: bool, ahead: Ahead | None = None) -> None:
        """Forget everything held and prepare for a program in which `outgoing` is called `sends` times.

        Args:
            sends: by message.
            training: whether backwards follow.
            ahead: of a round whose forwards run ahead.
        """
        if ahead is None or ahead.passed is None:
            self.give_up_flight()
        else:
            for held in (self._held, self._pending):
                _number_anew(held, ahead.passed)
        self._ahead = ahead
        self._results.clear()
        self._handed_out.clear()
        for away in self._away.values():
            away.parcel.discard()
        self._away.clear()
        self._sends = dict(sends)
        self._training = training
        self._copies = {name: self._state.tensor(name).detach().clone() for name in self._apart}
        self._put_in_place(lambda name: name not in self._written_at_end)
        present = {**self._state.parameters, **self._copies} if self._copies else self._state.parameters
        self._parameters = {
            name: present[known] if known in present else self._tensor(known)
            for name, known in self.program.parameters.items()
        }
        self._storages_of_parameters: frozenset[int] | None = None  # which stay while a program runs

    def _tensor(self, name: str) -> torch.Tensor:
        if name in self._copies:
            return self._copies[name]
        state = self._state
        return state.parameters[name] if name in state.parameters else state.buffers[name]

    def parameters_now(self) -> dict[str, torch.Tensor]:
        """Return the parameters, by the names of the values that computes read."""
        return dict(self._parameters)

    def state_now(self) -> dict[str, torch.Tensor]:
        """Return the state that the stage reads or writes, by canonical name."""
        return {name: self._tensor(name) for name in sorted(self._state_names)}

    def parameters_read(self, *, forward: bool) -> dict[str, torch.Tensor]:
        """Return the parameters that F reads, or I and W, by the names of the values."""
        halves = (self.program.forward,) if forward else (self.program.input_grad, self.program.weight_grad)
        read = {name for half in halves if half is not None for name in half.inputs}
        return {name: parameter for name, parameter in self._parameters.items() if name in read}

    def pin(self, microbatch: int, contents: Mapping[str, torch.Tensor], *, for_forward: bool = False) -> None:
        """Let computes of a micro-batch (F alone if asked) read these instead of the parameters."""
        if for_forward:
            self._for_forward[microbatch] = contents.keys()
        read = self._awaited(microbatch) if microbatch in self._pending else contents.keys()
        self._held[microbatch].update({name: content for name, content in contents.items() if name in read})

    def hold_buffers(self, microbatch: int, contents: Mapping[str, torch.Tensor]) -> None:
        """Let computes of a micro-batch read these, by canonical name, instead of the buffers."""
        read = {value: contents[name] for value, name in self.program.buffers.items() if name in contents}
        if read:
            self._held[microbatch].update(read)

    def readers_of(self, contents: Mapping[str, torch.Tensor]) -> dict[int, set[str]]:
        """Return the micro-batches that hold these very tensors, and the names of those that they hold."""
        holders = {m: {name for name in contents if held.get(name) is contents[name]} for m, held in self._held.items()}
        return {m: names for m, names in holders.items() if names}

    def held_tensors(self) -> set[int]:
        """Return the identities of all that micro-batches hold."""
        return {id(content) for held in self._held.values() for content in held.values()}

    def give_up_flight(self) -> None:
        """Forget forwards in flight, with the state that they have written."""
        for held in (self._held, self._pending, self._for_forward, self._later, self._averaged):
            held.clear()

    def load(self, microbatch: int, leaves: Mapping[int, Content]) -> None:
        """Take the stage's samples of the batch leaves that it reads, by index of the leaf."""
        self._held[microbatch].update({name: leaves[index] for name, index in self.program.leaves.items()})

    def receive(self, microbatch: int, contents: Mapping[str, Content]) -> None:
        """Take values of other stages, for the stage's samples, by name."""
        self._held[microbatch].update(contents)

    def compute(self, kind: ComputeKind, microbatch: int, slice_: Slice) -> None:
        """Run one pass on one micro-batch."""
        if torch.is_grad_enabled() or is_profiling():  # contexts take as long as an operator
            with torch.no_grad(), self._named_in_profiles(kind, (microbatch,)):
                self._pass(kind, microbatch, slice_)
        else:
            self._pass(kind, microbatch, slice_)

    def _pass(self, kind: ComputeKind, microbatch: int, slice_: Slice) -> None:
        match kind:
            case "F":
                self._forward(microbatch, slice_)
            case "I":
                self._input_half(microbatch, slice_)
            case "W":
                self._weight_half(microbatch, slice_)
            case "B":
                self._input_half(microbatch, slice_)
                self._weight_half(microbatch, slice_)

    def join(self, microbatches: Sequence[int], slice_: Slice) -> None:
        """Run the weight halves of several micro-batches as one; `slice_` has the samples and weights of them all."""
        half = self.program.weight_grad
        assert half is not None and half.along is not None, "a verified program joins W only where that can be done"
        with torch.no_grad(), self._named_in_profiles("W", microbatches):
            first = self._held[microbatches[0]]
            given = [value for value in half.inputs if value in first]
            held = {value: self._together(value, half.along, microbatches) for value in given}
            self._differentiate("W", half, held, slice_)
        for microbatch in microbatches:
            self._end_backward(microbatch)

    def _together(self, value: str, along: Mapping[str, int], microbatches: Sequence[int]) -> Content:
        """Return the content of an input of W for all samples of several micro-batches, and drop its pieces."""
        pieces = [self._held[microbatch][value] for microbatch in microbatches]
        if value not in along:
            return pieces[0]
        for microbatch in microbatches:
            if value not in self._to_be_sent(microbatch):
                del self._held[microbatch][value]
        tensors = [piece for piece in pieces if isinstance(piece, torch.Tensor)]
        return torch.cat(tensors, dim=along[value])

    def give_to_head(self) -> tuple[dict[str, Content], dict[str, dict[int, Content]]]:
        """Return what the head reads of the stage's state, and of micro-batches, by name; the stage lets go of it."""
        assert self._head is not None, "a verified program has HEAD where the stage has a head"
        state, parts = dict[str, Content](), dict[str, dict[int, Content]]()
        first = next(iter(self._held.values()), {})  # of the buffers that a batch may have for itself
        for name in self._head.inputs:
            if name in self._parameters or name in self.program.buffers:
                state[name] = self._input(name, first)
            elif name not in self.program.tangents:
                parts[name] = {m: held[name] for m, held in self._held.items() if name in held}
        for microbatch, pending in [*self._pending.items()]:
            self._pending[microbatch] = tuple(half for half in pending if half is not self._head)
            self._drop(microbatch)
        return state, parts

    def run_head(self, contents: dict[str, Content], slice_: Slice) -> dict[str, Content]:
        """Return what the head makes of its inputs for the whole batch, which the mapping loses."""
        assert self._head is not None, "a verified program has HEAD where the stage has a head"
        with torch.no_grad(), self._named_in_profiles("HEAD", ()):
            contents |= self._tangents(self._head, slice_)
            inputs = [contents.pop(name) for name in self._head.inputs]
            outputs = self._head.run(slice_.samples, slice_.key, *inputs)
        return dict(zip(self._head.outputs, outputs, strict=True))

    def wanted_from_head(self, microbatch: int) -> frozenset[str]:
        """Return the names of what the head makes that is held for a micro-batch: halves read it, or it is sent."""
        assert self._head is not None, "a verified program has HEAD where the stage has a head"
        return (self._awaited(microbatch) | self._to_be_sent(microbatch)) & frozenset(self._head.outputs)

    def results_of_head(self, made: Mapping[str, Content]) -> dict[str, Content]:
        """Return the step's outputs of the whole batch that the head has made."""
        return self._handed([name for name in self.program.results if name in made], made)

    def evict(self, microbatch: int, host: HostStore, slices: Slices) -> Parcel:
        """Start to copy what the stage offloads of a micro-batch to the host; its memory stays until `vacate`.

        Args:
            microbatch: its number.
            host: where it goes.
            slices: what the rank loaded of the micro-batch; a slice of the batch goes by itself.
        """
        self._away[microbatch] = send_away(self._leaving(microbatch), host, slices=slices)
        self._drop(microbatch)
        return self._away[microbatch].parcel

    def vacate(self, microbatch: int) -> None:
        """Give up the memory of what was evicted, once it is on the host."""
        self._away[microbatch].vacate()

    def _leaving(self, microbatch: int) -> dict[str, torch.Tensor]:
        """Return what `evict` takes away of a micro-batch."""
        wanted, device = self._awaited(microbatch) & self.program.offloaded, self._state.device
        wanted -= frozenset(() if self._head is None else self._head.inputs)  # all of which it needs at once
        held = self._held[microbatch].items()
        return {name: content for name, content in held if name in wanted and _can_leave(content, device)}

    def fetch(self, microbatch: int) -> None:
        """Start to copy back what was evicted."""
        self._away[microbatch].parcel.fetch()

    def awaited_parcel(self, microbatch: int) -> Parcel | None:
        """Return what has to be back before the backward of a micro-batch; None if nothing is away."""
        away = self._away.get(microbatch)
        return None if away is None else away.parcel

    def outgoing(self, direction: Pass, target: int, microbatch: int) -> dict[str, Content]:
        """Return the values of one message in their order; after the last message that needs them they are dropped."""
        held = self._held[microbatch]
        contents = {name: held[name] for name in self.program.sends[direction, target]}
        message = direction, target, microbatch
        self._sends[message] = left = self._sends.get(message, 0) - 1
        if left <= 0:
            del self._sends[message]
            self._drop(microbatch)
        return contents

    def results(self, microbatch: int) -> dict[str, Content]:
        """Return the step's outputs that F produced, and forget them."""
        return self._results.pop(microbatch, {})

    def free(self, microbatch: int) -> None:
        """Drop everything still held of a micro-batch."""
        self._held.pop(microbatch, None)
        self._pending.pop(microbatch, None)

    def left(self, batch: float = math.inf) -> tuple[str, ...]:
        """Name what is still held of the first micro-batches, as `micro-batch:value`; nothing after a program."""
        return tuple(f"{m}:{name}" for m, held in self._held.items() for name in held if m < batch)

    def saved_storages(self, slices: Mapping[int, Slices] = NO_SLICES) -> dict[int, int]:
        """Return address and bytes of all memory that waits for I and W, without parameters, buffers and results.

        Args:
            slices: by micro-batch, what the rank loaded; a slice of the batch counts for itself, although its memory is
                that of the batch.
        """
        own = self._storages() | self._handed_out
        found: dict[int, int] = {}
        for away in self._away.values():
            found |= {address: size for address, size in away.held().items() if address not in own}
        for microbatch, held in self._held.items():
            loaded = slices.get(microbatch, {})
            saved = (held[name] for name in self._awaited(microbatch) if name in held)
            for tensor in (content for content in saved if isinstance(content, torch.Tensor)):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    address, size = loaded.get(storage.data_ptr(), (storage.data_ptr(), storage.nbytes()))
                    found[address] = size
        return found

    def _forward(self, microbatch: int, slice_: Slice) -> None:
        program = self.program
        halves = (program.input_grad, program.weight_grad, self._head) if self._training else (self._head,)
        self._pending[microbatch] = tuple(half for half in halves if half is not None)
        held = self._held[microbatch]
        number = self._number(microbatch, slice_)
        inputs = self._inputs(program.forward, self._with_later(held, number))
        self._run(program.forward, inputs, held, slice_)
        self._update_buffers(microbatch, number, slice_.samples)
        for name in self._for_forward.pop(microbatch, ()):
            held.pop(name, None)
        self._results[microbatch] = self._handed(self._results_of_forward, held)
        self._drop(microbatch)

    def _handed(self, names: Sequence[str], held: Mapping[str, Content]) -> dict[str, Content]:
        """Return results that are handed out, whose memory stays to the end of the batch."""
        own = self._storages() if names else frozenset()
        results = {name: _apart(self._input(name, held), own) for name in names}
        self._handed_out |= storages_of(content for content in results.values() if isinstance(content, torch.Tensor))
        return results

    def _input_half(self, microbatch: int, slice_: Slice) -> None:
        if (away := self._away.pop(microbatch, None)) is not None:
            self._held[microbatch].update(away.tensors())
        half = self.program.input_grad
        if half is not None:
            self._half("I", half, microbatch, slice_)

    def _weight_half(self, microbatch: int, slice_: Slice) -> None:
        half = self.program.weight_grad
        if half is not None:
            self._half("W", half, microbatch, slice_)
        self._end_backward(microbatch)

    def _end_backward(self, microbatch: int) -> None:
        """Keep only what the head still reads, and what is to be sent."""
        self._pending[microbatch] = tuple(half for half in self._pending.get(microbatch, ()) if half is self._head)
        self._drop(microbatch)

    def _half(self, kind: ComputeKind, half: Half, microbatch: int, slice_: Slice) -> None:
        self._differentiate(kind, half, self._held[microbatch], slice_)
        self._pending[microbatch] = tuple(later for later in self._pending[microbatch] if later is not half)
        self._drop(microbatch)

    def _differentiate(self, kind: ComputeKind, half: Half, held: dict[str, Content], slice_: Slice) -> None:
        """Run a half on what is held, to which its outputs are added, and add up the gradients of parameters."""
        held.update(self._tangents(half, slice_))
        inputs = self._inputs(half, held)
        if half.streamed is None:
            self._run(half, inputs, held, slice_)
            state = [content for name, content in zip(half.inputs, inputs, strict=True) if name not in held]
            self._accumulate(self._due[kind], held, kept=[*held.values(), *state])
            return
        streamed, sums = half.streamed, Sums(self._state.parameters, inputs)

        def give(name: str, *terms: torch.Tensor) -> None:
            sums.add(name, *terms)
            self.made(name)

        outputs = streamed.run(slice_.samples, slice_.key, give, *inputs)
        sums.part_from(outputs)
        held.update(zip(streamed.outputs, outputs, strict=True))
        rest = {name: terms for name, terms in self._due[kind].items() if name not in streamed.gradients}
        self._accumulate(rest, held, kept=[*held.values(), *inputs])

    def _run(self, half: Half, inputs: Sequence[Content], held: dict[str, Content], slice_: Slice) -> None:
        outputs = half.run(slice_.samples, slice_.key, *inputs)
        held.update(zip(half.outputs, outputs, strict=True))

    def _inputs(self, half: Half, held: Mapping[str, Content]) -> list[Content]:
        parameters = self._parameters
        return [
            held[name] if name in held else parameters[name] if name in parameters else self._input(name, held)
            for name in half.inputs
        ]

    def _input(self, name: str, held: Mapping[str, Content]) -> Content:
        if name in held:
            return held[name]
        if name in self._parameters:
            return self._parameters[name]
        return self._tensor(self.program.buffers[name])

    def _tangents(self, half: Half, slice_: Slice) -> dict[str, Content]:
        names = self._tangent_names[id(half)]
        if not names:
            return {}
        assert self._loss is not None, f"stage {self.program.stage} reads a tangent, but no loss was named"
        weight = slice_.sum_weight if self._loss.combine == "sum" else slice_.mean_weight
        tangent = torch.full((), weight, dtype=self._loss.dtype, device=self._state.device)
        return dict.fromkeys(names, tangent)

    def _storages(self) -> frozenset[int]:
        """Return the storages of the stage's parameters and buffers, which change after a result was taken."""
        if self._storages_of_parameters is None:
            self._storages_of_parameters = storages_of(self._parameters.values())
        return self._storages_of_parameters | storages_of(map(self._tensor, self._state_names))

    @property
    def _batch_number(self) -> int:
        """Return the number of the batch whose backwards run."""
        return 0 if self._ahead is None else self._ahead.step

    def _number(self, microbatch: int, slice_: Slice) -> int:
        """Return the number of the batch of a micro-batch."""
        is_later = self._ahead is not None and microbatch >= self._ahead.batch
        return slice_.key.step if is_later else self._batch_number

    def _with_later(self, held: dict[str, Content], number: int) -> Mapping[str, Content]:
        """Return what is held, and state that this batch and earlier ones have written, which is not in place yet."""
        written = dict[str, torch.Tensor]()
        for batch in sorted(batch for batch in self._later if batch <= number):
            waits = self._written_at_end if batch == number else ()  # for the end of this batch
            written |= {name: content for name, content in self._later[batch].items() if name not in waits}
        if not written:
            return held
        return {**held, **{value: written[name] for value, name in self._written_inputs if name in written}}

    def _update_buffers(self, microbatch: int, number: int, samples: int) -> None:
        """Copy back the state that F overwrites; halves that read what was there before get it as a value of F.

        What forwards ahead write stays with the stage until the turn of their batch, so that all others see the state
        of now.
        """
        for name, value in self.program.mutations.items():
            content = self._held[microbatch][value]
            assert isinstance(content, torch.Tensor)
            if name in self.program.averaged:
                self._average(name, content, number, samples)
            elif name in self.program.once or number != self._batch_number:
                self._later[number][name] = content
            else:
                self._tensor(name).copy_(content)

    def _average(self, name: str, content: torch.Tensor, number: int, samples: int) -> None:
        """Take another content of a buffer into the mean over the samples so far."""
        self._averaged[number, name] = self._averaged.get((number, name), 0) + samples
        mean, share = self._later[number].get(name), samples / self._averaged[number, name]
        with torch.no_grad():
            self._later[number][name] = content if mean is None else mean + (content - mean) * share

    def finish(self) -> None:
        """Write the state that changes once per batch."""
        self._put_in_place(lambda name: True)
        self._copies = {}

    def _put_in_place(self, is_due: Callable[[str], bool]) -> None:
        """Write state of the batch at hand that has waited for it."""
        batch = self._batch_number
        later = self._later.get(batch, {})
        with torch.no_grad():
            for name in [name for name in later if is_due(name)]:
                self._tensor(name).copy_(later.pop(name))
                self._averaged.pop((batch, name), None)
        if not later:
            self._later.pop(batch, None)

    def _drop(self, microbatch: int) -> None:
        """Keep only what pending halves read, gradients that wait for W, and what is still to be sent."""
        held = self._held[microbatch]
        for name in held.keys() - self._awaited(microbatch) - self._to_be_sent(microbatch):
            del held[name]
        if not held:
            del self._held[microbatch]

    def _to_be_sent(self, microbatch: int) -> frozenset[str]:
        """Return the names of the values of messages that are not posted yet."""
        edges = tuple([edge for edge in self.program.sends if (*edge, microbatch) in self._sends])
        if edges not in self._to_send:
            self._to_send[edges] = frozenset(name for edge in edges for name in self.program.sends[edge])
        return self._to_send[edges]

    def _awaited(self, microbatch: int) -> frozenset[str]:
        """Return the names that pending halves read, tangents left out, and of gradients that wait for W."""
        pending = self._pending.get(microbatch, ())
        key = tuple(map(id, pending))  # halves are the program's, which lives as long as this stage
        if key not in self._reads:
            self._reads[key] = frozenset(n for half in pending for n in half.inputs).difference(self.program.tangents)
        names = self._reads[key]
        if microbatch in self._away:
            names -= self._away[microbatch].forms.keys()
        if self.program.weight_grad in pending:
            names |= self._waiting_for_weights
        return names

    def _named_in_profiles(self, kind: str, microbatches: Sequence[int]) -> contextlib.AbstractContextManager[object]:
        """Give what runs a name in the profile of torch, if one is being made: that takes longer than an operator."""
        if not is_profiling():
            return _UNNAMED
        return torch.profiler.record_function(f"PP:{self.program.stage}{kind}{'+'.join(map(str, microbatches))}")

    def _accumulate(
        self, due: Mapping[str, Sequence[str]], held: Mapping[str, Content], *, kept: Iterable[Content]
    ) -> None:
        """Add gradients to those of their parameters; a first one is taken as it is if nothing else uses its memory."""
        if not due:
            return
        users = Counter(storage_of(content) for content in kept if isinstance(content, torch.Tensor))
        for canonical, names in due.items():
            terms = [term for name in names if isinstance(term := held[name], torch.Tensor)]
            if not terms:
                continue
            gradient = reduce(torch.add, terms)
            users_of_its_own = 1 if len(names) == 1 else 0
            add_to(self._state.parameters[canonical], gradient, take=users[storage_of(gradient)] == users_of_its_own)


def _number_anew(held: dict[int, Any], passed: int) -> None:
    """Keep what is held of micro-batches from a number on, under numbers that begin there."""
    kept = {m - passed: values for m, values in held.items() if m >= passed}
    held.clear()
    held.update(kept)


def changed_by_several(programs: Iterable[StageProgram]) -> dict[int, frozenset[str]]:
    """Return by stage, of those of a rank in their order, the state that it uses and one before it changes."""
    changed, found = set[str](), dict[int, frozenset[str]]()
    for program in programs:
        used = {*program.buffers.values(), *program.parameters.values(), *program.mutations}
        found[program.stage] = frozenset(changed & used)
        changed |= program.mutations.keys() | program.written
    return found


def gradients_due(program: StageProgram, kind: str) -> dict[str, list[str]]:
    """List, by parameter, the gradients that are complete after I, or (all others) after W."""
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, canonical in program.gradients.items():
        names_of[canonical].append(name)
    early = set(program.input_grad.outputs) if program.input_grad is not None else set()
    return {canonical: names for canonical, names in names_of.items() if (kind == "I") == early.issuperset(names)}


def _can_leave(content: Content, device: torch.device) -> TypeGuard[torch.Tensor]:
    """Return whether a value is dense and on the device; seeds of attention, for one, are on the host already."""
    if not isinstance(content, torch.Tensor) or content.layout != torch.strided:
        return False
    return content.device.type == device.type


def slices_of(leaves: Iterable[Content]) -> Slices:
    """Return where slices of a batch lie."""
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return {storage_of(leaf): (leaf.data_ptr(), leaf.nbytes) for leaf in tensors}


def _apart(content: Content, storages: AbstractSet[int]) -> Content:
    """Return the content, or a copy of it if it lies in one of the storages."""
    if isinstance(content, torch.Tensor) and storage_of(content) in storages:
        return content.clone()
    return content
