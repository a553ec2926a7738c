"""Copies between host and device, and what is recorded, have the right numbers however late or early streams run.

The laws run on a fake device, once for every set of streams that run early; the others run as late as waits allow. A
mutant is a source file without one of its waits, records or synchronisations, and breaks a law.
"""

from __future__ import annotations

import itertools
import queue
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from capture.test_recorded_pieces import Stage as RecordedStage
from capture.test_recorded_pieces import any_order
from lightning_pipe.capture.steps.stage_program import Split, Value
from lightning_pipe.core.program import Compute, Evict, Fetch, Layout, Program, Samples, Traffic, Vacate
from lightning_pipe.runtime.activations.cuda import PinnedHost
from lightning_pipe.runtime.activations.protocol import StorageRange
from lightning_pipe.runtime.job import ResultSlice
from lightning_pipe.runtime.record import Recorder
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import drive
from runtime.fake_cuda import DEVICE, FakeCuda
from runtime.mutants import Mutant, unchanged
from runtime.test_offload import ONE_SLICE, offloading_stage

OFFLOAD = "lightning_pipe.runtime.activations.cuda"
OFFLOADS = "lightning_pipe.runtime.activations.offloads"
RECORDER = "lightning_pipe.capture.stages.cuda_recorder"
RESULTS = "lightning_pipe.runtime.exchanges.results"
WORKS = "lightning_pipe.runtime.transport.device_works"
GLOO = "lightning_pipe.runtime.transport.gloo"
FOREVER_S = 5.0
SIZE = 8

Law = Callable[[ModuleType, FakeCuda], None]
LAWS: dict[str, list[Law]] = {OFFLOAD: [], OFFLOADS: [], RECORDER: [], RESULTS: [], WORKS: [], GLOO: []}


def law_of(name: str) -> Callable[[Law], Law]:
    """Add a law to those of a module."""

    def add(law: Law) -> Law:
        LAWS[name].append(law)
        return law

    return add


def made(number: float) -> torch.Tensor:
    """Return a tensor of the device that the current stream computes."""
    return torch.arange(SIZE, dtype=torch.float32, device=DEVICE).add_(number)


def is_made(tensor: torch.Tensor, number: float) -> bool:
    """Return whether a tensor holds what `made` makes, once the device has come to this point."""
    return tensor.tolist() == [index + number for index in range(SIZE)]


def taken(host: Any, number: float) -> Any:
    """Send a tensor away whose memory has another owner at once; return its parcel."""
    content = made(number)
    parcel = host.take([StorageRange(content.untyped_storage(), 0, content.nbytes)])
    parcel.left.wait(0.0)
    del content
    made(-100.0)
    return parcel


def handed_over(parcel: Any) -> torch.Tensor:
    """Return what came back."""
    parcel.returned.wait(0.0)
    (storage,) = parcel.hand_over()
    return torch.empty(0, device=DEVICE).set_(storage)


@law_of(OFFLOAD)
def what_left_comes_back_although_its_memory_has_other_owners(module: ModuleType, fake: FakeCuda) -> None:
    host = module.PinnedHost(DEVICE)
    for turn in range(3):
        parcel = taken(host, turn)
        parcel.fetch()
        noise = made(-200.0)
        back = handed_over(parcel)
        assert is_made(back, turn)
        assert is_made(noise, -200.0)


@law_of(OFFLOAD)
def what_is_fetched_at_once_comes_back(module: ModuleType, fake: FakeCuda) -> None:
    host = module.PinnedHost(DEVICE)
    content = made(1.0)
    parcel = host.take([StorageRange(content.untyped_storage(), 0, content.nbytes)])
    parcel.fetch()
    assert is_made(handed_over(parcel), 1.0)


@law_of(OFFLOAD)
def buffers_are_used_again_behind_the_copy_that_reads_them(module: ModuleType, fake: FakeCuda) -> None:
    host = module.PinnedHost(DEVICE)
    first = taken(host, 1.0)
    first.fetch()
    second = taken(host, 2.0)
    second.fetch()
    assert [is_made(handed_over(parcel), 1.0 + turn) for turn, parcel in enumerate((first, second))] == [True, True]
    assert fake.calls.count("cudaHostAlloc") == 1


@law_of(OFFLOAD)
def discarded_parcels_write_to_nobody(module: ModuleType, fake: FakeCuda) -> None:
    host = module.PinnedHost(DEVICE)
    for is_fetched in (True, False):
        parcel = taken(host, 1.0)
        if is_fetched:
            parcel.fetch()
        parcel.discard()
        del parcel
        others = [made(10.0 + turn) for turn in range(4)]
        host.close()
        assert [is_made(other, 10.0 + turn) for turn, other in enumerate(others)] == [True] * 4


@law_of(OFFLOAD)
def copies_have_begun_before_they_end_and_close_waits_for_them(module: ModuleType, fake: FakeCuda) -> None:
    for closes_after_fetch in (False, True):
        host = module.PinnedHost(DEVICE)
        parcel = taken(host, 1.0)
        if closes_after_fetch:
            parcel.fetch()
        host.close()
        for begin, end in parcel.spans():
            assert begin.elapsed_time(end) > 0
        assert [stream.queued - stream.done for stream in fake.streams[-2:]] == [0, 0]


@law_of(RECORDER)
def what_is_tried_or_recorded_runs_in_turn_with_the_current_stream(module: ModuleType, fake: FakeCuda) -> None:
    recorder = module.CudaRecorder(DEVICE)
    given = torch.zeros(SIZE, device=DEVICE)
    for turn in range(3):
        given.copy_(made(turn))
        tried = recorder.try_out(lambda: given * 2)
        given.fill_(-1.0)
        assert (tried - tried / 2).tolist() == [index + turn for index in range(SIZE)]
        del tried
    launch = recorder.record(lambda: [given + 1])
    for turn in range(3):
        given.copy_(made(turn))
        (result,) = launch()
        assert is_made(result * 1, turn + 1)


@law_of(RECORDER)
def recorded_pieces_have_the_values_of_their_kernels_in_any_order(module: ModuleType, fake: FakeCuda) -> None:
    stage = RecordedStage(module.CudaRecorder(DEVICE))
    for kind, microbatch in any_order(3, 2, seed=0):
        stage.run(kind, microbatch)
        made(-100.0)
    for microbatch in range(3):
        stage.assert_right(microbatch)


@law_of(OFFLOADS)
def backwards_find_what_was_offloaded(module: ModuleType, fake: FakeCuda) -> None:
    given: list[torch.Tensor] = []
    stage = offloading_stage(DEVICE, given)
    offloads = module.Offloads({0: stage}, PinnedHost(DEVICE))
    offloads.begin(Recorder(0, None))
    for turn in range(2):
        stage.begin(Counter(), training=True)
        stage.load(0, {0: made(turn).reshape(2, -1)})
        stage.compute("F", 0, ONE_SLICE)
        offloads.evict(Evict(0, 0), {})
        drive(offloads.vacate(Vacate(0, 0)), wait=lambda pending: awaited(pending.handle))
        made(-100.0)
        offloads.fetch(Fetch(0, 0))
        made(-200.0)
        drive(offloads.collect(Compute(0, "I", 0)), wait=lambda pending: awaited(pending.handle))
        stage.compute("I", 0, ONE_SLICE)
        assert given.pop().t().tolist() == [[1.0 + turn, 2.0 + turn, 3.0 + turn], [5.0 + turn, 6.0 + turn, 7.0 + turn]]


def scalar(name: str) -> Value:
    return Value(name, torch.float32, lambda samples: (), None, combine="sum")


def results_of(module: ModuleType, **options: Any) -> tuple[Any, Program]:
    """Return the results of one rank, and a program of one micro-batch."""
    rows = Value("rows", torch.float32, lambda samples: (samples,), 0, rows=1, combine="cat")
    split = Split((), {"loss": scalar("loss"), "rows": rows}, Traffic((), ()), (), {"loss": 0, "rows": 0})
    layout, hub = Layout(((0,),)), Hub().endpoint(0)
    if options.pop("scalars_beside", False):
        options["sums"] = hub
    results = module.Results(split, layout, transport=hub, device=DEVICE, **options)
    return results, Program(((),), (SIZE,), layout, split.traffic)


def begun(results: Any, program: Program, number: float) -> Any:
    """Begin to collect results whose memory has other owners at once."""
    content = made(number)
    contents = {"loss": content.sum(), "rows": content * 1}
    pieces = {name: (ResultSlice(0, Samples(0, SIZE), piece),) for name, piece in contents.items()}
    walk = results.collect(program, pieces, ["loss", "rows"], votes={"stop": 1.0})
    del content, contents, pieces
    made(-100.0)
    return walk


def ends_well(walk: Any, number: float) -> bool:
    """Return whether results that were begun are right."""
    collected = drive(walk, wait=lambda pending: awaited(pending.handle))
    loss = sum(range(SIZE)) + SIZE * number
    return (
        collected.votes == {"stop": 1.0}
        and collected.values["loss"].item() == loss
        and is_made(collected.values["rows"], number)
    )


@law_of(RESULTS)
def results_are_read_on_the_host_when_they_are_there(module: ModuleType, fake: FakeCuda) -> None:
    for options in ({"scalars_beside": True}, {"carrier": torch.device("cpu")}):
        results, program = results_of(module, **options)
        for turn in range(3):
            assert ends_well(begun(results, program, turn), turn)


@law_of(RESULTS)
def pinned_memory_is_used_again_when_it_has_been_read(module: ModuleType, fake: FakeCuda) -> None:
    results, program = results_of(module, carrier=torch.device("cpu"))
    assert ends_well(begun(results, program, 0.0), 0.0)
    fake.calls.clear()
    walk = begun(results, program, 1.0)
    assert not fake.calls, "the host has waited"
    others = begun(results, program, 2.0)
    assert ends_well(walk, 1.0)
    assert ends_well(others, 2.0)
    fake.calls.clear()
    for turn in range(3):
        assert ends_well(begun(results, program, turn), turn)
    assert "cudaHostAlloc" not in fake.calls


@law_of(WORKS)
def the_host_reads_what_its_stream_has_reached(module: ModuleType, fake: FakeCuda) -> None:
    results = unchanged(RESULTS)
    results.StreamReached = module.StreamReached  # type: ignore[attr-defined]
    results_are_read_on_the_host_when_they_are_there(results, fake)


def awaited(handle: Any) -> None:
    while not handle.wait(FOREVER_S):
        pass


@dataclass(frozen=True)
class Wire:
    """What stands for gloo: messages of one channel, which are read as soon as they are posted."""

    letters: queue.SimpleQueue[torch.Tensor]

    def isend(self, tensor: torch.Tensor, *, peer: int, group: object) -> Arrival:
        self.letters.put(tensor.clone())
        return Arrival(self, torch.empty(0))

    def end(self, group: object) -> None:
        """Let nobody wait any more."""
        self.letters.put(torch.zeros(SIZE))

    def irecv(self, buffer: torch.Tensor, *, peer: int, group: object) -> Arrival:
        return Arrival(self, buffer)


@dataclass(frozen=True)
class Arrival:
    """An operation of gloo; a buffer without elements waits for nothing."""

    wire: Wire
    buffer: torch.Tensor

    def wait(self) -> None:
        if self.buffer.numel():
            self.buffer.copy_(self.wire.letters.get(timeout=FOREVER_S))


def on_a_wire(module: ModuleType, wire: Wire) -> Any:
    """Return a transport of rank 0 to and from rank 1, which is a wire, without a process group."""
    vars(module).update(isend=wire.isend, irecv=wire.irecv, dist=SimpleNamespace(destroy_process_group=wire.end))
    transport = module.GlooTransport(rank=0, ranks=2, timeout_s=FOREVER_S)
    transport._messages = wire
    transport._lines.update({channel: module._Line(channel) for channel in ((0, 1), (1, 0))})
    return transport


@law_of(GLOO)
def messages_of_a_device_are_sent_when_they_are_made_and_used_when_they_are_there(
    module: ModuleType, fake: FakeCuda
) -> None:
    wire = Wire(queue.SimpleQueue())
    with closing(on_a_wire(module, wire)) as transport:
        for turn in range(3):
            buffer = torch.empty(SIZE, device=DEVICE)
            receive = transport.receive([buffer], peer=1)
            assert not receive.wait(0.0), "nothing has been sent"
            content = made(turn)
            send = transport.send([content], peer=1)
            del content
            made(-100.0)
            assert receive.wait(FOREVER_S)
            assert receive.landed()
            del receive
            result = buffer * 1
            del buffer
            made(-200.0)
            assert is_made(result, turn)
            assert send.wait(FOREVER_S)


MUTANTS = [
    Mutant(OFFLOAD, "torch.cuda.current_stream().wait_event(self.end)"),
    Mutant(OFFLOAD, "self._out.wait_stream(torch.cuda.current_stream(self.device))"),
    Mutant(OFFLOAD, "begin.record()"),
    Mutant(OFFLOAD, "end.record()"),
    Mutant(OFFLOAD, "self._back.wait_stream(torch.cuda.current_stream(self.device))"),
    Mutant(OFFLOAD, "self._back.wait_event(after.end)"),
    Mutant(OFFLOAD, "begin.record()", number=1),
    Mutant(OFFLOAD, "end.record()", number=1),
    Mutant(OFFLOAD, "self.leave(buffers, end)"),
    Mutant(OFFLOAD, "self._out.wait_event(found.used)"),
    Mutant(OFFLOAD, "copy.wait(0.0)"),
    Mutant(OFFLOAD, "self._out.synchronize()"),
    Mutant(OFFLOAD, "self._back.synchronize()"),
    Mutant(
        OFFLOADS,
        "yield Wait(self._parcels[work.stage, work.microbatch].left, Evict(work.stage, work.microbatch))",
        "yield from ()",
    ),
    Mutant(OFFLOADS, "yield Wait(parcel.returned, Fetch(compute.stage, compute.microbatch))", "yield from ()"),
    Mutant(RECORDER, "self._stream.wait_stream(current)"),
    Mutant(RECORDER, "current.wait_stream(self._stream)"),
    Mutant(WORKS, "self._event.record(torch.cuda.current_stream(device))"),
    Mutant(RESULTS, 'yield Wait(under_way, "the results of this rank")'),
    Mutant(WORKS, "self._event.synchronize()"),
    Mutant(GLOO, "copied.record()"),
    Mutant(GLOO, "copied.synchronize()"),
    Mutant(GLOO, "if not self.ending.wait(timeout_s):", "if False:"),
    Mutant(GLOO, "there.copy_(here, non_blocking=True)  # queued on the current stream"),
]
EARLY = [{*chosen} for count in range(4) for chosen in itertools.combinations(range(3), count)]


def broken(module: ModuleType, laws: list[Law]) -> Iterator[str]:
    """Yield the laws that a module breaks, and with which streams early."""
    for law, early in itertools.product(laws, EARLY):
        try:
            with FakeCuda(early) as fake:
                law(module, fake)
        except (AssertionError, RuntimeError) as error:
            yield f"{law.__name__}, early {early}: {error}"


@pytest.mark.parametrize("name", LAWS)
def test_numbers_are_right_however_late_or_early_streams_run(name: str) -> None:
    assert [*broken(unchanged(name), LAWS[name])] == []


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=[f"{mutant.module.rpartition('.')[2]}: {mutant.line}" for mutant in MUTANTS]
)
def test_no_wait_can_be_left_out(mutant: Mutant) -> None:
    assert next(broken(mutant.load(), LAWS[mutant.module]), ""), "no law is broken without it"
