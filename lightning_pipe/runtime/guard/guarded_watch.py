"""Let a rank hear of the first failure of any rank, and find out who waits for whom.

    page        every instruction and every wait is written where the guard of this rank sees it (`guard/`)
    heard       the guard tells of failures; a waiting rank looks up every 0.2 s, and raises the first one, whoever's it
                is, instead of the consequence it sees itself ("Connection closed by peer", or data that never came)
    deadline    a wait that is too long is an error that says what the other rank does; an instruction that is too long
                while something is under way is noticed by the guard, and so is what others have to join
    meetings    ranks that wait for different things which all ranks do together will never meet, nor will ranks that
                wait in a circle for what has not begun (a program here, an exchange there): said at once

A rank that cannot look up, because it waits inside a device or a library, is ended by its guard.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from lightning_pipe.core.program import Instruction, Message, Recv, Send
from lightning_pipe.errors import InstructionError, OutOfMemoryError, PipeError, PipelineError
from lightning_pipe.runtime.guard.client import GuardClient
from lightning_pipe.runtime.guard.failure import (
    INSIDE,
    MESSAGE,
    NO_WAIT,
    OUTSIDE,
    PAIR,
    TOGETHER,
    UNHEARD,
    Failure,
    GuardedState,
)
from lightning_pipe.runtime.guard.watch import PATIENCE, POLL_S, MismatchError, OverdueError, Patience, PeerFailure
from lightning_pipe.runtime.waiting import Wait

_LAST_LINES = 6  # of a traceback, as much as names the user's line and the operation
_LOOK_S = 2.0  # after which a wait beside programs asks what the others wait for, and again
_MARGIN_S = 3.0  # after our deadline, the guard's
_SUSPENDED_S = 10.0  # between two looks: the job was suspended, which counts for no deadline
_MOST_WORDS = 4096  # instructions whose text is kept
NOWHERE = "the preparation of a step"


class GuardedWatch:
    """Watch over a rank by its guard.

    Args:
        guard: of this process, in a session.
        rank: this rank.
        ranks: number of ranks.
        patience: deadlines.
        hosts: number of hosts that the ranks are on.

    Attributes:
        guard, rank, ranks, patience, hosts: as given.
    """

    def __init__(
        self,
        guard: GuardClient,
        *,
        rank: int,
        ranks: int,
        patience: Patience = PATIENCE,
        hosts: int = 1,
    ) -> None:
        self.guard, self.rank, self.ranks, self.patience, self.hosts = guard, rank, ranks, patience, hosts
        self._depth, self._step, self._at = 0, -1, NOWHERE.encode()
        self._is_limited = False  # whether the guard keeps to the deadline where this rank is now
        self._met = 0  # waits beside programs
        self._programs = self._exchanges = 0  # begun
        guard.page.begun(0, 0)
        self._words: dict[int, tuple[object, bytes]] = {}

    @contextmanager
    def program(self, step: int) -> Iterator[None]:
        """Surround one program; may be nested."""
        self._depth += 1
        self._step, self._is_limited = step, False
        self._programs += 1
        self.guard.page.begun(self._programs, self._exchanges)
        self._note()
        try:
            self.raise_failure()
            yield
        except PeerFailure:
            raise
        except BaseException as error:
            self.report(error)
            raise
        finally:
            self._depth, self._is_limited = self._depth - 1, False
            self.guard.page.wait(NO_WAIT)
            self._note()

    @contextmanager
    def opening(self, what: str) -> Iterator[None]:
        """Surround something that other ranks must join and that cannot look up; errors of it are those of a peer."""
        self._depth += 1
        unopened, self.guard.unopened = self.guard.unopened, what
        try:
            with self.limited(what):
                self.raise_failure()
                yield
            self.guard.unopened = unopened
        except PipelineError:
            raise
        except RuntimeError as error:
            self.hear(hidden=error)
            raise
        finally:
            self._depth -= 1
            self._note()

    @contextmanager
    def limited(self, what: str) -> Iterator[None]:
        """Surround something that takes no other rank, but for which others wait: the guard keeps to the deadline."""
        outer = self._at, self._is_limited
        self._at, self._is_limited = what.encode(), True
        self._note()
        try:
            yield
        finally:
            self._at, self._is_limited = outer
            self._note()

    def at(self, instruction: Instruction, *, pending: bool = False) -> None:
        """Note the instruction that begins; while something is under way, the guard keeps to the deadline."""
        self._at, self._is_limited = self._word(instruction), pending
        self._note()
        self.raise_failure()

    def wait(self, wait: Wait) -> None:
        """Wait for a handle until the deadline; in a program, what lands after a failure may be rubbish: raise that."""
        beside = wait.kind in (PAIR, TOGETHER)
        self._met += beside
        start = seen = time.monotonic()
        end, look = start + self.patience.deadline_s, start + _LOOK_S
        page = self.guard.page
        peer = wait.what.peer if isinstance(wait.what, (Recv, Send)) else wait.peer
        page.wait(
            wait.kind, self._word(wait.what), count=self._met, number=wait.number, peer=peer, limit=end + _MARGIN_S
        )
        before: dict[int, GuardedState] = {}
        try:
            while not wait.handle.wait(POLL_S):
                self.raise_failure()
                now = time.monotonic()
                end += now - seen if now - seen > _SUSPENDED_S else 0.0
                seen = now
                if now > end:
                    raise OverdueError(self._overdue(wait))
                if beside and now > look:
                    before, look = self._look(before), time.monotonic() + _LOOK_S
        except PipelineError:
            raise
        except RuntimeError as error:
            raise self._disconnected(wait, error) from None
        if self._depth and not beside:
            self.raise_failure()
        if self._is_limited:
            self._note()
        page.wait(NO_WAIT)

    def exchange(self, number: int) -> None:
        """Note that an exchange begins which all ranks begin in one order."""
        self._exchanges = number
        self.guard.page.begun(self._programs, number)

    @property
    def begun(self) -> str:
        """Return in words how many programs and exchanges this rank has begun: as many as others at the same place."""
        return f"{self._programs} programs and {self._exchanges} exchanges"

    def report(self, error: BaseException, *, origin: int | None = None) -> int:
        """Tell the other ranks of a failure of this one, unless one has failed before.

        Args:
            error: what is raised.
            origin: the rank that has raised it first, where this one repeats it.

        Returns:
            The rank that was the first to raise this error: another one, where all ranks raise the same.
        """
        wraps = isinstance(error, PipeError) and not isinstance(error, OutOfMemoryError)  # else it says best itself
        root = (error.__cause__ if wraps else None) or error
        if self.guard.failure is None and isinstance(root, RuntimeError) and not isinstance(root, PipelineError):
            self.guard.heard.wait(self.patience.parting_s if _is_of_connection(root) else 0.0)
        told = root if isinstance(error, InstructionError) and not isinstance(root, PipelineError) else error
        cause = str(told) if isinstance(told, PipelineError) else f"{type(told).__name__}: {told}"
        lines = traceback.format_exception(type(root), root, root.__traceback__)[-_LAST_LINES:]
        shown = "" if isinstance(root, PipelineError) else "".join(lines).rstrip()
        late_s = self.patience.deadline_s if isinstance(error, OverdueError) else 0.0
        session = self.guard.session
        where = str(self.guard.page.state)
        rank = self.rank if origin is None else origin
        failure = Failure(rank, where, cause, shown, session, raised=True, late_s=late_s)
        first = self.guard.failure or self.guard.fail(failure, wait_s=self.patience.parting_s)
        return first.rank if first.raised and first.cause == cause else rank

    def meet(self, words: str, *, patience_s: float) -> str:
        """Return why not all ranks come here with the same words, outside of programs and in no wait; "" if they do.

        Nothing is sent, so that those who do not come are not disturbed. A rank that waits for this one does not come.
        """
        if self.guard.failure is None and self.guard.page.state.waits != NO_WAIT:
            return f"rank {self.rank} was interrupted while it waited for {self.guard.page.state.waiting}"
        end = time.monotonic() + patience_s
        self._at = words.encode()
        self._note()
        since: dict[tuple[int, int], float] = {}  # by rank, and which of its waits it is
        while True:
            if self.guard.failure is not None:
                return str(self.guard.failure).partition("\n")[0]
            states = self.guard.where(self._others)
            late = {rank: states.get(rank, UNHEARD) for rank in self._others}
            late = {rank: state for rank, state in late.items() if state.at != words}
            if not late:
                return ""
            now = time.monotonic()
            waiting = [since.setdefault((r, state.count), now) for r, state in late.items() if self._lacks_us(state)]
            if now > end or any(now - seen > _LOOK_S for seen in waiting):
                return ", ".join(f"rank {rank} is {state}" for rank, state in late.items())
            time.sleep(POLL_S / 4)

    def _lacks_us(self, state: GuardedState) -> bool:
        """Return whether a rank waits, beside programs, for what takes this one, which has not begun it."""
        has_begun = 0 < state.number <= self._exchanges
        return not has_begun and (state.waits == TOGETHER or (state.waits == PAIR and state.peer == self.rank))

    def settled(self, error: BaseException) -> None:
        """Raise the failure of another rank in the place of an error that is its consequence."""
        if _is_of_connection(error):
            self.hear(hidden=error)

    def hear(self, *, hidden: BaseException | None = None) -> None:
        """Raise the failure of a rank as `raise_failure` does, once it is heard of; it must have happened."""
        self.guard.heard.wait(self.patience.parting_s)
        self.raise_failure(hidden=hidden)

    def raise_failure(self, *, hidden: BaseException | None = None) -> None:
        """Raise the failure of a rank, if there is one; not this rank's own in the place of the error behind it."""
        failure = self.guard.failure
        if failure is not None and not (hidden is not None and failure.raised and failure.rank == self.rank):
            raise PeerFailure(str(failure)) from None

    def watch_processes(self, pids: Sequence[int]) -> None:
        """Let these processes end with this one."""
        self.guard.watch_processes(pids)

    def close(self) -> None:
        """End the session of the guard."""
        self.guard.end()
        self._words.clear()

    def _note(self) -> None:
        """Write where this rank is, and the time by which it must be elsewhere, if there is one."""
        limit = time.monotonic() + self.patience.deadline_s + _MARGIN_S if self._is_limited else 0.0
        self.guard.page.write(INSIDE if self._depth else OUTSIDE, self._step, self._at, limit=limit)

    def _word(self, what: Instruction | str) -> bytes:
        """Return the text of an instruction; those of programs are met again in every step."""
        kept = self._words.get(id(what))
        if kept is None:
            if len(self._words) > _MOST_WORDS:
                self._words.clear()
            kept = self._words[id(what)] = (what, str(what).encode())
        return kept[1]

    def _disconnected(self, wait: Wait, error: RuntimeError) -> PipelineError:
        """Return the failure behind a lost connection: what a rank has told, else that the peer is gone."""
        self.guard.heard.wait(self.patience.parting_s)
        if self.guard.failure is not None:
            return PeerFailure(str(self.guard.failure))
        seen = f"ank {self.rank} lost its connection while it waited for {_described(wait)} ({error})"
        if not isinstance(wait.what, (Recv, Send)):
            return PipelineError(f"R{seen}; {self._whereabouts(wait)}.")
        peer = wait.what.peer
        where = str(self.guard.where([peer]).get(peer, UNHEARD))
        cause = f"r{seen}; its process has probably died"
        session = self.guard.session
        failure = Failure(peer, where, cause, session=session, raised=True)
        return PeerFailure(str(self.guard.fail(failure, wait_s=self.patience.parting_s)))

    def _overdue(self, wait: Wait) -> str:
        return (
            f"Rank {self.rank} waits for {_described(wait)} for more than {self.patience.deadline_s:g} s; "
            f"{self._whereabouts(wait)}. If that is only slow, raise deadline_s."
        )

    def _whereabouts(self, wait: Wait) -> str:
        peers = (wait.what.peer,) if isinstance(wait.what, (Recv, Send)) else self._others
        states = self.guard.where(peers)
        return ", ".join(f"rank {peer} is {states.get(peer, UNHEARD)}" for peer in peers)

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.ranks) if rank != self.rank)

    def _look(self, before: dict[int, GuardedState]) -> dict[int, GuardedState]:
        """Return what the other ranks do; raise if it is what they did before, and they can never meet."""
        now = self.guard.where(self._others)
        if now == before and len(now) == len(self._others):
            states = {**now, self.rank: self.guard.page.state}
            if never_meet(list(states.values())) or in_circle(states):
                waits = ", ".join(f"rank {rank} for {states[rank].waiting}" for rank in sorted(states))
                raise MismatchError.of(waits)
        return now


def never_meet(states: Sequence[GuardedState]) -> bool:
    """Return whether all ranks wait for exchanges beside programs of which none can take place."""
    if any(state.waits not in (PAIR, TOGETHER) for state in states):
        return False
    pairs = Counter(state.waiting for state in states if state.waits == PAIR)
    return len({state.waiting for state in states}) > 1 and max(pairs.values(), default=0) < 2


def in_circle(states: Mapping[int, GuardedState]) -> bool:
    """Return whether ranks wait in a circle, each for what another has not begun: messages may be under way otherwise.

    Args:
        states: of all ranks.
    """
    left = {rank: _late_for(state, states) for rank, state in states.items()}
    while ends := [rank for rank, late in left.items() if not any(peer in left for peer in late)]:
        for rank in ends:
            del left[rank]
    return bool(left)


def _late_for(state: GuardedState, states: Mapping[int, GuardedState]) -> list[int]:
    """List the ranks that have not begun what a rank waits for."""
    others = {rank: other for rank, other in states.items() if state.peer in (rank, -1) and other is not state}
    if state.waits in (PAIR, TOGETHER):
        return [rank for rank, other in others.items() if other.exchanges < state.number]
    if state.waits == MESSAGE and state.mode == INSIDE and state.peer >= 0:
        return [rank for rank, other in others.items() if other.programs < state.programs]
    return []


def _is_of_connection(error: BaseException) -> bool:
    """Return whether an error may be the consequence of another rank's death."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "onnection", "NCCL", "Broken pipe"))
    )


def _described(wait: Wait) -> str:
    """Name what is waited for: `stage 2, micro-batch 0, direction F from rank 1`."""
    match wait.what:
        case Recv(message, peer):
            return f"{_spelled(message)} from rank {peer}"
        case Send(message, peer):
            return f"rank {peer} to take {_spelled(message)}"
        case other:
            return str(other)


def _spelled(message: Message) -> str:
    return f"stage {message.source}, micro-batch {message.microbatch}, direction {message.direction}"
