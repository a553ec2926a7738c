"""Every rank gets every output, combined as the whole batch would have it."""

import pytest
import torch

from lightning_pipe.capture.steps.stage_program import Split, Value
from lightning_pipe.core.program import Layout, Program, Traffic
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.exchanges.results import Collected, Results
from lightning_pipe.runtime.job import ProgramResult, ResultSlice
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import drive_together
from ranks.pipelines import CPU

SIZES = (3, 2)
BATCH = torch.tensor([1.0, 2.0, 6.0, -3.0, 5.0], dtype=torch.float64)
SCALAR = {"mean": torch.Tensor.mean, "sum": torch.Tensor.sum, "max": torch.Tensor.max, "min": torch.Tensor.min}


def collect(value: Value, stages: tuple[tuple[int, ...], ...], content: object) -> list[Collected]:
    """Collect one output of the last stage; `content(slice of the batch)` is the output of a slice."""
    layout = Layout(stages)
    owner = len(stages) - 1
    split = Split((), {value.name: value}, Traffic((), ()), (), {value.name: owner})
    program = Program(((),) * layout.ranks, SIZES, layout, split.traffic)
    hub = Hub()
    walks = []
    for rank in range(layout.ranks):
        pieces = []
        for microbatch, (size, offset) in enumerate(zip(SIZES, (0, 3), strict=True)):
            for replica, holder in enumerate(stages[owner]):
                samples = layout.samples(owner, replica, microbatch, size)
                if holder == rank and len(samples):
                    part = BATCH[offset + samples.start : offset + samples.stop]
                    pieces.append(ResultSlice(microbatch, samples, content(part)))
        outcome = ProgramResult({value.name: tuple(pieces)} if pieces else {}, Timeline(()))
        results = Results(split, layout, transport=hub.endpoint(rank), device=CPU)
        walks.append(results.collect(program, outcome.results, [value.name], votes={"stop": float(rank), "skip": 1.0}))
    return drive_together(walks)


LAYOUTS = {"1": ((0,),), "1-1": ((0,), (1,)), "1-2": ((0,), (1, 2)), "1-4": ((0,), (4, 1, 2, 3))}


@pytest.mark.parametrize("stages", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("how", SCALAR)
def test_scalars_of_slices_combine_to_that_of_the_batch(how: str, stages: tuple[tuple[int, ...], ...]) -> None:
    value = Value("v", torch.float64, lambda samples: (), None, combine=how)
    for collected in collect(value, stages, SCALAR[how]):
        torch.testing.assert_close(collected.values["v"], SCALAR[how](BATCH), rtol=0, atol=1e-15)
        assert sum(len(piece.samples) for piece in collected.pieces["v"]) == sum(SIZES)


@pytest.mark.parametrize("stages", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_come_in_the_order_of_the_batch(stages: tuple[tuple[int, ...], ...]) -> None:
    value = Value("v", torch.float64, lambda samples: (2, 3 * samples), 1, rows=3, combine="cat")

    def content(part: torch.Tensor) -> torch.Tensor:
        return part.repeat_interleave(3).expand(2, -1)

    for collected in collect(value, stages, content):
        assert torch.equal(collected.values["v"], content(BATCH))


def test_votes_are_summed_over_ranks() -> None:
    value = Value("v", torch.float64, lambda samples: (), None, combine="mean")
    for collected in collect(value, LAYOUTS["1-4"], torch.Tensor.mean):
        assert collected.votes == {"skip": 5.0, "stop": 10.0}


def test_python_numbers_flags_and_vectors_come_as_they_are() -> None:
    integer = Value("v", None, lambda samples: (), None)
    assert [c.values["v"] for c in collect(integer, LAYOUTS["1-2"], lambda part: 7)] == [7, 7, 7]
    flag = Value("v", torch.bool, lambda samples: (), None, combine="max")
    for collected in collect(flag, LAYOUTS["1-2"], lambda part: (part < 0).any()):
        assert collected.values["v"].dtype == torch.bool and collected.values["v"].item()
        assert [piece.content.item() for piece in collected.pieces["v"]] == [False, False, True, False]
    vector = Value("v", torch.float64, lambda samples: (2,), None, combine="sum")
    for collected in collect(vector, LAYOUTS["1-2"], lambda part: part.sum().expand(2)):
        assert torch.equal(collected.values["v"], BATCH.sum().expand(2))


def test_a_loss_that_is_not_a_number_reaches_every_rank() -> None:
    value = Value("v", torch.float32, lambda samples: (), None, combine="mean")
    for collected in collect(value, LAYOUTS["1-2"], lambda part: torch.tensor(float("nan") if 6.0 in part else 1.0)):
        assert collected.values["v"].isnan()


def test_an_output_without_separate_rows_is_refused_only_where_it_was_sliced() -> None:
    value = Value("v", torch.float64, lambda samples: (samples * samples,), None, combine="cat")
    with pytest.raises(PipelineError, match="microbatches=1"):
        collect(value, LAYOUTS["1-1"], lambda part: torch.outer(part, part).reshape(-1))
