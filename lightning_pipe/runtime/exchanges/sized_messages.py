"""Messages with values whose shapes only the sender knows: the sizes go first, in a tensor of a known length.

    sender      sizes (int64, a number for every dimension)      values
    receiver    posted at once                                   posted when the sizes are there

A channel keeps its order, so whatever is received behind such a message is posted behind it, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_pipe.capture.steps.stage_program import Value
from lightning_pipe.runtime.exchanges.mailbox import Letter, PendingReceive
from lightning_pipe.runtime.exchanges.slicing import buffer_for, packed
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Handle


@dataclass(frozen=True)
class SizedMessage:
    """What is known of a message before it comes.

    Attributes:
        values: that it holds, in order.
        samples: number of samples that they are of.
        batch_samples: number of samples of their batch.
        device: where they live.
    """

    values: tuple[Value, ...]
    samples: int
    batch_samples: int
    device: torch.device

    @property
    def has_sizes(self) -> bool:
        """Return whether sizes go before the values."""
        return any(value.sizes_travel for value in self.values)

    @property
    def no_sizes(self) -> list[int]:
        """Return sizes of values with nothing in them."""
        return [0] * sum(self._dims(value) for value in self.values if value.sizes_travel)

    def _dims(self, value: Value) -> int:
        return len(value.shape(self.samples, self.batch_samples))

    def sizes_of(self, contents: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sizes that go before these contents."""
        pairs = zip(contents, self.values, strict=True)
        sizes = [size for content, value in pairs if value.sizes_travel for size in content.shape]
        return torch.tensor(sizes, dtype=torch.int64, device=self.device)

    def buffers(self, sizes: Sequence[int] = ()) -> tuple[torch.Tensor, ...]:
        """Allocate what the message fills.

        Args:
            sizes: that came before it.
        """
        coming = iter(sizes)
        shapes = [
            tuple(itertools.islice(coming, self._dims(value))) if value.sizes_travel else None for value in self.values
        ]
        return tuple(
            buffer_for(value, self.samples, of=self.batch_samples, device=self.device, size=shape)
            for value, shape in zip(self.values, shapes, strict=True)
        )

    def views(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what travels of buffers: contiguous views of them."""
        return [packed(buffer, value) for buffer, value in zip(buffers, self.values, strict=True)]


class SizedSend:
    """The handle of sizes and values that were sent."""

    def __init__(self, sizes: Handle, values: Handle) -> None:
        self._handles = (sizes, values)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long for each; return whether both have left."""
        return all(handle.wait(timeout_s) for handle in self._handles)

    def landed(self) -> bool:
        """Return whether both have really left."""
        return all(handle.landed() for handle in self._handles)


class SizedReceive:
    """The handle of a message whose receiving is posted once its sizes, and what comes before it, are known.

    Args:
        form: what is known of it.
        transport: carries it.
        peer: the sender.
        behind: the receive before it from the same sender, which may not be posted yet.

    Attributes:
        tensors: what came, once the handle is done.
    """

    tensors: tuple[torch.Tensor, ...] = ()

    def __init__(self, form: SizedMessage, transport: Transport, peer: int, *, behind: SizedReceive | None) -> None:
        self._form, self._transport, self._peer, self._behind = form, transport, peer, behind
        self._header = torch.tensor(form.no_sizes, dtype=torch.int64, device=form.device)
        self._sizes: Handle | None = None
        self._values: Handle | None = None
        if behind is None or behind.is_posted:
            self._post_sizes()

    @property
    def is_posted(self) -> bool:
        """Return whether what follows on the channel may be posted."""
        return self._values is not None

    def _post_sizes(self) -> None:
        if self._form.has_sizes and self._sizes is None:
            self._sizes = self._transport.receive([self._header], peer=self._peer)

    def _advance(self, timeout_s: float) -> bool:
        """Post as much as can be posted; return whether that is all."""
        if self._values is not None:
            return True
        if self._behind is not None:
            if not self._behind._advance(timeout_s):
                return False
            self._behind = None
        self._post_sizes()
        if self._sizes is not None and not (self._sizes.wait(timeout_s) and self._sizes.landed()):
            return False
        self.tensors = self._form.buffers(self._header.tolist())
        views = self._form.views(self.tensors)
        self._values = self._transport.receive(views, peer=self._peer, owners=self.tensors)
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long for each of its parts; return whether the values may be used."""
        return self._advance(timeout_s) and self._values is not None and self._values.wait(timeout_s)

    def landed(self) -> bool:
        """Return whether the values are really there."""
        return self._values is not None and self._values.landed()


def tensors_of(letter: Letter) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a letter that has come."""
    late = isinstance(letter, PendingReceive) and isinstance(letter.handle, SizedReceive)
    return letter.handle.tensors if late else letter.tensors  # type: ignore[attr-defined]
