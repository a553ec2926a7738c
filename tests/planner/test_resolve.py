"""Places of a plan mean saved tensors, and plans with activation policies are judged by what that costs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from cost.captures import zoo_capture
from cost.sketches import WIDTH, chain
from lightning_pipe.core.cluster import NO_SWAP, Link
from lightning_pipe.core.graph import Node
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import Evict, Fetch
from lightning_pipe.cost.activations import KEEP, StagePolicy, candidates
from lightning_pipe.cost.counted import counted
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged, judge
from lightning_pipe.planner.evaluation.resolve import places_of, resolve_policies
from lightning_pipe.planner.problem import Problem, nominal_cluster
from lightning_pipe.strategy.plans.planning import warn_of_what_stays

CUTS = (1, 3)
SWAP = Link(latency_s=1e-5, bytes_per_s=1e9)


def named():
    """Return a chain of four layers whose nodes have names and modules; stage 1 of `CUTS` is h_1 and h_2."""
    graph = chain(4)
    paths = ["body.one", "body.one", "body.two", "body.two", ""]
    nodes = [Node(f"n{k}", "op", path, "", (), (), 0, 0, 0, 0) for k, path in enumerate(paths)]
    return replace(graph, nodes=tuple(nodes))


def plan_with(graph=None, *, recompute: tuple[str, ...] = (), offload: tuple[str, ...] = ()) -> Plan:
    """Return a plan of three stages, the last of which saves h_2 (that arrives) and h_3, or that graph's in one."""
    stages = [StagePlan("", (0,)), StagePlan("n1", (1,)), StagePlan("n2", (2,))] if graph is None else []
    last = stages.pop() if stages else StagePlan("", (0,))
    return Plan((*stages, replace(last, recompute=recompute, offload=offload)), 2)


def meant(recompute=(), offload=()) -> StagePolicy:
    """Return what places mean in stage 2 of the named chain cut before its second and third layer."""
    graph = named()
    works = Cutter(graph).works((1, 2))
    *others, policy = resolve_policies(plan_with(recompute=recompute, offload=offload), graph, works)
    assert others == [KEEP, KEEP]
    return policy


def names(memories) -> set[str]:
    return {named().tensors[m].name for m in memories}


@pytest.mark.parametrize(
    ("place", "expected"),
    [("h_2", {"h_2"}), ("n2", {"h_2"}), ("body.two", {"h_2", "h_3"}), ("body", {"h_2", "h_3"}), ("h_1", {"h_1"})],
)
def test_a_place_is_a_tensor_a_node_or_a_module_and_what_arrives_is_a_tensor(place, expected):
    """h_1 arrives in stage 2, so no node and no module of the stage makes it."""
    assert names(meant(offload=(place,)).offloaded) == expected


def test_recomputed_and_offloaded_are_told_apart():
    policy = meant(recompute=("n2",), offload=("h_1", "h_3"))
    assert names(policy.recomputed) == {"h_2"} and names(policy.offloaded) == {"h_1", "h_3"}


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"recompute": ("h_9",)}, r"Stage 2 .* names 'h_9' in `recompute:`.* no tensor, no node .* Did you mean h_\d"),
        ({"offload": ("zzz",)}, r"'zzz' in `offload:`.* It saves h_1, h_2, h_3\."),
        ({"offload": ("",)}, "'' in `offload:`"),
        ({"offload": ("body.one",)}, r"'body.one' .* saves nothing\. Name what this stage saves \(3 tensors\)"),
        ({"recompute": ("h_0",)}, "saves nothing"),
        ({"recompute": ("h_1",)}, "cannot recompute h_1: it arrives from elsewhere"),
        ({"recompute": ("body",), "offload": ("h_3", "h_2")}, "to recompute and to offload h_2, h_3; expected one"),
    ],
)
def test_places_that_mean_nothing_or_cannot_be_are_refused(places, message):
    with pytest.raises(PlanError, match=message):
        meant(**places)


@pytest.mark.parametrize("name", ["nanogpt_tied", "byol_buffers", "tabular_mixed"])
def test_places_of_some_memories_mean_just_these(name):
    graph, dice = zoo_capture(name)[0].graph, random.Random(3)
    places = [k for k in range(1, len(graph.nodes)) if k not in graph.uncuttable]
    for cuts in ((), (places[len(places) // 3],)):
        works = Cutter(graph).works(cuts)
        for _ in range(10):
            policies, stages = [], []
            for s, work in enumerate(works):
                able = [c.memory for c in candidates(graph, work) if c.is_remakeable]
                recomputed = frozenset(dice.sample(able, dice.randint(0, len(able))))
                rest = sorted({*work.saved} - recomputed)
                policies.append(StagePolicy(recomputed, frozenset(dice.sample(rest, dice.randint(0, len(rest))))))
                keys = [places_of(graph, work, m) for m in (policies[s].recomputed, policies[s].offloaded)]
                stages.append(StagePlan("", (s,), recompute=keys[0], offload=keys[1]))
            assert resolve_policies(Plan(tuple(stages), 2), graph, works) == tuple(policies)


def test_whole_modules_are_named_as_such():
    graph = zoo_capture("nanogpt_tied")[0].graph
    (work,) = Cutter(graph).works(())
    able = {c.memory for c in candidates(graph, work) if c.is_remakeable}
    assert set(places_of(graph, work, able)) > {"blocks", "norm"}
    block = {m for m in able if graph.nodes[graph.operations[graph.tensors[m].maker].at].module.startswith("blocks.1")}
    assert places_of(graph, work, block) == ("blocks.1",)


def problem(*, swap: bool = False) -> Problem:
    graph, cluster = named(), nominal_cluster(3)
    cluster = replace(cluster, hosts=(replace(cluster.hosts[0], swap=SWAP if swap else NO_SWAP),))
    return Problem(graph, counted(graph), cluster, samples=8)


def test_a_recomputing_plan_takes_longer_and_saves_less():
    judge_of = Judge(problem())
    plain, less = judge_of.judge(plan_with()), judge_of.judge(plan_with(recompute=("body",)))
    assert less.step_s > plain.step_s
    assert plain.prices.saved_bytes(2, 4) == 3 * WIDTH * 4
    assert less.prices.saved_bytes(2, 4) == WIDTH * 4
    assert judge_of.judge(plan_with()).step_s == plain.step_s, "one plan's policies are not another's"


def test_an_offloading_plan_is_copied_out_and_back_and_holds_less_in_between():
    def gpipe(**policies: Any) -> Judged:
        return judge(replace(plan_with(**policies), schedule="gpipe", microbatches=8), problem(swap=True))

    plain, less = gpipe(), gpipe(offload=("body",))
    swaps = [i for i in less.program.ranks[2] if isinstance(i, Evict | Fetch)]
    assert len(swaps) == 2 * 8, "out and back, for eight micro-batches"
    assert less.prices.saved_bytes(2, 1) == plain.prices.saved_bytes(2, 1)
    assert less.prices.offloaded_bytes(2, 1) == 2 * WIDTH
    assert less.prices.offloaded_bytes(1, 1) == 0
    assert less.prices.own_work_s(swaps[0], 2, 1) == SWAP.seconds(2 * WIDTH)
    assert less.peak_bytes[2] < plain.peak_bytes[2]


def test_what_a_given_plan_offloads_in_vain_is_said():
    """The last stage of 1F1B takes every micro-batch back at once."""
    judged = judge(plan_with(offload=("body",)), problem(swap=True))
    assert not any(isinstance(i, Evict | Fetch) for line in judged.program.ranks for i in line)
    with pytest.warns(UserWarning, match="The given plan offloads in stage 2, which keeps everything"):
        warn_of_what_stays(judged)


def test_offloading_where_no_link_to_a_host_is_known_is_refused():
    judge_of = Judge(problem())
    for _ in range(2):
        with pytest.raises(PlanError, match="Stage 2 of the plan offloads, but host nominal of its rank 2 has no link"):
            judge_of.judge(plan_with(offload=("h_3",)))
