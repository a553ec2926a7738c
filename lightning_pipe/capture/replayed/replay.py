"""Capture by replay: the units of a step as a graph for planners, and stage programs for any cut between them.

What planner, schedules, executor and checkpoints see is what a joint capture gives them: a graph whose nodes are units,
a profile, and a split. A stage's forward plays the step (`stage_replayer`), its backward is autograd's, in one
piece: W does nothing.

    trace = trace_units(request, tensors, parts=4)      on one rank, told to all
    capture = Replay(request, trace)
    capture.begin(arguments)                            before every batch
    split = capture.split((3, 7))
    capture.said()                                      what the last stage's plays said, after the batch
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch

from lightning_pipe.capture.graphs.trace import Request
from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.python.reads import shared_slots
from lightning_pipe.capture.python.tracked_number import Situation
from lightning_pipe.capture.recording.said_roles import SaidRole
from lightning_pipe.capture.recording.units import Source, UnitOutput, UnitTrace
from lightning_pipe.capture.replayed.denominator_watch import unequal
from lightning_pipe.capture.replayed.replay_graph import bytes_of, graph_of_units
from lightning_pipe.capture.replayed.replay_needs import StageNeeds, needs_of, readers_of, uncuttable
from lightning_pipe.capture.replayed.replay_values import LOSS, leaf_size, size_of
from lightning_pipe.capture.replayed.stage_replayer import BatchContext, PlayedStep, StageReplayer, StageSpec
from lightning_pipe.capture.replayed.unit_draws import unit_draws
from lightning_pipe.capture.stages.assign import moved
from lightning_pipe.capture.steps.module_tables import canonical_names
from lightning_pipe.capture.steps.record import Ref, StepRecord
from lightning_pipe.capture.steps.stage_program import NOT_HELD, Combine, Half, RandomKey, Split, StageProgram, Value
from lightning_pipe.capture.steps.step_function import StepRecording
from lightning_pipe.capture.steps.step_state import ModuleState
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.policy import ActivationPolicy
from lightning_pipe.core.profile import Profile
from lightning_pipe.core.program import Bucket, Edge, Pass, Traffic
from lightning_pipe.errors import PlanError
from lightning_pipe.profiles.published_graph import profile_of
from lightning_pipe.profiles.published_layers import Layer, LayerOutput, Layers

TAPE, TANGENT = "tape", "tangent"


class Replay:
    """A step that is replayed, the route `replay` (`capture.route`).

    Args:
        request: the step, with the module of this rank.
        trace: its units, the same on all ranks.
        reason: why it is replayed.

    Attributes:
        whole: why batches are not cut; "" if they are.
        general, ..., saves_by_plan: as for every `capture.route.Route`.
    """

    general: ClassVar[None] = None
    name: ClassVar[str] = "replay"
    fallback: ClassVar[str] = ""
    is_fixed: ClassVar[bool] = False
    is_sliceable: ClassVar[bool] = False
    can_run_ahead: ClassVar[bool] = False
    saves_by_plan: ClassVar[bool] = False

    def __init__(self, request: Request, trace: UnitTrace, *, reason: str = "") -> None:
        self.reason = reason
        self._request, self.trace = request, trace
        self._now = BatchContext(request.arguments, request.structure.template)
        self._aliases = canonical_names(request.module)
        self._shared = tuple(shared_slots(request.module))
        self.whole = trace.whole

    @property
    def record(self) -> StepRecord:
        """Return what is known of the step's words before it runs: that it has a loss."""
        loss = LOSS if self.trace.loss is not None else None
        return StepRecord((), loss, Ref(LOSS) if loss else None, ())

    @cached_property
    def graph(self) -> Graph:
        """Return the units as a graph."""
        return graph_of_units(self._layers, self.trace, self._names, self._request)

    @property
    def plays(self) -> Replay:
        """Return this: it gathers what plays say."""
        return self

    @property
    def timing(self) -> Profile:
        """Return the seconds of the traced run."""
        return self.profile

    @property
    def writes(self) -> frozenset[str]:
        """Return the names of the parameters that the step writes to."""
        return self.trace.writes

    @property
    def loss_role(self) -> Literal["mean", "sum"]:
        """Return how losses of micro-batches make that of the batch."""
        return self.trace.combine

    @property
    def proportional(self) -> frozenset[tuple[str, ...]]:
        """Return the places of the numbers that the step returns or logs, and that are in proportion to the samples."""
        return self.trace.proportional

    @property
    def said_roles(self) -> Mapping[tuple[str, ...], SaidRole]:
        """Return how other single numbers that the step returns or logs are combined, by place."""
        return self.trace.said.roles

    @property
    def is_random_in_python(self) -> bool:
        """Return whether the step draws random numbers of Python or NumPy."""
        return self.trace.is_random_in_python

    @property
    def has_unweighed_terms(self) -> bool:
        """Return whether the loss adds sums over samples to other terms."""
        return self.trace.has_terms

    @property
    def mixes_samples(self) -> bool:
        """Return True: nobody follows what sub-modules do with samples."""
        return True

    def averaged_buffers(self) -> tuple[str, ...]:
        """Return (): replicas take whole micro-batches, and what several of them change is the mean by samples."""
        return ()

    def buffers_by_parts(self) -> tuple[str, ...]:
        """Name the buffers that units change for the samples of every micro-batch."""
        changed = dict.fromkeys(name for unit in self.trace.units for name in unit.mutations)
        return tuple(name for name in changed if name not in self.trace.once)

    def left_whole(self, reason: str) -> Replay:
        """Return this, which from now on does not cut batches, for a reason."""
        self.leave_whole(reason)
        return self

    def told(self) -> str:
        """Return in a line by which route the step was captured, and why."""
        return f"The Python of the step runs on every rank (replay). {self.reason}"

    def mixed_logs(self) -> dict[str, str]:
        """Return the lines of logged numbers, by name, that are no sum, mean or extreme of what micro-batches log."""
        return dict(self.trace.said.mixed)

    def mixing(self) -> str:
        """Return, in words, where the step may mix its samples: no more is known."""
        return "A sub-module, or the loss, compares samples or combines them otherwise than by a sum or a mean."

    @cached_property
    def profile(self) -> Profile:
        """Return the seconds of the traced run."""
        found = profile_of(self._layers, fingerprint=self.graph.fingerprint, device="host", optimizer_state=0.0)
        return replace(found, source="measured")

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """Name every unit by its path; calls after the first by their number too."""
        counts: dict[str, int] = defaultdict(int)
        names = []
        for unit in self.trace.units:
            counts[unit.path] += 1
            names.append(unit.path if counts[unit.path] == 1 else f"{unit.path}#{counts[unit.path]}")
        return tuple(names)

    @cached_property
    def _layers(self) -> Layers:
        module, samples = self._request.module, self.trace.samples
        seen: set[str] = set()
        layers = []
        for k, (unit, name) in enumerate(zip(self.trace.units, self._names, strict=True)):
            new = [p for p in unit.parameters if p not in seen]
            seen.update(new)
            outputs = (LayerOutput(sum(map(bytes_of, unit.outputs)) / samples, readers_of(self.trace, k)),)
            weight = sum(module.get_parameter(p).nbytes for p in new)
            layers.append(
                Layer(
                    name, unit.path, (unit.forward_s,), (unit.backward_s,), weight, outputs, unit.saved_bytes / samples
                )
            )
        return Layers(tuple(layers), (samples,))

    @property
    def kept(self) -> str:
        """Name the state that the step keeps, and the lines that change it; "" if it keeps none."""
        named = {f"self.{change.name}{f' at {change.line}' if change.line else ''}" for change in self.trace.changes}
        return "; ".join(sorted(named))

    def leave_whole(self, reason: str) -> None:
        """Do not cut batches from now on; on all ranks."""
        self.whole = reason

    def begin(self, arguments: tuple[int, ...], template: Any) -> list[float]:
        """Take the arguments of the next batch, and what it holds besides tensors; stages read no numbers of it."""
        self._now.arguments, self._now.template = arguments, template
        self._now.state = ModuleState(self._request.module, shared=self._shared, copies=True)
        self._now.said.clear()
        self._now.denominators.clear()
        return []

    def said(self) -> list[tuple[int, int, int, StepRecording]]:
        """Return (micro-batch, first sample, samples, words) of every play that says something since `begin`."""
        return list(self._now.said)

    @property
    def speakers(self) -> tuple[int, ...]:
        """Return the stages whose plays say something: the last, and those with units that keep Python state."""
        return self._now.speakers

    def unequal_denominator(self) -> str:
        """Return the line where plays of the last stage since `begin` divided by counts that weigh wrongly, or ""."""
        return unequal(self._now.denominators)

    def with_role(self, role: Literal["mean", "sum"]) -> Replay:
        """Return the same step with losses of micro-batches combined as means or as sums."""
        return Replay(self._request, replace(self.trace, combine=role), reason=self.reason)

    def without_slices(self) -> Replay:
        """Return this step: its nodes are all taken for such that may mix samples."""
        return self

    def misfit(self, samples: int) -> str:
        """Return "" if slices of this many samples can be run, else why not."""
        if self._request.samples is None and samples != self.trace.samples:
            return f"its batches cannot be cut, and it was traced with {self.trace.samples} samples"
        return ""

    def with_totals(
        self,
        leaves: Sequence[Any],
        *,
        cut: Sequence[bool],
        sizes: Sequence[int],
        buffers: Mapping[str, torch.Tensor],
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Return the leaves of a whole batch as stages read them, and which are cut: as they are."""
        return tuple(leaves), tuple(cut)

    def changed(self, situation: Situation) -> str:
        """Return "": the Python of the step runs every time."""
        return ""

    def varying(self) -> tuple[Place, ...]:
        """Return (): numbers are read anew every time."""
        return ()

    def testimony(self, request: Request) -> str:
        """Return "": the Python of the step is not captured."""
        return ""

    def for_lengths(self, request: Request) -> None:
        """Return None: units are found anew for other lengths."""

    def matched_draws(self, request: Request, key: RandomKey) -> AbstractContextManager[Callable[[], str]]:
        """Let a plain run of the step draw the random numbers that plays draw, inside."""
        return unit_draws(self.trace, request, key)

    def split(
        self,
        cuts: tuple[int, ...],
        *,
        policies: Sequence[ActivationPolicy] = (),
        exact_ties: bool = False,
        held: Mapping[str, Set[int]] = NOT_HELD,
    ) -> Split:
        """Cut between units, before those at these positions.

        Args:
            cuts: positions.
            policies: (), as what modules save is autograd's.
            held: stages that hold a copy of a parameter, whether they use it here or not.
            exact_ties: not offered by replay.

        Raises:
            PlanError: if the units of a training step cannot be separated there, or exact ties are wanted; cuts of an
                evaluation are moved to where they can.
        """
        assert not policies, "a replayed step saves what autograd saves"
        if exact_ties:
            raise PlanError(
                "exact_ties needs the step as one graph, but this step is replayed. Remove exact_ties; gradients of "
                "parameters that several stages use are then added once per step, which differs by rounding only."
            )
        forbidden = uncuttable(self.trace)
        if self.trace.loss is None:
            cuts = moved(cuts, count=len(self.trace.units), forbidden=forbidden)
        wrong = sorted(forbidden.intersection(cuts))
        if wrong or (self.whole and any(cut == 0 for cut in cuts)):
            place = (*self._names, "its end")[wrong[0] if wrong else 0]
            raise PlanError(
                f"{self._request.method} cannot be cut before {place}: a stage before it would need what only stages "
                "behind it know (state that the step keeps, or a shape that depends on data)."
                + (
                    f" It keeps {self.kept}. Return it from the step and keep it in a hook, or log it."
                    if self.kept
                    else ""
                )
            )
        return _Splitter(self._request, self.trace, self._aliases, self._now, held).split(cuts)


@dataclass(frozen=True)
class _Stage:
    """One stage: its units, and what it needs."""

    number: int
    begin: int
    end: int
    needs: StageNeeds


class _Splitter:
    """Make stage programs."""

    def __init__(
        self,
        request: Request,
        trace: UnitTrace,
        aliases: dict[str, str],
        now: BatchContext,
        held: Mapping[str, Set[int]],
    ) -> None:
        self._held = held
        self._request, self._trace, self._aliases, self._now = request, trace, aliases, now
        self._units = trace.units
        self._batch_dim = request.batch_dim if request.samples is not None else None
        self._buffers = tuple(name for name, _ in request.module.named_buffers())
        self._names: dict[str, list[str]] = defaultdict(list)
        for name, canonical in aliases.items():
            self._names[canonical].append(name)

    def split(self, cuts: tuple[int, ...]) -> Split:
        bounds = (0, *cuts, len(self._units))
        stages = [
            _Stage(s, begin, end, needs_of(self._trace, begin, end, is_last=s == len(cuts)))
            for s, (begin, end) in enumerate(itertools.pairwise(bounds))
        ]
        owner = {k: stage.number for stage in stages for k in range(stage.begin, stage.end)}
        self._now.speakers = tuple(sorted({owner[k] for k in self._trace.keeping} | {len(stages) - 1}))
        programs = tuple(self._program(stage, stages, owner) for stage in stages)
        values = {value.name: value for value in self._values(stages)}
        edges = tuple(
            self._edge(direction, program.stage, target, [values[name] for name in names])
            for program in programs
            for (direction, target), names in sorted(program.sends.items())
        )
        buckets, parameters = self._buckets(programs)
        owners = {LOSS: len(stages) - 1} if self._trace.loss is not None else {}
        return Split(programs, values, Traffic(edges, buckets, (0,)), parameters, owners, may_lack_gradients=True)

    def _program(self, stage: _Stage, stages: list[_Stage], owner: dict[int, int]) -> StageProgram:
        part = self._part(stage, stages)
        player = StageReplayer(
            PlayedStep(
                module=self._request.module,
                method=self._request.method,
                structure=self._request.structure,
                batch_dim=self._batch_dim,
                context=self._request.context,
                trace=self._trace,
                device=self._request.device,
                has_backward=self._trace.loss is not None,
            ),
            part,
            self._now,
        )
        has_loss = part.is_last and self._trace.loss is not None
        leaves = {f"leaf{i}": i for i in part.leaves}
        receives: dict[tuple[Pass, int], list[str]] = defaultdict(list)
        sends: dict[tuple[Pass, int], list[str]] = defaultdict(list)
        if stage.number:
            receives["F", 0] += leaves
        else:
            for other in stages[1:]:
                sends["F", other.number] += [f"leaf{i}" for i in other.needs.leaves]
        for k in part.given:
            receives["F", owner[k]] += self._output_names(k)
            sends["B", owner[k]] += self._gradient_names(k, stage.number)
        for k, target in part.receivers:
            sends["F", target] += self._output_names(k)
            receives["B", target] += self._gradient_names(k, target)
        is_trained = self._trace.loss is not None
        return StageProgram(
            stage=stage.number,
            parameters={f"parameter:{name}": self._aliases[name] for own in part.parameters.values() for name in own},
            buffers={f"buffer:{name}": name for name in part.buffers},
            leaves=leaves if stage.number == 0 else {},
            tangents=(TANGENT,) if has_loss else (),
            forward=self._forward(player, has_loss=has_loss),
            input_grad=self._backward(player, stage.number, has_loss=has_loss) if is_trained else None,
            weight_grad=None,
            receives={edge: tuple(names) for edge, names in receives.items() if names and _is_run(edge, is_trained)},
            sends={edge: tuple(names) for edge, names in sends.items() if names and _is_run(edge, is_trained)},
            mutations={name: f"changed:{name}" for name in part.mutations},
            once=self._trace.once & set(part.mutations),
            written=frozenset(self._aliases[name] for name in self._trace.writes) & part.parameters.keys(),
            gradients={f"gradient:{name}": name for name in part.trained},
            results=(LOSS,) if has_loss else (),
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
            begin=stage.begin,
            end=stage.end,
            is_last=stage.number == len(stages) - 1,
            given=needs.units,
            leaves=tuple(sorted({i for reader in readers for i in reader.needs.leaves})),
            sent=tuple(sorted({k for k, _ in receivers})),
            parameters={name: tuple(self._names[name]) for name in needs.parameters},
            absent=(*(n for name in sorted(read - set(needs.parameters)) for n in self._names[name]), *written),
            buffers=tuple(buffers),
            mutations=tuple(n for n in self._buffers if n in mutations or (n in changes and n in needs.state)),
            trained=tuple(name for name in needs.parameters if name in self._trace.trained),
            spare=tuple(name for name in dict.fromkeys(self._aliases.values()) if name not in used),
            receivers=tuple(receivers),
        )

    def _all_sources(self) -> Iterator[Source]:
        for unit in self._units:
            yield from unit.reads
        for escape in self._trace.escapes:
            yield from escape.reads
        yield from self._trace.tail

    def _forward(self, player: StageReplayer, *, has_loss: bool) -> Half:
        part = player.part
        parameters = [name for own in part.parameters.values() for name in own]
        state = [*parameters, *part.buffers]
        leaves = [f"leaf{i}" for i in part.leaves]
        inputs = [f"parameter:{n}" for n in parameters] + [f"buffer:{n}" for n in part.buffers] + leaves
        given = [name for k in part.given for name in self._output_names(k)]
        outputs = [TAPE, *(name for k in part.sent for name in self._output_names(k)), *([LOSS] if has_loss else [])]
        changed = [f"changed:{name}" for name in part.mutations]

        def run(samples: int, key: Any, *values: Any) -> tuple[Any, ...]:
            tensors = iter(values)
            hung = {name: next(tensors) for name in state}
            batch = {i: next(tensors) for i in part.leaves}
            handed = {k: tuple(next(tensors) for _ in self._units[k].outputs) for k in part.given}
            handle, sent, loss, buffers = player.forward(samples, key, state=hung, leaves=batch, given=handed)
            made = [tensor for k in part.sent for tensor in sent[k]]
            return (handle, *made, *([loss] if has_loss else []), *(buffers[name] for name in part.mutations))

        return Half((*inputs, *given), (*outputs, *changed), run)

    def _backward(self, player: StageReplayer, number: int, *, has_loss: bool) -> Half:
        part = player.part
        back = [(k, target, self._gradient_names(k, target)) for k, target in part.receivers]
        inputs = [TAPE, *([TANGENT] if has_loss else []), *(name for *_, names in back for name in names)]
        outputs = [name for k in part.given for name in self._gradient_names(k, number)]

        def run(samples: int, key: Any, handle: int, *values: Any) -> tuple[Any, ...]:
            tensors = iter(values)
            tangent = next(tensors) if has_loss else None
            gradients = {(k, target): tuple(next(tensors) for _ in names) for k, target, names in back}
            returned, trained = player.backward(handle, tangent=tangent, gradients=gradients)
            return (*(g for k in part.given for g in returned[k]), *(trained[name] for name in part.trained))

        return Half(tuple(inputs), (*outputs, *(f"gradient:{name}" for name in part.trained)), run)

    def _output_names(self, k: int) -> list[str]:
        return [f"unit{k}.{i}" for i in range(len(self._units[k].outputs))]

    def _gradient_names(self, k: int, target: int) -> list[str]:
        """Name the gradients of a unit's outputs that come back from a stage."""
        outputs = self._units[k].outputs
        return [f"unit{k}.{i}.gradient{target}" for i, output in enumerate(outputs) if output.has_gradient]

    def _values(self, stages: list[_Stage]) -> Iterator[Value]:
        """Yield what is known of everything that crosses stages, and of the loss."""
        for i, leaf in enumerate(self._request.structure.leaves):
            along = self._batch_dim if self._batch_dim is not None and len(leaf.shape) > self._batch_dim else None
            yield Value(f"leaf{i}", leaf.dtype, partial(leaf_size, leaf, batch_dim=along), along)
        for stage in stages:
            for k in stage.needs.units:
                outputs = self._units[k].outputs
                for name, output in zip(self._output_names(k), outputs, strict=True):
                    yield _value(name, output, combine="mean")
                differentiated = [output for output in outputs if output.has_gradient]
                for name, output in zip(self._gradient_names(k, stage.number), differentiated, strict=True):
                    yield replace(_value(name, output, combine="sum"), order=())
        if self._trace.loss is not None:
            yield Value(LOSS, self._trace.loss, lambda samples: (), None, combine=self._trace.combine)

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
