"""The runtime's own seconds are those of a rehearsal that neither work nor posted messages account for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.core.program import Compute, Message, Recv, Samples, Send
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Handle
from lightning_pipe.strategy.plans import runtime_overhead
from lightning_pipe.strategy.plans.runtime_overhead import _Layer, _rehearsed
from ranks.links import connected
from ranks.world import World
from runtime.fake_cuda import DEVICE, FakeCuda

WORK, CALL, BEFORE, POST, FLIGHT = 2.0, 0.25, 0.125, 0.5, 0.0625


def sent(microbatch: int) -> Message:
    return Message("F", 0, 1, microbatch, Samples(0, 1))


def rehearsal(microbatches: int) -> list[Timeline]:
    """Return what two ranks would record of forwards only, the second always waiting for the first."""
    first, second = [], []
    now = 0.0
    for m in range(microbatches):
        end = now + WORK + CALL
        first += [Event(0, Compute(0, "F", m), now, end), Event(0, Send(sent(m), 1), end, end + POST)]
        arrived = end + FLIGHT
        begun = arrived + BEFORE
        second += [
            Event(1, Recv(sent(m), 0), 0.0, arrived),
            Event(1, Compute(1, "F", m), begun, begun + WORK + CALL),
        ]
        now = end + POST + BEFORE
    return [Timeline(tuple(first)), Timeline(tuple(second))]


def test_work_and_posts_are_no_part_of_a_call_and_what_is_waited_for_is_that_of_messages():
    told = [[(timeline, WORK)] * 3 for timeline in rehearsal(10)]
    found = _rehearsed(told)
    assert found.call_s == pytest.approx(CALL + BEFORE)
    assert found.message_s == pytest.approx(FLIGHT)


def test_a_core_that_is_slow_after_it_waited_makes_calls_longer():
    slow = 0.5
    found = _rehearsed([[(timeline, WORK - slow)] * 3 for timeline in rehearsal(10)])
    assert found.call_s == pytest.approx(CALL + BEFORE + slow), "its work, alone, took less"


def test_work_takes_time_and_leaves_random_numbers_and_gradients_alone():
    before = torch.get_rng_state()
    layer = _Layer(torch.device("cpu"))
    assert 0 < layer.alone_s() < 60
    layer(0, "F", 1)
    assert torch.equal(before, torch.get_rng_state())


class Counted:
    """A transport that knows its receives that have been posted and have not landed."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._posted: list[Handle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def receive(self, buffers: Sequence[torch.Tensor], *, peer: int, owners: Sequence[torch.Tensor] = ()) -> Handle:
        self._posted.append(self._transport.receive(buffers, peer=peer, owners=owners))
        return self._posted[-1]

    def pending(self) -> int:
        """Return their number."""
        self._posted = [handle for handle in self._posted if not handle.landed()]
        return len(self._posted)


def rehearsed() -> tuple[list[str], Any]:
    """Rehearse on a fake device; return what a program has called that waits for others, and what was measured."""
    with connected() as links, FakeCuda() as fake, pytest.MonkeyPatch.context() as patch:
        transport, called = Counted(links.transport), list[str]()

        def synchronize(device: object = None) -> None:
            if pending := transport.pending():
                raise RuntimeError(f"the device never comes to rest: {pending} receives are posted")
            fake.synchronize()

        def new_group(*args: Any, **options: Any) -> Any:
            fake.calls.append("new_group")
            return group_of(*args, **options)

        def run(executor: Executor, *args: Any, **options: Any) -> Any:
            begin = len(fake.calls)
            outcome = walk_of(executor, *args, **options)
            called.extend({"torch.cuda.synchronize", "new_group"}.intersection(fake.calls[begin:]))
            return outcome

        group_of, walk_of = dist.new_group, Executor.run
        patch.setattr(torch.cuda, "synchronize", synchronize)
        patch.setattr(dist, "new_group", new_group)
        patch.setattr(Executor, "run", run)
        patch.setattr(runtime_overhead, "_MICROBATCHES", 4)
        patch.setattr(runtime_overhead, "_RUNS", 2)
        patch.setattr(runtime_overhead, "_IMAGES", (1, 4, 8, 8))
        patch.setattr(runtime_overhead, "_KERNEL", (4, 4, 3, 3))
        return called, runtime_overhead.rehearse(replace(links, transport=transport), DEVICE)


def test_a_rehearsal_waits_for_its_stream_while_receives_are_posted() -> None:
    """It waited for the device once, which with NCCL does not rest before a peer has sent what it owes."""
    (first, measured), (second, nothing) = World(2).run(rehearsed)
    assert first == second == []
    assert measured.call_s >= 0 and nothing is None
