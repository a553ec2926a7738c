"""Runtime of one captured step on a rank: stages, an executor, and a program per way to cut a batch.

A forward-only step may read parameters in a stage that does not hold them (validation may use a module at another
place than training does). Those are borrowed: copied from a rank that has them, again after every training step.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn

from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.stages.split import check_slices
from lightning_pipe.capture.steps.batch import contents
from lightning_pipe.capture.steps.module_tables import canonical_names
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.capture.steps.step_function import NUMBERS
from lightning_pipe.capture.text_fields import texts
from lightning_pipe.capture.tracked.number_expressions import MOST_INPUTS
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import AnyCompute, CopyingOrder, Layout, Program, Seam, VerifiedProgram
from lightning_pipe.errors import PipelineError
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.runtime.activations.protocol import HostStore
from lightning_pipe.runtime.agree import disagreements
from lightning_pipe.runtime.exchanges.groups import bucket_group, connect
from lightning_pipe.runtime.exchanges.results import Results
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.stage import State
from lightning_pipe.schedule.formats.text import format_program
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.forward_only import forward_only
from lightning_pipe.schedule.registry import planned_join, planned_order
from lightning_pipe.schedule.rules import Dataflow, forwards_first, is_forwards_first
from lightning_pipe.schedule.verification.rounds import verify_rounds
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import WeightPolicy
from lightning_pipe.strategy.parameters.weights import Placement, Weights
from lightning_pipe.strategy.ranks.connections import Connections
from lightning_pipe.strategy.start.compilation import Compilation
from lightning_pipe.strategy.steps.captured import Captured
from lightning_pipe.strategy.steps.message_bounds import message_bounds
from lightning_pipe.strategy.steps.metrics import exchanged
from lightning_pipe.strategy.steps.step_calls import StepRequest


class RankStep:
    """A captured step on this rank.

    Args:
        captured: the captured step.
        split: its stages.
        plan: ranks of the stages, and schedule.
        links: to the other ranks.
        weights: where parameters live.
        device: where this rank computes.
        host: where it offloads to.
        early: whether ranks run ahead of each other.
        compilation: compiles the stages; None if they run as they are.

    Attributes:
        captured: as given.
        early, plan: as given.
        buffers: of this rank, by name.
    """

    def __init__(
        self,
        captured: Captured,
        split: Split,
        *,
        plan: Plan,
        links: Connections,
        weights: Weights,
        device: torch.device,
        host: HostStore,
        early: bool = False,
        compilation: Compilation | None = None,
    ) -> None:
        check_slices(split, plan.layout)
        self.early = early
        self._compiled = None if compilation is None else compilation.of(split)
        split = split if self._compiled is None else self._compiled.split
        self.capture, self.split = captured.capture, split
        self.names = exchanged(captured.capture)
        self.captured = captured
        self.plan, self._links, self._weights, self._device = plan, links, weights, device
        self._lent: dict[str, torch.Tensor] = {}
        self._lent_at = -1
        self._borrowed: tuple[str, ...] = ()
        self._borrowed_in: Placement | None = None
        self._parameters: dict[str, torch.Tensor] = {**weights.parameters}
        self._numbers = torch.zeros(MOST_INPUTS, dtype=torch.float64, device=device)
        state = State(
            parameters=self._parameters,
            # Only the first map of a chain is ever written to, so the others need not be mutable as its type says.
            buffers=ChainMap({NUMBERS: self._numbers}, self._lent, weights.buffers),  # type: ignore[arg-type]
            device=device,
            sparse=_sparse(captured.request.module),
        )
        self.buffers = state.buffers
        transport = links.transport
        loss = self.capture.record.loss
        self.executor = Executor(split, plan.layout, state=state, transport=transport, loss=loss, host=host)
        # Scalars travel beside the program, on the host; tensors of a device behind it.
        beside, is_on_host = links.control.transport, early or device.type == "cpu"
        self.results = Results(
            split,
            plan.layout,
            transport=(beside if is_on_host else None) or transport,
            device=device,
            carrier=torch.device("cpu") if is_on_host and beside is not None else device,
            sums=None if is_on_host else beside or transport,
        )
        self._programs: dict[tuple[tuple[int, ...], bool, Seam | None], VerifiedProgram] = {}
        self._most_messages: dict[int, int] = {}  # by the identity of a program
        self._are_rounds_proved = False

    def misfit(self, call: StepRequest) -> str:
        """Return "" if what was captured holds for a call now, else what has changed."""
        captured, template = self.captured, call.structure.template
        if self.capture.plays is not None:
            return self.capture.changed(call.situation)
        if captured.reader.has_read and texts(template) != texts(captured.template):
            return "the texts of the batch, which the step reads, have changed"
        holds_more = call.structure.form is None  # than tensors, whose collections the key of a step has
        if holds_more and contents(template) != contents(captured.template):
            return "objects in the batch, which are no tensors, have changed"
        total = captured.request.total_of(call.structure)
        return self.capture.changed(call.situation) or (self.capture.misfit_of_results(total) if total else "")

    def testimony(self, call: StepRequest) -> str:
        """Return "" if the step's Python does now what was captured, else what it does otherwise."""
        request = replace(self.captured.request, arguments=call.arguments, structure=call.structure)
        with torch.inference_mode(False):
            return self.capture.testimony(request)

    def for_lengths(self, call: StepRequest) -> Captured | None:
        """Return the captured step for a call with other lengths, if what was captured holds for them."""
        if self.capture.general is None or self.misfit(call):
            return None
        captured = self.captured
        template = captured.reader.marked(call.structure.template)
        structure = replace(call.structure, template=template)
        request = replace(captured.request, structure=structure, arguments=call.arguments)
        capture = self.capture.for_lengths(request)
        if capture is None:
            return None
        return replace(captured, capture=capture, request=request, template=call.structure.template)

    def varying(self) -> tuple[Place, ...]:
        """List the places of numbers that the step read and that have become other numbers."""
        return self.capture.varying()

    @property
    def has_loss(self) -> bool:
        """Return whether the step gives a loss."""
        return self.capture.record.loss is not None

    @property
    def layout(self) -> Layout:
        """Return the ranks of its stages."""
        return self.plan.layout

    @property
    def why_not_ahead(self) -> str:
        """Return why no forwards may run ahead of the step's batch; "" if they may."""
        if self.capture.plays is not None:
            return "its Python is replayed"
        if state := next((one.state for one in self.capture.late_values if one.state), ""):
            return f"all samples of a batch make the buffer {state}"
        if self.split.traffic.head is not None:
            return "its gradients need all samples of the batch"
        if guards := self.capture.record.guards:
            return f"it decides by numbers of the batch at {guards[0].line}"
        return ""

    def prepare(self, call: StepRequest) -> tuple[float, ...]:
        """Take what a call brings besides the tensors of its batch: numbers, or for a replayed step everything.

        Returns:
            The numbers that stages read.
        """
        if numbers := self.capture.begin(call.arguments, call.structure.template):
            self._numbers[: len(numbers)].copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
        return tuple(numbers)

    def foreseen_numbers(self, call: StepRequest) -> tuple[float, ...] | None:
        """Return the numbers that stages will read for a later batch; None where they cannot be computed now."""
        try:
            return tuple(self.capture.numbers(call.situation))
        except Exception:  # an error of the step belongs to the turn of its batch
            return None

    def held_numbers(self, numbers: Sequence[float]) -> dict[str, torch.Tensor]:
        """Return numbers as a buffer that one batch holds; nothing where stages read none."""
        if not numbers:
            return {}
        vector = torch.zeros(MOST_INPUTS, dtype=torch.float64)
        vector[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        return {NUMBERS: vector.to(self._device)}

    def state_now(self, *, written: bool = False) -> dict[str, torch.Tensor]:
        """Return the buffers that stages of this rank read and write, or only those that they write."""
        stages = self.executor.stages.values()
        state = {name: tensor for stage in stages for name, tensor in stage.state_now().items() if name != NUMBERS}
        names = {name for stage in stages for name in stage.program.mutations} if written else state.keys()
        return {name: state[name] for name in state if name in names}

    def program(
        self,
        sizes: tuple[int, ...],
        *,
        synchronise: bool,
        training: bool,
        seam: Seam | None = None,
        policy: WeightPolicy | None = None,
    ) -> VerifiedProgram:
        """Return the proved program for micro-batches of these sizes, agreed on and connected; on all ranks together.

        Args:
            sizes: samples of the micro-batches.
            synchronise: whether gradients are summed.
            training: whether there is a backward.
            seam: how a round joins those before and after it.
            policy: that decides its order.

        Raises:
            BrokenRouteError: on every rank, if it cannot be made for a fault of this package.
        """
        key = (sizes, synchronise and training, seam)
        if key not in self._programs:

            def proved() -> VerifiedProgram:
                if seam is not None and policy is not None:
                    return self._round(sizes, synchronise, seam, policy)
                return self._joined(sizes, synchronise, training)

            program = self._links.control.made(proved, what="its program")
            agree(self._links, {"program": format_program(program)})
            if self._compiled is not None:
                self._compiled.compile_for(program, control=self._links.control)
            with self._links.watch.opening("the connections of a program"):
                connect(self._links.transport, [program])
            self._programs[key] = program
        return self._programs[key]

    def _joined(self, sizes: tuple[int, ...], synchronise: bool, training: bool) -> VerifiedProgram:
        """Return the program of a batch, which joins W of several micro-batches where the graph holds for them."""
        program = self._lowered(sizes, synchronise, training, join=planned_join(self.plan))
        if why := next(filter(None, map(self.capture.misfit, joined_samples(program))), ""):
            rank_zero_warn(
                f"W of several micro-batches is not joined, as the graph does not hold for their samples: {why}. "
                "Set a smaller `join` in the options of the plan."
            )
            program = self._lowered(sizes, synchronise, training, join=1)
        return program

    def _lowered(self, sizes: tuple[int, ...], synchronise: bool, training: bool, *, join: int) -> VerifiedProgram:
        layout, count = self.plan.layout, len(sizes)
        return verify(
            lower(
                self._planned_order(count) if training else forward_only(layout, count),
                layout=layout,
                sizes=sizes,
                traffic=self.split.traffic,
                training=training,
                synchronise=synchronise and training,
                join=join,
                beside=self.plan.beside_copies,
                confirms=self.early and training,
                publishes=True,
            ),
            launches=self._links.transport.launches,
        )

    def _planned_order(self, microbatches: int) -> CopyingOrder:
        """Return the order of a batch; all forwards first where gradients need all samples, whatever was planned."""
        order, head = planned_order(self.plan, microbatches=microbatches), self.split.traffic.head
        if head is None or not head.holds_backwards or is_forwards_first(order):
            return order
        rank_zero_warn(
            f"Gradients of {self.captured.request.method} need all samples of a batch at once, which was not planned "
            f"for: all forwards run before its backwards, and activations of {microbatches} micro-batches are kept."
        )
        return forwards_first(order)

    def prove_rounds(self, policy: WeightPolicy, sizes: tuple[int, ...]) -> None:
        """Prove, once, that rounds of such batches fit together and keep what the policy promises.

        Raises:
            ProgramError: if they do not.
        """
        if self._are_rounds_proved:
            return
        rounds, enters = list[VerifiedProgram](), tuple[int, ...]()
        batches = max(policy.ahead(self.layout, len(sizes))) // len(sizes) + 3  # filling, full and emptying
        for left in reversed(range(batches)):
            seam = policy.seam(self.layout, len(sizes), enters=enters, following=(len(sizes),) * left)
            known = (sizes * batches)[: seam.batch + max(seam.leaves)]
            rounds.append(self._round(known, True, seam, policy))
            enters = seam.leaves
        verify_rounds(rounds, policy)
        self._are_rounds_proved = True

    def _round(self, sizes: tuple[int, ...], synchronise: bool, seam: Seam, policy: WeightPolicy) -> VerifiedProgram:
        layout, traffic = self.plan.layout, self.split.traffic
        order = policy.order(layout, seam)
        program = lower(
            order, layout=layout, sizes=sizes, traffic=traffic, synchronise=synchronise, publishes=True, seam=seam
        )
        return verify(program, launches=self._links.transport.launches)

    def most_messages(self, program: VerifiedProgram) -> int | None:
        """Return how many messages may be under way beside a compute; None where the host sees them land."""
        if self._links.transport.launches == "on host":
            return None
        if id(program) not in self._most_messages:
            self._most_messages[id(program)] = message_bounds(program)[self._links.control.rank]
        return self._most_messages[id(program)]

    def keep_sums_once(self) -> None:
        """Forget gradients that are sums over ranks already, except on one rank of each sum: one that has kept it."""
        rank, shared = self._links.control.rank, self._weights.sharing()
        for bucket, names in zip(self.split.traffic.buckets, self.split.bucket_parameters, strict=True):
            group = bucket_group(bucket, self.plan.layout)
            for name in names if rank in group else ():
                if rank != (self._weights.owner(name) if name in shared else group[0]):
                    self._weights.parameters[name].grad = None

    def borrowed_parameters(self) -> dict[str, list[int]]:
        """Return parameters that stages read or train without all of their ranks holding them, and these stages."""
        found: dict[str, list[int]] = {}
        for program in self.split.stages:
            for name in dict.fromkeys((*program.parameters.values(), *program.gradients.values())):
                if not self._weights.held_by(name, self.plan.layout.stages[program.stage]):
                    found.setdefault(name, []).append(program.stage)
        return found

    def refresh(self, version: int) -> None:
        """Copy what this step borrows, if weights have changed since."""
        if self._borrowed_in is not self._weights.placement:
            self._borrowed_in = self._weights.placement
            self._borrowed = tuple(sorted({name for name, _ in self._elsewhere()}))
            for name in self._lent.keys() - {*self._borrowed}:  # it is held now
                del self._lent[name]
            self._show_lent()
        if self._lent_at == version or not self._borrowed:
            return
        for name in self._borrowed:
            value = self._weights.copied(name)
            if not self._weights.has(name):
                self._lent[name] = value.to(self._device)
        self._show_lent()
        self._lent_at = version

    def _show_lent(self) -> None:
        """Let stages read what is lent in the place of parameters that are not here."""
        real = self._weights.parameters
        self._parameters.update({**real, **{name: value for name, value in self._lent.items() if name in real}})

    def _elsewhere(self) -> Iterator[tuple[str, int]]:
        """List what a stage reads without all of its ranks holding it."""
        for program in self.split.stages:
            ranks = self.plan.layout.stages[program.stage]
            read = [name for name in program.buffers.values() if name not in program.mutations]  # others are spread
            for name in [*program.parameters.values(), *read]:
                if not self._weights.held_by(name, ranks):
                    yield name, program.stage


def _sparse(module: nn.Module) -> frozenset[str]:
    """Name the parameters of a module whose gradients are sparse."""
    names = canonical_names(module)
    tables = ((path, m) for path, m in module.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    return frozenset(names[f"{path}.weight".removeprefix(".")] for path, table in tables if table.sparse)


_LONGEST = 24  # characters of a text that is said itself, not its hash


@lru_cache(maxsize=1024)
def slices(layout: Layout, sizes: tuple[int, ...]) -> frozenset[int]:
    """Return the numbers of samples that computes will have."""
    lengths = {
        len(layout.samples(stage, replica, microbatch, size))
        for microbatch, size in enumerate(sizes)
        for stage, ranks in enumerate(layout.stages)
        for replica in range(len(ranks))
    }
    return frozenset(lengths - {0})


def pieces(layout: Layout, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the samples of the smallest parts in which a batch is computed: slices, where replicas share samples.

    Where other stages take whole micro-batches because they mix samples, those are returned.
    """
    stage = max(range(len(layout.stages)), key=lambda s: len(layout.stages[s]))
    if layout.whole:
        return sizes
    return tuple(
        samples
        for microbatch, size in enumerate(sizes)
        for replica in range(len(layout.stages[stage]))
        if (samples := len(layout.samples(stage, replica, microbatch, size)))
    )


def joined_samples(program: Program) -> list[int]:
    """Return the numbers of samples that joined W have, rising."""
    flow = Dataflow.of(program)
    joined = {
        flow.count(one, rank=rank)
        for rank, line in enumerate(program.ranks)
        for one in line
        if isinstance(one, AnyCompute) and one.is_joined
    }
    return sorted(joined)


def agree(links: Connections, what: Mapping[str, str]) -> None:
    """Compare texts over all ranks.

    Raises:
        PipelineError: on every rank, if they differ.
    """
    control = links.control
    if control.ranks == 1:
        return
    mine = {name: text if len(text) <= _LONGEST else _hash(text) for name, text in what.items()}
    label = "agreement about the " + " and ".join(what)
    said = [control.to_first(mine, source=rank, what=label) for rank in range(control.ranks)]
    complaints = disagreements([texts for texts in said if texts is not None])
    if complaints := control.broadcast(complaints, source=0, what=label):
        raise PipelineError(
            "The ranks do not agree: " + "; ".join(complaints) + ". All ranks must run the same code with the same "
            "configuration and data; what is random or read from the host must not decide about them."
        )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
