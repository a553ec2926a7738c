"""Stage programs of replayed units: what each stage is given, sends and trains, and the functions that play it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.recording.unit_inputs import RUNNING
from lightning_pipe.capture.recording.units import Source, UnitOutput, UnitTrace
from lightning_pipe.capture.replayed.replay_graph import leaf_sizes
from lightning_pipe.capture.replayed.replay_head import (
    OF_HEAD,
    TANGENT,
    TAPE,
    ReplayHead,
    asked_name,
    batch_head,
    fixed_size,
    gradient_names,
    head_gradient,
    headed_backward,
    output_names,
    state_names,
    state_values,
)
from lightning_pipe.capture.replayed.replay_needs import StageNeeds, compared_units, head_needs, needs_of
from lightning_pipe.capture.replayed.replay_values import (
    LOSS,
    leaf_size,
    size_of,
    sizes_as_tensor,
    sizes_name,
    sizes_value,
)
from lightning_pipe.capture.replayed.stage_replayer import StageReplayer
from lightning_pipe.capture.replayed.stage_spec import BatchContext, PlayedStep, StageSpec
from lightning_pipe.capture.steps.stage_program import Combine, Half, Split, StageProgram, Value
from lightning_pipe.core.program import Bucket, Edge, HeadTraffic, Pass, Traffic
from lightning_pipe.lightning_names import rank_zero_warn


@dataclass(frozen=True)
class _Stage:
    """One stage: its units, what it needs, and of that what its head needs."""

    number: int
    begin: int
    end: int
    needs: StageNeeds
    head: StageNeeds | None = None


class UnitSplitter:
    """Make stage programs of the units of a step.

    Args:
        request: the step, with the module of this rank.
        trace: its units.
        aliases: canonical names of the parameters by all names.
        now: what changes from batch to batch.
        held: stages that hold a copy of a parameter, whether they use it here or not.
        recomputed: units that run again in the backward.
        sizes_travel: whether stages tell each other how large is what units return.
    """

    def __init__(
        self,
        request: Request,
        trace: UnitTrace,
        aliases: dict[str, str],
        now: BatchContext,
        held: Mapping[str, Set[int]],
        recomputed: Set[int],
        *,
        sizes_travel: bool,
    ) -> None:
        self._held, self._recomputed = held, recomputed
        self._request, self._trace, self._aliases, self._now = request, trace, aliases, now
        self._units, self._sizes_travel = trace.units, sizes_travel
        self._asked: tuple[int, ...] = ()
        self._batch_dim = request.batch_dim if request.samples is not None else None
        self._buffers = tuple(name for name, _ in request.module.named_buffers())
        norms = [path for path, m in request.module.named_modules() if isinstance(m, RUNNING)]
        self._statistics = {f"{path}.{name}" for path in norms for name in ("running_mean", "running_var")}
        self._once = trace.once | {f"{path}.num_batches_tracked" for path in norms}
        self._names: dict[str, list[str]] = defaultdict(list)
        for name, canonical in aliases.items():
            self._names[canonical].append(name)

    def split(self, cuts: tuple[int, ...]) -> Split:
        """Cut before the units at these positions, which must be allowed."""
        bounds = (0, *cuts, len(self._units))
        if self._trace.head:
            self._asked = compared_units(self._trace, leaf_sizes(self._trace, self._request))
        stages = [
            self._stage(number, begin, end, is_last=number == len(cuts))
            for number, (begin, end) in enumerate(itertools.pairwise(bounds))
        ]
        owner = {k: stage.number for stage in stages for k in range(stage.begin, stage.end)}
        owner[len(self._units)] = len(cuts)  # of glue
        self._follow_state(owner)
        inside = {owner[k] for k in self._trace.keeping | self._trace.outputting}
        self._now.speakers = tuple(sorted({*inside, *self._now.knowing.values(), len(stages) - 1}))
        programs = tuple(self._program(stage, stages, owner) for stage in stages)
        values = {value.name: value for value in self._values(stages)}
        edges = tuple(
            self._edge(direction, program.stage, target, [values[name] for name in names])
            for program in programs
            for (direction, target), names in sorted(program.sends.items())
        )
        buckets, parameters = self._buckets(programs)
        owners = {LOSS: len(stages) - 1} if self._trace.loss is not None else {}
        traffic = Traffic(edges, buckets, (0,), head=self._head_traffic(programs[-1], values))
        return Split(programs, values, traffic, parameters, owners, may_lack_gradients=True)

    def _head_traffic(self, program: StageProgram, values: Mapping[str, Value]) -> HeadTraffic | None:
        """Return the bytes that the head of the last stage is given of all micro-batches."""
        if program.head is None:
            return None
        edge = self._edge("F", 0, 0, [values[name] for name in program.head.half.inputs if name in values])
        return HeadTraffic(edge.bytes_per_sample, edge.fixed_bytes, holds_backwards=program.head.holds_backwards)

    @property
    def _stops(self) -> bool:
        """Return whether plays of the last stage end behind its last unit."""
        return self._trace.head == "holds" or (self._trace.head == "speaks" and self._trace.loss is None)

    def _stage(self, number: int, begin: int, end: int, *, is_last: bool) -> _Stage:
        needs = needs_of(self._trace, begin, end, is_last=is_last and not self._stops)
        if not is_last or not self._trace.head:
            return _Stage(number, begin, end, needs)
        head = head_needs(self._trace, self._asked)
        return _Stage(number, begin, end, needs.joined(head, begin=begin), head)

    def _follow_state(self, owner: Mapping[int, int]) -> None:
        """Note which stage knows of Python state outside of units; warn where several write to it."""
        stages = {place: {owner[k] for k in place.units} for place in self._trace.written}
        self._now.knowing = {place.path: min(by) for place, by in stages.items() if len(by) == 1}
        glue = len(self._units)
        self._now.written_by_glue = frozenset(place.path for place in self._trace.written if glue in place.units)
        if scattered := sorted(place.name for place, by in stages.items() if len(by) > 1):
            rank_zero_warn(
                f"{', '.join(scattered)} is changed inside of sub-modules (by a hook, say) that different ranks run. "
                "It is left as the last stage leaves it, which has not seen the changes of the others: a counter "
                "counts the calls of that stage alone. Keep it on the sub-modules themselves, or in the step."
            )

    def _played(self) -> PlayedStep:
        return PlayedStep(
            module=self._request.module,
            method=self._request.method,
            structure=self._request.structure,
            batch_dim=self._batch_dim,
            context=self._request.context,
            trace=self._trace,
            device=self._request.device,
            has_backward=self._trace.loss is not None,
            sizes_travel=self._sizes_travel,
        )

    def _program(self, stage: _Stage, stages: list[_Stage], owner: dict[int, int]) -> StageProgram:
        part, step = self._part(stage, stages), self._played()
        player = StageReplayer(step, part, self._now)
        has_loss = stage is stages[-1] and self._trace.loss is not None
        head = None if stage.head is None else self._head_part(stage, stage.head, part)
        leaves = {f"leaf{i}": i for i in part.leaves}
        receives: dict[tuple[Pass, int], list[str]] = defaultdict(list)
        sends: dict[tuple[Pass, int], list[str]] = defaultdict(list)
        if stage.number:
            receives["F", 0] += leaves
        else:
            for other in stages[1:]:
                sends["F", other.number] += [f"leaf{i}" for i in other.needs.leaves]
        for k in part.given:
            receives["F", owner[k]] += output_names(self._units, k)
            sends["B", owner[k]] += gradient_names(self._units, k, stage.number)
        for k, target in part.receivers:
            sends["F", target] += output_names(self._units, k)
            receives["B", target] += gradient_names(self._units, k, target)
        last, asked = len(stages) - 1, [asked_name(k) for k in self._asked if owner[k] == stage.number]
        if stage.number < last:
            sends["F", last] += asked
        else:
            for k in (k for k in self._asked if owner[k] != last):
                receives["F", owner[k]].append(asked_name(k))
        if self._sizes_travel and stage.number:
            receives["F", stage.number - 1].append(sizes_name(stage.number - 1))
        if self._sizes_travel and stage.number < last:
            sends["F", stage.number + 1].append(sizes_name(stage.number))
        is_trained = self._trace.loss is not None
        return StageProgram(
            stage=stage.number,
            parameters={f"parameter:{name}": self._aliases[name] for own in part.parameters.values() for name in own},
            buffers={f"buffer:{name}": name for name in part.buffers},
            leaves=leaves if stage.number == 0 else {},
            tangents=(TANGENT,) if has_loss else (),
            forward=self._forward(player, last, has_loss=has_loss and part.is_last),
            input_grad=self._backward(player, stage.number, head, has_loss=has_loss) if is_trained else None,
            weight_grad=None,
            receives={edge: tuple(names) for edge, names in receives.items() if names and _is_run(edge, is_trained)},
            sends={edge: tuple(names) for edge, names in sends.items() if names and _is_run(edge, is_trained)},
            mutations={name: f"changed:{name}" for name in part.mutations},
            once=self._once & set(part.mutations),
            averaged=frozenset(self._statistics.intersection(part.mutations)),
            written=frozenset(self._aliases[name] for name in self._trace.writes) & part.parameters.keys(),
            gradients={f"gradient:{name}": name for name in part.trained},
            results=(LOSS,) if has_loss else (),
            head=None if head is None else batch_head(self._units, ReplayHead(step, head, self._now)),
        )

    def _head_part(self, stage: _Stage, needs: StageNeeds, part: StageSpec) -> StageSpec:
        """Return what the head plays: no unit, to the end of the step."""
        end, holds = len(self._units), self._trace.head == "holds"
        read = {str(name) for kind, name in self._all_sources() if kind == "parameter"}
        return replace(
            part,
            begin=end,
            end=end,
            is_last=True,
            stops=False,
            is_head=True,
            given=needs.units,
            leaves=needs.leaves,
            sent=(),
            parameters={name: tuple(self._names[name]) for name in needs.parameters},
            absent=tuple(n for name in sorted(read - {*needs.parameters}) for n in self._names[name]),
            buffers=tuple(name for name in self._buffers if name in needs.state),
            mutations=(),
            trained=tuple(name for name in needs.parameters if holds and name in self._trace.trained),
            receivers=(),
            recomputed=frozenset(),
            asked=self._asked,
        )

    def _part(self, stage: _Stage, stages: list[_Stage]) -> StageSpec:
        units, needs = self._units, stage.needs
        used = {name for one in stages for name in one.needs.parameters}
        own = range(stage.begin, stage.end)
        readers = [stage] if stage.number else stages  # the first stage hands leaves to the others
        receivers = [(k, other.number) for other in stages for k in other.needs.units if k in own]
        mutations = {name for k in own for name in units[k].mutations}
        changes = {change.name for change in self._trace.changes if change.is_tensor and change.before <= stage.end}
        inside = {name for k in own for name in units[k].buffers}
        buffers = [n for n in self._buffers if n in inside or n in mutations or n in needs.state]
        read = {str(name) for kind, name in self._all_sources() if kind == "parameter"}
        written = [name for name in self._buffers if name in changes and name not in buffers]
        return StageSpec(
            number=stage.number,
            begin=stage.begin,
            end=stage.end,
            is_last=stage is stages[-1] and not self._stops,
            stops=stage is stages[-1] and self._stops,
            asked=tuple(k for k in self._asked if k in own),
            given=needs.units,
            leaves=tuple(sorted({i for reader in readers for i in reader.needs.leaves})),
            sent=tuple(sorted({*(k for k, _ in receivers), *(k for k in own if stage.head and k in stage.head.units)})),
            parameters={name: tuple(self._names[name]) for name in needs.parameters},
            absent=(*(n for name in sorted(read - set(needs.parameters)) for n in self._names[name]), *written),
            buffers=tuple(buffers),
            mutations=tuple(n for n in self._buffers if n in mutations or (n in changes and n in needs.state)),
            trained=tuple(name for name in needs.parameters if name in self._trace.trained),
            spare=tuple(name for name in dict.fromkeys(self._aliases.values()) if name not in used),
            receivers=tuple(receivers),
            recomputed=frozenset(self._recomputed & {*own}),
        )

    def _all_sources(self) -> Iterator[Source]:
        for unit in self._units:
            yield from unit.reads
        for escape in self._trace.escapes:
            yield from escape.reads
        yield from self._trace.tail

    def _forward(self, player: StageReplayer, last: int, *, has_loss: bool) -> Half:
        part = player.part
        is_told, tells = (self._sizes_travel and is_inside for is_inside in (part.number > 0, part.number < last))
        state = state_names(part)
        inputs = [*state_values(part), *(f"leaf{i}" for i in part.leaves)]
        given = [name for k in part.given for name in output_names(self._units, k)]
        outputs = [
            TAPE,
            *(name for k in part.sent for name in output_names(self._units, k)),
            *([LOSS] if has_loss else []),
        ]
        outputs += [asked_name(k) for k in part.asked]
        given += [sizes_name(part.number - 1)] if is_told else []
        outputs += [sizes_name(part.number)] if tells else []
        changed = [f"changed:{name}" for name in part.mutations]

        def run(samples: int, key: Any, *values: Any) -> tuple[Any, ...]:
            tensors = iter(values)
            hung = {name: next(tensors) for name in state}
            batch = {i: next(tensors) for i in part.leaves}
            handed = {k: tuple(next(tensors) for _ in self._units[k].outputs) for k in part.given}
            sizes = next(tensors) if is_told else None
            play = player.forward(samples, key, state=hung, leaves=batch, given=handed, sizes=sizes)
            made = [tensor for k in part.sent for tensor in play.sent[k]]
            made += [play.loss] if has_loss else []
            made += [play.asked[k] for k in part.asked]
            made += [sizes_as_tensor(self._units, play.sizes)] if tells else []
            return (play.tape, *made, *(play.changed[name] for name in part.mutations))

        return Half((*inputs, *given), (*outputs, *changed), run)

    def _backward(self, player: StageReplayer, number: int, head: StageSpec | None, *, has_loss: bool) -> Half:
        part = player.part
        if head is not None and self._trace.head == "holds":
            return headed_backward(self._units, player, head, number, self._now)
        back = [(k, target, gradient_names(self._units, k, target)) for k, target in part.receivers]
        inputs = [TAPE, *([TANGENT] if has_loss else []), *(name for *_, names in back for name in names)]
        outputs = [name for k in part.given for name in gradient_names(self._units, k, number)]

        def run(samples: int, key: Any, handle: int, *values: Any) -> tuple[Any, ...]:
            tensors = iter(values)
            tangent = next(tensors) if has_loss else None
            gradients = {(k, target): tuple(next(tensors) for _ in names) for k, target, names in back}
            returned, trained = player.backward(handle, tangent=tangent, gradients=gradients)
            return (*(g for k in part.given for g in returned[k]), *(trained[name] for name in part.trained))

        return Half(tuple(inputs), (*outputs, *(f"gradient:{name}" for name in part.trained)), run)

    def _values(self, stages: list[_Stage]) -> Iterator[Value]:
        """Yield what is known of everything that crosses stages, and of the loss."""
        for i, leaf in enumerate(self._request.structure.leaves):
            along = self._batch_dim if self._batch_dim is not None and len(leaf.shape) > self._batch_dim else None
            yield Value(f"leaf{i}", leaf.dtype, partial(leaf_size, leaf, batch_dim=along), along)
        for stage in stages:
            for k in stage.needs.units:
                outputs = self._units[k].outputs
                for name, output in zip(output_names(self._units, k), outputs, strict=True):
                    yield replace(_value(name, output, combine="mean"), sizes_travel=self._sizes_travel)
                differentiated = [output for output in outputs if output.has_gradient]
                for name, output in zip(gradient_names(self._units, k, stage.number), differentiated, strict=True):
                    yield replace(_value(name, output, combine="sum"), order=(), sizes_travel=self._sizes_travel)
            if self._sizes_travel:
                yield sizes_value(self._units, stage.number)
        for k in self._asked:
            yield Value(asked_name(k), torch.float64, lambda samples: (samples, 2), 0, combine="cat")
        if (head := stages[-1].head) is not None:
            yield from self._values_of_head(head)
        if self._trace.loss is not None:
            combine: Combine = "same" if self._trace.head == "holds" else self._trace.combine
            yield Value(LOSS, self._trace.loss, lambda samples: (), None, combine=combine)

    def _values_of_head(self, head: StageNeeds) -> Iterator[Value]:
        """Yield what is known of what the head is given, and makes."""
        for k in head.units:
            outputs = self._units[k].outputs
            for name, output in zip(output_names(self._units, k), outputs, strict=True):
                yield _value(name, output, combine="mean")
            differentiated = [output for output in outputs if output.has_gradient]
            for name, output in zip(gradient_names(self._units, k, OF_HEAD), differentiated, strict=True):
                yield replace(_value(name, output, combine="sum"), order=())
        for name in head.parameters:
            parameter = self._request.module.get_parameter(name)
            yield Value(head_gradient(name), parameter.dtype, partial(fixed_size, tuple(parameter.shape)), None)

    def _edge(self, direction: Pass, source: int, target: int, values: list[Value]) -> Edge:
        samples = self._trace.samples
        sizes = [(value.batch_dim is None, _value_bytes(value, samples)) for value in values]
        per_sample = sum(size for is_fixed, size in sizes if not is_fixed) / samples
        return Edge(direction, source, target, per_sample, sum(size for is_fixed, size in sizes if is_fixed))

    def _buckets(self, programs: tuple[StageProgram, ...]) -> tuple[tuple[Bucket, ...], tuple[tuple[str, ...], ...]]:
        """Group trained parameters by the stages that hold them."""
        holders: dict[str, set[int]] = defaultdict(set)
        for program in programs:
            for name in dict.fromkeys(program.parameters.values()):
                if name in self._trace.trained:
                    holders[name] |= {program.stage, *self._held.get(name, ())}
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in dict.fromkeys(self._aliases.values()):
            if name in holders:
                groups[tuple(sorted(holders[name]))].append(name)
        sizes = {name: self._request.module.get_parameter(name).nbytes for name in holders}
        buckets = tuple(Bucket(stages, sum(sizes[name] for name in names)) for stages, names in groups.items())
        return buckets, tuple(tuple(names) for names in groups.values())


def _is_run(edge: tuple[Pass, int], is_trained: bool) -> bool:
    return edge[0] == "F" or is_trained


def _value(name: str, output: UnitOutput, *, combine: Combine) -> Value:
    """Return what is known of one tensor; without samples, its slices are combined as the loss is."""
    how: Combine = "cat" if output.batch_dim is not None else combine
    return Value(name, output.dtype, partial(size_of, output), output.batch_dim, output.rows, how, output.order)


def _value_bytes(value: Value, samples: int) -> int:
    assert value.dtype is not None, "units return tensors"
    return torch.Size(value.size(samples)).numel() * value.dtype.itemsize
