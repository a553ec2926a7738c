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

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from lightning_pipe.capture.closed_stages import closed
from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.python.state_slots import shared_slots
from lightning_pipe.capture.recording.unit_loss import unlike_law
from lightning_pipe.capture.recording.units import Head, OutputRules, UnitTrace
from lightning_pipe.capture.replayed.module_scope import TrainedParameters
from lightning_pipe.capture.replayed.replay_graph import bytes_of, graph_of_units
from lightning_pipe.capture.replayed.replay_needs import readers_of, uncuttable
from lightning_pipe.capture.replayed.replay_values import LOSS
from lightning_pipe.capture.replayed.stage_spec import BatchContext
from lightning_pipe.capture.replayed.unit_draws import unit_draws
from lightning_pipe.capture.replayed.unit_split import UnitSplitter
from lightning_pipe.capture.slicing.results import LateValue
from lightning_pipe.capture.stages.assign import moved
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.module_tables import HookTables, canonical_names
from lightning_pipe.capture.steps.record import Ref, StepRecord
from lightning_pipe.capture.steps.stage_program import FIRST_KEY, NOT_HELD, RandomKey, Split
from lightning_pipe.capture.steps.step_state import ModuleState
from lightning_pipe.capture.tracked.number_expressions import Situation
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.policy import ActivationPolicy
from lightning_pipe.core.profile import Profile
from lightning_pipe.errors import PlanError
from lightning_pipe.profiles.published_graph import profile_of, stash_of
from lightning_pipe.profiles.published_layers import Layer, LayerOutput, Layers


class Replay:
    """A step that is replayed, the route `replay` (`capture.route`).

    Args:
        request: the step, with the module of this rank.
        trace: its units, the same on all ranks.
        reason: why it is replayed.

    Attributes:
        whole: why batches are not cut; "" if they are.
        late_values, ..., number_names: as for every `capture.route.Route`.
    """

    late_values: ClassVar[tuple[LateValue, ...]] = ()
    by_parts: ClassVar[tuple[str, ...]] = ()
    general: ClassVar[None] = None
    name: ClassVar[str] = "replay"
    identity: ClassVar[str] = ""
    is_exact: ClassVar[bool] = False
    is_sliceable: ClassVar[bool] = False
    number_names: ClassVar[list[str]] = []

    def __init__(self, request: Request, trace: UnitTrace, *, reason: str = "") -> None:
        self.reason = reason
        self._request, self.trace = request, trace
        self._now = BatchContext(request.arguments, request.structure.template)
        self._aliases = canonical_names(request.module)
        self._shared = tuple(shared_slots(request.module))
        self._hooks = HookTables(request.module)
        self.whole = trace.whole

    @property
    def record(self) -> StepRecord:
        """Return what is known of the step's words before it runs: that it has a loss."""
        loss = LOSS if self.trace.loss is not None else None
        return StepRecord((), loss, Ref(LOSS) if loss else None, ())

    @cached_property
    def graph(self) -> Graph:
        """Return the units as a graph."""
        return graph_of_units(self._layers, self.trace, self._names, self._request, uncuttable=self._uncuttable)

    @property
    def _sizes_travel(self) -> bool:
        """Return whether batches are never cut, so that the number of samples need not tell any size."""
        return bool(self.trace.whole) or self._request.samples is None

    @cached_property
    def _uncuttable(self) -> dict[int, str]:
        return uncuttable(self.trace, sizes_travel=self._sizes_travel)

    @property
    def plays(self) -> Replay:
        """Return this: it gathers what plays say."""
        return self

    @property
    def head(self) -> Head:
        """Return what is run once per batch: "holds", "speaks" or ""."""
        return self.trace.head

    @property
    def timing(self) -> Profile:
        """Return the seconds of the traced run."""
        return self.profile

    @property
    def writes(self) -> frozenset[str]:
        """Return the names of the parameters that the step writes to."""
        return self.trace.writes

    @property
    def sets_first(self) -> frozenset[str]:
        """Return the names of the parameters that the first call of the step alone writes to."""
        return self.trace.sets_first

    @property
    def proportional(self) -> frozenset[tuple[str, ...]]:
        """Return the places of the numbers that the step returns or logs, and that are in proportion to the samples."""
        return self.trace.proportional

    @property
    def output(self) -> OutputRules:
        """Return what is known of what the step outputs."""
        return self.trace.output

    @property
    def mixing(self) -> tuple[str, ...]:
        """Return the paths of the sub-modules that mix samples: they return something else for parts of a batch."""
        return self.trace.mixing

    @property
    def rows(self) -> Mapping[tuple[str, ...], int]:
        """Return the dimension along which what the step returns or logs has rows of samples, by place."""
        return self.trace.rows

    def unlike_law(self, plays: Sequence[tuple[int, StepRecording]]) -> str:
        """Return "" if plays with so many samples make their losses as was proven, else what they do."""
        if self.trace.law is None:
            return ""
        laws = [(samples, recording.law) for samples, recording in plays if recording.law is not None]
        return unlike_law((self.trace.samples, self.trace.law), laws)

    @property
    def may_draw(self) -> bool:
        """Return True: nobody knows what the Python of the step draws."""
        return True

    @property
    def draws(self) -> tuple[str, ...]:
        """Name what the traced runs draw at random, dropout aside, each with the user's line."""
        in_python = ("numbers of Python's or NumPy's generator",) if self.trace.is_random_in_python else ()
        return (*self.trace.draws, *in_python)

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
        why = self.trace.headless
        said = f" What it says is made of what micro-batches say, since {why}." if why else ""
        return f"replayed, its Python runs on every rank. {self.reason}{said}"

    @cached_property
    def profile(self) -> Profile:
        """Return the seconds of the traced run."""
        found = profile_of(
            self._layers, fingerprint=self.graph.fingerprint, device=self._request.device.type, optimizer_state=0.0
        )
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
            outputs = (LayerOutput(sum(map(bytes_of, unit.outputs)) / samples, readers_of(self.trace, ("unit", k))),)
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
        self._now.metrics = None
        self._now.said.clear()
        self._now.late = Counter()
        self._now.trained = self._trained.now()
        self._now.hooks, self._now.left_hooks = HookTables(self._request.module), None
        return []

    def numbers(self, situation: Situation) -> list[float]:
        """Return []: the Python of the step reads its numbers itself."""
        return []

    def cut(self, sizes: tuple[int, ...]) -> None:
        """Take the samples of the micro-batches that come next, by which lists of the batch are cut, too."""
        self._now.sizes = sizes

    def said(self) -> list[tuple[int, int, int, StepRecording]]:
        """Return (micro-batch, first sample, samples, words) of every play that says something since `begin`."""
        return list(self._now.said)

    @property
    def speakers(self) -> tuple[int, ...]:
        """Return the stages whose plays say something: the last, and those with units that keep Python state."""
        return self._now.speakers

    @cached_property
    def _trained(self) -> TrainedParameters:
        return TrainedParameters(self._request.module)

    def turn(self, turned: Mapping[str, bool]) -> None:
        """Have `requires_grad` as the step has left it where it came to its end, and hooks as one play has."""
        self._trained.put(self._now.trained | dict(turned))
        if self._now.left_hooks is not None:
            self._now.left_hooks.restore()

    def late_changes(self) -> Mapping[str, int]:
        """Return, by name, how many plays since `begin` have changed state that the traced run has not."""
        return dict(self._now.late)

    def misfit(self, samples: int) -> str:
        """Return "" if slices of this many samples can be run, else why not."""
        if self._request.samples is None and samples != self.trace.samples:
            return f"its batches cannot be cut, and it was traced with {self.trace.samples} samples"
        if self.trace.is_for_one_count and samples != self.trace.samples:
            return f"it was traced with {self.trace.samples} samples, and does not run with others"
        return ""

    def misfit_of_results(self, samples: int) -> str:
        """Return "": what it says is told by numbers, batch by batch."""
        return ""

    def with_totals(
        self,
        leaves: Sequence[Any],
        *,
        cut: Sequence[bool],
        sizes: Sequence[int],
        buffers: Mapping[str, torch.Tensor],
        key: RandomKey = FIRST_KEY,
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        """Return the leaves of a whole batch as stages read them, and which are cut: as they are."""
        return tuple(leaves), tuple(cut)

    def changed(self, situation: Situation) -> str:
        """Return why units must be found again before the first batch; later the Python of the step runs every time."""
        is_new = self._now.state is None
        return "hooks were registered since its sub-modules were called" if is_new and not self._hooks.is_same() else ""

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
        reads_twice: bool = False,
    ) -> Split:
        """Cut between units, before those at these positions.

        Args:
            cuts: positions.
            policies: of the stages: units whose stash is made again run again; () keeps what autograd saves.
            held: stages that hold a copy of a parameter, whether they use it here or not.
            exact_ties: not offered by replay.
            reads_twice: as of a captured step; no forwards of this one run ahead, so its backward reads what F read.

        Raises:
            PlanError: if the units of a training step cannot be separated there, or exact ties are wanted; cuts of an
                evaluation are moved to where they can.
        """
        made = {name for policy in policies if policy.backward is not None for name in policy.backward.made}
        recomputed = {k for k, name in enumerate(self._names) if stash_of(name) in made}
        if exact_ties:
            raise PlanError(
                "exact_ties needs the step as one graph, but this step is replayed. Remove exact_ties; gradients of "
                "parameters that several stages use are then added once per step, which differs by rounding only."
            )
        forbidden = self._uncuttable
        if self.trace.loss is None:
            cuts = moved(cuts, count=len(self.trace.units), forbidden=forbidden)
        wrong = sorted(forbidden.keys() & {*cuts})
        if wrong or (self.whole and any(cut == 0 for cut in cuts)):
            place = (*self._names, "its end")[wrong[0] if wrong else 0]
            why = f": {forbidden[wrong[0]]}" if wrong else ""
            raise PlanError(
                f"{self._request.method} cannot be cut before {place}: a stage before it would need what only stages "
                f"behind it know (state that the step keeps, or a value that cannot be sent){why}."
                + (
                    f" It keeps {self.kept}. Return it from the step and keep it in a hook, or log it."
                    if self.kept
                    else ""
                )
            )
        splitter = UnitSplitter(
            self._request,
            self.trace,
            self._aliases,
            self._now,
            held,
            recomputed,
            sizes_travel=self._sizes_travel,
        )
        return closed(splitter.split(cuts))
