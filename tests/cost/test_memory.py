"""Liveness on graphs that can be counted by hand."""

from __future__ import annotations

import pytest

from cost.sketches import WEIGHT, WIDTH, Sketch, chain
from lightning_pipe.core.profile import Profile
from lightning_pipe.cost.memory import MemoryModel
from lightning_pipe.cost.stage import stage_works


def memory_of(graph, cuts=()):
    memory = MemoryModel(graph)
    return [memory.stage(work) for work in stage_works(graph, cuts)]


def test_a_forward_needs_what_it_was_given_and_two_values_of_a_chain_at_a_time():
    sketch = Sketch(4)
    x = sketch.batch()
    for k in range(4):
        x = sketch.forward(f"h{k}", k, x)
    (memory,) = memory_of(sketch.graph())
    assert memory.workspace("F", 5) == 3 * WIDTH * 5, "the field of the batch, an input, an output"


def test_a_view_needs_no_memory_and_keeps_its_base_alive():
    sketch = Sketch(4)
    big = sketch.forward("big", 0, sketch.batch("x", per_sample=0), size=(100, 0))
    view = sketch.forward("view", 1, big, base=big, size=(100, 0))
    other = sketch.forward("other", 2, view, size=(10, 0))
    sketch.forward("last", 3, view, other, size=(10, 0))
    (memory,) = memory_of(sketch.graph())
    assert memory.workspace("F", 1) == 120


def test_views_of_state_and_of_what_was_given_need_no_memory():
    sketch = Sketch(3)
    x = sketch.batch()
    view = sketch.forward("view", 0, x, base=x)
    weight = sketch.make("weight", "repeated", -1, size=(0, 1000), of_state=True, parameters=("w",))
    sketch.forward("out", 1, view, weight)
    (memory,) = memory_of(sketch.graph())
    assert memory.workspace("F", 1) == 2 * WIDTH, "the field of the batch and the output"


def test_what_a_forward_leaves_is_not_its_workspace():
    saved = WIDTH * 4  # x, h_0, h_1 and h_2
    (memory,) = memory_of(chain(3))
    assert memory.saved(1) == saved
    assert memory.results(1) == 4
    assert memory.workspace("F", 1) == 0


def test_one_gradient_of_a_parameter_at_a_time_is_there_beside_those_that_it_is_added_to():
    (memory,) = memory_of(chain(3))
    assert memory.workspace("W", 1) == WEIGHT + WIDTH, "that of a parameter, and that of an activation"
    assert memory.gradient_bytes("W", 1) == WEIGHT + WIDTH - 2 * WIDTH, "two of activations are left"
    assert memory.gradient_bytes("B", 1) == memory.gradient_bytes("W", 1)
    assert memory.gradient_bytes("F", 1) == memory.gradient_bytes("I", 1) == 0


def test_the_input_half_needs_what_arrived_and_what_it_makes():
    memory = memory_of(chain(4), (1, 3))[1]
    assert memory.workspace("I", 2) == 2 * 3 * WIDTH, "d_h_2 arrived, d_h_1 is kept, d_h_0 is sent"
    assert memory.kept(2) == 2 * 4 * WIDTH


def test_a_whole_backward_needs_the_more_of_its_halves():
    memory = memory_of(chain(4), (1, 3))[1]
    more = memory.workspace("W", 2) + memory.kept(2) - memory.saved(2)
    assert memory.workspace("B", 2) == max(memory.workspace("I", 2), more) == more


@pytest.mark.parametrize(("terms", "sums"), [(1, 0), (2, 1), (3, 2), (5, 2)])
def test_a_gradient_of_several_terms_needs_room_for_their_sum(terms, sums):
    sketch = Sketch(2)
    h = sketch.forward("h", 0, sketch.batch(), parameters=("w",))
    sketch.gradients += [(sketch.gradient("w", 0, h), "w") for _ in range(terms)]
    (memory,) = memory_of(sketch.graph())
    assert memory.workspace("W", 1) == WEIGHT * (terms + sums)
    assert memory.gradient_bytes("W", 1) == (WEIGHT if terms == 1 else 0)


def test_a_gradient_that_is_part_of_something_larger_is_not_taken_over():
    sketch = Sketch(2)
    h = sketch.forward("h", 0, sketch.batch(), parameters=("w", "v"))
    both = sketch.backward("both", 0, h, size=(0, 2 * WEIGHT))
    sketch.gradients += [(sketch.gradient(name, 0, both, base=both), name) for name in ("w", "v")]
    (memory,) = memory_of(sketch.graph())
    assert memory.workspace("W", 1) == 2 * WEIGHT
    assert memory.gradient_bytes("W", 1) == 0


def test_a_gradient_that_other_stages_add_to_is_not_taken_over():
    graph = chain(2)
    (work,) = stage_works(graph, ())
    assert MemoryModel(graph).stage(work).gradient_bytes("W", 1) > 0
    assert MemoryModel(graph).stage(work, shared=frozenset({"w_0", "w_1"})).gradient_bytes("W", 1) == 0


def test_new_content_of_state_is_there_until_the_forward_ends():
    sketch = Sketch(3)
    x = sketch.batch("x", per_sample=0)
    new = sketch.forward("new", 0, x, size=(0, 24))
    sketch.forward("a", 1, x, size=(0, 5))
    sketch.forward("b", 2, x, size=(0, 5))
    graph = sketch.graph()
    assert memory_of(graph)[0].workspace("F", 1) == 24
    sketch.updates.append((new, "mean"))
    assert memory_of(sketch.graph())[0].workspace("F", 1) == 29


def tower(*sizes: int):
    """Return a chain of forward operations whose results have so many bytes; the last one is all that is taken."""
    sketch = Sketch(len(sizes))
    x = sketch.batch("x", per_sample=0)
    for k, size in enumerate(sizes):
        x = sketch.forward(f"h{k}", k, x, size=(0, size))
    return sketch.graph()


def scratchy(*rows: tuple[int, ...], samples: tuple[int, ...] = (2, 4)) -> Profile:
    return Profile("sketch", "cpu", samples, ((1.0,) * len(samples),) * len(rows), scratch_bytes=rows)


def workspace(graph, profile: Profile | None, samples: int = 2) -> int:
    (work,) = stage_works(graph, ())
    return MemoryModel(graph, profile=profile).stage(work).workspace("F", samples)


@pytest.mark.parametrize(
    ("scratch", "needed"),
    [((0, 0, 0), 50), ((0, 0, 7), 57), ((0, 7, 0), 50), ((0, 11, 0), 51), ((45, 0, 0), 55), ((45, 60, 7), 100)],
)
def test_scratch_counts_while_its_operation_runs(scratch, needed):
    """Results of 10, 30 and 20 bytes: 10, 40 and 50 are there at a time."""
    assert workspace(tower(10, 30, 20), scratchy(*((own, own) for own in scratch))) == needed


@pytest.mark.parametrize(("samples", "expected"), [(1, 0), (2, 20), (3, 50), (4, 80), (6, 140)])
def test_scratch_lies_on_a_line_between_measured_samples_and_is_never_negative(samples, expected):
    assert workspace(tower(10), scratchy((20, 80)), samples) == 10 + expected


def test_a_profile_without_scratch_adds_none():
    graph = chain(3)
    bare = Profile("sketch", "cpu", (2, 4), ((1.0, 1.0),) * len(graph.operations))
    for work in stage_works(graph, ()):
        plain, other = (MemoryModel(graph, profile=profile).stage(work) for profile in (None, bare))
        assert [plain.workspace(k, 3) for k in "FIWB"] == [other.workspace(k, 3) for k in "FIWB"]


def test_scratch_of_an_operation_counts_in_the_half_that_runs_it():
    graph = chain(3)
    rows = [(1000, 1000) if operation.name == "d_w_1" else (0, 0) for operation in graph.operations]
    (work,) = stage_works(graph, ())
    plain, other = (MemoryModel(graph, profile=profile).stage(work) for profile in (None, scratchy(*rows)))
    assert other.workspace("W", 2) > plain.workspace("W", 2) + 800
    assert [other.workspace(k, 2) for k in "FI"] == [plain.workspace(k, 2) for k in "FI"]
