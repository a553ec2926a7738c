"""Rounds of pipelines that are never flushed: what policies promise is proved, and harm is refused before it runs."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import (
    AnyCompute,
    Bucket,
    Compute,
    Edge,
    Joined,
    Layout,
    Program,
    Recv,
    Send,
    Traffic,
    VerifiedProgram,
)
from lightning_pipe.core.versions import Pin, PinOlder, Predict, PredictBack
from lightning_pipe.errors import ProgramError
from lightning_pipe.report.account import accounts
from lightning_pipe.schedule.formats.text import format_program, parse_program
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.rounds import verify_rounds
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import POLICIES, WeightPolicy, until_backward, until_first_backward
from lightning_pipe.simulator import UnitPrices
from lightning_pipe.simulator.ahead import period, steady_step, with_entering
from lightning_pipe.simulator.horizons import counted_horizons
from lightning_pipe.simulator.memory import memory_curves
from lightning_pipe.simulator.simulate import simulate
from schedule.rounds_interpreter import Broken, run

LAYOUTS = [((0,), (1,)), ((0,), (1,), (2,)), ((0,), (1,), (2,), (3,)), ((0, 1), (2,)), ((0,), (1, 2), (3,))]
BATCHES = [(1,) * 7, (2,) * 5, (4, 4, 4, 1), (3, 3, 2, 3, 1), (2, 1, 4, 1, 2), (1,)]


def chain(stages: int) -> Traffic:
    """Return the traffic of a chain whose first and last stage read the batch."""
    forward = [Edge("F", s, s + 1, 8.0) for s in range(stages - 1)]
    backward = [Edge("B", s + 1, s, 8.0) for s in range(stages - 1)]
    buckets = tuple(Bucket((s,), 1) for s in range(stages))
    return Traffic((*forward, *backward), buckets, loads=(0, stages - 1))


def rounds_of(policy: WeightPolicy, layout: Layout, batches: Sequence[int]) -> list[Program]:
    """Return the rounds of batches of so many micro-batches, from an empty pipeline to an empty one."""
    rounds: list[Program] = []
    for number, batch in enumerate(batches):
        enters = rounds[-1].seam.leaves if rounds and rounds[-1].seam else ()
        seam = policy.seam(layout, batch, enters=enters, following=batches[number + 1 :])
        sizes = (2,) * (batch + max(seam.leaves))
        order, traffic = policy.order(layout, seam), chain(len(layout.stages))
        rounds.append(lower(order, layout=layout, sizes=sizes, traffic=traffic, publishes=True, seam=seam))
    return rounds


def middle(policy: WeightPolicy, stages: int, batch: int) -> VerifiedProgram:
    """Return a round in the middle of many."""
    return verify(rounds_of(policy, Layout(tuple((r,) for r in range(stages))), (batch,) * 40)[20])


@pytest.mark.parametrize("name", POLICIES)
def test_policies_keep_their_promises_and_rounds_fit_together(name: str) -> None:
    """One version where one is promised, and no more than are allowed. Every round is written and read as it is."""
    for layout in map(Layout, LAYOUTS):
        for batches in BATCHES:
            rounds = rounds_of(POLICIES[name], layout, batches)
            assert [parse_program(format_program(program)) for program in rounds] == rounds
            reads = verify_rounds([verify(program) for program in rounds], POLICIES[name])
            forwards = [read for read in reads if read.compute.kind == "F"]
            assert len(forwards) == sum(map(len, layout.stages)) * sum(batches)


def test_a_middle_round_has_the_order_that_the_docs_show() -> None:
    line = middle(POLICIES["pipedream"], 4, 4).ranks[1]
    passes = [str(x)[1:] for x in line if isinstance(x, Compute) and x.kind in "FI"]
    assert " ".join(passes).replace("I", "B") == "F2 B0 F3 B1 F4 B2 F5 B3"


def test_what_a_policy_does_not_keep_is_refused() -> None:
    layout = Layout(((0,), (1,), (2,)))
    stale = [verify(program) for program in rounds_of(POLICIES["stale"], layout, (3,) * 4)]
    for promise in ("micro-batch", "batch"):
        with pytest.raises(ProgramError, match=rf'"versions": .* one version for a {promise}'):
            verify_rounds(stale, replace(POLICIES["stale"], promise=promise))
    stash = [verify(program) for program in rounds_of(POLICIES["pipedream"], layout, (1,) * 6)]
    with pytest.raises(ProgramError, match='law "versions": it holds 2 versions, the policy says 1'):
        verify_rounds(stash, replace(POLICIES["pipedream"], live=lambda ahead, batch: 1))
    once = [verify(program) for program in rounds_of(POLICIES["xpipe"], layout, (3,) * 4)]
    with pytest.raises(ProgramError, match='law "versions": it holds 3 versions, the policy says 2'):
        verify_rounds(once, replace(POLICIES["xpipe"], live=lambda ahead, batch: 2))
    with pytest.raises(ProgramError, match=r'"seam": .* enter, the round before left'):
        verify_rounds(stash[1:], POLICIES["pipedream"])
    with pytest.raises(ProgramError, match=r'"seam": it leaves .* no round follows'):
        verify_rounds(stash[:3], POLICIES["pipedream"])


STASHES = ("pipedream", "pipedream_vertical")  # micro-batches of a batch may have versions of their own


@pytest.mark.parametrize("name", POLICIES)
def test_weight_halves_are_joined_only_where_they_read_one_version(name: str) -> None:
    """One product for all of a batch would read the weights of its first micro-batch; lowering joins what it may."""
    policy, layout, rounds = POLICIES[name], Layout(((0,), (1,))), list[Program]()
    for number in range(4):
        enters = rounds[-1].seam.leaves if rounds and rounds[-1].seam else ()
        seam = policy.seam(layout, 3, enters=enters, following=(3,) * (3 - number))
        late, *others = policy.order(layout, seam)
        line = [replace(x, kind="I") if x.kind == "B" else x for x in late] + [Compute(0, "W", m) for m in range(3)]
        sizes, traffic = (2,) * (3 + max(seam.leaves)), replace(chain(2), joinable=(0,))
        rounds.append(lower((tuple(line), *others), layout=layout, sizes=sizes, traffic=traffic, seam=seam, join=3))
    verify_rounds([verify(program) for program in rounds], policy)
    halves = [x for x in rounds[1].ranks[0] if isinstance(x, AnyCompute) and x.kind == "W"]
    all_in_one = {halves[0]: Joined(0, (0, 1, 2))} | dict.fromkeys(halves[1:])
    line = [y for x in rounds[1].ranks[0] if (y := all_in_one.get(x, x)) is not None]
    rounds[1] = replace(rounds[1], ranks=(tuple(line), rounds[1].ranks[1]))
    with pytest.raises(ProgramError, match="reads 0 and 1") if name in STASHES else contextlib.nullcontext():
        verify_rounds([verify(program) for program in rounds], policy)


@pytest.mark.parametrize(("stages", "batch"), [(4, 4), (4, 8), (8, 8)])
def test_no_rank_waits_between_rounds(stages: int, batch: int) -> None:
    """A round takes the work of one rank; with a flush it takes p - 1 times F and B longer (Narayanan et al. 2019)."""
    for name, message in (("pipedream", 0.25), ("2bw", 0.25), ("pb", 1.0)):
        program = middle(POLICIES[name], stages, batch)
        assert period(program, UnitPrices(latency=message)) == pytest.approx(3 * batch)
        curves = memory_curves(simulate(program, UnitPrices()), program=program, prices=UnitPrices())
        assert [c.peak_in_flight for c in curves] == [1 + a for a in POLICIES[name].ahead(program.layout, batch)]


def test_messages_that_take_long_are_waited_for_across_rounds() -> None:
    """As long as a message takes, a rank waits for it in the round that takes it, not in the one that receives it."""
    slow = {name: period(middle(POLICIES[name], 4, 4), UnitPrices(latency=1.5)) for name in ("pipedream", "pb")}
    assert slow["pipedream"] == pytest.approx(18) and slow["pb"] < 13


@pytest.mark.parametrize("latency", [0.25, 1.5])
@pytest.mark.parametrize(("name", "batch"), [("pipedream", 4), ("pb", 4), ("pipedream", 1)])
def test_a_simulated_round_is_accounted_as_a_recorded_one(name: str, batch: int, latency: float) -> None:
    """It has the receives that its computes take, and no time that nothing explains."""
    program, prices = middle(POLICIES[name], 4, batch), UnitPrices(latency=latency)
    timeline = with_entering(steady_step(program, prices), program)
    receives = {e.instruction.message for e in timeline.events if isinstance(e.instruction, Recv)}
    for source, target in ((0, 1), (1, 2), (2, 3)):
        taken = {m.microbatch for m in receives if (m.source, m.target) == (source, target)}
        assert taken == {m for m in range(len(program.sizes)) if program.runs(target, "F", m)}
    for account in accounts(timeline):
        overhead = sum(gap.overhead for gap in account.gaps if not gap.first)  # its rank was in the round before
        assert overhead == pytest.approx(0, abs=1e-9)


def _mutant(program: Program, draw: random.Random) -> Program:
    """Return a program with one thing changed: a place, a number, the kind of a choice, or the seam."""
    rank = draw.randrange(len(program.ranks))
    line = list(program.ranks[rank])
    place = draw.randrange(len(line))
    match draw.choice(["drop", "twice", "swap", "move", "number", "choice", "seam", "batch"]):
        case "drop":
            del line[place]
        case "twice":
            line.insert(draw.randrange(len(line) + 1), line[place])
        case "swap":
            other = min(place + 1, len(line) - 1)
            line[place], line[other] = line[other], line[place]
        case "move":
            line.insert(draw.randrange(len(line)), line.pop(place))
        case "number":
            match line[place]:
                case Compute() | OwnWork() as x:
                    line[place] = replace(x, microbatch=draw.randrange(len(program.sizes)))
                case Send() | Recv() as x:
                    message = replace(x.message, microbatch=draw.randrange(len(program.sizes)))
                    line[place] = replace(x, message=message)
        case "choice":
            match line[place]:
                case Pin(stage, microbatch):
                    line[place] = PinOlder(stage, microbatch)
                case PinOlder(stage, microbatch):
                    line[place] = Pin(stage, microbatch)
                case Predict(stage, microbatch):
                    line[place] = PredictBack(stage, microbatch)
                case PredictBack(stage, microbatch):
                    line[place] = Predict(stage, microbatch)
        case "seam":
            assert program.seam is not None
            name = draw.choice(["enters", "leaves"])
            numbers = list(getattr(program.seam, name))
            numbers[draw.randrange(len(numbers))] += draw.choice([-1, 1])
            return replace(program, seam=replace(program.seam, **{name: tuple(numbers)}))
        case "batch":
            assert program.seam is not None
            return replace(program, seam=replace(program.seam, batch=program.seam.batch + draw.choice([-1, 1])))
    return replace(program, ranks=(*program.ranks[:rank], tuple(line), *program.ranks[rank + 1 :]))


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["stale", "pb", "pipedream", "pipedream_vertical", "2bw", "spectrain", "xpipe", "pb_lwpv"]
)
def test_whatever_would_do_harm_is_refused_before_it_runs(name: str, count: int) -> None:
    """An interpreter of numbers says of mutants whether they end with other weights, or do not end."""
    policy, draw = POLICIES[name], random.Random(name)
    harmful = 0
    for _ in range(count):
        layout = Layout(tuple((r,) for r in range(draw.choice([2, 3, 4]))))
        rounds = rounds_of(policy, layout, (batch := draw.choice([1, 2, 3]),) * 5)
        shared = batch if policy.predicts_once else 0
        wanted = run(rounds, shared=shared)
        place = draw.randrange(len(rounds))
        mutants = [*rounds[:place], _mutant(rounds[place], draw), *rounds[place + 1 :]]
        try:
            is_harmful = run(mutants, shared=shared) != pytest.approx(wanted, abs=1e-12)
        except Broken:
            is_harmful = True
        harmful += is_harmful
        if is_harmful:
            with pytest.raises(ProgramError):
                verify_rounds([verify(program) for program in mutants], policy)
    assert harmful > count // 4


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_horizons_are_those_of_the_papers_and_of_the_program(stages: int) -> None:
    """Counted from the program, they are the closed forms for one micro-batch, and for several one less at times.

    F and B take equally long, and messages no time. XPipe writes its forms another way; they say the same.
    """
    layout, even = Layout(tuple((r,) for r in range(stages))), UnitPrices(weight_grad=0.0)
    for count in (1, 2, 4):
        for s in range(stages):
            written = (math.floor((count + stages - s / 2 - 2) / count), (count + s // 2 - 1) // count)
            assert until_first_backward(s, stages, count) == written
        batch = 2 * stages
        for name in ("spectrain", "pb"):
            rounds = [verify(program) for program in rounds_of(POLICIES[name], layout, (count,) * (2 * batch))]
            if name == "spectrain":
                forms = [until_first_backward(s, stages, count) for s in range(stages)]
                less = [
                    form - counted
                    for pairs in zip(forms, counted_horizons(rounds, even, batch), strict=True)
                    for form, counted in zip(*pairs, strict=True)
                ]
                assert set(less) <= ({0} if count == 1 else {0, 1})
            else:
                reads = {read.compute: read.version.steps for read in verify_rounds(rounds, POLICIES[name])}
                for s in range(stages):
                    first = batch * count
                    counted = reads[Compute(s, "I", first)] - reads[Compute(s, "F", first)]
                    assert until_backward(s, stages, count) == (counted, 0)
