"""Laws of ranks that run ahead, with all ranks in one thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch

from lightning_pipe.core.program import Compute
from lightning_pipe.runtime.ahead import Ahead
from lightning_pipe.runtime.job import ProgramResult, ResultSlice
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import Wait, drive_together
from ranks.pipelines import Case, capture_of, executor_of, job_of, module_of, plain_gradients, program_of, split_of

CASES = {
    "1f1b": Case("Chain", ((0,), (1,), (2,)), sizes=(2, 2, 2, 1)),
    "gpipe": Case("Skip", ((0,), (1,), (2,)), schedule="gpipe"),
    "zb_h2": Case("Skip", ((0,), (1,), (2,)), sizes=(1,) * 6, schedule="zb_h2"),
    "two stages on one rank": Case("Chain", ((0,), (1,), (0,))),
    "replicas": Case("Skip", ((0, 1), (2,), (3, 4)), sizes=(3, 3, 2)),
    "two pipes": Case("Skip", ((0, 1), (1, 0)), ("third",), (3, 3, 2), "chimera", frozenset({0, 1})),
}


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

    def run(self, *, holds: bool) -> list[ProgramResult]:
        program = program_of(self.case, self.split)
        self.told = [[] for _ in self.executors]
        walks = [
            executor.walk(
                program,
                job_of(self.case),
                at=lambda instruction, rank=rank: self.told[rank].append(str(instruction)),
                ahead=Ahead(self.answer(holds)),
                forwarded=lambda results, rank=rank: self.note(rank, results),
            )
            for rank, executor in enumerate(self.executors)
        ]
        return drive_together(walks)

    def answer(self, holds: bool):
        def ask() -> Iterator[Wait]:
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
    computes = [text for line in world.told for text in line if any(k in text for k in ("I", "W", "STEP", "results"))]
    assert computes == []
    assert all(parameter.grad is None for module in world.modules for parameter in module.parameters())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_told_behind_the_last_forward_and_before_the_next_backward(case):
    world = World(case)
    world.run(holds=True)
    program = program_of(case, world.split)
    for line, told in zip(program.ranks, world.told, strict=True):
        at = told.index("results")
        behind = [x for x in line[at:] if isinstance(x, Compute)]
        before = [x for x in line[:at] if isinstance(x, Compute)]
        assert all(x.kind != "F" for x in behind)
        last = max(i for i, x in enumerate(before) if x.kind == "F")
        assert all(x.kind != "I" for x in before[last:])
