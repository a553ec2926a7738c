"""Laws of joined W: which of them lowering joins, and what verify refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.core.program import Compute, Instruction, Joined, Layout, Program, Traffic
from lightning_pipe.errors import ConfigError, ProgramError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.formats.text import parse
from lightning_pipe.schedule.formats.torch_csv import write_csv_with_communication
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.rules import halves
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, simulate

TWO = Layout(((0,), (1,)))


def program_of(join: int, *, layout: Layout = TWO, sizes: tuple[int, ...] = (2,) * 5, delay: str = "end") -> Program:
    order = order_of("2bp", layout=layout, microbatches=len(sizes), options={"delay": delay, "join": join})
    return lower(order, layout=layout, sizes=sizes, traffic=chain(len(layout.stages)), join=join)


def weight_halves(line: tuple[Instruction, ...]) -> str:
    return " ".join(str(x) for x in line if isinstance(x, (Compute, Joined)) and x.kind == "W")


@pytest.mark.parametrize(
    ("join", "found"),
    [
        (1, "0W0 0W1 0W2 0W3 0W4"),
        (2, "0W0+1 0W2+3 0W4"),
        (3, "0W0+1+2 0W3+4"),
        (4, "0W0+1+2+3 0W4"),
        (9, "0W0+1+2+3+4"),
    ],
)
def test_weight_halves_that_follow_each_other_are_joined_up_to_the_most(join, found):
    assert weight_halves(verify(program_of(join)).ranks[0]) == found


def test_only_neighbours_of_one_joinable_stage_are_joined():
    order = (tuple(Compute(s, "W", m) for s, m in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (0, 2))),)
    traffic = Traffic((), (), joinable=(0, 2))
    program = lower(order, layout=Layout(((0,),) * 3), sizes=(1,) * 3, traffic=traffic, join=9)
    assert weight_halves(program.ranks[0]) == "0W0+1 1W0 1W1 2W0+1 0W2"


def test_a_replica_joins_only_what_it_has_samples_of():
    layout = Layout(((0, 1), (2,)), whole=frozenset({0}))
    lines = verify(program_of(9, layout=layout)).ranks
    assert [weight_halves(line) for line in lines] == ["0W0+2+4", "0W1+3", "1W0+1+2+3+4"]


def test_all_else_of_the_program_stays_as_it_is():
    """Nothing moves but `Free`, which comes behind the last micro-batch of its W."""
    apart, joined = program_of(1), program_of(9)
    for rank, (alone, together) in enumerate(zip(apart.ranks, joined.ranks, strict=True)):
        singles = [one for x in together for one in (halves(x) if isinstance(x, Joined) else [x])]
        assert sorted(map(str, singles)) == sorted(map(str, alone))
        behind = [str(x) for x in together[[isinstance(x, Joined) for x in together].index(True) + 1 :]]
        assert [x for x in behind if "FREE" in x] == [f"{rank}FREE{m}" for m in range(5)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("0W0+1", r'missing 0W2, 0W3, 0W4|law "free"'),
        ("0W0+1+2+3+4+4", r'law "once": it \(or a part of it\) has run before'),
        ("0W0+1+2+3+5", "there are 2 stages and 5 micro-batches"),
        ("1W0+1+2+3+4", r'law "once": stage 1 belongs to ranks \(1,\)'),
    ],
)
def test_a_wrong_joined_w_is_refused(wrong, message):
    program = program_of(9)
    line = [parse(wrong) if isinstance(x, Joined) else x for x in program.ranks[0]]
    with pytest.raises(ProgramError, match=message):
        verify(replace(program, ranks=(tuple(line), program.ranks[1])))


def test_a_joined_w_comes_after_every_i_of_it():
    program = program_of(9)
    line = list(program.ranks[0])
    i = next(i for i, x in enumerate(line) if str(x) == "0I4")
    j = next(j for j, x in enumerate(line) if isinstance(x, Joined))
    line[i], line[j] = line[j], line[i]
    with pytest.raises(ProgramError, match=r'0W0\+1\+2\+3\+4: law "inputs": it needs 0I4 before it'):
        verify(replace(program, ranks=(tuple(line), program.ranks[1])))


def test_a_stage_that_cannot_join_and_a_single_w_are_refused():
    program = program_of(9)
    with pytest.raises(ProgramError, match=r'law "join": W of stage 0 cannot be joined; joinable: \(1,\)'):
        verify(replace(program, traffic=replace(program.traffic, joinable=(1,))))
    line = tuple(one for x in program.ranks[0] for one in (_singles(x) if isinstance(x, Joined) else (x,)))
    with pytest.raises(ProgramError, match=r'law "join": it has 1 micro-batches'):
        verify(replace(program, ranks=(line, program.ranks[1])))


def _singles(joined: Joined) -> tuple[Joined, ...]:
    return tuple(Joined(joined.stage, (m,)) for m in joined.microbatches)


def test_a_replica_without_samples_is_refused():
    program = program_of(9, layout=Layout(((0, 1), (2,)), whole=frozenset({0})))
    line = tuple(parse("0W0+1+2+4") if isinstance(x, Joined) else x for x in program.ranks[0])
    with pytest.raises(ProgramError, match=r'law "once": this rank has no samples of micro-batch 1 in stage 0'):
        verify(replace(program, ranks=(line, *program.ranks[1:])))


def test_w_on_all_samples_is_priced_on_all_samples():
    class PerSample(UnitPrices):
        def compute_s(self, compute, rank, samples):
            return 0.5 + samples

    timeline = simulate(verify(program_of(9, sizes=(1, 2, 3, 4))), PerSample())
    spent = {str(e.instruction): e.end - e.start for e in timeline.events}
    assert spent["0W0+1+2+3"] == 10.5
    assert timeline.busy(0) == pytest.approx(2 * (4 * 0.5 + 10) + 10.5)


@pytest.mark.parametrize("join", [2, 5, 16])
def test_the_time_in_units_is_that_of_single_ones(join):
    for delay in ("end", "idle"):
        makespans = [
            simulate(verify(program_of(j, delay=delay)), UnitPrices(1.0, 2.0, 3.0)).makespan for j in (1, join)
        ]
        assert makespans[0] <= makespans[1] if delay == "idle" else makespans[0] == makespans[1]


@pytest.mark.parametrize("found", [0, -1, "all"])
def test_a_number_that_cannot_be_meant_is_named(found):
    with pytest.raises(ConfigError, match=f"schedule '2bp': found join {found!r}; expected a number of micro-batches"):
        order_of("2bp", layout=TWO, microbatches=2, options={"join": found})


def test_torch_has_no_action_for_it():
    with pytest.raises(ProgramError, match=r"the program joins weight halves \(0W0\+1"):
        write_csv_with_communication(verify(program_of(9)))
