"""Mailbox of a rank: received and expected messages by (direction, source, target, micro-batch)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from lightning_pipe.core.program import Message, Pass, Recv
from lightning_pipe.runtime.record import Mark
from lightning_pipe.runtime.waiting import Handle

Address: TypeAlias = tuple[Pass, int, int, int]  # direction, source, target, microbatch


@dataclass(frozen=True)
class Letter:
    """The tensors of one message, from a stage on this rank."""

    message: Message
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class PendingReceive(Letter):
    """The tensors of a message from another rank, valid once the handle is done; it was posted at `posted`."""

    receive: Recv
    handle: Handle
    posted: Mark


class Mailbox:
    """Letters of one rank that no compute has taken yet."""

    def __init__(self) -> None:
        self._letters: dict[Address, list[Letter]] = defaultdict(list)

    def put(self, letter: Letter) -> None:
        """Keep a letter until a compute takes it."""
        message = letter.message
        address = (message.direction, message.source, message.target, message.microbatch)
        self._letters[address].append(letter)

    def take(self, address: Address) -> tuple[Letter, ...]:
        """Return and forget all letters of an address, in the order in which they were put."""
        return tuple(self._letters.pop(address, ()))

    def left(self, *, batch: int | None = None) -> tuple[Letter, ...]:
        """Return the letters that nobody has taken, all or those of the first micro-batches."""
        letters = (letter for letters in self._letters.values() for letter in letters)
        return tuple(letter for letter in letters if batch is None or letter.message.microbatch < batch)

    def pass_on(self, passed: int, *, posted: Mark) -> None:
        """Number letters anew once so many micro-batches have passed; they count as posted at a mark of now."""
        left = self.left()
        self._letters.clear()
        for letter in left:
            message = replace(letter.message, microbatch=letter.message.microbatch - passed)
            if isinstance(letter, PendingReceive):
                letter = replace(letter, receive=replace(letter.receive, message=message), posted=posted)
            self.put(replace(letter, message=message))

    def clear(self) -> None:
        """Forget all letters."""
        self._letters.clear()
