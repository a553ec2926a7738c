"""What holds where messages of different edges share the network card of a host: together they keep to its speed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.core.program import Send
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.estimates.recurrence import Estimator
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judged, judge
from lightning_pipe.planner.problem import Problem
from planner.test_uniform import layers

FAST = Link(0.0, 1e15)
CARD = 100.0  # bytes per second
WIDTH, SAMPLES = 50.0, 16
STAGES = ((0,), (1,), (2,), (3,))


def hosts(*names: str, card: float = CARD) -> Cluster:
    """Return equal devices, each on the host of its name; hosts with as many letters as they have devices."""
    device = Device("x", 1 << 40)
    return Cluster(tuple(Host(f"h{i}", (device,) * len(name), FAST, Link(0.0, card)) for i, name in enumerate(names)))


def problem(cluster: Cluster, *, seconds: float = 0.001) -> Problem:
    graph, profile = layers([seconds] * 4, [WIDTH] * 4, samples=SAMPLES)
    return Problem(graph, profile, cluster, SAMPLES)


def judged(cluster: Cluster, ranks: tuple[tuple[int, ...], ...] = STAGES, **options: float) -> Judged:
    """Judge one layer per stage in micro-batches of one sample."""
    asked = problem(cluster, **options)
    return judge(Candidate((1, 2, 3), ranks, SAMPLES, (SAMPLES,) * 4).plan(asked), asked)


def passed(found: Judged, cluster: Cluster, *, out: int) -> tuple[float, float]:
    """Return the bytes that leave a host, and the seconds from the first to the last."""
    sent = [
        event
        for event in found.timeline.events
        if isinstance(event.instruction, Send)
        and cluster.host_of(event.rank) == out != cluster.host_of(event.instruction.peer)
    ]
    count = sum(found.prices.message_bytes(event.instruction.message) for event in sent)
    return count, max(event.end for event in sent) - min(event.start for event in sent)


def test_a_card_passes_no_more_than_it_can():
    """Stages 0 and 2 on one host, 1 and 3 on the other: three edges cross, two of them in the same direction."""
    cluster = hosts("ab", "cd")
    found = judged(cluster, ((0,), (2,), (1,), (3,)))
    for host in (0, 1):
        count, seconds = passed(found, cluster, out=host)
        assert count >= 2 * SAMPLES * WIDTH
        assert count / seconds <= CARD * (1 + 1e-9)


def test_edges_with_cards_of_their_own_do_not_wait():
    """The same pipeline, but stages 2 and 3 have hosts of their own, whose cards only they use."""
    shared, apart = hosts("ab", "cd"), hosts("a", "b", "c", "d")
    crossing = ((0,), (2,), (1,), (3,))
    assert judged(shared, crossing).step_s > 1.2 * judged(apart).step_s


def test_one_edge_has_the_card_for_itself():
    """Stages 0, 1 | 2, 3: one edge, one message each way at a time; forwards leave where backwards enter."""
    found = judged(hosts("ab", "cd"), seconds=1.0)
    messages = [event for event in found.timeline.events if isinstance(event.instruction, Send) and event.rank == 1]
    across = [event for event in messages if event.instruction.peer == 2]
    assert [event.end - event.start for event in across] == pytest.approx([WIDTH / CARD] * SAMPLES)


def test_estimates_know_how_busy_a_card_is_at_least():
    shared = problem(hosts("ab", "cd"))
    estimator = Estimator(StageCostTable(shared, [1, 2, 3]))
    outline = Candidate((1, 2, 3), ((0,), (2,), (1,), (3,)), SAMPLES, (SAMPLES,) * 4)
    row = estimator.row(outline.cuts, outline.ranks, SAMPLES)
    assert row.card == pytest.approx(3 * WIDTH / CARD), "two edges forward and one back, or the other way round"
    assert estimator.step_s(outline) >= SAMPLES * row.card
    assert judge(outline.plan(shared), shared).step_s >= SAMPLES * row.card * (1 - 1e-9)
    fast = replace(shared, cluster=hosts("abcd"))
    assert Estimator(StageCostTable(fast, [1, 2, 3])).row(outline.cuts, outline.ranks, SAMPLES).card == 0.0
