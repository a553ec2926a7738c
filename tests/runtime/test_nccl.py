"""Laws of the NCCL transport that need no GPU: which groups exist, in which order they are used, and when."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

from lightning_pipe.core.program import Compute, Layout, Recv, VerifiedProgram
from lightning_pipe.errors import ProgramError
from lightning_pipe.profiler.network.link_probe import ProbeHandle, probe_links
from lightning_pipe.runtime.exchanges.groups import channels, connect, groups
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.transport.nccl import NcclTransport, in_rounds
from lightning_pipe.runtime.transport.staged import StagedTransport
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.lower.transfers import AHEAD
from lightning_pipe.schedule.registry import order_of
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.strategy.plans.runtime_overhead import chain_split, chain_traffic
from runtime.fake_nccl import COMMUNICATOR_BYTES, FakeGroup, FakeNccl

CPU, WIDTH, MICROBATCHES = torch.device("cpu"), 4, 6
LAYOUTS = {
    "1-1": ((0,), (1,)),
    "1-1-1": ((0,), (1,), (2,)),
    "2-1": ((0, 1), (2,)),
    "2-2": ((0, 1), (2, 3)),
    "two stages each": ((0,), (1,), (0,), (1,)),
}


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    fake = FakeNccl()
    fake.install(monkeypatch)
    return fake


def transports_of(nccl: FakeNccl, ranks: int) -> list[NcclTransport]:
    return [NcclTransport(rank=rank, device=CPU, timeout_s=60) for rank in range(ranks)]


def on_each(nccl: FakeNccl, transports: list[NcclTransport], call: Callable[[NcclTransport], object]) -> None:
    """Let every rank do something, one after the other."""
    for transport in transports:
        nccl.rank = transport.rank
        call(transport)


def program_of(stages: tuple[tuple[int, ...], ...]) -> VerifiedProgram:
    layout = Layout(stages)
    order = order_of("1f1b", layout=layout, microbatches=MICROBATCHES)
    traffic = chain_traffic(len(stages), WIDTH * 4)
    return verify(lower(order, layout=layout, sizes=(2,) * MICROBATCHES, traffic=traffic), launches="late")


def run(nccl: FakeNccl, program: VerifiedProgram, transport: NcclTransport) -> None:
    """Run one rank's part of a program, and note its computes in the log."""
    stages = range(len(program.layout.stages))

    def note(stage: int, kind: str, samples: int) -> None:
        nccl.log[nccl.rank].append(f"{stage}{kind}")

    split = chain_split(len(stages), width=WIDTH, work=note)
    state = State({f"w{s}": torch.zeros(1) for s in stages}, {}, CPU)
    samples = sum(program.sizes)
    offsets = tuple(range(0, samples, 2))
    executor = Executor(split, program.layout, state=state, transport=transport)
    executor.run(program, BatchInput((torch.zeros(samples, WIDTH),), (True,), offsets))


def wait(handle: ProbeHandle, what: str) -> None:
    assert handle.wait(0.0)


@pytest.mark.parametrize("stages", LAYOUTS.values(), ids=LAYOUTS)
def test_both_ends_of_every_group_see_the_same_order(nccl: FakeNccl, stages: tuple[tuple[int, ...], ...]) -> None:
    program = program_of(stages)
    transports = transports_of(nccl, program.layout.ranks)
    on_each(nccl, transports, lambda transport: connect(transport, [program]))
    on_each(nccl, transports, partial(run, nccl, program))
    for group in nccl.groups:
        calls = [group.calls[rank] for rank in group.ranks]
        assert calls[0] and all(other == calls[0] for other in calls), group


@pytest.mark.parametrize("stages", LAYOUTS.values(), ids=LAYOUTS)
def test_every_group_has_carried_something_when_open_returns_and_none_is_made_later(
    nccl: FakeNccl, stages: tuple[tuple[int, ...], ...]
) -> None:
    program = program_of(stages)
    transports = transports_of(nccl, program.layout.ranks)
    on_each(nccl, transports, lambda transport: connect(transport, [program]))
    opened = len(nccl.groups)
    assert all(group.calls[rank] for group in nccl.groups for rank in group.ranks)
    on_each(nccl, transports, partial(run, nccl, program))
    assert len(nccl.groups) == opened


def test_greetings_that_block_until_all_members_have_come_end(nccl: FakeNccl) -> None:
    ranks = range(4)
    everyone = [(a, b) for a in ranks for b in ranks if a != b]
    sets = [(0, 1), (2, 3), (0, 1, 2, 3), (1, 2)]
    transports = transports_of(nccl, 4)
    met: dict[int, list[int]] = {rank: [] for rank in ranks}  # the groups in the order in which each rank greets
    nccl.on_call = lambda group, call: met[nccl.rank].append(next(i for i, g in enumerate(nccl.groups) if g is group))
    on_each(nccl, transports, lambda transport: transport.open(channels=everyone, groups=sets))
    while any(met.values()):
        ready = [
            number
            for number, group in enumerate(nccl.groups)
            if all(met[rank] and met[rank][0] == number for rank in group.ranks)
        ]
        assert ready, f"ranks wait for each other: {met}"
        for rank in nccl.groups[ready[0]].ranks:
            met[rank].pop(0)


def test_disjoint_pairs_are_greeted_at_the_same_time() -> None:
    pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
    rounds = [in_rounds(pairs)[i : i + 4] for i in range(0, len(pairs), 4)]
    assert sorted(pairs) == sorted(in_rounds(pairs))
    assert all(len({rank for pair in row for rank in pair}) == 8 for row in rounds[:7])


def test_after_the_probe_exactly_the_groups_of_the_program_are_left(nccl: FakeNccl) -> None:
    program = program_of(LAYOUTS["1-1-1"])
    transports = transports_of(nccl, 3)
    on_each(nccl, transports, lambda t: probe_links(t, hosts=(0, 0, 0), device=CPU, wait=wait))
    assert all(nccl.left(rank) == [] for rank in range(3))
    on_each(nccl, transports, lambda transport: connect(transport, [program]))
    on_each(nccl, transports, partial(run, nccl, program))
    wanted = [tuple(sorted(pair)) for pair in channels(program)] + list(groups(program))
    for rank in range(3):
        assert sorted(nccl.left(rank)) == sorted(group for group in wanted if rank in group)
    on_each(nccl, transports, lambda transport: transport.close())
    assert all(nccl.left(rank) == [] for rank in range(3))


def test_torch_does_not_end_the_process_for_an_error_that_the_guard_hears_of(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    (transport,) = transports_of(nccl, 1)
    transport.open(channels=[(0, 1)], groups=[(0, 1)])
    assert nccl.handling == {"0"} and name not in os.environ
    monkeypatch.setenv(name, "1")  # what the user has set
    transport.open(channels=[(1, 0)], groups=[])
    assert nccl.handling == {"0", "1"} and os.environ[name] == "1"


def test_what_a_communicator_takes_is_measured(nccl: FakeNccl) -> None:
    transports = transports_of(nccl, 2)
    assert transports[0].communicator_bytes == 0
    on_each(nccl, transports, lambda transport: transport.open(channels=[(0, 1), (1, 0)], groups=[(0, 1)]))
    assert transports[0].communicator_bytes == COMMUNICATOR_BYTES


@pytest.mark.parametrize("stages", LAYOUTS.values(), ids=LAYOUTS)
def test_receives_are_launched_right_before_the_compute_that_needs_them(
    nccl: FakeNccl, stages: tuple[tuple[int, ...], ...]
) -> None:
    program = program_of(stages)
    transports = transports_of(nccl, program.layout.ranks)
    on_each(nccl, transports, lambda transport: connect(transport, [program]))
    nccl.log.clear()
    on_each(nccl, transports, partial(run, nccl, program))
    for rank, log in nccl.log.items():
        for position, entry in enumerate(log):
            if entry.endswith(f">{rank}"):
                following = next(x for x in log[position:] if not x.endswith(f">{rank}"))
                assert following[-1] in "FIW", (rank, position, log)


def test_a_receive_waits_for_its_buffer_and_for_no_compute_queued_behind_that(nccl: FakeNccl) -> None:
    program = program_of(LAYOUTS["1-1"])
    transports = transports_of(nccl, 2)
    on_each(nccl, transports, lambda transport: connect(transport, [program]))
    compute_stream = nccl.stream
    nccl.log.clear()
    nccl.launches.clear()
    on_each(nccl, transports, partial(run, nccl, program))
    for rank in range(2):
        computes = [i for i, entry in enumerate(nccl.log[rank]) if entry[-1] in "FIW"]
        line = program.ranks[rank]
        receives = [x for x in line if isinstance(x, Recv)]
        messages = [receive.message for receive in receives]
        users = [Compute(x.target, "F" if x.direction == "F" else "I", x.microbatch) for x in messages]
        order = [x for x in line if isinstance(x, Compute)]
        assert len(nccl.launches[rank]) == len(receives)
        for user, (stream, awaited) in zip(users, nccl.launches[rank], strict=True):
            number = order.index(user)
            assert stream is not compute_stream
            assert all(event.stream is compute_stream for event in awaited)
            allowed = computes[max(0, number - AHEAD)]  # nothing from this compute on is waited for
            assert awaited[-1].position <= allowed


def test_an_abort_during_open_ends_it_and_reaches_every_group_though_one_fails(nccl: FakeNccl) -> None:
    (transport,) = transports_of(nccl, 1)
    threads: list[FakeGroup] = []

    def fail(group: FakeGroup, call: str) -> None:
        if len(threads) == 2:
            nccl.groups[0].fails = True
            transport.abort()
        threads.append(group)

    nccl.on_call = fail
    with pytest.raises(RuntimeError, match="aborted, because a rank has failed"):
        transport.open(channels=[(0, 1), (1, 0), (0, 2), (2, 0)], groups=[(0, 1, 2)])
    wait_for(lambda: all(group.aborted == {0} for group in nccl.groups))
    transport.close()
    with pytest.raises(RuntimeError, match="aborted"):
        transport.open(channels=[(0, 3)], groups=[])


def test_what_was_under_way_at_an_abort_raises_and_never_lands(nccl: FakeNccl) -> None:
    transport, _ = transports = transports_of(nccl, 2)
    on_each(nccl, transports, lambda t: t.open(channels=[(0, 1), (1, 0)], groups=[(0, 1)]))
    nccl.rank = 0
    handles = [
        transport.send([torch.zeros(2)], peer=1),
        transport.receive([torch.zeros(2)], peer=1),
        transport.all_reduce(torch.zeros(2), group=(0, 1)),
        transport.reached(),
    ]
    transport.abort()
    for handle in handles:
        assert not handle.landed()
        with pytest.raises(RuntimeError, match="aborted"):
            handle.wait(0.0)
        assert not handle.landed()


def test_a_program_that_is_proved_for_a_host_is_refused(nccl: FakeNccl) -> None:
    program = program_of(LAYOUTS["1-1"])
    (transport,) = transports_of(nccl, 1)
    with pytest.raises(ProgramError, match='proved for launches "on host"; its transport launches receives "late"'):
        run(nccl, verify(program), transport)


def test_the_first_run_of_each_program_goes_over_the_host(nccl: FakeNccl) -> None:
    program, hub = program_of(LAYOUTS["1-1"]), Hub()
    transports = transports_of(nccl, 2)
    on_each(nccl, transports, lambda transport: connect(transport, [program]))
    nccl.log.clear()
    split = chain_split(2, width=WIDTH, work=lambda *_: None)
    state = State({f"w{s}": torch.zeros(1) for s in range(2)}, {}, CPU)
    staged = [StagedTransport(transport, hub.endpoint(transport.rank)) for transport in transports]
    executors = [Executor(split, program.layout, state=state, transport=transport) for transport in staged]
    job = BatchInput((torch.zeros(12, WIDTH),), (True,), tuple(range(0, 12, 2)))
    for run_number in range(3):
        nccl.rank = 0
        walk = executors[0].walk(program, job)
        next(walk, None)  # as far as it gets alone
        assert bool(nccl.log[0]) == (run_number > 0)
        walk.close()


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until other threads have come so far."""
    for thread in threading.enumerate():
        if thread.name == "abort":
            thread.join(10)
    assert is_so()
