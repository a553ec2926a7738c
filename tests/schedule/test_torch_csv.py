"""Laws of torch's CSV: what we write torch takes, what torch writes we read, and what nobody could mean is refused."""

from __future__ import annotations

import re

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from benchmarks.closed_forms import Row, program_of
from lightning_pipe.core.program import Bucket, Compute, Edge, Layout, Order, Traffic, VerifiedProgram
from lightning_pipe.errors import ProgramError
from lightning_pipe.schedule import SCHEDULES
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.formats.torch_csv import (
    layout_of,
    microbatches_of,
    read_csv,
    write_csv,
    write_csv_with_communication,
)
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify

P, M = 4, 8
COMPUTE, COMMUNICATION = "compute_only", "compute_comms"


def rows(names=SCHEDULES) -> list:
    return [
        pytest.param(Row(name, P, M, chunks), id=f"{name}-{chunks}")
        for name in names
        for chunks in SCHEDULES[name].stages_per_device
    ]


ONE_REPLICA = [param for param in rows() if not param.values[0].layout.whole]


class Sketch:
    """What torch's schedules ask of a stage before anything runs."""

    submod, group_rank = None, 0

    def __init__(self, *, num_stages: int, group_size: int) -> None:
        self.num_stages, self.group_size = num_stages, group_size


def sketches(layout: Layout) -> list[Sketch]:
    count = len(layout.stages) // layout.ranks
    return [Sketch(num_stages=len(layout.stages), group_size=layout.ranks) for _ in range(count)]


def proved(order: Order) -> VerifiedProgram:
    layout = layout_of(order)
    sizes = (1,) * microbatches_of(order)
    return verify(lower(order, layout=layout, sizes=sizes, traffic=chain(len(layout.stages))))


@pytest.mark.parametrize("row", rows())
def test_an_order_is_read_as_it_was_written_and_so_are_its_layout_and_micro_batches(row):
    text = write_csv(row.order)
    assert read_csv(text) == row.order
    assert (layout_of(row.order), microbatches_of(row.order)) == (row.layout, M)


@pytest.mark.parametrize("row", rows())
def test_of_a_program_with_communication_the_computes_are_read(row):
    program = program_of(row)
    computes = tuple(tuple(one for one in line if isinstance(one, Compute)) for line in program.ranks)
    assert read_csv(write_csv_with_communication(program)) == computes


@pytest.mark.parametrize("row", ONE_REPLICA)
@pytest.mark.parametrize("kind", [COMPUTE, COMMUNICATION])
def test_torch_takes_what_we_write(row, kind, tmp_path):
    """It validates on loading, lowers computes, and runs sends, receives and computes dry."""
    layout, path = row.layout, tmp_path / "schedule.csv"
    written = write_csv(row.order) if kind == COMPUTE else write_csv_with_communication(program_of(row))
    path.write_text(written, encoding="utf-8", newline="")
    runtime = torch_schedules._PipelineScheduleRuntime(sketches(layout), M)
    runtime._load_csv(str(path), format=kind)
    assert runtime.stage_index_to_group_rank == {stage: ranks[0] for stage, ranks in enumerate(layout.stages)}
    run = {rank: [one for one in line if timed(one)] for rank, line in runtime.pipeline_order_with_comms.items()}
    torch_schedules._simulate_comms_compute(run, lambda s: layout.stages[s][0], len(layout.stages))


def timed(action) -> bool:
    """Return whether torch's dry run knows an action; of parameters it knows none."""
    return action.computation_type.value not in ("UNSHARD", "RESHARD", "REDUCE_GRAD")


@pytest.mark.parametrize("row", ONE_REPLICA)
def test_every_stage_is_reduced_once_behind_its_last_weight_gradient(row):
    """There torch divides gradients by the number of micro-batches."""
    for line in write_csv_with_communication(program_of(row)).splitlines():
        words = line.split(",")
        for stage in {word.removesuffix("REDUCE_GRAD") for word in words if word.endswith("REDUCE_GRAD")}:
            last = max(i for i, word in enumerate(words) if re.fullmatch(rf"{stage}[BW]\d+", word))
            assert words.index(f"{stage}REDUCE_GRAD") == last + 1
        assert len([word for word in words if word.endswith("REDUCE_GRAD")]) == len(row.layout.stages) // P


THEIRS = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize("kind", [COMPUTE, COMMUNICATION])
@pytest.mark.parametrize("name", THEIRS)
def test_what_torch_writes_is_read_and_proved(name, kind, tmp_path):
    chunks, path = 2, tmp_path / "schedule.csv"
    if not hasattr(torch_schedules, f"Schedule{name}"):
        pytest.skip(f"this torch has no Schedule{name}")
    stages = [Sketch(num_stages=P * chunks, group_size=P) for _ in range(chunks)]
    made = getattr(torch_schedules, f"Schedule{name}")(stages, M)
    made._dump_csv(str(path), format=kind)
    order = read_csv(path.read_text(encoding="utf-8"))
    program = proved(order)
    assert (len(program.layout.stages), len(program.sizes)) == (P * chunks, M)
    mapped = made.stage_index_to_group_rank
    assert program.layout == Layout(tuple((mapped[stage],) for stage in range(P * chunks)))


def test_a_pair_that_overlaps_is_a_forward_and_a_backward():
    assert read_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2") == (
        tuple(Compute(0, kind, m) for kind, m in [("F", 0), ("F", 1), ("F", 2), ("B", 0), ("B", 1), ("B", 2)]),
    )


def test_idle_cells_spaces_and_actions_on_parameters_are_no_computes():
    assert read_csv('0UNSHARD, 0F0 ,,"0B0",0REDUCE_GRAD,0RESHARD\r\n') == ((Compute(0, "F", 0), Compute(0, "B", 0)),)


GOOD = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_the_text_from_which_mistakes_are_made_is_none():
    assert read_csv(GOOD) == tuple((Compute(s, "F", 0), Compute(s, "B", 0)) for s in range(2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found no computes"),
        (",,\n", "found no computes"),
        ("0F0,0B0\n1F0,1X0", r"row 2 \(rank 1\), column 2: found '1X0'; expected 2F0, 2B0"),
        ("0F0,0B", r"row 1 \(rank 0\), column 2: found '0B'"),
        ("0F0junk,0B0", "found '0F0junk'"),
        ("0F0,(0B1;0F0)OVERLAP_F_B", "column 2: .* expected a forward, then a backward"),
        ("0F0,(0F1;0W0)OVERLAP_F_B", "expected a forward, then a backward"),
        ("0F\0", "found"),
        (GOOD.replace("0SEND_F0,", ""), r"row 1 \(rank 0\): found no 0SEND_F0"),
        (GOOD.replace("1RECV_F0,", ""), r"row 2 \(rank 1\), column 1: found 1F0; expected 1RECV_F0 before it"),
        (GOOD.replace("0F0,0SEND_F0", "0SEND_F0,0F0"), "column 1: found 0SEND_F0; .* behind the compute"),
        (GOOD.replace("0SEND_F0", "0SEND_F0,0SEND_F0"), "column 3: found 0SEND_F0; .* each once"),
        (GOOD.replace("1SEND_B0", "1SEND_B0,1SEND_F0"), "column 5: found 1SEND_F0; .* between neighbouring stages"),
        (GOOD.replace("0RECV_B0", "0RECV_B0,0RECV_B1"), "column 4: found 0RECV_B1"),
    ],
)
def test_a_text_that_cannot_be_meant_is_refused_with_row_and_column(text, message):
    with pytest.raises(ProgramError, match=message):
        read_csv(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n\n1F0,1B0", "rank 1 computes nothing"),
        ("0F0,0B0\n2F0,2B0", r"found computes of the stages \[0, 2\]"),
        ("0F0,0F2,0B0,0B2", r"stage 0: found computes of the micro-batches \[0, 2\]"),
        ("0F0\n0B0", "stage 0, micro-batch 0: found computes on ranks 0 and 1"),
        ("0F0,0B0,0F1,0B1\n0F2,0B2", r"stage 0: .* on the ranks \[0, 0, 1\].*in turn, such as \[0, 1, 0\]"),
    ],
)
def test_a_layout_that_an_order_does_not_tell_is_refused(text, message):
    with pytest.raises(ProgramError, match=message):
        layout_of(read_csv(text))


def test_ranks_that_take_whole_micro_batches_in_turn_are_replicas():
    found = layout_of(read_csv("0F0,0B0,0F2,0B2\n0F1,0B1\n"))
    assert found == Layout(((0, 1),), frozenset({0}))


SKIP = Traffic((*chain(3).edges, Edge("F", 0, 2, 1.0), Edge("B", 2, 0, 1.0)), chain(3).buckets)
TIED = Traffic(chain(3).edges, (Bucket((0, 2), 1), Bucket((1,), 1)))


@pytest.mark.parametrize(
    ("stages", "traffic", "message"),
    [
        (((0,), (1,), (2,)), SKIP, "messages from stage 0 to 2; torch has neighbours' only"),
        (((0,), (1, 2), (3,)), chain(3), "stage 1 has replicas that share every micro-batch"),
        (((0,), (1,), (2,)), TIED, r"stages \(0, 2\) share parameters"),
        (((0,), (1,), (2,)), Traffic(chain(3).edges, chain(3).buckets, offloads=(1,)), r"stages \[1\] offload"),
    ],
)
def test_a_program_that_torch_has_no_actions_for_is_refused(stages, traffic, message):
    layout = Layout(stages)
    order = SCHEDULES["gpipe"].order(layout, 2)
    program = verify(lower(order, layout=layout, sizes=(2, 2), traffic=traffic))
    with pytest.raises(ProgramError, match=message):
        write_csv_with_communication(program)
