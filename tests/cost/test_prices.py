"""Prices of a plan: sums of operations, links of the cluster, bytes of the stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost.sketches import WEIGHT, WIDTH, Sketch, chain
from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.core.profile import OptimizerProfile, Profile
from lightning_pipe.core.program import Compute, Evict, Fetch, Layout, Message, Samples
from lightning_pipe.cost.activations import KEEP, StagePolicy
from lightning_pipe.cost.counted import NOMINAL, counted
from lightning_pipe.cost.optimizer import optimizer_state_bytes, step_s
from lightning_pipe.cost.prices import Pricer, price
from lightning_pipe.errors import PlanError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import memory_curves, simulate

GRAPH = chain(4)
COUNT = len(GRAPH.operations)
ADAM = OptimizerProfile(seconds_per_byte=1e-3, seconds_per_tensor=0.1, fixed_s=1.0, state_bytes_per_byte=2.0)
PROFILE = Profile("sketch", "cpu", (2, 4), tuple((1.0 + o, 2.0 + o) for o in range(COUNT)), call_s=0.5, optimizer=ADAM)
CUTS = (1, 3)
LINK = Link(1.0, 4.0)


def cluster(*speeds: float) -> Cluster:
    devices = tuple(Device("d", 2**30, speed) for speed in speeds)
    return Cluster((Host("h", devices, inside=LINK, network=LINK),))


STRAIGHT = Layout(((0,), (1,), (2,)))


def prices_of(layout=STRAIGHT, *, graph=GRAPH, cuts=CUTS, profile=PROFILE, there=None):
    return price(graph, cuts, layout, profile=profile, cluster=there or cluster(*(1.0,) * layout.ranks))


def test_a_compute_takes_the_seconds_of_its_operations_and_of_a_call():
    """Stage 1: F is h_1, h_2; I is d_h_1, d_h_0; W is d_w_2, d_w_1."""
    prices = prices_of()
    number = {operation.name: o for o, operation in enumerate(GRAPH.operations)}
    for kind, names in {"F": ("h_1", "h_2"), "I": ("d_h_1", "d_h_0"), "W": ("d_w_2", "d_w_1")}.items():
        expected = sum(PROFILE.seconds[number[name]][1] for name in names) + PROFILE.call_s
        assert prices.compute_s(Compute(1, kind, 0), 1, 4) == pytest.approx(expected)


def test_a_whole_backward_is_both_halves_in_one_call():
    prices = prices_of()
    both = [prices.compute_s(Compute(1, kind, 0), 1, 3) for kind in "IW"]
    assert prices.compute_s(Compute(1, "B", 0), 1, 3) == pytest.approx(sum(both) - PROFILE.call_s)


@pytest.mark.parametrize(("samples", "share"), [(2, 0.0), (3, 0.5), (4, 1.0), (6, 2.0)])
def test_between_measured_samples_times_lie_on_a_line(samples, share):
    prices = prices_of()
    low, high = (prices.compute_s(Compute(1, "F", 0), 1, n) for n in (2, 4))
    assert prices.compute_s(Compute(1, "F", 0), 1, samples) == pytest.approx(low + share * (high - low))


def test_a_faster_device_computes_and_steps_faster():
    prices = prices_of(there=cluster(1.0, 2.0, 1.0))
    plain = prices_of()
    assert prices.compute_s(Compute(1, "F", 0), 1, 4) == plain.compute_s(Compute(1, "F", 0), 1, 4) / 2
    assert prices.step_s(1) == plain.step_s(1) / 2
    assert prices.step_s(0) == plain.step_s(0)


def test_a_message_takes_its_bytes_over_the_link():
    message = Message("F", 0, 1, 0, Samples(0, 3))
    assert prices_of().message_bytes(message) == 3 * WIDTH
    assert prices_of().transfer_s(message, 0, 1) == LINK.seconds(3 * WIDTH)


def test_messages_of_one_exchange_share_the_card_of_their_host():
    hosts = tuple(Host(name, (Device("d", 1),) * 2, inside=LINK, network=LINK) for name in "ab")
    layout = Layout(((0, 1), (2, 3)))
    prices = prices_of(layout, cuts=(2,), there=Cluster(hosts))
    message = Message("F", 0, 1, 0, Samples(0, 2))
    assert prices.transfer_s(message, 0, 2) == LINK.latency_s + 2 * 2 * WIDTH / LINK.bytes_per_s


def test_a_bucket_is_reduced_over_all_ranks_that_hold_one_of_its_stages():
    layout = Layout(((0, 1), (2,), (2,)))
    prices = prices_of(layout)
    order = order_of("gpipe", layout=layout, microbatches=2)
    program = verify(lower(order, layout=layout, sizes=(4, 4), traffic=prices.traffic))
    assert prices.reduce_s(0, program) == pytest.approx(2 * (1.0 + WEIGHT / 2 / 4.0))
    assert prices.reduce_s(1, program) == 0.0
    timeline = simulate(program, prices)
    curves = memory_curves(timeline, program=program, prices=prices)
    assert all(curve.peak_total_bytes > curve.state_bytes > 0 for curve in curves)


def tied():
    sketch = Sketch(2)
    x = sketch.batch()
    one = sketch.forward("one", 0, x, parameters=("w", "frozen"))
    two = sketch.forward("two", 1, one, parameters=("w",))
    late = sketch.backward("late", 1, two, reach=0)
    sketch.gradients += [(sketch.gradient("w", 1, late, one), "w"), (sketch.gradient("w", 0, late, x), "w")]
    sketch.buffers["mean"] = 7
    return sketch.graph()


@pytest.mark.parametrize(
    ("stages", "parameters"), [(((0,), (1,)), (2, 1)), (((0,), (0,)), (2,)), (((0, 1), (2,)), (2, 2, 1))]
)
def test_a_rank_holds_a_parameter_once_and_gradients_and_state_of_those_that_are_trained(stages, parameters):
    """Stage 0 holds w and a frozen parameter, stage 1 holds w."""
    graph = tied()
    profile = replace(PROFILE, seconds=PROFILE.seconds[: len(graph.operations)])
    prices = prices_of(Layout(stages), graph=graph, cuts=(1,), profile=profile)
    for rank, held in enumerate(parameters):
        assert prices.state_bytes(rank) == held * WEIGHT + WEIGHT + 2 * WEIGHT + 7
        assert prices.step_s(rank) == step_s(ADAM, [WEIGHT])


def test_the_optimizer_is_priced_by_bytes_and_tensors():
    assert step_s(ADAM, [100, 300]) == pytest.approx(1.0 + 0.4 + 0.2)
    assert step_s(ADAM, [100, 300], speed=2.0) == pytest.approx(0.8)
    assert optimizer_state_bytes(ADAM, [100, 300]) == 800


def test_bytes_of_a_stage_follow_the_samples():
    prices = prices_of()
    assert prices.saved_bytes(1, 3) == 2 * WIDTH * 3
    assert prices.kept_bytes(1, 3) == 4 * WIDTH * 3
    assert prices.result_bytes(2, 3) == 4 and prices.result_bytes(1, 3) == 0
    assert prices.workspace_bytes(Compute(1, "I", 0), 3) == 3 * WIDTH * 3
    assert prices.gradient_bytes(Compute(1, "W", 0), 3) == WEIGHT


def test_what_a_stage_offloads_is_copied_over_the_link_of_its_rank_and_stays_among_what_it_saves():
    """Stage 1 saves h_0, which arrives, and h_1."""
    hosts = tuple(
        Host(name, (Device("d", 1),) * count, inside=LINK, network=LINK, swap=Link(latency, 2.0))
        for name, count, latency in (("a", 1, 1.0), ("b", 2, 3.0))
    )
    pricer = Pricer(GRAPH, profile=PROFILE, cluster=Cluster(hosts))
    h_0, h_1 = (t for t, tensor in enumerate(GRAPH.tensors) if tensor.name in ("h_0", "h_1"))
    plain = pricer.price(CUTS, STRAIGHT)
    less = pricer.price(CUTS, STRAIGHT, (KEEP, StagePolicy(frozenset(), frozenset({h_1})), KEEP))
    assert (plain.traffic.offloads, less.traffic.offloads) == ((), (1,))
    assert [less.offloaded_bytes(s, 3) for s in range(3)] == [0, 3 * WIDTH, 0]
    assert less.own_work_s(Evict(1, 0), 0, 3) == 1.0 + 3 * WIDTH / 2.0
    assert less.own_work_s(Fetch(1, 0), 1, 3) == 3.0 + 3 * WIDTH / 2.0
    assert less.saved_bytes(1, 3) == plain.saved_bytes(1, 3) == 2 * WIDTH * 3
    both = pricer.price(CUTS, STRAIGHT, (KEEP, StagePolicy(frozenset({h_1}), frozenset({h_0})), KEEP))
    assert both.saved_bytes(1, 3) == both.offloaded_bytes(1, 3) == 3 * WIDTH


@pytest.mark.parametrize("profile", [replace(PROFILE, graph="other"), replace(PROFILE, seconds=PROFILE.seconds[1:])])
def test_a_profile_of_another_graph_is_refused(profile):
    with pytest.raises(PlanError, match="Measure a new profile"):
        prices_of(profile=profile)


def test_counted_seconds_are_overhead_flops_and_bytes():
    sketch = Sketch(2, samples=4)
    x = sketch.batch()
    out = sketch.forward("mm", 0, x, parameters=("w",), flops=4000, touched_bytes=WEIGHT + 2 * 4 * WIDTH)
    sketch.forward("view", 1, out, base=out, touched_bytes=64)
    sketch.make("mask", "repeated", -1, size=(0, 0), touched_bytes=50)
    profile = counted(sketch.graph())
    assert profile.source == "counted"
    for samples in (1, 2, 4, 9):
        computing_s, touched = 1000 * samples / NOMINAL.flops_of("float32"), WEIGHT + 2 * samples * WIDTH
        expected = NOMINAL.operation_s + computing_s + touched / NOMINAL.memory_bytes_per_s
        assert profile.operation_s(0, samples) == pytest.approx(expected)
        assert profile.operation_s(1, samples) == 0.0
        assert profile.operation_s(2, samples) == pytest.approx(NOMINAL.operation_s + 50 / NOMINAL.memory_bytes_per_s)


def test_every_module_of_the_zoo_has_a_price(zoo):
    _, capture, _, _ = zoo
    graph = capture.graph
    places = [k for k in range(1, len(graph.nodes)) if k not in graph.uncuttable]
    cuts = (places[len(places) // 2],)
    layout = Layout(((0,), (1,)))
    prices = price(graph, cuts, layout, profile=counted(graph), cluster=cluster(1.0, 1.0))
    order = order_of("gpipe" if graph.head else "1f1b", layout=layout, microbatches=3)
    program = verify(lower(order, layout=layout, sizes=(2, 2, 2), traffic=prices.traffic))
    timeline = simulate(program, prices)
    assert timeline.makespan > 0
    for curve in memory_curves(timeline, program=program, prices=prices):
        assert min(*curve.held_bytes, *curve.buffer_bytes, *curve.workspace_bytes, *curve.in_flight) == 0
        assert curve.buffer_bytes[-1] == curve.workspace_bytes[-1] == curve.in_flight[-1] == curve.held_bytes[-1] == 0
