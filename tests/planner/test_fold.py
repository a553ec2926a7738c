"""Few of many equal groups of replicas tell what all of them do: a folded plan is judged as the full one is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_pipe.cli.tables import rank_table
from lightning_pipe.core.cluster import Cluster, Device, Host, Link, PairLink
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.planner.comparison.alternatives import alternatives
from lightning_pipe.planner.evaluation import evaluate as judging
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged, unfolded
from lightning_pipe.planner.problem import Problem
from planner.test_uniform import layers

PER_HOST = 4
NODES = 8
MICROBATCHES = 5
INSIDE, NETWORK, SWAP = Link(1e-5, 1e8), Link(1e-4, 2e7), Link(1e-5, 1e8)


def hosts(ranks: int, speeds: tuple[float, ...] = (1.0,)) -> Cluster:
    """Return hosts of four devices, the last one maybe of fewer; network cards are slow enough to matter."""
    devices = tuple(Device("x", 1 << 40, speeds[rank % len(speeds)]) for rank in range(ranks))
    cut = [devices[i : i + PER_HOST] for i in range(0, ranks, PER_HOST)]
    return Cluster(tuple(Host(f"h{i}", own, INSIDE, NETWORK, SWAP) for i, own in enumerate(cut)))


def problem(draw: random.Random, devices: Cluster, samples: int, *, training: bool = True) -> Problem:
    seconds = [draw.uniform(1e-4, 1e-3) for _ in range(NODES)]
    graph, profile = layers(seconds, [draw.choice((1e3, 1e4, 1e5)) for _ in range(NODES)], samples=samples)
    graph = replace(graph, parameter_bytes=dict.fromkeys(graph.parameter_bytes, 1_000_000))
    return Problem(graph, replace(profile, call_s=1e-5, post_s=1e-5), devices, samples, training=training)


def by_group(groups: int, multiples: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the ranks of each stage where a group has the ranks of all its stages side by side."""
    each, starts = sum(multiples), [sum(multiples[:s]) for s in range(len(multiples))]
    return [
        tuple(k * each + a + i for k in range(groups) for i in range(n)) for a, n in zip(starts, multiples, strict=True)
    ]


def by_stage(groups: int, multiples: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the ranks of each stage where a stage has the ranks of all its replicas side by side."""
    starts = [groups * sum(multiples[:s]) for s in range(len(multiples))]
    return [tuple(range(a, a + groups * n)) for a, n in zip(starts, multiples, strict=True)]


def plan(draw: random.Random, ranks: list[tuple[int, ...]], weights: tuple[int, ...] = ()) -> Plan:
    """Return a plan with cuts and depths by chance; weights repeat along the replicas of every stage."""
    cuts = [0, *sorted(draw.sample(range(1, NODES), len(ranks) - 1))]
    shares = [weights * (len(own) // len(weights)) if weights else () for own in ranks]
    stages = [
        StagePlan(f"h_{cut}" if cut else "", own, weights=share)
        for cut, own, share in zip(cuts, ranks, shares, strict=True)
    ]
    depths = sorted((draw.randint(1, 4) for _ in stages), reverse=True)
    return Plan(tuple(stages), MICROBATCHES, "1f1b", {"warmup": ",".join(map(str, depths))})


def random_case(seed: int) -> tuple[Problem, Plan]:
    """Return a plan of equal groups: of 2 to 8, in either arrangement, some with two stages on the same ranks."""
    draw = random.Random(seed)
    groups = draw.randint(2, 8)
    multiples = draw.choice([(1, 1), (2, 1, 1), (1, 2), (2, 4, 1), (1, 1, 1, 1), (4, 8, 2), (4,)])
    ranks = draw.choice([by_group, by_stage])(groups, multiples)
    ranks += draw.choice([[], [], ranks[:1]])
    samples = groups * draw.randint(1, 3) * MICROBATCHES
    devices = hosts(groups * sum(multiples))
    return problem(draw, devices, samples, training=draw.random() < 0.8), plan(draw, ranks)


def both(asked: Problem, given: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[Judged, Judged]:
    """Judge a plan folded, however short its program is, and in full."""
    monkeypatch.setattr(judging, "_WHOLE", 0)
    judge = Judge(asked)
    return judge.judge(given), judge.judge(given, folds=False)


def is_folded(judged: Judged) -> bool:
    return len(set(judged.representatives)) < len(judged.representatives)


def check_equal(folded: Judged, full: Judged) -> None:
    assert folded.step_s == pytest.approx(full.step_s, rel=1e-12)
    assert folded.bubble == pytest.approx(full.bubble, rel=1e-9)
    assert folded.peak_bytes == full.peak_bytes
    assert [folded.timeline.busy(rank) for rank in folded.representatives] == pytest.approx(
        [full.timeline.busy(rank) for rank in full.representatives], rel=1e-12
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_folded_judgement_equals_the_full_one(seed: int, monkeypatch: pytest.MonkeyPatch):
    check_equal(*both(*random_case(seed), monkeypatch))


def test_most_plans_of_more_than_two_equal_groups_are_folded(monkeypatch: pytest.MonkeyPatch):
    judged = [both(*random_case(seed), monkeypatch)[0] for seed in range(20)]
    assert sum(map(is_folded, judged)) > 10


def test_folding_keeps_the_bytes_that_all_ranks_send(monkeypatch: pytest.MonkeyPatch):
    for seed, arranged in enumerate((by_group, by_stage)):
        draw = random.Random(seed)
        asked, given = problem(draw, hosts(28), 20), plan(draw, arranged(4, (2, 4, 1)))
        folded, full = (alternatives(asked, judged, [])[0] for judged in both(asked, given, monkeypatch))
        assert folded == full and folded.bytes_sent > 0


def test_groups_of_unequal_replicas_with_weights_are_folded(monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(0)
    asked = problem(draw, hosts(16, speeds=(2.0, 1.0)), 12 * MICROBATCHES)
    folded, full = both(asked, plan(draw, by_group(4, (2, 2)), weights=(2, 1)), monkeypatch)
    assert is_folded(folded)
    check_equal(folded, full)


def test_groups_that_offload_are_folded(monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(0)
    asked, given = problem(draw, hosts(16), 8 * MICROBATCHES), plan(draw, by_stage(8, (1, 1)))
    given = replace(given, stages=(replace(given.stages[0], offload=("h_0",)), *given.stages[1:]))
    folded, full = both(asked, given, monkeypatch)
    assert is_folded(folded) and folded.program.traffic.offloads
    check_equal(folded, full)


def test_one_group_of_every_kind_is_kept(monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(0)
    ranks = by_stage(8, (1, 1))
    alike, given = problem(draw, hosts(16), 8 * MICROBATCHES), plan(draw, ranks)
    first, *others = alike.cluster.hosts
    device = first.devices[3]
    slow = replace(first, devices=(*first.devices[:3], replace(device, speed=0.5)))
    small = replace(first, devices=(*first.devices[:3], replace(device, memory_bytes=1 << 20)))
    pair = PairLink(ranks[0][5], ranks[1][5], replace(NETWORK, latency_s=0.1))
    for cluster in (Cluster((slow, *others)), Cluster((small, *others)), replace(alike.cluster, links=(pair,))):
        asked = replace(alike, cluster=cluster)
        folded, full = both(asked, given, monkeypatch)
        assert len(set(folded.representatives)) == 6  # two alike, and the one that differs
        assert folded.overflow(cluster) == full.overflow(cluster)
        check_equal(folded, full)


def test_a_micro_batch_that_groups_cannot_share_evenly_is_judged_in_full(monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(0)
    asked, given = problem(draw, hosts(16), 8 * MICROBATCHES + 1), plan(draw, by_stage(8, (1, 1)))
    folded, full = both(asked, given, monkeypatch)
    assert not is_folded(folded) and folded.timeline == full.timeline


def test_tables_and_drawings_show_all_ranks_of_a_folded_plan(monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(0)
    asked, given = problem(draw, hosts(16), 16 * MICROBATCHES), plan(draw, by_stage(16, (1,)))
    folded, full = both(asked, given, monkeypatch)
    assert rank_table(folded, asked) == rank_table(full, asked)
    assert unfolded(folded, asked).timeline == full.timeline and unfolded(full, asked) is full


def test_a_short_program_is_judged_in_full():
    asked, given = random_case(1)
    assert Judge(asked).judge(given).representatives == tuple(range(asked.cluster.ranks))
