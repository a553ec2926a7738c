"""Handles of operations that a device's communicator carries out (NCCL): the host queues them and goes on.

    StreamWork       operations that are launched; waiting makes the current stream wait, not the host
    LateReceive      a receive that is launched when it is waited for, since a launched one runs on the device until its
                     message comes. It is late on the host and early on the device: its buffer is free for what comes as
                     soon as the current stream has reached the place at which it was announced
    StreamReached    all that the current stream was told so far; the only handle here for which the host waits

Waiting for the first two lets their tensors go: the stream that uses the memory again comes behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Launch = Callable[[torch.Tensor], dist.Work]


class AbortFlag:
    """Whether the communicators of this rank were aborted: works that are under way then end without content.

    Attributes:
        is_set: whether they were.
    """

    def __init__(self) -> None:
        self.is_set = False

    def check(self) -> None:
        """Raise if they were.

        Raises:
            RuntimeError: names the reason; whoever watches over the rank knows the failure behind it.
        """
        if self.is_set:
            raise RuntimeError("NCCL communicators of this rank were aborted, because a rank has failed")


class StreamWork:
    """Launched operations, and the tensors that they use until the current stream waits for them.

    Args:
        works: the operations.
        tensors: what they read or write.
        aborted: of their communicator.
    """

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor], aborted: AbortFlag) -> None:
        self._works, self._tensors, self._aborted = tuple(works), tuple(tensors), aborted

    def wait(self, timeout_s: float) -> bool:
        """Make the current stream wait, not the host.

        Raises:
            RuntimeError: if the communicator was aborted.
        """
        self._aborted.check()
        for work in self._works:
            work.wait()
        self._tensors = ()
        return True

    def landed(self) -> bool:
        """Return whether the device has finished the operations; those of an aborted communicator never have."""
        return not self._aborted.is_set and all(work.is_completed() for work in self._works)


class ReceiveQueue:
    """Receives of one channel in the order of its messages, launched when somebody waits for them.

    Args:
        launch: launches the receive of one tensor on the current stream.
        beside: the stream that launches; it waits for nothing but buffers.
        aborted: of the channel's communicator.
    """

    def __init__(self, launch: Launch, *, beside: torch.cuda.Stream, aborted: AbortFlag) -> None:
        self._launch, self._beside, self._aborted = launch, beside, aborted
        self._announced: deque[LateReceive] = deque()

    def announce(self, buffers: Sequence[torch.Tensor]) -> LateReceive:
        """Take the next place in the channel for buffers that were just allocated on the current stream."""
        is_free = torch.cuda.Event()
        is_free.record()
        receive = LateReceive(buffers, is_free, self)
        self._announced.append(receive)
        return receive

    def launched(self, receive: LateReceive) -> StreamWork:
        """Launch everything up to a receive, and return its work."""
        self._aborted.check()
        while receive.work is None:
            first = self._announced.popleft()
            with torch.cuda.stream(self._beside):
                self._beside.wait_event(first.is_free)
                works = [self._launch(buffer) for buffer in first.buffers]
            first.work = StreamWork(works, first.buffers, self._aborted)
        return receive.work


class LateReceive:
    """A receive that is launched when it is waited for.

    Args:
        buffers: for what comes.
        is_free: reached when nothing uses their memory any more.
        queue: of the channel.

    Attributes:
        buffers: as given, until the receive was waited for.
        is_free: as given.
        work: the operations, once they are launched.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], is_free: torch.cuda.Event, queue: ReceiveQueue) -> None:
        self.buffers, self.is_free, self._queue = tuple(buffers), is_free, queue
        self.work: StreamWork | None = None

    def wait(self, timeout_s: float) -> bool:
        """Launch it, and make the current stream wait, not the host.

        Raises:
            RuntimeError: if the communicator was aborted.
        """
        self._queue.launched(self).wait(timeout_s)
        self.buffers = ()
        return True

    def landed(self) -> bool:
        """Return whether the message is there."""
        return self.work is not None and self.work.landed()


class StreamReached:
    """All that the current stream of a device was told until now.

    Args:
        device: the device.
        aborted: of the communicators whose works are among it; None where there are none.
    """

    def __init__(self, device: torch.device, aborted: AbortFlag | None = None) -> None:
        self._aborted = aborted or AbortFlag()
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self, timeout_s: float) -> bool:
        """Wait for the device, whatever the time-out: the guard keeps to deadlines, and an abort ends the wait.

        Raises:
            RuntimeError: if the communicators were aborted.
        """
        self._event.synchronize()
        self._aborted.check()
        return True

    def landed(self) -> bool:
        """Return whether the device is there."""
        return not self._aborted.is_set and bool(self._event.query())
