"""Laws of milestones, and of ranks that run ahead, with all ranks in one thread."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from lightning_pipe.core.milestones import (
    MILESTONES,
    Confirm,
    Milestone,
    MilestoneEffects,
    Publish,
    Rollback,
    milestone,
)
from lightning_pipe.core.program import Compute, Instruction
from lightning_pipe.errors import ProgramError
from lightning_pipe.report import chrome_trace
from lightning_pipe.report.plot import plot_timeline
from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.runtime.job import ProgramResult, ResultSlice
from lightning_pipe.runtime.milestones import at_once
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import Wait, drive_together
from lightning_pipe.schedule.formats.text import format_program, parse_program
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, simulate
from ranks.pipelines import Case, capture_of, executor_of, job_of, module_of, plain_gradients, program_of, split_of

CASES = {
    "1f1b": Case("Chain", ((0,), (1,), (2,)), sizes=(2, 2, 2, 1)),
    "gpipe": Case("Skip", ((0,), (1,), (2,)), schedule="gpipe"),
    "zb_h2": Case("Skip", ((0,), (1,), (2,)), sizes=(1,) * 6, schedule="zb_h2"),
    "two stages on one rank": Case("Chain", ((0,), (1,), (0,))),
    "replicas": Case("Skip", ((0, 1), (2,), (3, 4)), sizes=(3, 3, 2)),
    "two pipes": Case("Skip", ((0, 1), (1, 0)), ("third",), (3, 3, 2), "chimera", frozenset({0, 1})),
}


class Noting(Unwatched):
    """Notes the instructions of a rank."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def at(self, instruction: Instruction, *, pending: bool = False) -> None:
        self.told.append(str(instruction))


class World:
    """All ranks of a case, and what they have told."""

    def __init__(self, case: Case) -> None:
        capture = capture_of(case, module_of(case))
        self.case, self.split = case, split_of(case, capture)
        hub = Hub()
        self.modules = [module_of(case) for _ in range(case.layout.ranks)]
        self.executors = [
            executor_of(case, m, capture, self.split, hub.endpoint(r)) for r, m in enumerate(self.modules)
        ]
        self.told: list[list[str]] = []
        self.taken_back: list[int] = []
        self.others: dict = {}  # handlers of other milestones
        self.program = program_of(case, self.split, milestones=True)

    def run(self, *, holds: bool) -> list[ProgramResult]:
        self.told = [[] for _ in self.executors]
        walks = [
            executor.walk(
                self.program,
                job_of(self.case),
                watch=Noting(self.told[rank]),
                milestones={
                    Confirm: self.answer(holds),
                    Publish: at_once(lambda results, rank=rank: self.note(rank, results)),
                    Rollback: at_once(lambda results, rank=rank: self.taken_back.append(rank)),
                    **self.others,
                },
            )
            for rank, executor in enumerate(self.executors)
        ]
        return drive_together(walks)

    def answer(self, holds: bool):
        def ask(pieces: Mapping[str, Sequence[ResultSlice]]) -> Iterator[Wait]:
            yield from ()
            return holds

        return ask

    def note(self, rank: int, results: Mapping[str, Sequence[ResultSlice]]) -> None:
        self.told[rank].append("results")
        self.pieces = {name: len(pieces) for name, pieces in results.items()} or getattr(self, "pieces", {})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_program_that_was_given_up_leaves_nothing_behind(case):
    world = World(case)
    for holds in (False, False, True):
        outcomes = world.run(holds=holds)
        assert [outcome.given_up for outcome in outcomes] == [not holds] * len(outcomes)
        assert all(not outcome.results for outcome in outcomes) or holds
    expected = plain_gradients(case, [(0, sum(case.sizes))])
    for executor, module in zip(world.executors, world.modules, strict=True):
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        for name in {n for stage in executor.stages.values() for n in stage.program.gradients.values()}:
            torch.testing.assert_close(gradients[name], expected[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_backward_has_run_when_a_program_is_given_up(case):
    world = World(case)
    world.run(holds=False)
    told = [text for line in world.told for text in line if text not in ("CONFIRM", "ROLLBACK")]
    assert not [text for text in told if any(k in text for k in ("I", "W", "STEP", "PUBLISH", "results"))]
    assert [line[-2:] for line in world.told] == [["CONFIRM", "ROLLBACK"]] * len(world.told)
    assert sorted(world.taken_back) == [*range(len(world.told))], "once on every rank"
    assert all(parameter.grad is None for module in world.modules for parameter in module.parameters())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_told_behind_the_last_forward_and_before_the_next_backward(case):
    world = World(case)
    world.run(holds=True)
    for line, told in zip(world.program.ranks, world.told, strict=True):
        at = told.index("results")
        behind = [x for x in line[at:] if isinstance(x, Compute)]
        before = [x for x in line[:at] if isinstance(x, Compute)]
        assert all(x.kind != "F" for x in behind)
        last = max(i for i, x in enumerate(before) if x.kind == "F")
        assert all(x.kind != "I" for x in before[last:])


def test_a_milestone_without_a_handler_is_named_before_anything_runs():
    world = World(CASES["gpipe"])
    for given, missing in (({}, "CONFIRM"), ({Confirm: world.answer(True), Publish: at_once(print)}, "ROLLBACK")):
        told: list[str] = []
        walk = world.executors[0].walk(world.program, job_of(world.case), watch=Noting(told), milestones=given)
        with pytest.raises(ProgramError, match=rf"\({missing}\) has no handler"):
            next(walk)
        assert told == []


@pytest.fixture
def rest_stop() -> Iterator[type[Milestone]]:
    """Define a milestone: every rank begins with it, and awaits the end of the step before."""

    @milestone
    @dataclass(frozen=True, order=True)
    class RestStop(Milestone):
        code: ClassVar[str] = "REST"
        effects: ClassVar[MilestoneEffects] = MilestoneEffects("rest", precedes=("F",), awaits_steps=True, label="rest")

    yield RestStop
    del MILESTONES["REST"]


def test_a_new_milestone_is_parsed_proved_simulated_drawn_and_run(rest_stop, tmp_path):
    case = CASES["two stages on one rank"]
    world = World(case)
    plain = program_of(case, world.split)
    program = verify(parse_program(re.sub(r"(rank \d:)", r"\1 REST", format_program(plain))))
    assert [line[0] for line in program.ranks] == [rest_stop()] * 2
    timeline = simulate(program, UnitPrices(), begins=(0.0, 1000.0))
    rests = {e.rank: e for e in timeline.events if e.instruction == rest_stop()}
    assert [(rests[rank].start, rests[rank].end) for rank in (0, 1)] == [(0.0, 1000.0), (1000.0, 1000.0)]
    assert [event["name"] for event in json.loads(chrome_trace(timeline))["traceEvents"]].count("REST") == 2
    plot_timeline(timeline, tmp_path / "rest.png")
    world.program, seen = program, list[int]()
    world.others = {rest_stop: at_once(lambda pieces: seen.append(len(pieces)))}
    outcomes = world.run(holds=True)
    assert len(seen) == 2 and not any(outcome.given_up for outcome in outcomes)


def test_a_milestone_out_of_its_place_or_unknown_is_refused(rest_stop):
    world = World(CASES["gpipe"])
    plain = program_of(world.case, world.split)
    late = replace(plain, ranks=tuple((*line[:-1], rest_stop(), line[-1]) for line in plain.ranks))
    with pytest.raises(ProgramError, match='REST: law "rest": F of this rank comes before it'):
        verify(late)
    with pytest.raises(ProgramError, match="found 'NAP'; what stands once"):
        parse_program(format_program(plain).replace(" STEP", " NAP STEP"))
    with pytest.raises(ProgramError, match="is written REST, as RestStop is"):
        milestone(type("Other", (Milestone,), {"code": "REST", "effects": rest_stop.effects}))
    with pytest.raises(ProgramError, match="declares no effects"):
        milestone(type("Other", (Milestone,), {"code": "OTHER"}))
    unknown = type("Unknown", (Milestone,), {"code": "UNKNOWN", "effects": rest_stop.effects})()
    with pytest.raises(ProgramError, match="Unknown is not known; decorate it with `milestone`"):
        verify(replace(plain, ranks=tuple((*line[:-1], unknown, line[-1]) for line in plain.ranks)))
