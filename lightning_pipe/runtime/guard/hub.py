"""Decide which failure was the first, and tell all guards of it; in the guard of rank 0.

Several deaths may be heard of in any order (a launcher ends all ranks when one has died): the hub waits a moment, and
takes the earliest. An error that a rank raised is passed on at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from lightning_pipe.runtime.guard.failure import OUTSIDE, Failure, GuardedState, unpacked
from lightning_pipe.runtime.guard.lines import Message

CUT_OFF = "its guard has closed the connection: the processes of its host were killed, or the network has cut it off"
MOMENT_S = 0.4  # between the first word of a death and the decision who was first


class GuardHub:
    """What all guards have told.

    Args:
        send: sends a message to the guard of a rank.
        say: shows a text to the user.
        stale_s: seconds without a word after which a guard's host is taken for dead.
    """

    def __init__(self, send: Callable[[int, Message], None], say: Callable[[str], None], *, stale_s: float) -> None:
        self.stale_s = stale_s
        self._send, self._say = send, say
        self._heard: dict[int, float] = {}
        self._states: dict[int, GuardedState] = {}
        self._sessions: dict[int, int] = {}
        self._ended: dict[int, GuardedState] = {}
        self._raised: dict[int, Failure] = {}  # by session
        self._lasting: Failure | None = None
        self._pending: list[Failure] = []
        self._due = 0.0

    @property
    def members(self) -> tuple[int, ...]:
        """Return the ranks whose guards are connected."""
        return tuple(self._heard)

    @property
    def is_settled(self) -> bool:
        """Return whether everything that was heard of has been told."""
        return not self._pending

    def has_met(self, rank: int) -> bool:
        """Return whether the guard of a rank has ever come."""
        return rank in self._states

    def join(self, rank: int, now: float) -> None:
        """Welcome the guard of a rank."""
        self._heard[rank] = now
        self._states[rank] = GuardedState()

    def take(self, rank: int, message: Message, now: float) -> None:
        """Hear a message of the guard of a rank."""
        self._heard[rank] = now
        match message["do"]:
            case "beat":
                self._states[rank] = GuardedState(**message["state"])
            case "session":
                self._begin(rank, message["number"])
            case "fail":
                self.declare(unpacked(message["failure"]), now)
            case "where":
                states = {str(peer): asdict(self._states[peer]) for peer in message["ranks"] if peer in self._states}
                self._send(rank, {"say": "where", "states": states, "number": message["number"]})
            case "bye":
                self._heard.pop(rank)
                self._ended[rank] = self._states[rank]
                self._miss_ended()

    def lost(self, rank: int, now: float) -> None:
        """Hear that the connection to the guard of a rank is closed."""
        if self._heard.pop(rank, None) is not None:
            cause = CUT_OFF
            where = str(self._states[rank])
            self.declare(Failure(rank, where, cause, session=self._sessions.get(rank, 0), lasting=True), now)

    def declare(self, failure: Failure, now: float) -> None:
        """Hear of a failure."""
        if not self._pending:
            self._due = now + (0.0 if failure.raised else MOMENT_S)
        self._pending.append(failure)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Tell what is due, and look for guards that are silent."""
        if self._pending and now >= self._due:
            first = min(self._pending, key=lambda failure: failure.when)
            self._pending.clear()
            self._tell(first)
        for rank, heard in list(self._heard.items()):
            if now - heard > self.stale_s:
                self._heard.pop(rank)
                cause = f"no word from its host for {self.stale_s:g} s: it is down, or cut off"
                where, session = str(self._states[rank]), self._sessions.get(rank, 0)
                self.declare(Failure(rank, where, cause, session=session, lasting=True, late_s=self.stale_s), now)

    def _begin(self, rank: int, session: int) -> None:
        self._sessions[rank] = session
        self._states[rank] = GuardedState(mode=OUTSIDE)  # what it did last, it did in another session
        self._raised = {number: failure for number, failure in self._raised.items() if number >= session - 1}
        known = self._raised.get(session) or self._lasting
        if known is not None:
            self._send(rank, {"say": "failure", "failure": known.packed()})
        self._miss_ended()

    def _miss_ended(self) -> None:
        """Tell ranks that are in a fit to which a rank will not come any more."""
        newest = max(self._sessions.values(), default=0)
        for rank, state in self._ended.items():
            if self._sessions.get(rank, 0) < newest and self._lasting is None:
                cause = "its script has ended, but other ranks wait for it in another fit"
                self._tell(Failure(rank, str(state), cause, session=newest, lasting=True))

    def _tell(self, failure: Failure) -> None:
        """Pass on a failure, if it is the first of its session."""
        if failure.lasting and self._lasting is None:
            self._lasting = failure
        if failure.session in self._raised:
            return
        self._raised[failure.session] = failure
        if not failure.raised:
            self._say(str(failure))
        for rank in self._heard:
            self._send(rank, {"say": "failure", "failure": failure.packed()})
