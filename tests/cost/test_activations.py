"""What recomputation does to the halves of a stage, and what it never does."""

from __future__ import annotations

import random
import zlib

import pytest

from cost.sketches import WEIGHT, WIDTH, Sketch, chain, names, tensors
from lightning_pipe.core.program import Compute, Layout
from lightning_pipe.cost.activations import KEEP, StagePolicy, candidates, with_policy
from lightning_pipe.cost.counted import counted
from lightning_pipe.cost.memory import MemoryModel
from lightning_pipe.cost.prices import Pricer
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.planner.problem import nominal_cluster


def recomputing(*memories: int) -> StagePolicy:
    return StagePolicy(frozenset(memories), frozenset())


def number(graph, name: str) -> int:
    return next(t for t, tensor in enumerate(graph.tensors) if tensor.name == name)


def without(graph, cuts, s: int, *dropped: str):
    """Return a stage of a cut graph that recomputes tensors of these names."""
    cutter = Cutter(graph)
    policy = recomputing(*(number(graph, name) for name in dropped))
    return with_policy(cutter.tables, cutter.works(cuts)[s], policy)


def blocks(count: int):
    """Return blocks x -> a -> b -> x between an embedding and a loss; every backward operation reads one activation."""
    sketch = Sketch(3 * count + 2)
    made = [sketch.forward("x0", 0, sketch.batch())]
    for k in range(count):
        for name in (f"a{k}", f"b{k}", f"x{k + 1}"):
            made.append(sketch.forward(name, len(made), made[-1]))
    sketch.results.append(sketch.forward("loss", len(made), made[-1], size=(0, 4)))
    gradient = sketch.backward("d_loss", len(made), made[-1], reach=0)
    for at in reversed(range(1, len(made))):
        gradient = sketch.backward(f"d_{at}", at, gradient, made[at - 1], reach=0)
    sketch.gradients.append((sketch.gradient("w", 0, gradient), "w"))
    return sketch.graph()


def runs(graph, work) -> None:
    """Check that every operation of a stage finds what it reads: made before it in its half, arrived, or held."""
    own = {o for half in (work.forward, work.input_grad, work.weight_grad) for o in half.operations}

    def memory(t: int) -> int:
        tensor = graph.tensors[t]
        return memory(tensor.base) if tensor.base >= 0 and tensor.maker in own else t

    def run(half, present: set[int]) -> set[int]:
        for o in half.operations:
            lacks = [graph.tensors[t].name for t in graph.operations[o].reads if t not in present]
            assert not lacks, f"{graph.operations[o].name} lacks {lacks}"
            present |= {t for t, tensor in enumerate(graph.tensors) if tensor.maker == o}
        assert present.issuperset(half.outputs)
        return present & {*half.outputs, *half.given}

    def held(left: set[int], memories: tuple[int, ...]) -> set[int]:
        there = {*memories, *work.results}
        return {t for t in left if memory(t) in there or (graph.tensors[memory(t)].of_state and memory(t) != t)}

    of_head = {*graph.head_makes} if work.head_reads else set()
    after_f = held(run(work.forward, {*work.forward.given}), work.saved) | of_head
    after_i = after_f | run(work.input_grad, after_f | {*work.input_grad.given})
    run(work.weight_grad, held(after_i, work.kept))


def stages(name: str, graph):
    """Yield (tables, stage, dice) for stages of some cuts."""
    dice = random.Random(zlib.crc32(name.encode()))
    cutter = Cutter(graph)
    places = [k for k in range(1, len(graph.nodes)) if k not in graph.uncuttable]
    for count in (1, 3):
        cuts = sorted(dice.sample(places, min(len(places), count - 1)))
        yield from ((cutter.tables, work, dice) for work in cutter.works(cuts))


def remakeable(graph, work) -> list[int]:
    return [c.memory for c in candidates(graph, work) if c.is_remakeable]


def some(memories: list[int], dice: random.Random) -> frozenset[int]:
    return frozenset(dice.sample(memories, dice.randint(0, len(memories))))


def test_recomputing_nothing_changes_nothing(zoo):
    _, capture, _, _ = zoo
    for tables, work, _ in stages(zoo[0], capture.graph):
        assert with_policy(tables, work, KEEP) == work


def test_every_operation_finds_what_it_reads_whatever_is_recomputed(zoo):
    graph = zoo[1].graph
    for tables, work, dice in stages(zoo[0], graph):
        saved = remakeable(graph, work)
        for dropped in ((), saved, some(saved, dice), some(saved, dice)):
            runs(graph, with_policy(tables, work, recomputing(*dropped)))


def test_recomputing_all_leaves_what_arrives_and_what_cannot_be_made_anew(zoo):
    graph = zoo[1].graph
    for tables, work, _ in stages(zoo[0], graph):
        less = with_policy(tables, work, recomputing(*work.saved))
        lasting = {c.memory for c in candidates(graph, work) if not c.is_remakeable}
        assert lasting <= {*less.saved} <= lasting | {*work.forward.given}


def test_only_what_arrives_or_follows_from_overwritten_state_cannot_be_made_anew(zoo):
    graph = zoo[1].graph
    overwritten = {state for _, state in graph.updates}
    for _, work, _ in stages(zoo[0], graph):
        lost = {c.memory for c in candidates(graph, work) if not c.is_remakeable} - {*work.forward.given}
        assert overwritten or not lost, [graph.tensors[m].name for m in lost]


def test_recomputing_more_saves_nothing_more_but_what_arrived(zoo):
    graph = zoo[1].graph
    for tables, work, dice in stages(zoo[0], graph):
        more = some(remakeable(graph, work), dice)
        fewer = some(sorted(more), dice)
        larger, smaller = (set(with_policy(tables, work, recomputing(*d)).saved) for d in (fewer, more))
        assert smaller - larger <= set(work.forward.given)


def test_what_runs_again_is_all_that_is_added(zoo):
    """Backward operations run once, in I or W, each half in the order of the joint graph; F runs what it ran."""
    graph = zoo[1].graph

    def backward(half) -> list[int]:
        return [o for o in half.operations if graph.operations[o].phase == "backward"]

    for tables, work, dice in stages(zoo[0], graph):
        less = with_policy(tables, work, recomputing(*some(remakeable(graph, work), dice)))
        assert less.forward.operations == work.forward.operations
        assert len({*less.input_grad.operations}) == len(less.input_grad.operations)
        first, second = backward(less.input_grad), backward(less.weight_grad)
        assert sorted(first) == first and sorted(second) == second
        assert sorted([*first, *second]) == sorted([*backward(work.input_grad), *backward(work.weight_grad)])
        again = {*less.input_grad.operations} - {*first}
        assert all(o in work.forward.operations or graph.operations[o].phase == "repeated" for o in again)


def test_a_chain_makes_an_activation_anew_where_it_is_read_first():
    """Stage 1 is h_1, h_2; d_w_2 reads h_1 and the arriving gradient, so both run in I; d_w_1 stays in W."""
    graph = chain(4)
    work = without(graph, (1, 3), 1, "h_1")
    assert names(graph, work.input_grad.operations) == ["h_1", "d_w_2", "d_h_1", "d_h_0"]
    assert names(graph, work.weight_grad.operations) == ["d_w_1"]
    assert tensors(graph, work.saved) == {"h_0"}
    assert tensors(graph, work.kept) == {"h_0", "d_h_1"}
    assert tensors(graph, work.input_grad.outputs) == {"d_w_2", "d_h_1", "d_h_0"}
    assert tensors(graph, work.weight_grad.outputs) == {"d_w_1"}
    assert tensors(graph, work.forward.outputs) == {"h_2"}


def test_what_is_sent_leaves_f_although_it_is_recomputed():
    """h_0 goes to stage 1, whose backward reads it; stage 0 has no need of it, so stage 1 cannot drop it."""
    graph = chain(4)
    assert not any(c.is_remakeable for c in candidates(graph, Cutter(graph).works((1, 3))[1]) if c.memory == 1)
    last = without(graph, (1,), 1, "h_1", "h_2", "h_3")
    assert tensors(graph, last.saved) == {"h_0"}
    assert names(graph, last.input_grad.operations)[:4] == ["h_1", "h_2", "h_3", "d_loss"]


def test_what_arrived_is_held_where_only_recomputation_reads_it():
    sketch = Sketch(4)
    first = sketch.forward("first", 0, sketch.batch())
    up = sketch.forward("up", 1, first)
    out = sketch.forward("out", 2, up)
    sketch.results.append(sketch.forward("loss", 3, out, size=(0, 4)))
    late = sketch.backward("late", 2, up, reach=0)
    sketch.gradients.append((sketch.gradient("w", 0, late), "w"))
    graph = sketch.graph()
    assert tensors(graph, Cutter(graph).works((1,))[1].saved) == {"up"}
    work = without(graph, (1,), 1, "up")
    assert tensors(graph, work.saved) == {"first"}
    assert names(graph, work.input_grad.operations) == ["up", "late"]
    runs(graph, work)


def test_what_needs_overwritten_state_stays_kept():
    sketch = Sketch(3)
    x = sketch.batch()
    normed = sketch.forward("normed", 0, x, buffers=("mean",))
    twice = sketch.forward("twice", 1, normed)
    update = sketch.forward("update", 1, twice, size=(0, 7))
    sketch.updates.append((update, "mean"))
    sketch.buffers["mean"] = 7
    sketch.results.append(sketch.forward("loss", 2, twice, size=(0, 4)))
    sketch.gradients.append((sketch.gradient("w", 0, twice, x), "w"))
    graph = sketch.graph()
    (work,) = Cutter(graph).works(())
    assert tensors(graph, work.saved) == {"x", "twice"}
    assert not remakeable(graph, work), (
        "what twice is made of was made of the mean before the step, and nobody saves it"
    )
    assert without(graph, (), 0, "twice") == work


def test_the_gradient_of_a_bias_goes_along_with_that_of_its_weight():
    """Else the gradient that both read would wait for W, and the transposed gradient of the weight too."""
    sketch = Sketch(4)
    x = sketch.batch()
    hidden = sketch.forward("hidden", 1, sketch.forward("first", 0, x))
    out = sketch.forward("out", 2, hidden, parameters=("w", "b"))
    sketch.results.append(sketch.forward("loss", 3, out, size=(0, 4)))
    gradient = sketch.backward("gradient", 3, out, reach=0)
    product = sketch.backward("product", 2, gradient, hidden, size=(0, WEIGHT))
    turned = sketch.backward("turned", 2, product, base=product, size=(0, WEIGHT))
    bias = sketch.gradient("b", 2, gradient)
    sketch.backward("sent", 2, gradient, reach=0)
    sketch.gradients += [(turned, "w"), (bias, "b")]
    graph = sketch.graph()
    assert tensors(graph, Cutter(graph).works((1,))[1].kept) == {"gradient", "hidden"}
    work = without(graph, (1,), 1, "hidden")
    assert work.kept == work.weight_grad.operations == work.weight_grad.outputs == ()
    assert {"turned", "d_b"} <= tensors(graph, work.input_grad.outputs)


@pytest.mark.parametrize("count", [2, 5])
def test_blocks_that_keep_their_inputs_hold_one_block_at_a_time(count):
    """While b is read there are a, b, the gradient that arrived for the block, and the one that is made."""
    graph, cuts = blocks(count), (1, 3 * count + 1)
    inner = [f"{name}{k}" for k in range(count) for name in "ab"]
    kept, less = Cutter(graph).works(cuts)[1], without(graph, cuts, 1, *inner)
    before, after = (MemoryModel(graph).stage(work) for work in (kept, less))
    assert before.saved(1) == 3 * count * WIDTH
    assert after.saved(1) == count * WIDTH, "the inputs of the blocks"
    assert before.workspace("I", 1) == 3 * WIDTH, "what arrived, and two gradients"
    assert after.workspace("I", 1) == 5 * WIDTH
    assert before.workspace("F", 1) == WIDTH, "what is sent"
    assert after.workspace("F", 1) == 2 * WIDTH, "and what an operation of a block reads"


def test_a_recomputing_backward_takes_the_seconds_of_what_runs_again():
    graph = chain(4)
    pricer = Pricer(graph, profile=counted(graph), cluster=nominal_cluster(3))
    layout = Layout(((0,), (1,), (2,)))
    plain = pricer.price((1, 3), layout)
    less = pricer.price((1, 3), layout, (KEEP, recomputing(number(graph, "h_1")), KEEP))
    o = {operation.name: o for o, operation in enumerate(graph.operations)}
    for kind, added in {"F": (), "I": ("h_1", "d_w_2"), "B": ("h_1",)}.items():
        expected = plain.compute_s(Compute(1, kind, 0), 1, 4)
        expected += sum(pricer.profile.operation_s(o[name], 4) for name in added)
        assert less.compute_s(Compute(1, kind, 0), 1, 4) == pytest.approx(expected), kind
    assert less.saved_bytes(1, 3) == 3 * WIDTH
    assert less.saved_bytes(2, 3) == plain.saved_bytes(2, 3)
