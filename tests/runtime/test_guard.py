"""What guards tell each other, and what a waiting rank makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.core.program import Compute, Message, Recv, Reduce, Samples
from lightning_pipe.errors import InstructionError, PipelineError, UnsupportedError
from lightning_pipe.runtime.guard.client import GuardClient
from lightning_pipe.runtime.guard.failure import INSIDE, MESSAGE, OUTSIDE, PAIR, TOGETHER, Failure, GuardedState
from lightning_pipe.runtime.guard.guarded_watch import GuardedWatch, in_circle, never_meet
from lightning_pipe.runtime.guard.hub import MOMENT_S, GuardHub
from lightning_pipe.runtime.guard.page import SharedPage
from lightning_pipe.runtime.guard.pids import ending
from lightning_pipe.runtime.guard.watch import MismatchError, Patience, PeerFailure
from lightning_pipe.runtime.waiting import Done, Wait
from runtime.guards import Aborted, Never, Told

QUICK = Patience(deadline_s=0.5, stale_s=30, grace_s=30, parting_s=0.1)
RECEIVE = Recv(Message("F", 0, 1, 2, Samples(0, 4)), 1)


class Broken(Never):
    """A handle whose connection is lost."""

    def wait(self, timeout_s: float) -> bool:
        raise RuntimeError("Connection closed by peer")


class Guards:
    """A hub with guards of some ranks, and what they were told."""

    def __init__(self, ranks: int) -> None:
        self.told: list[tuple[int, Failure]] = []
        self.where: dict[str, Any] = {}
        self.said: list[str] = []
        self.hub = GuardHub(self._tell, self.said.append, stale_s=10)
        for rank in range(ranks):
            self.hub.join(rank, 0.0)
            self.hub.take(rank, {"do": "session", "number": 1}, 0.0)

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        if message["say"] == "where":
            self.where = message["states"]
        else:
            self.told.append((rank, Failure(**message["failure"])))

    def fail(self, rank: int, *, when: float, now: float, **fields: Any) -> None:
        failure = Failure(rank, "at 0F1 of step 3", "a cause", session=1, when=when, **fields)
        self.hub.take(rank, {"do": "fail", "failure": failure.packed()}, now)


def test_the_earliest_of_several_deaths_is_told_to_all_and_said_once():
    guards = Guards(3)
    guards.fail(0, when=2.0, now=0.1, lasting=True)
    guards.fail(1, when=1.0, now=0.2, lasting=True)
    guards.hub.tick(0.2 + MOMENT_S)
    assert guards.said == ["Rank 1 died at 0F1 of step 3: a cause"]
    assert [(rank, failure.rank) for rank, failure in guards.told] == [(0, 1), (1, 1), (2, 1)]


def test_an_error_is_told_at_once_and_only_the_first_of_a_fit():
    guards = Guards(2)
    guards.fail(1, when=1.0, now=0.0, raised=True)
    guards.fail(0, when=2.0, now=0.0, raised=True)
    assert guards.said == [] and [failure.rank for _, failure in guards.told] == [1, 1]


def test_a_later_fit_hears_of_a_death_but_not_of_an_error():
    for lasting, expected in ((True, [1]), (False, [])):
        guards = Guards(2)
        guards.fail(1, when=1.0, now=0.0, raised=not lasting, lasting=lasting)
        guards.hub.tick(1.0)
        guards.told.clear()
        guards.hub.take(0, {"do": "session", "number": 2}, 1.0)
        assert [failure.rank for _, failure in guards.told] == expected


def test_a_rank_whose_script_has_ended_is_missed_by_the_next_fit():
    guards = Guards(2)
    guards.hub.take(1, {"do": "bye"}, 1.0)
    assert not guards.told
    guards.hub.take(0, {"do": "session", "number": 2}, 1.0)
    assert [failure.cause for _, failure in guards.told] == [
        "its script has ended, but other ranks wait for it in another fit"
    ]


def test_what_a_rank_did_in_its_last_session_is_not_told_in_the_next():
    guards = Guards(2)
    guards.hub.take(1, {"do": "beat", "state": asdict(GuardedState(OUTSIDE, -1, "a meeting"))}, 0.0)
    guards.hub.take(0, {"do": "where", "ranks": [1], "number": 1}, 0.1)
    assert guards.where["1"]["at"] == "a meeting"
    guards.hub.take(1, {"do": "session", "number": 2}, 0.2)
    guards.hub.take(0, {"do": "where", "ranks": [1], "number": 2}, 0.3)
    assert guards.where["1"] == asdict(GuardedState(OUTSIDE))


@pytest.mark.parametrize("silent", [True, False])
def test_a_guard_that_is_gone_or_silent_is_a_failure_with_what_its_rank_did(silent: bool):
    guards = Guards(2)
    guards.hub.take(1, {"do": "beat", "state": asdict(GuardedState(INSIDE, 7, "1F0"))}, 0.0)
    guards.hub.take(0, {"do": "beat", "state": asdict(GuardedState())}, 10.5)
    if not silent:
        guards.hub.lost(1, 10.5)
    guards.hub.tick(10.6)
    guards.hub.tick(11.6)
    assert guards.said[0].startswith("Rank 1 died at 1F0 of step 7: ")


def test_a_page_is_read_as_it_was_written_whatever_the_length_of_its_texts():
    page = SharedPage()
    page.write(INSIDE, 12, b"x" * 1000, limit=5.0)
    page.wait(TOGETHER, b"the others", count=3, number=8, peer=-1, limit=4.0)
    page.begun(5, 6)
    expected = GuardedState(INSIDE, 12, "x" * 300, TOGETHER, "the others", 3, 8, -1, 5, 6)
    assert page.state == expected and page.limit == 4.0
    page.beat()
    assert SharedPage(page.descriptor).beats == 1


def waiting(*waits: tuple[int, str]) -> list[GuardedState]:
    return [GuardedState(OUTSIDE, 1, "STEP", kind, what) for kind, what in waits]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (waiting((TOGETHER, "a"), (TOGETHER, "b")), True),
        (waiting((TOGETHER, "a"), (TOGETHER, "a")), False),
        (waiting((PAIR, "a"), (TOGETHER, "b"), (TOGETHER, "b")), True),
        (waiting((PAIR, "a"), (PAIR, "a"), (TOGETHER, "b")), False),
        (waiting((PAIR, "a"), (0, "")), False),
        (waiting((MESSAGE, "a"), (TOGETHER, "b")), False),
    ],
)
def test_ranks_never_meet_where_no_exchange_has_all_that_it_needs(states: Sequence[GuardedState], expected: bool):
    assert never_meet(list(states)) is expected


def waiter(kind: int, **fields: int) -> GuardedState:
    return GuardedState(INSIDE if kind == MESSAGE else OUTSIDE, waits=kind, **fields)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((waiter(MESSAGE, peer=1, programs=2, exchanges=3), waiter(TOGETHER, number=4, programs=1, exchanges=4)), True),
        ((waiter(MESSAGE, peer=1, programs=2, exchanges=3), waiter(PAIR, peer=0, number=4, programs=1)), True),
        ((waiter(MESSAGE, peer=1, programs=2, exchanges=4), waiter(PAIR, peer=0, number=4, programs=1)), False),
        ((waiter(MESSAGE, peer=1, programs=2, exchanges=3), waiter(TOGETHER, number=4, programs=2)), False),
        ((waiter(MESSAGE, peer=1, programs=2, exchanges=3), waiter(0, programs=1)), False),
        ((waiter(MESSAGE, programs=2, peer=1), waiter(MESSAGE, programs=1, peer=0)), False),
        (
            (
                waiter(MESSAGE, peer=1, programs=2, exchanges=3),
                waiter(MESSAGE, peer=2, programs=2, exchanges=3),
                waiter(TOGETHER, number=4, programs=1, exchanges=4),
            ),
            True,
        ),
    ],
    ids=["behind", "not sent", "under way", "has begun it", "computes", "no exchange", "three"],
)
def test_ranks_wait_in_a_circle_only_for_what_has_not_begun(states: Sequence[GuardedState], expected: bool):
    assert in_circle(dict(enumerate(states))) is expected


@pytest.fixture
def guard() -> Told:
    return Told()


@pytest.fixture
def watch(guard: Any) -> GuardedWatch:
    return GuardedWatch(guard, rank=0, ranks=2, patience=QUICK)


def test_what_is_there_is_not_waited_for(watch: GuardedWatch):
    with watch.program(0):
        watch.at(Reduce(0))
        watch.wait(Wait(Done(), RECEIVE))


class LooksUp(Done):
    """A handle that notes the limit at which the guard would speak while it is waited for."""

    def __init__(self, page: SharedPage) -> None:
        self.page, self.limit = page, 0.0

    def wait(self, timeout_s: float) -> bool:
        self.limit = self.page.limit
        return True


def test_the_guard_limits_an_instruction_while_something_is_under_way_from_its_last_wait_on(
    guard: Told, watch: GuardedWatch
):
    """A host that spins inside of CUDA seems to work, so nobody spoke before torch did, a minute after the deadline."""
    handle, compute = LooksUp(guard.page), Compute(0, "F", 1)
    with watch.program(3):
        watch.at(compute)
        assert guard.page.limit == 0.0, "computes may take long where nobody waits, as those that are compiled first"
        start = time.monotonic() + QUICK.deadline_s
        watch.at(compute, pending=True)
        first = guard.page.limit
        watch.wait(Wait(handle, RECEIVE))
        assert start <= first < handle.limit < guard.page.limit, "who waits is not late, nor is who has just waited"
        assert guard.page.state.at == str(compute) and guard.page.state.mode == INSIDE
        watch.at(Reduce(0))
        assert guard.page.limit == 0.0
        watch.at(compute, pending=True)
    assert guard.page.limit == 0.0, "what is beside programs has limits of its own"


def test_a_limit_around_something_is_back_when_what_is_inside_has_ended(guard: Told, watch: GuardedWatch):
    with watch.limited("the sums of gradients"):
        watch.wait(Wait(Done(), RECEIVE))
        assert guard.page.limit > 0.0 and guard.page.state.at == "the sums of gradients"
        with watch.opening("connections"):
            assert guard.page.limit > 0.0 and guard.page.state.mode == INSIDE
        assert guard.page.limit > 0.0 and guard.page.state.mode == OUTSIDE
    assert guard.page.limit == 0.0


def test_what_lands_after_a_failure_is_not_taken_for_data(guard: Told, watch: GuardedWatch):
    """Works that were aborted read as completed."""
    with pytest.raises(PeerFailure, match="Rank 1 failed at 1F0 of step 7"), watch.program(7):
        watch.wait(Wait(Aborted(guard), RECEIVE))


def test_what_all_ranks_exchanged_beside_a_program_holds_though_another_has_failed_since(
    guard: Told, watch: GuardedWatch
):
    """Where all ranks raise one error by what they exchanged, each raises it as its own, also the one that is last."""
    watch.wait(Wait(Aborted(guard), "the plan", TOGETHER))
    assert guard.failure is not None and guard.page.state.waits == 0


def test_the_deadline_names_what_the_other_rank_does(guard: Told, watch: GuardedWatch):
    guard.states[1] = GuardedState(OUTSIDE, 7, "STEP")
    expected = r"stage 0, micro-batch 2, direction F from rank 1 .* 0\.5 s; rank 1 is outside a program, after STEP"
    with pytest.raises(PipelineError, match=expected), watch.program(7):
        watch.wait(Wait(Never(), RECEIVE))
    assert guard.own[0].late_s == QUICK.deadline_s and "waiting for" in guard.own[0].where


def test_a_lost_connection_is_the_failure_of_the_peer(guard: Told, watch: GuardedWatch):
    guard.states[1] = GuardedState(INSIDE, 7, "0F2")
    with pytest.raises(PeerFailure, match=r"Rank 1 failed at 0F2 of step 7: .*Connection closed"), watch.program(7):
        watch.wait(Wait(Broken(), RECEIVE))


def test_the_failure_of_another_rank_is_raised_instead_of_its_consequence(guard: Told, watch: GuardedWatch):
    guard.failure = Failure(1, "at 1F0 of step 7", "ValueError: user", "train.py:3")
    guard.heard.set()
    expected = "Rank 1 failed at 1F0 of step 7: ValueError: user\ntrain.py:3"
    with pytest.raises(PeerFailure, match=expected), watch.opening("connections"):
        raise RuntimeError("gloo: Connection closed by peer")
    with pytest.raises(PeerFailure, match=expected), watch.program(8):
        pass


def test_an_error_is_told_with_the_instruction_and_the_users_line(guard: Told, watch: GuardedWatch):
    def fail() -> None:
        with watch.program(3):
            watch.at(Compute(0, "F", 1))
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail()
    (told,) = guard.own
    assert (told.where, told.cause, told.raised) == ("at 0F1 of step 3", "KeyError: 'mine'", True)
    assert "test_guard.py" in told.lines


def test_an_error_is_told_as_it_reads_unless_it_only_names_the_instruction(guard: Told, watch: GuardedWatch):
    """A loader's worker that was gone was told as "Connection reset by peer", and advice of ours as "KeyError"."""
    for kind in (RuntimeError, PipelineError, UnsupportedError, InstructionError):
        error = kind("Do as follows.")
        error.__cause__ = KeyError("reset")
        watch.report(error)
    assert [told.cause for told in guard.own] == [
        "RuntimeError: Do as follows.",
        "Do as follows.",
        "UnsupportedError: Do as follows.",
        "KeyError: 'reset'",
    ]
    assert all("KeyError" in told.lines for told in guard.own)


def test_an_error_that_another_rank_has_raised_first_is_its(guard: Told, watch: GuardedWatch):
    """Both ranks raised the error of rank 1, and each named the other; no terminal showed the user's line."""
    assert watch.report(ValueError("mine")) == watch.rank
    assert watch.report(ValueError("of 1"), origin=1) == 1 and guard.own[-1].rank == 1
    guard.failure = Failure(1, "at the start", "ValueError: of all", raised=True)
    assert [watch.report(ValueError(text)) for text in ("of all", "mine")] == [1, watch.rank]


def test_ranks_that_do_different_things_are_told_what_each_waits_for(guard: Told):
    watch = GuardedWatch(guard, rank=0, ranks=2, patience=Patience())  # type: ignore[arg-type]
    guard.states[1] = GuardedState(OUTSIDE, 7, "STEP", TOGETHER, "the next batch", 4)
    with pytest.raises(MismatchError, match=r"rank 0 for weights, rank 1 for the next batch.*is_global_zero"):
        watch.wait(Wait(Never(), "weights", PAIR))


def test_a_meeting_ends_where_another_rank_waits_for_this_one(guard: Told):
    watch = GuardedWatch(guard, rank=1, ranks=2, patience=Patience())  # type: ignore[arg-type]
    guard.states[0] = GuardedState(OUTSIDE, -1, "elsewhere", PAIR, "the graph", 3, peer=1)
    start = time.monotonic()
    assert "rank 0 is at elsewhere, waiting for the graph" in watch.meet("here", patience_s=60.0)
    assert time.monotonic() - start < 30
    guard.states[0] = GuardedState(OUTSIDE, -1, "here", TOGETHER, "what comes then", 4, 9)
    assert watch.meet("here", patience_s=60.0) == ""


@pytest.fixture
def client() -> Iterator[GuardClient]:
    client = GuardClient()
    client.begin(0, Patience(deadline_s=30).limits)
    yield client
    client.end()
    client.close()


def test_a_guard_hears_answers_and_ends_with_its_rank(client: GuardClient):
    places = client.host(["127.0.0.1"])["places"]
    assert len(places) == 1 and client.host(["127.0.0.1"])["places"] == places
    failure = client.fail(Failure(0, "at the start", "mine", session=client.session, raised=True), wait_s=30)
    assert client.failure == failure and client.heard.is_set()


def test_what_outlasts_its_limit_is_a_failure_of_the_guard(client: GuardClient):
    client.page.write(OUTSIDE, 2, b"the loading of a batch", limit=time.monotonic() - 1)
    assert client.heard.wait(30)
    assert client.failure is not None and "the deadline is over" in client.failure.cause
    assert client.failure.where == "outside a program, after the loading of a batch of step 2"


def test_a_guard_that_is_cut_off_is_no_member_any_more():
    """The guard of rank 0 waited for a good-bye that could not come, when the network between hosts was cut."""
    guards = Guards(2)
    guards.hub.take(0, {"do": "session", "number": 1}, 11.0)
    guards.hub.tick(11.0)
    guards.hub.tick(11.0 + MOMENT_S)
    assert guards.hub.members == (0,) and guards.hub.is_settled
    assert [failure.rank for _, failure in guards.told] == [1]


SCRIPT = """
import atexit, concurrent.futures, os, sys, threading, time
from lightning_pipe.runtime.guard.client import guard_of_this_process
from lightning_pipe.runtime.guard.failure import OUTSIDE, Failure
from lightning_pipe.runtime.guard.process import GuardTimeouts

guard, limits = guard_of_this_process(), GuardTimeouts(deadline_s=1.0, stale_s=30.0, grace_s=0.5)
never, what = threading.Event(), sys.argv[1]
def compute():
    guard.begin(1, limits)
    guard.page.write(OUTSIDE, -1, b"the preparation of a step")
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        pass
    guard.end()
if "computes" in what:
    thread = threading.Thread(target=compute)
    thread.start() if "thread" in what else compute()
    if "thread" in what:
        thread.join()
    sys.exit(0)
guard.begin(1, limits)
if what == "waits before it has come":
    never.wait()
guard.page.write(OUTSIDE, -1, b"the preparation of a step")
if what == "waits in a hook":
    never.wait()
guard.fail(Failure(1, "at 0F1 of step 3", "a cause", session=1, raised=True), wait_s=30)
guard.end()
if what == "has a thread":
    threading.Thread(target=never.wait).start()
if what == "has an executor":
    concurrent.futures.ThreadPoolExecutor(1).submit(never.wait)
if what == "has a handler":
    atexit.register(never.wait)
if what == "has a destructor":
    class Waits:
        def __del__(self, read=os.read, ends=os.pipe()):
            read(ends[0], 1)
    waits = Waits()
"""


AT_EXIT = "Rank 1 is ended at the exit of its script, before the first step. Rank 1 failed at 0F1"


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("computes", 0, ""),
        pytest.param("computes in a thread", 0, "", marks=pytest.mark.slow),
        ("fails", 0, ""),
        (
            "waits before it has come",
            1,
            "Rank 1 failed at the start, before the first step: it is still there after 1 s",
        ),
        (
            "waits in a hook",
            1,
            "the preparation of a step, before the first step: its training thread has done nothing for",
        ),
        pytest.param("has a thread", 1, AT_EXIT, marks=pytest.mark.slow),
        pytest.param("has an executor", 1, AT_EXIT, marks=pytest.mark.slow),
        pytest.param("has a handler", 1, AT_EXIT, marks=pytest.mark.slow),
        ("has a destructor", -9, AT_EXIT),
    ],
)
def test_a_rank_that_waits_for_ever_ends_without_any_other(what: str, code: int, words: str):
    """Ranks were left that hung before they had come to the others, in all hooks at once, or at their exit."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done
    assert words in done.stderr and ("lightning_pipe" in done.stderr) is bool(words), done
    assert "without a word" not in done.stderr, done
    if what.startswith("waits"):
        assert "Rank 1 was at" in done.stderr and "in wait" in done.stderr, done


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="how a process has ended is read in /proc")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os._exit(3)", "exit code 3"),
        ("os.abort()", "by SIGABRT: a library"),
        ("os.kill(os.getpid(), 9)", "by SIGKILL"),
    ],
)
def test_how_a_process_has_ended_is_told_until_it_is_waited_for(code: str, expected: str):
    child = subprocess.Popen([sys.executable, "-c", f"import os; {code}"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert expected in ending(child.pid)
    child.wait()
    assert ending(child.pid).endswith("or called os._exit")
