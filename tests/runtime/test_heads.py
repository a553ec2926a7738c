"""A head makes gradients and results those of the whole batch, with all ranks in one thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch

from lightning_pipe.core.milestones import Confirm, Head, Publish, Rollback
from lightning_pipe.core.program import Compute, Free, Program, Seam, VerifiedProgram
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.errors import InstructionError, ProgramError
from lightning_pipe.report import chrome_trace, plot_timeline
from lightning_pipe.runtime.exchanges.groups import groups
from lightning_pipe.runtime.exchanges.results import Results
from lightning_pipe.runtime.executor import run_together
from lightning_pipe.runtime.job import ProgramResult
from lightning_pipe.runtime.milestones import at_once
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import Wait, drive_together
from lightning_pipe.schedule.formats.text import format_program, parse_program
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, memory_curves, simulate
from ranks.headed import HeadCase, executor_of, job_of, parameters_of, plain, program_of, split_of

TWO, THREE = ((0,), (1,)), ((0,), (1,), (2,))
CASES = {
    f"{loss} {name}": HeadCase(loss, **arguments)
    for loss in ("contrast", "root", "mean")
    for name, arguments in {
        "of one micro-batch": {"stages": TWO, "sizes": (5,)},
        "of two": {"stages": THREE, "sizes": (3, 2)},
        "of four unequal ones": {"stages": THREE, "sizes": (3, 1, 2, 2)},
        "with both stages on one rank": {"stages": ((0,), (1,), (0,)), "sizes": (2, 2)},
        "with two last replicas": {"stages": ((0,), (1, 2)), "sizes": (4, 3)},
        "with unequal last replicas": {"stages": ((0,), (1, 2)), "sizes": (4, 1), "weights": ((1,), (1, 3))},
        "with a last replica without samples": {"stages": ((0,), (1, 2)), "sizes": (2, 2), "weights": ((1,), (5, 1))},
        "from one to two to one": {"stages": ((0,), (1, 2), (3,)), "sizes": (3, 4)},
        "with last replicas in turn": {"stages": ((0,), (1, 2)), "sizes": (2, 3, 1), "whole": frozenset({1})},
        "breadth first": {"stages": ((0,), (1,), (0,), (1,)), "sizes": (2, 1, 2), "schedule": "breadth_first"},
        "with joined weight halves": {"stages": TWO, "sizes": (2, 3, 1), "schedule": "2bp", "join": 3},
        "offloaded": {"stages": TWO, "sizes": (2,) * 6, "offloads": (0, 1)},
    }.items()
}
SPEAKING = {
    "1f1b": HeadCase("mean", THREE, (2, 1, 2, 2), "1f1b"),
    "1f1b of replicas": HeadCase("mean", ((0,), (1, 2)), (4, 3, 2), "1f1b"),
    "1f1b of replicas, one of which has nothing of the last": HeadCase(
        "mean", ((0,), (1, 2)), (4, 3, 2), "1f1b", weights=((1,), (1, 3))
    ),
    "two pipes": HeadCase("mean", ((0, 1), (1, 0)), (3, 3, 2), "chimera", whole=frozenset({0, 1})),
    "zero bubble": HeadCase("mean", THREE, (1,) * 6, "zb_h2"),
}


class World:
    """All ranks of a case."""

    def __init__(self, case: HeadCase) -> None:
        self.case, hub = case, Hub()
        self.endpoints = [hub.endpoint(rank) for rank in range(case.layout.ranks)]
        self.parameters = [parameters_of(case) for _ in self.endpoints]
        self.executors = [
            executor_of(case, parameters, endpoint)
            for parameters, endpoint in zip(self.parameters, self.endpoints, strict=True)
        ]

    def run(self, program: VerifiedProgram, **changes: float) -> list[ProgramResult]:
        return run_together(self.executors, program, [job_of(self.case, **changes)] * len(self.executors))

    def told(self, program: VerifiedProgram, outcomes: list[ProgramResult]) -> list[torch.Tensor]:
        walks = [
            Results(split_of(self.case), self.case.layout, transport=endpoint, device=torch.device("cpu")).collect(
                program, outcome.results, ["told"]
            )
            for endpoint, outcome in zip(self.endpoints, outcomes, strict=True)
        ]
        return [collected.values["told"] for collected in drive_together(walks)]


@pytest.mark.parametrize("case", [*CASES.values(), *SPEAKING.values()], ids=[*CASES, *SPEAKING])
def test_gradients_and_results_are_those_of_the_whole_batch(case: HeadCase) -> None:
    world, program, (expected, told) = World(case), program_of(case), plain(case)
    outcomes = world.run(program)
    seen: dict[str, torch.Tensor] = {}
    for executor, parameters in zip(world.executors, world.parameters, strict=True):
        for name in {n for stage in executor.stages.values() for n in stage.program.gradients.values()}:
            torch.testing.assert_close(parameters[name].grad, expected[name], rtol=0, atol=1e-12, msg=name)
            assert torch.equal(parameters[name].grad, seen.setdefault(name, parameters[name].grad)), name
    assert seen.keys() == {name for name, gradient in expected.items() if gradient is not None}
    for result in world.told(program, outcomes):
        torch.testing.assert_close(result, told, rtol=0, atol=1e-12)


REPLICATED = {name: case for name, case in {**CASES, **SPEAKING}.items() if len(case.stages[-1]) > 1}


@pytest.mark.parametrize("case", REPLICATED.values(), ids=REPLICATED)
def test_replicas_post_the_same_collectives_in_the_same_order_in_groups_that_are_open(case: HeadCase) -> None:
    """A device that carries them (NCCL) hangs otherwise."""
    for training in (True, False):
        world, program = World(case), program_of(case, training=training)
        posted = [noted_collectives(endpoint) for endpoint in world.endpoints]
        world.run(program)
        first, *others = (posted[rank] for rank in case.stages[-1])
        assert first and all(other == first for other in others)
        assert {group for _, group, *_ in first} <= {*groups(program)}


def noted_collectives(endpoint) -> list[tuple]:
    """Return the list that an endpoint writes its collectives to."""
    noted: list[tuple] = []
    sums, copies = endpoint.all_reduce, endpoint.broadcast

    def all_reduce(tensor, *, group):
        noted.append(("sum", group, tensor.shape, tensor.dtype))
        return sums(tensor, group=group)

    def broadcast(tensor, *, source, group):
        noted.append(("copy", group, tensor.shape, tensor.dtype, source))
        return copies(tensor, source=source, group=group)

    endpoint.all_reduce, endpoint.broadcast = all_reduce, broadcast
    return noted


def test_weights_of_batches_and_programs_that_only_accumulate_count() -> None:
    case = CASES["contrast with two last replicas"]
    world, (expected, _) = World(case), plain(case)
    for synchronise in (False, True):
        world.run(program_of(case, synchronise=synchronise), weight=0.5)
    for name in ("weight1", "scale"):
        torch.testing.assert_close(world.parameters[2][name].grad, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", [CASES["root with two last replicas"], SPEAKING["1f1b"]], ids=["root", "mean"])
def test_a_program_without_backwards_tells_what_the_head_says_and_keeps_nothing(case: HeadCase) -> None:
    world, program = World(case), program_of(case, training=False)
    for result in world.told(program, world.run(program)):
        torch.testing.assert_close(result, plain(case)[1], rtol=0, atol=1e-12)


def test_what_the_head_reads_is_let_go_when_it_has_run(monkeypatch) -> None:
    """Terms are numbers that the head alone reads; its slope is held until the input half of each micro-batch."""
    case = CASES["root of two"]
    world, program = World(case), program_of(case)
    stage, held = world.executors[2].stages[2], list[set[str]]()
    compute = stage.compute

    def noting(kind, microbatch, slice_) -> None:
        held.append({name for name in stage.left() if name.split(":")[1] in ("term", "slope")})
        compute(kind, microbatch, slice_)

    monkeypatch.setattr(stage, "compute", noting)
    world.run(program)
    assert held == [set(), {"0:term"}, {"0:slope", "1:slope"}, *[{"1:slope"}] * 2, set()]


@pytest.mark.parametrize("name", ["contrast with two last replicas", "mean with two last replicas"])
def test_a_program_that_was_given_up_has_run_no_head_and_leaves_nothing_behind(name: str) -> None:
    case = CASES[name]
    world, program, (expected, told) = World(case), program_of(case, milestones=True), plain(case)
    pieces: list[Mapping] = []

    def answer(holds: bool):
        def ask(results: Mapping) -> Iterator[Wait]:
            yield from ()
            return holds

        return {Confirm: ask, Publish: at_once(pieces.append), Rollback: at_once(lambda results: None)}

    for holds in (False, True):
        walks = [e.walk(program, job_of(case), milestones=answer(holds)) for e in world.executors]
        outcomes = drive_together(walks)
        assert [bool(pieces), *(o.given_up for o in outcomes)] == [holds, *[not holds] * len(outcomes)]
    torch.testing.assert_close(pieces[1]["told"][0].content, told, rtol=0, atol=1e-12)  # when results are told
    torch.testing.assert_close(world.parameters[1]["weight1"].grad, expected["weight1"], rtol=0, atol=1e-12)


def test_an_error_in_the_head_names_it(monkeypatch) -> None:
    case = CASES["root of two"]
    world = World(case)

    def fail(*inputs: object) -> None:
        raise ValueError("the user's mistake")

    monkeypatch.setattr(world.executors[2].stages[2], "run_head", fail)
    with pytest.raises(InstructionError, match="Rank 2 failed at HEAD: ValueError: the user's mistake"):
        world.run(program_of(case))


def test_the_text_of_a_program_with_a_head_is_read_back() -> None:
    for case in (CASES["contrast of two"], SPEAKING["1f1b"]):
        program = program_of(case)
        assert verify(parse_program(format_program(program))) == program


def test_a_head_is_simulated_recorded_and_drawn(tmp_path) -> None:
    """Replicas begin it together, when the last of them has come."""
    case = CASES["root with two last replicas"]
    world, program = World(case), program_of(case)
    timeline = simulate(program, UnitPrices(head=5.0))
    assert {(e.rank, e.start, e.end) for e in timeline.events if e.instruction == Head()} == {(1, 3, 8), (2, 3, 8)}
    plot_timeline(timeline, tmp_path / "head.png")
    recorded = run_together(world.executors, program, [job_of(case)] * 3, record=True, record_memory=True)
    assert [str(e.instruction) for o in recorded for e in o.timeline.events].count("HEAD") == 2
    assert chrome_trace(timeline).count('"HEAD"') == 2
    measured = Timeline(tuple(event for outcome in recorded for event in outcome.timeline.events))
    assert len(memory_curves(measured, program=program, prices=UnitPrices())) == 3


def test_a_program_whose_stages_have_another_head_is_not_run() -> None:
    world, program = World(CASES["root of two"]), program_of(CASES["root of two"])
    stage = world.executors[2].stages[2]
    stage.program = replace(stage.program, head=None)
    with pytest.raises(ProgramError, match="The program of rank 2 has HEAD, but its stages have none"):
        world.run(program)


def with_line(program: Program, rank: int, line: tuple) -> Program:
    return replace(program, ranks=tuple(line if r == rank else other for r, other in enumerate(program.ranks)))


MUTATED = {"held": CASES["contrast with two last replicas"], **SPEAKING}


@pytest.mark.parametrize("case", MUTATED.values(), ids=MUTATED)
def test_a_head_out_of_place_is_refused(case: HeadCase) -> None:
    """On every rank of the last stage it is moved to every place, left out, and written twice."""
    program = program_of(case)
    for rank in case.stages[-1]:
        line = program.ranks[rank]
        rest = tuple(x for x in line if x != Head())
        for place in range(len(rest)):
            before, after = ([x for x in part if isinstance(x, Compute)] for part in (rest[:place], rest[place:]))
            is_early = any(x.kind == "F" and x.stage == case.last for x in after)
            is_late = case.loss != "mean" and any(x.kind != "F" and x.stage == case.last for x in before)
            if is_early or is_late:
                with pytest.raises(ProgramError, match=r'law "(head|free)"'):
                    verify(with_line(program, rank, (*rest[:place], Head(), *rest[place:])))
        with pytest.raises(ProgramError, match=r'law "free": not before it: HEAD'):
            verify(with_line(program, rank, rest))
        unfreed = tuple(x for x in rest if not isinstance(x, Free) or x.stage != case.last)
        with pytest.raises(ProgramError, match=r'law "head": missing HEAD'):
            verify(with_line(program, rank, unfreed))
        with pytest.raises(ProgramError, match=r'HEAD: law "head": it stands twice'):
            verify(with_line(program, rank, tuple(y for x in line for y in ((x, x) if x == Head() else (x,)))))
    for rank in {*range(case.layout.ranks)} - {*case.stages[-1]}:
        with pytest.raises(ProgramError, match=r'HEAD: law "head": no stage of this rank needs it'):
            verify(with_line(program, rank, (Head(), *program.ranks[rank])))


def test_replicas_that_come_to_the_head_while_one_waits_for_another_are_a_deadlock() -> None:
    """Rank 0 has its part of the last stage behind it, but not the forwards that rank 1 needs for its own."""
    case = HeadCase("root", ((0, 1), (1, 0)), (2, 2, 2), whole=frozenset({0, 1}))
    program = program_of(case)
    first = program.ranks[0]
    late = [x for x in first if str(x).startswith(("0LOAD2", "0F2", "0SEND_F2"))]
    behind = tuple(x for x in first if x != Head() and x not in late)
    place = max(i for i, x in enumerate(behind) if str(x) == "1F1") + 1
    with pytest.raises(ProgramError, match=r'law "deadlock": rank 0, .*HEAD waits for rank 1; rank 1'):
        verify(with_line(program, 0, (*behind[:place], Head(), *late, *behind[place:])))


def test_rounds_that_mix_batches_have_no_head() -> None:
    program = program_of(CASES["root of two"])
    with pytest.raises(ProgramError, match="the last stage has a head, which needs all samples of a batch"):
        verify(replace(program, seam=Seam(2, (0, 0, 0), (0, 0, 0))))
