"""Programs over gloo: the same gradients as over the local transport, and every kind of tensor."""

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.exchanges.results import Results
from lightning_pipe.runtime.guard.watch import Unwatched
from lightning_pipe.runtime.memory import PeakMemory
from lightning_pipe.runtime.transport.process_group import process_group_transport
from lightning_pipe.runtime.waiting import Handle, drive
from ranks.pipelines import (
    CPU,
    Case,
    batch_of,
    capture_of,
    executor_of,
    job_of,
    module_of,
    plain_gradients,
    program_of,
    split_of,
)
from ranks.world import World

CASES = {
    "1-1": Case("Chain", ((0,), (1,)), ("second",), sizes=(3, 2)),
    "two stages on one rank": Case("Skip", ((0,), (1,), (0,))),
    "1-1-1 skip": Case("Skip", ((0,), (1,), (2,))),
    "tied": Case("Tied", ((0,), (1,), (2,))),
    "2-1": Case("Chain", ((0, 1), (2,)), ("second",), sizes=(3, 2)),
    "1-2": Case("Chain", ((0,), (1, 2)), ("second",)),
    "2-1, three to one, and nothing of the last": Case(
        "Skip", ((0, 1), (2,)), ("second",), sizes=(4, 4, 1), weights=((3, 1), (1,))
    ),
    "2-2": Case("Skip", ((0, 1), (2, 3)), ("second",), sizes=(5, 4)),
}


def gradients_and_loss_of_a_program(case: Case) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
    module = module_of(case)
    capture = capture_of(case, module)
    split = split_of(case, capture)
    program = program_of(case, split)
    transport = process_group_transport(CPU, deadline_s=20)
    connect(transport, [program])
    executor = executor_of(case, module, capture, split, transport)
    outcome = executor.run(program, job_of(case))
    loss = capture.record.loss
    results = Results(split, case.layout, transport=transport, device=CPU)
    collected = drive(results.collect(program, outcome.results, [loss]), wait=Unwatched().wait)
    transport.close()
    owned = {name for stage in executor.stages.values() for name in stage.program.gradients.values()}
    return {name: p.grad for name, p in module.named_parameters() if name in owned}, collected.values[loss]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_and_loss_over_gloo_equal_those_of_the_batch(case: Case) -> None:
    expected = plain_gradients(case, [(0, sum(case.sizes))])
    expected_loss = module_of(case).training_step(batch_of(case), 0)
    seen = set()
    for gradients, loss in World(case.layout.ranks).run(gradients_and_loss_of_a_program, case):
        torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)
            seen.add(name)
    assert seen == set(expected)


KINDS = [
    torch.arange(3.0),
    torch.tensor([True, False]),
    torch.tensor(7),
    torch.zeros(0, 4),
    torch.arange(4, dtype=torch.bfloat16).view(2, 2),
    torch.tensor([1 + 2j, 3j]),
    torch.arange(8.0)[::8],  # contiguous, with a stride of eight
    torch.ones(300_000),
]


def settle(handle: Handle) -> None:
    while not handle.wait(1.0):
        pass


def swap_every_kind_of_tensor() -> list[torch.Tensor]:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    transport = process_group_transport(CPU)
    transport.open(channels=[(0, 1), (1, 0)], groups=[(0, 1)])
    sends = [transport.send(KINDS, peer=peer), transport.send([KINDS[0] + rank], peer=peer)]
    buffers = [torch.zeros_like(tensor) for tensor in KINDS]
    later = [torch.zeros(3)]
    receives = [transport.receive(buffers, peer=peer), transport.receive(later, peer=peer)]
    for handle in (receives[1], receives[0], *sends):  # out of order
        settle(handle)
    total, word = torch.tensor([1.0 + rank]), torch.tensor([rank == 0])
    settle(transport.all_reduce(total, group=(0, 1)))
    settle(transport.broadcast(word, source=0, group=(0, 1)))
    assert all(handle.landed() for handle in (*sends, *receives))
    transport.close()
    return [*buffers, *later, total, word]


def test_every_kind_of_tensor_travels_in_both_directions_at_once() -> None:
    for rank, received in enumerate(World(2).run(swap_every_kind_of_tensor)):
        expected = [*KINDS, KINDS[0] + 1 - rank, torch.tensor([3.0]), torch.tensor([True])]
        for found, tensor in zip(received, expected, strict=True):
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)


_MESSAGE_BYTES = 2**20


def peak_of_many_messages() -> int:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    transport = process_group_transport(CPU)
    transport.open(channels=[(0, 1)], groups=[])
    with PeakMemory(CPU) as peak:
        for _ in range(8):
            tensor = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8)
            handle = (transport.send if rank == 0 else transport.receive)([tensor], peer=peer)
            settle(handle)
            del tensor, handle
    transport.close()
    return peak.bytes


def threads_that_a_profiler_records() -> int:
    """Return of how many threads a profiler hears, also one that is stopped with messages and sums under way."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    transport = process_group_transport(CPU, deadline_s=20)
    transport.open(channels=[(0, 1), (1, 0)], groups=[(0, 1)])
    threads: set[int] = set()
    for finishes in (True, False):
        mine, theirs, summed, told = (torch.full((64,), float(rank)) for _ in range(4))
        with profile(use_cpu=True, profile_memory=True) as seen:
            handles = [transport.receive([theirs], peer=peer), transport.all_reduce(summed, group=(0, 1))]
            handles += [transport.send([mine], peer=peer), transport.broadcast(told, source=0, group=(0, 1))]
            if finishes:
                settle_all(handles)
        settle_all(handles)
        assert theirs.eq(peer).all() and summed.eq(1).all() and told.eq(0).all()
        threads |= {event.start_thread_id() for event in seen.kineto_results.events()}
    transport.close()
    return len(threads)


def settle_all(handles: list[Handle]) -> None:
    for handle in handles:
        settle(handle)


def test_what_other_threads_do_for_a_message_is_kept_from_profilers() -> None:
    """Fits with memory=True ended by std::bad_alloc or a segmentation fault: gloo told a profiler that had stopped."""
    assert World(2).run(threads_that_a_profiler_records) == [1, 1]


def test_memory_of_messages_is_seen_to_be_let_go() -> None:
    """Once the thread that waits inside gloo let it go, where nobody counts, so that every message seemed to stay."""
    assert World(2).run(peak_of_many_messages) == [_MESSAGE_BYTES] * 2
