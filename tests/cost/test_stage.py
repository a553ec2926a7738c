"""What a cut makes of a graph: laws on graphs that can be counted by hand."""

from __future__ import annotations

import pytest

from cost.sketches import WEIGHT, WIDTH, Sketch, chain, names, tensors
from lightning_pipe.core.program import Bucket, Edge
from lightning_pipe.cost.counted import counted
from lightning_pipe.cost.stage import position_seconds, stage_works, traffic


def test_a_chain_sends_one_activation_and_one_gradient_over_every_cut():
    assert traffic(chain(4), (1, 3)).edges == (
        Edge("F", 0, 1, WIDTH),
        Edge("B", 1, 0, WIDTH),
        Edge("F", 1, 2, WIDTH),
        Edge("B", 2, 1, WIDTH),
    )


def test_every_stage_reduces_its_own_parameters():
    assert traffic(chain(4), (1, 3)).buckets == (Bucket((0,), WEIGHT), Bucket((1,), 2 * WEIGHT), Bucket((2,), WEIGHT))


def test_what_flows_to_an_earlier_stage_is_input_half_and_the_rest_weight_half():
    graph = chain(4)
    first, second, third = stage_works(graph, (1, 3))
    assert names(graph, first.forward.operations) == ["h_0"]
    assert names(graph, second.forward.operations) == ["h_1", "h_2"]
    assert names(graph, third.input_grad.operations) == ["d_loss", "d_h_2"]
    assert names(graph, third.weight_grad.operations) == ["d_w_3"]
    assert names(graph, second.input_grad.operations) == ["d_h_1", "d_h_0"]
    assert names(graph, second.weight_grad.operations) == ["d_w_2", "d_w_1"]
    assert first.input_grad.operations == (), "nothing leaves the first stage"
    assert names(graph, first.weight_grad.operations) == ["d_w_0"]


def test_a_stage_saves_what_its_backward_reads_and_keeps_what_its_weight_half_reads():
    graph = chain(4)
    first, second, third = stage_works(graph, (1, 3))
    assert tensors(graph, first.saved) == {"x"}
    assert tensors(graph, second.saved) == {"h_0", "h_1"}, "h_2 is only sent"
    assert tensors(graph, third.saved) == {"h_2", "h_3"}
    assert tensors(graph, second.kept) == {"h_0", "h_1", "d_h_2", "d_h_1"}
    assert tensors(graph, third.kept) == {"h_2", "d_loss"}, "h_3 is read by the input half only"
    assert tensors(graph, first.kept) == {"x", "d_h_0"}, "the gradient that arrived is kept"


def test_the_memory_of_a_result_is_not_saved_again():
    sketch = Sketch(2)
    hidden = sketch.forward("h", 0, sketch.batch(), parameters=("w",))
    sketch.results.append(hidden)
    sketch.gradients.append((sketch.gradient("w", 0, hidden), "w"))
    (work,) = stage_works(sketch.graph(), ())
    assert (tensors(sketch.graph(), work.saved), tensors(sketch.graph(), work.results)) == (set(), {"h"})


def test_a_skip_connection_travels_straight_to_its_reader():
    sketch = Sketch(3)
    early = sketch.forward("early", 0, sketch.batch())
    middle = sketch.forward("middle", 1, early)
    sketch.forward("late", 2, middle, early)
    assert traffic(sketch.graph(), (1, 2)).edges == (
        Edge("F", 0, 1, WIDTH),
        Edge("F", 0, 2, WIDTH),
        Edge("F", 1, 2, WIDTH),
    )


def test_a_field_of_the_batch_travels_from_the_stage_that_loads():
    sketch = Sketch(2)
    x, y = sketch.batch("x"), sketch.batch("y", per_sample=3)
    hidden = sketch.forward("h", 0, x)
    sketch.forward("loss", 1, hidden, y, size=(0, 4))
    graph = sketch.graph()
    assert traffic(graph, (1,)).edges == (Edge("F", 0, 1, WIDTH + 3.0),)
    assert tensors(graph, stage_works(graph, (1,))[0].forward.given) == {"x", "y"}


def viewed() -> Sketch:
    """Return: big -> view, the view is saved for the gradient of w at position 2."""
    sketch = Sketch(3)
    big = sketch.forward("big", 0, sketch.batch(), size=(100, 0))
    view = sketch.forward("view", 1, big, base=big)
    out = sketch.forward("out", 2, view, parameters=("w",))
    sketch.gradients.append((sketch.gradient("w", 2, view, out), "w"))
    return sketch


def test_a_saved_view_keeps_all_of_its_base():
    graph = viewed().graph()
    (work,) = stage_works(graph, ())
    assert tensors(graph, work.saved) == {"big", "out"}


def test_a_view_that_travels_arrives_with_memory_of_its_own():
    graph = viewed().graph()
    assert tensors(graph, stage_works(graph, (2,))[1].saved) == {"view", "out"}
    assert tensors(graph, stage_works(graph, (1,))[1].saved) == {"big", "out"}, "the base has travelled"


def test_a_view_of_state_uses_no_memory_where_it_is_made():
    sketch = Sketch(2)
    part = sketch.forward("part", 0, size=(0, 50), of_state=True, parameters=("w",))
    out = sketch.forward("out", 1, part, sketch.batch())
    sketch.gradients.append((sketch.gradient("w", 1, part, out), "w"))
    graph = sketch.graph()
    assert tensors(graph, stage_works(graph, ())[0].saved) == {"out"}
    assert tensors(graph, stage_works(graph, (1,))[1].saved) == {"part", "out"}


def test_a_repeated_operation_runs_in_every_half_that_reads_it_and_never_travels():
    sketch = Sketch(2)
    table = sketch.make("table", "repeated", -1, size=(0, 40), parameters=("t",))
    mask = sketch.make("mask", "repeated", -1, table, size=(0, 20))
    one = sketch.forward("one", 0, sketch.batch(), mask)
    two = sketch.forward("two", 1, one, mask)
    late = sketch.backward("d_one", 1, two, mask, reach=0)
    sketch.gradients.append((sketch.gradient("w", 0, late), "w"))
    sketch.parameters["w"] = WEIGHT
    graph = sketch.graph()
    first, second = stage_works(graph, (1,))
    assert names(graph, first.forward.operations) == ["table", "mask", "one"]
    assert names(graph, second.forward.operations) == ["table", "mask", "two"]
    assert names(graph, second.input_grad.operations) == ["table", "mask", "d_one"]
    assert names(graph, first.weight_grad.operations) == ["d_w"]
    assert traffic(graph, (1,)).edges == (Edge("F", 0, 1, WIDTH), Edge("B", 1, 0, WIDTH))
    assert first.parameters == ("t", "w") and second.parameters == ("t",)
    assert tensors(graph, second.saved) == {"two"}, "a repeated value is not saved"


def tied() -> Sketch:
    """Return: w is used at positions 0 and 2; an operation adds the two terms of its gradient."""
    sketch = Sketch(3)
    x = sketch.batch()
    one = sketch.forward("one", 0, x, parameters=("w",))
    two = sketch.forward("two", 1, one)
    three = sketch.forward("three", 2, two, parameters=("w",))
    late = sketch.backward("late", 2, three, reach=0)
    term = sketch.gradient("w", 2, late, two)
    early = sketch.backward("early", 1, late, reach=0)
    other = sketch.gradient("w", 0, early, x)
    total = sketch.backward("sum", 0, term, other, size=(0, WEIGHT), adds_terms=True)
    sketch.gradients.append((total, "w"))
    return sketch


def test_terms_of_a_tied_parameter_stay_in_their_stages_and_are_reduced_together():
    graph = tied().graph()
    works, found = stage_works(graph, (1,)), traffic(graph, (1,))
    assert [tensors(graph, tuple(t for t, _ in work.gradients)) for work in works] == [{"d_w"}, {"d_w"}]
    assert all("sum" not in names(graph, work.weight_grad.operations) for work in works)
    assert found.buckets == (Bucket((0, 1), WEIGHT),)
    assert [edge.fixed_bytes for edge in found.edges] == [0, 0], "no gradient of a parameter travels"


def test_terms_of_one_stage_are_added_there():
    graph = tied().graph()
    (work,) = stage_works(graph, ())
    assert names(graph, work.weight_grad.operations)[-1] == "sum"
    assert tensors(graph, tuple(t for t, _ in work.gradients)) == {"sum"}


def test_a_term_of_the_input_half_waits_for_that_of_the_weight_half():
    sketch = Sketch(3)
    h = sketch.forward("h", 1, sketch.forward("x0", 0, sketch.batch()), parameters=("w",))
    back = sketch.backward("back", 2, h, reach=0)
    early = sketch.gradient("w", 1, back, reach=0)  # one operation makes it together with what is sent
    sketch.backward("sent", 0, early)
    late = sketch.backward("late", 1, back, size=(0, WEIGHT))
    sketch.gradients += [(early, "w"), (late, "w")]
    graph = sketch.graph()
    assert tensors(graph, stage_works(graph, (1,))[1].kept) == {"d_w", "back"}


def test_state_that_is_overwritten_is_copied_for_the_half_that_reads_it_as_it_was():
    sketch = Sketch(2)
    new = sketch.forward("new", 0, sketch.batch(), size=(0, 24), buffers=("mean",))
    out = sketch.forward("out", 1, new)
    sketch.gradients.append((sketch.gradient("w", 1, out, buffers=("mean",)), "w"))
    sketch.updates.append((new, "mean"))
    sketch.parameters["w"], sketch.buffers["mean"] = WEIGHT, 24
    (work,) = stage_works(sketch.graph(), ())
    assert (work.saved_state, work.kept_state) == (24, 24)
    sketch.updates.clear()
    assert stage_works(sketch.graph(), ())[0].saved_state == 0


def test_two_equal_cuts_make_an_empty_stage():
    works = stage_works(chain(3), (2, 2))
    assert works[1].forward.operations == works[1].saved == works[1].parameters == ()
    assert {(e.source, e.target) for e in traffic(chain(3), (2, 2)).edges} == {(0, 2), (2, 0)}


@pytest.mark.parametrize("cuts", [(), (2,), (1, 3)])
def test_seconds_of_positions_add_up_to_those_of_the_stages(cuts):
    graph = chain(4)
    profile = counted(graph)
    positions = position_seconds(graph, profile, 3)
    bounds = (0, *cuts, len(graph.nodes))
    for s, work in enumerate(stage_works(graph, cuts)):
        halves = (work.forward.operations, (*work.input_grad.operations, *work.weight_grad.operations))
        expected = [sum(profile.operation_s(o, 3) for o in half) for half in halves]
        found = [sum(p[phase] for p in positions[bounds[s] : bounds[s + 1]]) for phase in (0, 1)]
        assert found == pytest.approx(expected)


def test_a_repeated_operation_is_charged_once_per_direction_where_it_is_read_first():
    sketch = Sketch(3)
    mask = sketch.make("mask", "repeated", -1, touched_bytes=1000)
    one = sketch.forward("one", 1, sketch.batch(), mask)
    two = sketch.forward("two", 2, one, mask)
    sketch.backward("back", 2, two, mask)
    graph = sketch.graph()
    profile = counted(graph)
    positions = position_seconds(graph, profile, 4)
    mask_s, plain = profile.operation_s(0, 4), profile.operation_s(1, 4)
    assert positions[1][0] == pytest.approx(mask_s + plain)
    assert positions[2] == pytest.approx((plain, mask_s + plain))
