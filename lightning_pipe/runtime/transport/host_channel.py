"""Both ends of a channel between two processes of one host: a socket, and slots of memory that both have.

    up to INLINE_BYTES     the bytes of a message travel through the socket
    more                   they are copied into a slot; its number travels, and comes back when the receiver needs it no
                           more. The memory of a new slot travels as a file descriptor with its first number

The receiver copies small tensors out of a slot. A large one that owns its memory gets its part of the slot instead,
which is not copied, and the slot goes back when the last of its parts has been let go.

Both ends know the size of every message, and decide alike. There are as many slots as messages were under way, or in
use, at once, each as large as the largest that it had to hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from lightning_pipe.runtime.shared_memory import new_memory
from lightning_pipe.runtime.transport.collectives import as_bytes

INLINE_BYTES = 8 * 2**10  # 40 such messages fit into the buffer of a socket
_LENT_BYTES = 256 * 2**10  # of a tensor that is not copied out of its slot: to lend takes 20 us
_ALIGNMENT = 64  # of the parts of a slot, in bytes
_NOTE = struct.Struct("<ii")  # number of a slot; whether its memory comes along
_CREDIT = struct.Struct("<i")  # number of a slot
_NONE = -1  # no descriptor, no slot
_LAST, _OTHER = True, False  # users of a slot
_MOST_PARTS = 512  # of a message in one call of the system, which takes 1,024
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

Memory: TypeAlias = "ctypes.Array[ctypes.c_char]"
Take: TypeAlias = Callable[[list[torch.Tensor]], None]


@dataclass
class Expected:
    """A message that is expected.

    Attributes:
        sizes: bytes of its tensors.
        buffers: contiguous tensors for them.
        owners: tensors whose memory the buffers are, where other memory will do as well; else empty.
        take: called with what is in the slot, as bytes, in the place of buffers.
        byte_count: bytes of all tensors.
        got: how many of its bytes are there.
        note: what is there of the note that says in which slot it is, if it is in one.
        is_over: whether it is in its buffers.
    """

    sizes: tuple[int, ...]
    buffers: tuple[torch.Tensor, ...] = ()
    owners: tuple[torch.Tensor, ...] = ()
    take: Take | None = None
    byte_count: int = field(init=False)
    got: int = 0
    note: bytes = b""
    is_over: bool = False

    def __post_init__(self) -> None:
        self.byte_count = sum(self.sizes)

    def end(self) -> None:
        """Note that it is there, and let go of memory."""
        self.is_over, self.buffers, self.owners, self.take = True, (), (), None


class Outbox:
    """The sender's end of a channel.

    Attributes:
        line: the socket.
        left: how many messages have left.
        queue: what found no room in the socket, and descriptors with it.
        error: why nothing can leave any more, or "".
    """

    def __init__(self, line: socket.socket) -> None:
        self.line, self.left, self.error = line, 0, ""
        self._posted = 0
        self.queue: deque[tuple[bytes, int]] = deque()
        self._slots: list[mmap.mmap] = []  # shared memory of a message each
        self._free: set[int] = set()  # numbers of slots
        self._cut_credit = b""  # first bytes of a number of which the rest is still to come

    def send(self, tensors: Sequence[torch.Tensor]) -> int:
        """Write a message, or keep it until there is room; return its number."""
        self._posted += 1
        total, descriptor = sum([tensor.nbytes for tensor in tensors]), _NONE
        parts: list[Memory | bytes] = [*map(_memory, tensors)]
        if total > INLINE_BYTES:
            number, descriptor = self._put_in_slot(tensors)
            parts, total = [_NOTE.pack(number, descriptor != _NONE)], _NOTE.size
        if self.queue:
            self.move()
        waits = bool(self.queue) and not self.error
        sent = 0 if waits or self.error else self._write(parts, descriptor)
        if sent == total and not waits:
            self.left += 1
        else:
            self.queue.append((b"".join(map(bytes, parts))[sent:], descriptor if sent == 0 else _NONE))
            self.move()
        return self._posted

    def move(self) -> None:
        """Write what had no room."""
        while self.queue and not self.error:
            content, descriptor = self.queue[0]
            sent = self._write([content], descriptor)
            if sent < len(content):
                self.queue[0] = (content[sent:], descriptor if sent == 0 else _NONE)
                return
            self.queue.popleft()
            self.left += 1

    def trim(self) -> None:
        """Give up the memory of free slots, in both processes; it is there again when it is written to."""
        self._take_back()
        for number in self._free:
            _empty(self._slots[number])

    def close(self) -> None:
        """End the connection."""
        self.line.close()
        for _, descriptor in self.queue:
            if descriptor != _NONE:
                os.close(descriptor)
        self._slots.clear()

    def _write(self, parts: Sequence[Memory | bytes], descriptor: int) -> int:
        """Write as much as there is room for; return how many bytes."""
        try:
            if descriptor == _NONE:
                return self.line.sendmsg(parts[:_MOST_PARTS])
            sent = socket.send_fds(self.line, parts, [descriptor])
            os.close(descriptor)
            return sent
        except BlockingIOError:
            return 0
        except OSError as error:
            self.error = _lost(error)
            return 0

    def _put_in_slot(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Copy a message into a slot; return its number, and the descriptor of its memory if that is new."""
        self._take_back()
        spans = [*_spans([tensor.nbytes for tensor in tensors])]
        total = spans[-1].stop
        large = [number for number in self._free if len(self._slots[number]) >= total]
        number, descriptor = min(large, key=lambda number: len(self._slots[number]), default=_NONE), _NONE
        if number == _NONE:
            descriptor = new_memory(total, name="messages")
            number = self._keep(_mapped(descriptor))
        self._free.discard(number)
        content = _bytes_of(self._slots[number])
        for span, tensor in zip(spans, tensors, strict=True):
            content[span].copy_(as_bytes(tensor))
        return number, descriptor

    def _keep(self, memory: mmap.mmap) -> int:
        """Give memory a number: that of a free slot, which is too small, or a new one."""
        if not self._free:
            self._slots.append(memory)
            return len(self._slots) - 1
        number = self._free.pop()
        self._slots[number] = memory
        return number

    def _take_back(self) -> None:
        """Note which slots the receiver has emptied."""
        with contextlib.suppress(OSError):  # there is nothing to read, or nobody, which writing finds out
            while came := self.line.recv(64 * _CREDIT.size):
                credits = self._cut_credit + came
                whole = len(credits) // _CREDIT.size * _CREDIT.size
                self._free.update(number for (number,) in _CREDIT.iter_unpack(credits[:whole]))
                self._cut_credit = credits[whole:]


class Inbox:
    """The receiver's end of a channel.

    Attributes:
        line: the socket.
        expected: messages that are, in their order.
        owed: numbers of empty slots to give back; from whatever thread lets go of a tensor.
        error: why nothing can come any more, or "".
    """

    def __init__(self, line: socket.socket) -> None:
        self.line, self.error = line, ""
        self.expected: deque[Expected] = deque()
        self.owed: deque[int] = deque()
        self._slots: dict[int, mmap.mmap] = {}
        self._new: mmap.mmap | None = None  # memory of the slot that comes with the next note
        self._credits = b""  # that found no room in the socket

    def expect(self, expected: Expected) -> None:
        """Let a message be the next but for those expected already."""
        self.give_back()
        expected.is_over = not expected.byte_count
        if not expected.is_over:
            self.expected.append(expected)

    def move(self) -> None:
        """Take what has come of the expected messages."""
        try:
            while self.expected and not self.error:
                if self._read(self.expected[0]):
                    self.expected.popleft().end()
        except BlockingIOError:
            return
        except OSError as error:
            self.error = _lost(error)
        finally:
            self.give_back()

    def close(self) -> None:
        """End the connection."""
        self.line.close()
        self._slots.clear()

    def _read(self, expected: Expected) -> bool:
        """Take what has come of a message; return whether that was all."""
        if expected.byte_count <= INLINE_BYTES:
            expected.got += _some(self.line.recvmsg_into(_rest(expected.buffers, expected.got)[:_MOST_PARTS])[0])
            return expected.got == expected.byte_count
        content, descriptors, *_ = socket.recv_fds(self.line, _NOTE.size - len(expected.note), 1, _CLOSED_ON_EXEC)
        _some(len(content))
        expected.note += content
        for descriptor in descriptors:
            self._new = _mapped(descriptor)  # its number may still be to come
            os.close(descriptor)
        if len(expected.note) < _NOTE.size:
            return False
        number, is_new = _NOTE.unpack(expected.note)
        if is_new:
            assert self._new is not None, "it came with the note"
            self._slots[number] = self._new
        self._take(number, expected)
        return True

    def _take(self, number: int, expected: Expected) -> None:
        """Bring what is in a slot to its buffers, or give their owners, or who takes it, its parts."""
        slot, lease, spans = self._slots[number], _Lease(number, self.owed), [*_spans(expected.sizes)]
        if expected.take is not None:
            expected.take([lease.part(slot, span) for span in spans])
        content, owners = _bytes_of(slot), expected.owners or (None,) * len(expected.buffers)
        for buffer, owner, span in zip(expected.buffers, owners, spans, strict=False):
            if owner is not None and buffer.nbytes >= _LENT_BYTES and _may_be_set(owner):
                lease.lend(slot, span, owner)
            else:
                as_bytes(buffer).copy_(content[span])
        lease.end()

    def give_back(self) -> None:
        """Tell the sender which slots are empty; later, if there is no room for that now."""
        while self.owed:
            self._credits += _CREDIT.pack(self.owed.popleft())
        if self._credits:
            with contextlib.suppress(OSError):
                self._credits = self._credits[self.line.send(self._credits) :]


class _Lease:
    """Parts of a slot that tensors have; the slot is empty when none has any more.

    Args:
        number: of the slot.
        empty: where its number is put then.
    """

    def __init__(self, number: int, empty: deque[int]) -> None:
        self._number, self._empty = number, empty
        self._users = deque([_LAST])  # one for whoever reads the message, and above it one for every part

    def lend(self, slot: mmap.mmap, span: slice, owner: torch.Tensor) -> None:
        """Let a tensor have a part of the slot instead of its memory.

        That stays with the part, untouched: whatever counts or limits the memory of this process finds it there, where
        it would not find memory that is shared.
        """
        part = self.part(slot, span, instead_of=owner.untyped_storage())
        with torch.no_grad():
            owner.set_(part.untyped_storage(), 0, owner.shape, owner.stride())

    def part(self, slot: mmap.mmap, span: slice, *, instead_of: object = None) -> torch.Tensor:
        """Return a part of the slot as bytes, which uses it while it lives, and keeps something else alive."""
        self._users.append(_OTHER)
        part = (ctypes.c_char * (span.stop - span.start)).from_buffer(slot, span.start)
        part.instead_of = instead_of
        weakref.finalize(part, self.end).atexit = False
        return _bytes_of(part)

    def end(self) -> None:
        """Count one user less; from any thread, and in the middle of anything."""
        if self._users.pop() == _LAST:
            self._empty.append(self._number)


def _spans(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield where in a slot the tensors of a message are that have so many bytes."""
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += -(-size // _ALIGNMENT) * _ALIGNMENT


def _may_be_set(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor may be changed now: not outside of the mode in which it was made."""
    return tensor.is_inference() == torch.is_inference_mode_enabled()


def _memory(tensor: torch.Tensor) -> Memory:
    """Return the bytes of a contiguous tensor, which must outlive them."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _rest(buffers: Sequence[torch.Tensor], got: int) -> list[Memory]:
    """Return the bytes of contiguous tensors, one after another, but for the first ones."""
    parts = []
    for buffer in buffers:
        skipped = min(got, buffer.nbytes)
        got -= skipped
        if skipped < buffer.nbytes:
            parts.append((ctypes.c_char * (buffer.nbytes - skipped)).from_address(buffer.data_ptr() + skipped))
    return parts


def _mapped(descriptor: int) -> mmap.mmap:
    """Return shared memory."""
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)


def _empty(memory: mmap.mmap) -> None:
    """Let shared memory have no pages until it is written to; where the system cannot do that, it keeps them."""
    if hasattr(mmap, "MADV_REMOVE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_REMOVE)


def _bytes_of(memory: Memory | mmap.mmap) -> torch.Tensor:
    """Return memory as a tensor of bytes."""
    with torch.inference_mode(False):  # a tensor of validation could not be written to in training
        return torch.frombuffer(memory, dtype=torch.uint8)


def _some(count: int) -> int:
    """Return the count of bytes that were read, if the other end has not closed.

    Raises:
        ConnectionError: if it has.
    """
    if not count:
        raise ConnectionResetError("the other end has closed it")
    return count


def _lost(error: OSError) -> str:
    return f"Connection to a rank of this host is lost: {error}"
