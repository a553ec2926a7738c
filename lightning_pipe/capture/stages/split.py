"""Split of a graph, cut at given positions, into stage programs.

For every stage: what its forward and backward nodes read from elsewhere decides what crosses. A forward value travels
from its producer straight to every stage that uses it, forward or backward; batch fields travel from stage 0 in the
same way; gradients travel to earlier stages. What a stage sends back is computed first (I), the rest of its backward
later (W).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import Flow, value
from lightning_pipe.capture.operators import takes_output
from lightning_pipe.capture.stages.assign import Kinds, assign, made_of_parameters, partial_sums
from lightning_pipe.capture.stages.batched_weight_grad import joining
from lightning_pipe.capture.stages.emit import Emitter
from lightning_pipe.capture.stages.recomputing import recomputing_halves
from lightning_pipe.capture.stages.state_once import state_averaged, state_once
from lightning_pipe.capture.steps.stage_program import NOT_HELD, BatchHead, Half, Split, StageProgram, Value
from lightning_pipe.capture.torch_private import is_backward
from lightning_pipe.core.policy import KEEP_ALL, ActivationPolicy
from lightning_pipe.core.program import Bucket, Edge, HeadTraffic, Layout, Pass, Traffic
from lightning_pipe.errors import PlanError


@dataclass
class _Needs:
    """What one stage reads from elsewhere and computes; names of values."""

    forward: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    receives: dict[tuple[Pass, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    sends: dict[tuple[Pass, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    gradients: dict[str, str] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)


class Splitter:
    """Cut one joint graph.

    Args:
        joint: the graph.
        kinds: its nodes by kind.
        flow: how samples flow.
        aliases: parameter name -> canonical name (equal for tied parameters).
        device: where it will run.
        exact_ties: whether gradients of a parameter that several stages use are added per micro-batch, in autograd's
            order, instead of once per step; they then travel for every micro-batch.
        held: stages that hold a copy of a parameter, whether they use it in this graph or not: all copies get its
            gradient.
        reads_twice: whether the backward may read other weights than F, so that it makes what is made of them again.
    """

    def __init__(
        self,
        joint: JointGraph,
        *,
        kinds: Kinds,
        flow: Flow,
        aliases: dict[str, str],
        device: torch.device,
        exact_ties: bool = False,
        held: Mapping[str, Set[int]] = NOT_HELD,
        reads_twice: bool = False,
    ) -> None:
        self._held, self._reads_twice, self._device = held, reads_twice, device
        self._joint, self._kinds, self._flow, self._aliases = joint, kinds, flow, aliases
        self._exact_ties = exact_ties
        self._joining = joining(joint, kinds, flow)
        self._nodes: dict[str, fx.Node] = {node.name: node for node in joint.module.graph.nodes}
        self._emitter = Emitter(joint, repeated=kinds.repeated, device=device)
        self._sizes = self._emitter.sizes
        self._state = set(joint.parameters) | set(joint.buffers)

    def split(self, cuts: tuple[int, ...], policies: Sequence[ActivationPolicy] = ()) -> Split:
        """Cut at these positions (indices of `Kinds.placed`); two equal positions make an empty stage.

        Args:
            cuts: positions.
            policies: what each stage does with what it saves; () if all keep everything.

        Raises:
            PlanError: if the positions are out of order, or separate state that the step overwrites from its readers.
        """
        placed = len(self._kinds.placed)
        if any(b < a for a, b in itertools.pairwise((0, *cuts, placed))):
            raise PlanError(
                f"Cut positions {list(cuts)} are no cuts of {placed} nodes; expected ascending positions between 0 and "
                f"{placed}."
            )
        stages = assign(self._joint, self._kinds, cuts)
        if self._reads_twice:
            again = made_of_parameters(self._joint, self._kinds, stages)
            stages = {name: stage for name, stage in stages.items() if name not in again}
            self._emitter = Emitter(self._joint, repeated=self._kinds.repeated | again, device=self._device)
        count = len(cuts) + 1
        needs = [_Needs() for _ in range(count)]
        for name, stage in stages.items():
            if self._nodes[name].op == "placeholder":  # what the head gives
                continue
            (needs[stage].backward if is_backward(self._nodes[name]) else needs[stage].forward).append(name)
        self._place_outputs(needs, stages)
        self._drop_unneeded(needs)
        for stage in range(count):
            self._connect(stage, needs, stages)
        self._check_mutations(needs, stages)
        policies = tuple(policies) or (KEEP_ALL,) * count
        programs = tuple(self._program(stage, needs, policies[stage]) for stage in range(count))
        return self._assemble(programs, needs)

    def _place_outputs(self, needs: list[_Needs], stages: dict[str, int]) -> None:
        last = len(needs) - 1
        outputs = [*([self._joint.loss] if self._joint.loss in self._nodes else []), *self._joint.results]
        for name in dict.fromkeys(outputs):
            needs[stages.get(name, last)].results.append(name)
        terms: dict[str, list[str]] = defaultdict(list)
        for name, parameter in self._joint.gradients:
            own = [name] if self._exact_ties else [t.name for t in partial_sums(self._nodes[name], stages)]
            terms[self._aliases[parameter]] += own
        for parameter, names in terms.items():
            first = min(stages[name] for name in names)
            for name in names:
                needs[first if self._exact_ties else stages[name]].gradients[name] = parameter

    def _drop_unneeded(self, needs: list[_Needs]) -> None:
        """Drop what only adds terms that stay in their stages, as these would travel to be added."""
        backward = {name for own in needs for name in own.backward}
        outputs = {name for own in needs for name in (*own.gradients, *own.results)}
        needed = self._ancestors(outputs, backward)
        for own in needs:
            own.backward = [name for name in own.backward if name in needed or self._taken_from(name) in needed]

    def _connect(self, stage: int, needs: list[_Needs], stages: dict[str, int]) -> None:
        """Find where everything comes from that a stage reads but does not compute."""
        own = needs[stage]
        used: dict[str, None] = dict.fromkeys(self._head_inputs(stage, needs))
        elsewhere = {name: None for name in own.gradients if stages[name] != stage}
        used.update(elsewhere)
        for names in (own.forward, own.backward, own.results):
            for name in sorted(self._reads(names, own.results if names is own.results else ()), key=self._position):
                used.setdefault(name)
        for name in used:
            if name in self._state or name in self._joint.tangents:
                continue
            source = stages.get(name, 0)
            if source == stage or (stage == 0 and name in self._joint.leaves):
                continue
            backwards = source > stage
            direction: Pass = "B" if backwards else "F"
            own.receives[direction, source].append(name)
            needs[source].sends[direction, stage].append(name)

    def _head_inputs(self, stage: int, needs: Sequence[_Needs]) -> tuple[str, ...]:
        """Return what the head reads, if a stage is the last one."""
        head = self._joint.head
        return head.inputs if head is not None and stage == len(needs) - 1 else ()

    def _reads(self, names: list[str], results: list[str] | tuple[str, ...]) -> set[str]:
        reads = self._emitter.inputs_of([n for n in names if n not in results or n in self._kinds.repeated])
        return reads | {n for n in results if n in self._joint.leaves}

    def _position(self, name: str) -> int:
        return self._emitter._order[name]

    def _check_mutations(self, needs: list[_Needs], stages: dict[str, int]) -> None:
        """State that the step overwrites must be read in one stage only."""
        for state, new in self._joint.mutations.items():
            placeholders = [p for p, n in {**self._joint.parameters, **self._joint.buffers}.items() if n == state]
            readers = {
                s for s, own in enumerate(needs) for p in placeholders if p in self._emitter.inputs_of(own.forward)
            }
            owner = stages.get(new, 0)
            if readers - {owner}:
                raise PlanError(
                    f"{state} is overwritten by the step in stage {owner} and read in stage "
                    f"{min(readers - {owner})}; they must be one stage. Move the cut so that it does not lie between "
                    f"{self._place(placeholders)} and {self._line(new)}."
                )

    def _place(self, placeholders: list[str]) -> str:
        users = [u.name for p in placeholders for u in self._nodes[p].users]
        return self._line(users[0]) if users else "its reader"

    def _line(self, name: str) -> str:
        return (self._nodes[name].meta.get("custom") or {}).get("line") or name

    def _program(self, stage: int, needs: Sequence[_Needs], policy: ActivationPolicy) -> StageProgram:
        joint, own = self._joint, needs[stage]
        head = BatchHead(joint.head) if joint.head is not None and stage == len(needs) - 1 else None
        for_head = set(self._head_inputs(stage, needs))
        mutations = {state: new for state, new in joint.mutations.items() if new in own.forward}
        received = {n for names in own.receives.values() for n in names}
        input_names, weight_names = self._halves(own, policy)
        backward_reads = self._reads_of(input_names) | self._reads_of(weight_names)
        overwritten = {
            f"{p}_before": p
            for p, state in {**joint.parameters, **joint.buffers}.items()
            if state in mutations and p in backward_reads
        }
        forward = self._forward(own, mutations, backward_reads | for_head, overwritten)
        renamed = {p: before for before, p in overwritten.items()}
        wants = {n for names in own.sends.values() for n in names}
        input_outputs = self._input_outputs(input_names, weight_names, own, wants)
        read_later = wants | self._reads_of(weight_names)
        input_grad = self._backward(input_names, input_outputs, own, renamed, kept=read_later)
        weight_outputs = [n for n in own.gradients if n in weight_names or n in received]
        weight_grad = self._backward(weight_names, weight_outputs, own, renamed, kept=wants)
        if policy.backward is None and weight_grad is not None and self._is_joinable(weight_grad, weight_names, own):
            along = {n: dim for n, dim in self._joining.along.items() if n in weight_grad.inputs}
            weight_grad = replace(weight_grad, along=along)
        of_head = None if head is None else head.half
        halves = [h for h in (forward, input_grad, weight_grad, of_head) if h is not None]
        read = {n for h in halves for n in h.inputs}
        return StageProgram(
            stage=stage,
            parameters={n: self._aliases[f] for n, f in joint.parameters.items() if n in read},
            buffers={n: f for n, f in joint.buffers.items() if n in (read if stage else read | joint.batch_buffers)},
            leaves={n: i for n, i in joint.leaves.items() if stage == 0 and n in read | wants | set(own.results)},
            tangents=tuple(n for n in joint.tangents if n in read),
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            receives={edge: tuple(names) for edge, names in own.receives.items()},
            sends={edge: tuple(names) for edge, names in own.sends.items()},
            mutations=mutations,
            once=state_once(joint, self._flow) & mutations.keys(),
            averaged=state_averaged(joint, self._flow) & mutations.keys(),
            gradients=dict(own.gradients),
            results=tuple(own.results),
            offloaded=frozenset(policy.offloaded),
            head=head,
        )

    def _reads_of(self, names: Sequence[str]) -> set[str]:
        """Return what a half that runs these nodes is given."""
        return self._emitter.inputs_of(names) - set(names)

    def _is_joinable(self, half: Half, names: list[str], own: _Needs) -> bool:
        """Return whether W of several micro-batches can be one: see `joining`."""
        joining, run = self._joining, {*names, *self._emitter.repeated_by(names)}
        early = {parameter for name, parameter in own.gradients.items() if name not in half.outputs}
        waits = early & {own.gradients[name] for name in half.outputs}  # for another term, made by I
        return not waits and run <= joining.operations and set(half.inputs) <= joining.values | self._state

    def _halves(self, own: _Needs, policy: ActivationPolicy) -> tuple[list[str], list[str]]:
        """Separate the backward nodes that are needed for what is sent from the others; drop those nobody needs.

        Where the stage recomputes, I also runs what is recomputed, and what reads it.
        """
        backward = set(own.backward)
        sent = {n for (direction, _), names in own.sends.items() if direction == "B" for n in names}
        first = self._ancestors(sent & backward, backward)
        first |= {name for name in backward if self._taken_from(name) in first}
        second = self._ancestors(set(own.gradients), backward) - first
        halves = sorted(first, key=self._position), sorted(second, key=self._position)
        if policy.backward is None:
            return self._emitter.in_order(halves[0]), self._emitter.in_order(halves[1])
        return recomputing_halves(*halves, policy=policy.backward, nodes=self._nodes)

    def _taken_from(self, name: str) -> str:
        """Return the operation out of whose results a node is taken; taking it at once lets the others be freed."""
        node = self._nodes[name]
        return node.all_input_nodes[0].name if takes_output(node) else ""

    def _ancestors(self, names: set[str], within: set[str]) -> set[str]:
        found, pending = set(), [n for n in names if n in within]
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending.extend(n.name for n in self._nodes[name].all_input_nodes if n.name in within)
        return found

    def _forward(
        self, own: _Needs, mutations: dict[str, str], backward_reads: set[str], overwritten: dict[str, str]
    ) -> Half:
        computed = set(own.forward)
        leaves = {n for names in own.sends.values() for n in names} | backward_reads | set(own.results)
        outputs = [n for n in own.forward if n in leaves or n in mutations.values()]
        outputs += [n for n in own.results if n in self._kinds.repeated]
        inputs = self._emitter.inputs_of([*own.forward, *(n for n in own.results if n in self._kinds.repeated)])
        outside = sorted((inputs | set(overwritten.values())) - computed, key=self._position)
        outputs += overwritten
        return self._emitter.make(
            self._emitter.in_order(computed, [n for n in outputs if n not in overwritten]),
            inputs=outside,
            outputs=outputs,
            copied=overwritten,
        )

    def _input_outputs(
        self, input_names: list[str], weight_names: list[str], own: _Needs, wants: set[str]
    ) -> list[str]:
        kept, backward = self._emitter.inputs_of(weight_names), set(own.backward)
        return [n for n in input_names if n in backward and (n in wants or n in own.gradients or n in kept)]

    def _backward(
        self, names: list[str], outputs: list[str], own: _Needs, renamed: dict[str, str], *, kept: set[str]
    ) -> Half | None:
        """Make a half of the backward, which gives gradients away whose terms it makes all, and nobody else reads."""
        if not names and not outputs:
            return None
        received = set(outputs) - set(names)  # gradients that another stage has computed
        inputs = sorted(self._reads_of(names) | received, key=self._position)
        terms: dict[str, list[str]] = defaultdict(list)
        for name, parameter in own.gradients.items():
            terms[parameter].append(name)
        made = set(outputs) - received - kept
        given = {parameter: tuple(found) for parameter, found in terms.items() if made.issuperset(found)}
        half = self._emitter.make(names, inputs=inputs, outputs=outputs, given=given)
        return replace(half, inputs=tuple(renamed.get(n, n) for n in half.inputs))

    def _assemble(self, programs: tuple[StageProgram, ...], needs: list[_Needs]) -> Split:
        crossing = {n for own in needs for names in own.sends.values() for n in names}
        outputs = {n for own in needs for n in own.results}
        head = self._joint.head
        of_head = set() if head is None else {*head.inputs, *head.outputs}
        values = {n: value(self._nodes[n], self._joint, self._flow) for n in crossing | outputs | of_head}
        if (loss := self._joint.loss) is not None and loss not in values:
            values[loss] = Value(loss, self._joint.loss_dtype, lambda samples: (), None, combine="sum")
        edges = tuple(
            self._edge(direction, source, target, names)
            for source, own in enumerate(needs)
            for (direction, target), names in sorted(own.sends.items())
        )
        trained = {parameter for program in programs for parameter in program.gradients.values()}
        holders: dict[str, set[int]] = defaultdict(set)
        for program in programs:
            for parameter in {*program.parameters.values(), *program.gradients.values()} & trained:
                holders[parameter] |= {program.stage, *self._held.get(parameter, ())}
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for parameter in dict.fromkeys(self._aliases.values()):
            if parameter in holders:
                groups[tuple(sorted(holders[parameter]))].append(parameter)
        sizes = {self._aliases[f]: _bytes(self._nodes[n]) for n, f in self._joint.parameters.items()}
        buckets = tuple(Bucket(stages, sum(sizes[p] for p in names)) for stages, names in groups.items())
        owners = {n: program.stage for program in programs for n in program.results}
        weights = [(program.stage, program.weight_grad) for program in programs]
        joinable = tuple(stage for stage, half in weights if half is not None and half.along is not None)
        offloads = tuple(program.stage for program in programs if program.offloaded)
        elsewhere = self._state | {*self._joint.tangents}  # nobody puts it together
        lines = [] if head is None else [self._sizes.line(self._nodes[n]) for n in head.inputs if n not in elsewhere]
        gathered = HeadTraffic(sum(line[0] for line in lines), sum(line[1] for line in lines)) if head else None
        traffic = Traffic(edges, buckets, offloads=offloads, joinable=joinable, head=gathered)
        return Split(programs, values, traffic, tuple(map(tuple, groups.values())), owners)

    def _edge(self, direction: Pass, source: int, target: int, names: list[str]) -> Edge:
        lines = [self._sizes.line(self._nodes[name]) for name in names]
        return Edge(direction, source, target, sum(line[0] for line in lines), sum(line[1] for line in lines))


def _bytes(node: fx.Node) -> int:
    tensor = node.meta["val"]
    return int(tensor.numel() * tensor.element_size())


def check_slices(split: Split, layout: Layout) -> None:
    """Check that stages which share micro-batches differently exchange only values that can be sliced.

    Raises:
        PlanError: naming the value and the stages.
    """
    for program in split.stages:
        for (_, target), names in program.sends.items():
            here, there = layout.stages[program.stage], layout.stages[target]
            if _share_alike(layout, program.stage, target):
                continue
            for name in names:
                known = split.values[name]
                if known.batch_dim is None and known.combine in ("cat", "max", "min"):
                    raise PlanError(
                        f"Stage {program.stage} on {len(here)} ranks sends {name} to stage {target} on {len(there)} "
                        "ranks, but its samples do not lie in separate rows, so it cannot be cut into slices. Give "
                        "both stages the same number of ranks, with the same share and weights, or move the cut to "
                        "another node."
                    )


def _share_alike(layout: Layout, one: int, other: int) -> bool:
    """Return whether the n-th replicas of two stages have the same samples of every micro-batch, or all of it."""
    if all(stage in layout.whole or len(layout.stages[stage]) == 1 for stage in (one, other)):
        return True
    shares = [layout.shares(stage) for stage in (one, other)]
    proportions = [[Fraction(share, sum(own)) for share in own] for own in shares]
    return proportions[0] == proportions[1] and (one in layout.whole) == (other in layout.whole)
