"""One rank fails: every rank ends within seconds and says which one, where and why."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.exchanges.groups import connect
from lightning_pipe.runtime.guard.watch import PATIENCE, Patience
from lightning_pipe.runtime.stage import Slice
from lightning_pipe.runtime.transport.process_group import process_group_transport
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Done, Handle
from lightning_pipe.strategy.ranks.connections import begin_watch, meet_guards
from ranks.pipelines import CPU, Case, capture_of, executor_of, job_of, module_of, program_of, split_of
from ranks.world import Died, Returned, World

CASE = Case("Chain", ((0,), (1,), (2,)))
LIMIT_S = 20.0
SOON_S = 10.0  # after a deadline
STEP = 2  # in which faults happen
ENDLESS = 2**31 - 1  # iterations of a hash: more than ten minutes


@dataclass(frozen=True)
class Fault:
    """What one rank does wrong at the forward of a micro-batch.

    It raises, dies, hangs, raises once another hangs, computes without end, or withholds its messages.
    """

    rank: int
    what: str
    microbatch: int = 1


class Rank:
    """One rank with its faults, in the place of its stage's `compute` and of its transport."""

    def __init__(self, faults: Sequence[Fault], patience: Patience) -> None:
        self.number, self.step, self.stepped = dist.get_rank(), 0, 0
        self.faults = {(f.what, f.microbatch) for f in faults if f.rank == self.number}
        module = module_of(CASE)
        capture = capture_of(CASE, module)
        split = split_of(CASE, capture)
        self.program = program_of(CASE, split)
        self.transport: Transport = process_group_transport(CPU)
        connect(self.transport, [self.program])
        self.executor = executor_of(CASE, module, capture, split, Withholding(self), self.optimize)
        stage = self.executor.stages[self.number]
        self._compute, stage.compute = stage.compute, self.compute  # type: ignore[method-assign]
        if self.number != 1:  # one rank is in a hurry, so that it is known who speaks
            patience = replace(patience, deadline_s=PATIENCE.deadline_s)
        self.watch = begin_watch(self.number, dist.get_world_size(), deadline_s=patience.deadline_s)
        self.watch.guard.begin(self.number, patience.limits)
        self.watch.patience = patience
        self.store = dist.group.WORLD.get_group_store()
        meet_guards(self.watch, self.store, start=time.monotonic())

    def optimize(self) -> None:
        self.stepped += 1

    def compute(self, kind: str, microbatch: int, slice_: Slice) -> None:
        if self.step == STEP and kind == "F":
            if ("raises", microbatch) in self.faults:
                raise ValueError("the user's mistake")
            if ("raises after", microbatch) in self.faults:
                self.store.wait(["a rank hangs"])
                raise ValueError("the user's mistake")
            if ("dies", microbatch) in self.faults:
                os.kill(os.getpid(), signal.SIGKILL)
            if ("spins", microbatch) in self.faults:
                hashlib.pbkdf2_hmac("sha256", b"", b"", ENDLESS)  # others run meanwhile, as while CUDA spins
            if ("hangs", microbatch) in self.faults:
                self.store.set("a rank hangs", "")
                dist.recv(torch.zeros(1), src=2)
        self._compute(kind, microbatch, slice_)  # type: ignore[arg-type]


class Withholding:
    """The transport of a rank, which sends nothing any more if that is its fault."""

    def __init__(self, rank: Rank) -> None:
        self._own, self.rank = rank, rank.number

    def send(self, tensors: Sequence[torch.Tensor], *, peer: int) -> Handle:
        if self._own.step == STEP and ("withholds", 1) in self._own.faults:
            return Done()
        return self._own.transport.send(tensors, peer=peer)

    def __getattr__(self, name: str) -> object:
        return getattr(self._own.transport, name)


def train(faults: Sequence[Fault], patience: Patience) -> tuple[str, float]:
    """Return what this rank says, and the seconds from the fault until it does."""
    rank = Rank(faults, patience)
    begin = time.monotonic()
    try:
        for rank.step in range(STEP + 2):
            begin = time.monotonic()
            rank.executor.run(rank.program, job_of(CASE, step=rank.step), watch=rank.watch)
    except PipelineError as error:
        assert rank.stepped == STEP, "no optimizer steps by a batch that fails somewhere"
        return str(error), time.monotonic() - begin
    finally:
        rank.watch.close()
    return "all went well", time.monotonic() - begin


def results(faults: Sequence[Fault], patience: Patience = PATIENCE) -> list[object]:
    return World(3).results(train, faults, patience)


def test_without_faults_all_goes_well() -> None:
    assert [r.value[0] for r in results([]) if isinstance(r, Returned)] == ["all went well"] * 3


def test_every_rank_names_the_rank_that_raised_its_instruction_and_the_cause() -> None:
    for rank, result in enumerate(results([Fault(1, "raises")])):
        assert isinstance(result, Returned)
        text, seconds = result.value
        assert "Rank 1 failed at 1F1" in text and "ValueError: the user's mistake" in text
        assert rank == 1 or ("of step 2" in text and "test_failures.py" in text), "others see the user's line"
        assert seconds < LIMIT_S


def test_every_rank_names_the_rank_that_was_killed_and_its_last_instruction() -> None:
    first, killed, last = results([Fault(1, "dies")])
    assert isinstance(killed, Died) and killed.exitcode == -signal.SIGKILL
    for result in (first, last):
        assert isinstance(result, Returned)
        text, seconds = result.value
        assert "Rank 1 died at 1F1 of step 2: its process has ended without a word" in text
        assert seconds < LIMIT_S


def test_a_message_that_never_comes_is_named_at_the_deadline() -> None:
    expected = (
        "Rank 1 waits for stage 0, micro-batch 0, direction F from rank 0 for more than 2 s; "
        "rank 0 is at 0I0, waiting for 0RECV_B0<1@1[0:2] of step 2"
    )
    for result in results([Fault(0, "withholds")], Patience(deadline_s=2.0)):
        assert isinstance(result, Returned)
        assert expected in result.value[0]


def test_a_rank_that_cannot_look_up_prints_the_failure_and_ends() -> None:
    faults = [Fault(1, "hangs", 0), Fault(0, "raises after")]
    first, hanging, last = results(faults, Patience(grace_s=0.5))
    assert isinstance(hanging, Died) and hanging.exitcode == 1
    assert (
        "Rank 1 is ended at 1F0 of step 2. Rank 0 failed at 0F1 of step 2: ValueError: the user's mistake"
        in hanging.stderr
    )
    for result in (first, last):
        assert isinstance(result, Returned) and "Rank 0 failed at 0F1" in result.value[0]


def test_a_rank_that_computes_without_end_while_messages_are_under_way_is_named_at_the_deadline() -> None:
    """A host that waits inside of CUDA spins: it was taken for one that works, and ended by torch, if at all."""
    first, spinning, last = results([Fault(1, "spins")], Patience(deadline_s=2.0, grace_s=0.5))
    assert isinstance(spinning, Died) and spinning.exitcode == 1
    assert "Rank 1 is ended at 1F1 of step 2." in spinning.stderr
    for result in (first, last):
        assert isinstance(result, Returned)
        text, seconds = result.value
        assert "Rank 1 failed at 1F1 of step 2: it is still there after 2 s; the deadline is over" in text
        assert seconds < 2.0 + SOON_S
