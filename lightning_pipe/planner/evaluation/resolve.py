"""Resolution of a plan against a graph: names become cut positions and saved tensors, also across graphs.

Cut position k puts nodes 0..k-1 before and k.. after (core.graph).
"""

from __future__ import annotations

import difflib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_pipe.core.graph import Graph, Node
from lightning_pipe.core.plan import Plan, StagePlan, keeps_all
from lightning_pipe.cost.activations import KEEP, StagePolicy, candidates, checkpointed
from lightning_pipe.cost.stage import StageWork
from lightning_pipe.errors import PlanError


def resolve(plan: Plan, graph: Graph, *, ranks: int) -> tuple[int, ...]:
    """Return the positions at which the plan's stages 1, 2, ... begin.

    Raises:
        PlanError: if the plan was made for another graph, names a place that does not exist, has its stages out of
            order, or uses other ranks than 0..ranks-1.
    """
    if plan.graph and plan.graph != graph.fingerprint:
        raise PlanError(
            f"The plan was made for graph {plan.graph}, the step's graph is {graph.fingerprint}. Make a new plan, or "
            "remove `graph:` from the file if its stage names are still right."
        )
    check_ranks_of_plan(plan, ranks)
    if plan.microbatches < 1:
        raise PlanError(f"The plan has microbatches: {plan.microbatches}; expected at least 1.")
    if plan.stages[0].at:
        raise PlanError(f"The first stage begins at {plan.stages[0].at!r}; expected '' (the start of the graph).")
    positions = [_position(stage.at, graph) for stage in plan.stages]
    for (a, b), (one, two) in zip(itertools.pairwise(positions), itertools.pairwise(plan.stages), strict=True):
        if b <= a:
            raise PlanError(
                f"Stage {two.at!r} begins at node {b} of the graph, not after stage {one.at!r} at node {a}. List the "
                "stages in forward order, each with at least one node."
            )
    for position, stage in zip(positions, plan.stages, strict=True):
        if position in graph.uncuttable:
            raise PlanError(
                f"A stage cannot begin at {stage.at!r}: {graph.uncuttable[position]}. Begin the stage earlier or later."
            )
    return tuple(positions[1:])


def _position(at: str, graph: Graph) -> int:
    position = graph.position(at)
    if position < 0:
        known = [node.name for node in graph.nodes] + [node.module for node in graph.nodes]
        close = difflib.get_close_matches(at, list(dict.fromkeys(known)), n=3)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise PlanError(f"The plan begins a stage at {at!r}, which is no node and no module of the graph.{hint}")
    return position


def check_ranks_of_plan(plan: Plan, ranks: int) -> None:
    """Refuse a plan that does not use all ranks of the trainer, or a stage that has none.

    Raises:
        PlanError: with the ranks of both.
    """
    if not plan.stages or any(not stage.ranks for stage in plan.stages):
        raise PlanError("The plan has no stages, or a stage without ranks; expected at least one rank per stage.")
    for s, stage in enumerate(plan.stages):
        if len(set(stage.ranks)) != len(stage.ranks):
            raise PlanError(f"Stage {s} lists a rank twice: {list(stage.ranks)}.")
    check_weights(plan)
    used = {rank for stage in plan.stages for rank in stage.ranks}
    if used != set(range(ranks)):
        raise PlanError(
            f"The plan uses ranks {sorted(used)}, the trainer has ranks 0..{ranks - 1}. Every rank must run a stage: "
            f"change `devices` to {max(used) + 1}, or the plan's ranks."
        )


def check_weights(plan: Plan) -> None:
    """Check that weights of replicas fit the replicas, before the plan's layout is asked who computes what.

    Raises:
        PlanError: naming the stage, if weights are fewer or more than its ranks, below 1, or given for replicas that
            take whole micro-batches.
    """
    for s, stage in enumerate(plan.stages):
        if not stage.weights:
            continue
        if stage.share == "microbatches":
            raise PlanError(
                f"Stage {s} has weights: {list(stage.weights)}, but `share: microbatches`, under which its replicas "
                "take whole micro-batches in turn. Remove the weights, or write `share: samples`."
            )
        if len(stage.weights) != len(stage.ranks) or min(stage.weights) < 1:
            raise PlanError(
                f"Stage {s} has weights: {list(stage.weights)} for ranks {list(stage.ranks)}; expected as many whole "
                "numbers from 1. Write one weight for each rank, or remove the weights for equal parts."
            )


def resolve_policies(plan: Plan, graph: Graph, works: Sequence[StageWork]) -> tuple[StagePolicy, ...]:
    """Return what each stage of the plan does not keep.

    Args:
        plan: its places are names of saved tensors, or of nodes or modules, which mean all that is saved of what they
            make; what arrives from another stage, or with the batch, has only the name of its tensor.
        graph: of the step.
        works: its stages, when all is kept.

    Returns:
        What the plan's stages say, and what checkpoints in the module would not keep, unless the plan ignores them.

    Raises:
        PlanError: if a place is unknown or saves nothing in its stage, if something cannot be recomputed, or is to be
            both recomputed and offloaded.
    """
    said = [
        KEEP if keeps_all(stage) else _policy(_Places(graph, work, stage=s), stage)
        for s, (stage, work) in enumerate(zip(plan.stages, works, strict=True))
    ]
    if plan.ignore_checkpoints:
        return tuple(said)
    wished = (checkpointed(graph, work) for work in works)
    return tuple(
        replace(own, recomputed=own.recomputed | (more - own.offloaded)) for own, more in zip(said, wished, strict=True)
    )


def _policy(places: _Places, plan: StagePlan) -> StagePolicy:
    recomputed = places.recomputable(plan.recompute)
    offloaded = places.resolve(plan.offload, key="offload")
    if both := recomputed & offloaded:
        raise PlanError(
            f"Stage {places.stage} is to recompute and to offload {places.listed(both)}; expected one of both. Remove "
            "them from `recompute:` or from `offload:`, or name smaller places."
        )
    return StagePolicy(recomputed, offloaded)


def places_followed(graph: Graph, work: StageWork, places: Iterable[str], *, again: bool) -> tuple[str, ...]:
    """Return those of some places that mean something that the stage saves, and (`again`) can recompute."""
    known = _Places(graph, work)
    can = {c.memory for c in candidates(graph, work) if c.is_remakeable or not again}
    return tuple(place for place in places if known.meaning.get(place, frozenset((-1,))) <= can)


def places_of(graph: Graph, work: StageWork, memories: Iterable[int]) -> tuple[str, ...]:
    """Return few places that mean just these of the memories that a stage saves.

    Modules of which all is chosen that they save in the stage, then nodes, then tensors; in the order of the graph.

    Args:
        graph: of the step.
        work: the stage, when all is kept.
        memories: some of its `saved`.
    """
    places, rest = _Places(graph, work), set(memories)
    found: dict[str, int] = {}
    for place in sorted(places.meaning, key=lambda p: (-len(places.meaning[p]), p not in places.modules, -len(p))):
        meant = places.meaning[place]
        if meant <= rest:
            found[place] = min(meant)
            rest -= meant
    assert not rest, f"the stage does not save {sorted(rest)}"
    return tuple(sorted(found, key=lambda place: found[place]))


class _Places:
    """What places mean in one stage.

    Attributes:
        stage: its number.
        meaning: place -> memories that it saves; a name that a module shares with a node or a tensor is not its own.
        modules: places that are modules.
    """

    def __init__(self, graph: Graph, work: StageWork, *, stage: int = 0) -> None:
        self.stage = stage
        self._graph, self._work = graph, work
        names: dict[str, set[int]] = defaultdict(set)
        modules: dict[str, set[int]] = defaultdict(set)
        made_here = set(work.forward.operations)
        for memory in work.saved:
            tensor = graph.tensors[memory]
            names[tensor.name].add(memory)
            if tensor.maker in made_here and graph.operations[tensor.maker].phase == "forward":
                node = graph.nodes[graph.operations[tensor.maker].at]
                names[node.name].add(memory)
                for module in _paths(node.module):
                    modules[module].add(memory)
        self.modules = frozenset(modules.keys() - names.keys())
        self.meaning = {place: frozenset(meant) for place, meant in (modules | names).items()}

    def resolve(self, places: Sequence[str], *, key: str) -> frozenset[int]:
        """Return the memories that places mean; `key` is where they stand in the plan."""
        return frozenset(memory for place in places for memory in self._meant(place, key))

    def _meant(self, place: str, key: str) -> frozenset[int]:
        if place in self.meaning:
            return self.meaning[place]
        where = f"Stage {self.stage} of the plan names {place!r} in `{key}:`"
        if place and (self._graph.position(place) >= 0 or any(t.name == place for t in self._graph.tensors)):
            raise PlanError(
                f"{where}, where it saves nothing. Name what this stage saves ({len(self._work.saved)} tensors), or "
                "remove the name."
            )
        close = difflib.get_close_matches(place, self.meaning, n=3)
        hint = f"Did you mean {', '.join(close)}?" if close else f"It saves {self.listed(self._work.saved)}."
        raise PlanError(f"{where}, which is no tensor, no node and no module of the graph. {hint}")

    def recomputable(self, places: Sequence[str]) -> frozenset[int]:
        """Return what the backward can recompute of places.

        Raises:
            PlanError: if that is nothing of one of them.
        """
        remakeable = {c.memory for c in candidates(self._graph, self._work) if c.is_remakeable} if places else set()
        found = set[int]()
        for place in places:
            meant = self._meant(place, "recompute")
            if meant.isdisjoint(remakeable):
                raise PlanError(
                    f"Stage {self.stage} cannot recompute {self.listed(meant)}: it arrives from elsewhere, is read by "
                    f"what is not recomputed, or needs state that the step overwrites. Remove {place!r} from "
                    "`recompute:`."
                )
            found |= meant & remakeable
        return frozenset(found)

    def listed(self, memories: Iterable[int]) -> str:
        """Name some memories."""
        names = [self._graph.tensors[memory].name for memory in sorted(memories)]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return (", ".join(names[:_MOST_NAMES]) or "nothing") + more


_MOST_NAMES = 5  # in a message


def _paths(module: str) -> list[str]:
    """Return a module and all modules that it is in, the outermost first; nothing for the step itself."""
    return list(itertools.accumulate(module.split("."), "{}.{}".format)) if module else []


@dataclass(frozen=True)
class Transferred:
    """Cuts of another graph of the same module.

    Attributes:
        cuts: positions in the other graph; equal positions mark stages without work there.
        missing: stage -> parameters that it reads there but does not hold in the first graph.
    """

    cuts: tuple[int, ...]
    missing: dict[int, tuple[str, ...]]


def transfer_cuts(graph: Graph, cuts: tuple[int, ...], other: Graph) -> Transferred:
    """Cut `other` (the graph of validation, say) so that every stage reads parameters that it holds already.

    Nodes without parameters stay with the node before them, unless the graph cannot be cut or sliced there. A parameter
    that `graph` does not read at all is held everywhere.
    """
    holders: dict[str, set[int]] = {}
    for stage, nodes in enumerate(_stages(graph, cuts)):
        for node in nodes:
            for parameter in node.parameters:
                holders.setdefault(parameter, set()).add(stage)
    everywhere = set(range(len(cuts) + 1))
    begins = [0]
    missing: dict[int, dict[str, None]] = {}
    free = 0  # first position after the last node with parameters
    for position, node in enumerate(other.nodes):
        held = [holders.get(parameter, everywhere) for parameter in node.parameters]
        if not held:
            continue
        stage = len(begins) - 1
        later = [s for s in set.intersection(*held) if s >= stage]
        begins += [_good_position(other, free, position)] * (min(later) - stage if later else 0)
        free = position + 1
        for parameter, stages in zip(node.parameters, held, strict=True):
            if len(begins) - 1 not in stages:
                missing.setdefault(len(begins) - 1, {})[parameter] = None
    begins += [len(other.nodes)] * (len(cuts) + 1 - len(begins))
    return Transferred(tuple(begins[1:]), {stage: tuple(names) for stage, names in missing.items()})


def _good_position(graph: Graph, first: int, last: int) -> int:
    """Return the last position of a range at which the graph can be cut and sliced, else the last of all."""
    avoided = graph.uncuttable.keys() | graph.unsliceable
    return next((position for position in range(last, first - 1, -1) if position not in avoided), last)


def _stages(graph: Graph, cuts: tuple[int, ...]) -> list[tuple[Node, ...]]:
    bounds = (0, *cuts, len(graph.nodes))
    return [graph.nodes[a:b] for a, b in itertools.pairwise(bounds)]
