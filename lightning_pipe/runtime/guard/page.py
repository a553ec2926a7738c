"""Share what a rank does with its guard, through a page of memory: it can be read when the rank is dead or stopped.

The rank's threads write without a system call (some microseconds); a reader that comes between may see the text of one
instruction with the number of another, for a moment.
"""

from __future__ import annotations

import mmap
import os
import struct

from lightning_pipe.runtime.guard.failure import GuardedState
from lightning_pipe.runtime.shared_memory import new_memory

_SIZE = 4096
_BEATS = struct.Struct("<Q")
_STATE = struct.Struct("<BqdH300s")  # mode, step, limit, length and text of the instruction
_WAIT = struct.Struct("<BIIidH300s")  # kind, count, number, peer, limit, length and text of what is waited for
_BEGUN = struct.Struct("<II")  # programs, exchanges
_AT = _BEATS.size
_WAITING = _AT + _STATE.size
_SO_FAR = _WAITING + _WAIT.size
_LONGEST = 300  # bytes of a text


class SharedPage:
    """A page of shared memory.

    Args:
        descriptor: of the memory; by default new memory.

    Attributes:
        descriptor: given to the guard.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = new_memory(_SIZE, name="rank")
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)

    def beat(self) -> None:
        """Show that the rank's interpreter runs."""
        _BEATS.pack_into(self._memory, 0, self.beats + 1)

    @property
    def beats(self) -> int:
        """Return the number of signs of life."""
        return int(_BEATS.unpack_from(self._memory, 0)[0])

    def write(self, mode: int, step: int, at: bytes, *, limit: float = 0.0) -> None:
        """Write what the rank does now.

        Args:
            mode: of `GuardedState`.
            step: of `GuardedState`.
            at: text.
            limit: time of `time.monotonic` by which it must do something else; 0 for none.
        """
        _STATE.pack_into(self._memory, _AT, mode, step, limit, min(len(at), _LONGEST), at)

    def wait(
        self, kind: int, what: bytes = b"", *, count: int = 0, number: int = 0, peer: int = -1, limit: float = 0.0
    ) -> None:
        """Write what the rank waits for now, as `GuardedState` says, and until when, as `write` does."""
        _WAIT.pack_into(self._memory, _WAITING, kind, count, number, peer, limit, min(len(what), _LONGEST), what)

    def begun(self, programs: int, exchanges: int) -> None:
        """Write how many programs the rank has begun, and how many exchanges."""
        _BEGUN.pack_into(self._memory, _SO_FAR, programs, exchanges)

    @property
    def limit(self) -> float:
        """Return the time by which the rank must do something else, that of its wait where it waits; 0 for none."""
        own: float = _STATE.unpack_from(self._memory, _AT)[2]
        waiting: float = _WAIT.unpack_from(self._memory, _WAITING)[4]
        return waiting or own

    @property
    def state(self) -> GuardedState:
        """Return what the rank does."""
        mode, step, _, length, at = _STATE.unpack_from(self._memory, _AT)
        waits, count, number, peer, _, size, what = _WAIT.unpack_from(self._memory, _WAITING)
        begun = _BEGUN.unpack_from(self._memory, _SO_FAR)
        return GuardedState(mode, step, _text(at[:length]), waits, _text(what[:size]), count, number, peer, *begun)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.descriptor)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
