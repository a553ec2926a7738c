"""What a rank holds over time is what its stages hold, is recorded only when asked for, and ends at nothing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch

from lightning_pipe.capture.steps.stage_program import Half, RandomKey, StageProgram
from lightning_pipe.core.program import Compute
from lightning_pipe.runtime.executor import run_together
from lightning_pipe.runtime.job import ProgramResult
from lightning_pipe.runtime.stage import Slice, Stage, State
from lightning_pipe.runtime.transport.local import Hub
from ranks.pipelines import CPU, Case, capture_of, executor_of, job_of, module_of, program_of, split_of

SLICE = Slice(4, RandomKey(0, 0, 0), mean_weight=1.0, sum_weight=1.0)
KEPT = StageProgram(
    stage=0,
    parameters={"w": "weight"},
    buffers={},
    leaves={},
    tangents=(),
    forward=Half(("w", "x"), ("y", "row"), lambda samples, key, w, x: (x * w, (x + w)[0])),
    input_grad=Half(("w", "g"), ("gx",), lambda samples, key, w, g: (g * w,)),
    weight_grad=Half(("row", "w", "x"), (), lambda samples, key, *given: ()),
    receives={("F", -1): ("x",), ("B", 1): ("g",)},
    sends={("F", 1): ("y",), ("B", -1): ("gx",)},
    mutations={},
    gradients={},
    results=(),
)


def test_a_stage_keeps_whole_storages_once_and_without_parameters() -> None:
    weight = torch.ones(100)
    stage = Stage(KEPT, {}, state=State({"weight": weight}, {}, CPU))
    stage.begin(Counter({("F", 1, 0): 1, ("B", -1, 0): 1}), training=True)
    x = torch.ones(4, 100)
    stage.receive(0, {"x": x})
    stage.compute("F", 0, SLICE)
    assert sum(stage.saved_storages().values()) == 2 * 1600, "x, and all of x + w, of which a row is kept; y is sent"
    stage.receive(1, {"x": x[2:]})
    stage.compute("F", 1, SLICE)
    assert sum(stage.saved_storages().values()) == 3 * 1600 - 800, "x of the second micro-batch is a view of the first"
    stage.free(0)
    stage.free(1)
    assert stage.saved_storages() == {}


def outcomes_of(case: Case, **record: bool) -> list[ProgramResult]:
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    executors = [executor_of(case, module_of(case), capture, split, hub.endpoint(r)) for r in range(case.layout.ranks)]
    return run_together(executors, program_of(case, split), [job_of(case)] * case.layout.ranks, **record)


CASES = {
    "1-1-1": Case("Chain", ((0,), (1,), (2,))),
    "two stages on one rank": Case("Skip", ((0,), (1,), (0,))),
    "2-1": Case("Chain", ((0, 1), (2,)), ("second",)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_memory_rises_from_the_first_compute_and_falls_to_nothing(case: Case) -> None:
    for rank, outcome in enumerate(outcomes_of(case, record_memory=True)):
        times, amounts = zip(*outcome.memory, strict=True)
        assert all(a <= b for a, b in pairwise(times))
        assert amounts[-1] == 0 < min(max(amounts), amounts[0])
        first = next(e for e in outcome.timeline.events if isinstance(e.instruction, Compute) and e.rank == rank)
        assert times[0] >= first.end


def test_nothing_is_counted_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "saved_storages", None)
    case = CASES["1-1-1"]
    for record in (False, True):
        assert all(outcome.memory == () for outcome in outcomes_of(case, record=record))
    with pytest.raises(TypeError, match="'NoneType'"):
        outcomes_of(case, record_memory=True)


def test_gpipe_holds_all_micro_batches_and_one_f_one_b_as_many_as_stages() -> None:
    sizes = (2,) * 6

    def peaks(schedule: str) -> list[int]:
        case = Case("Chain", ((0,), (1,), (2,)), schedule=schedule, sizes=sizes)
        return [max(held for _, held in outcome.memory) for outcome in outcomes_of(case, record_memory=True)]

    gpipe, one_f_one_b = peaks("gpipe"), peaks("1f1b")
    assert all(less < more for less, more in zip(one_f_one_b, gpipe, strict=True)), (one_f_one_b, gpipe)
    assert one_f_one_b[0] > one_f_one_b[1]
