"""Prices protocol: what a cost model answers so that a program can be priced.

A protocol, so that `schedule` and `simulator` do not know `cost`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import AnyCompute, Bucket, Message, Pass, Program


class Cards(Protocol):
    """What messages of different exchanges share on their way, and wait for each other at: network cards of hosts."""

    def passes(self, message: Message, sender: int, receiver: int) -> Iterable[tuple[Hashable, float]]:
        """Return the cards that a message passes, each in one direction.

        With each, the seconds for which all messages of this exchange together (of one edge and micro-batch) keep it
        busy; what they do to each other is in the seconds of their transfer.
        """
        ...


class Prices(Protocol):
    """Seconds and bytes of the parts of a program."""

    def compute_s(self, compute: AnyCompute, rank: int, samples: int) -> float:
        """Return the seconds of a compute on `samples` samples, those of all its micro-batches."""
        ...

    def transfer_s(self, message: Message, sender: int, receiver: int) -> float:
        """Return the seconds that a message occupies its channel, latency included."""
        ...

    def post_s(self, message: Message) -> float:
        """Return the seconds for which the posting of a message keeps its sender from computing."""
        ...

    def reduce_s(self, bucket: int, program: Program) -> float:
        """Return the seconds of the all-reduce of a bucket."""
        ...

    def piece_shares(self, bucket: Bucket) -> Sequence[tuple[float, float]]:
        """Return in which pieces a bucket is summed along with the last W of its stage, in order.

        Of each, the share of W's seconds after which its gradients are made, rising, and its share of the bytes.
        """
        ...

    def sum_busy_share(self) -> float:
        """Return the share of the seconds of sums in which they keep their ranks from computing (0 to 1)."""
        ...

    def piece_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of the largest piece in which a bucket is summed."""
        ...

    def head_s(self, rank: int, samples: int) -> float:
        """Return the seconds of the head of the last stage on a batch of this many samples.

        Replicas give each other what it takes within them.
        """
        ...

    def head_bytes(self, samples: int) -> tuple[int, int]:
        """Return the bytes that the last stage has of a micro-batch for the head alone, and those that the head makes.

        The former are there from F to the head, the latter from the head to the end of I (or B).
        """
        ...

    def head_workspace_bytes(self, samples: int) -> int:
        """Return the bytes of what the head makes of a batch of this many samples, at most at once."""
        ...

    def step_s(self, rank: int) -> float:
        """Return the seconds of the optimizer step of a rank."""
        ...

    def step_bytes(self, rank: int) -> int:
        """Return the bytes that the optimizer step of a rank needs beside its state."""
        ...

    def saved_bytes(self, stage: int, samples: int) -> int:
        """Return the bytes that a stage saves from F to I for `samples` samples of a micro-batch, without results.

        What is offloaded is in them, what is recomputed is not.
        """
        ...

    def offloaded_bytes(self, stage: int, samples: int) -> int:
        """Return the part of the saved bytes that is on the host only, until `Fetch` takes memory for it again."""
        ...

    def own_work_s(self, work: OwnWork, rank: int, samples: int) -> float:
        """Return the seconds of own work that occupies something.

        Raises:
            PlanError: if it has no price.
        """
        ...

    def own_work_bytes(self, work: OwnWork, rank: int, samples: int) -> int:
        """Return the bytes that own work holds, or gives up.

        Raises:
            PlanError: if it has no price.
        """
        ...

    def kept_bytes(self, stage: int, samples: int) -> int:
        """Return the bytes that a stage keeps from I to W for `samples` samples of a micro-batch, without results."""
        ...

    def result_bytes(self, stage: int, samples: int) -> int:
        """Return the bytes of the step's outputs (loss, logged values) that stay from F to the end of the batch."""
        ...

    def workspace_bytes(self, compute: AnyCompute, samples: int) -> int:
        """Return the most bytes that a compute needs beyond what its stages keep while it runs.

        What arrived for it is in them, and each gradient of a parameter until it is added to those that are there.
        Joined W put together what their micro-batches kept, and drop each piece then.
        """
        ...

    def gradient_bytes(self, compute: AnyCompute, samples: int) -> int:
        """Return the part of the workspace that the first compute of a batch does not need.

        Its gradients become those of the parameters, which are counted from the beginning.
        """
        ...

    def message_bytes(self, message: Message) -> int:
        """Return the bytes of a message."""
        ...

    def sent_bytes(self, stage: int, direction: Pass, samples: int) -> int:
        """Return the bytes of everything that a compute sends, each value once however many stages get it."""
        ...

    def state_bytes(self, rank: int) -> int:
        """Return the bytes of parameters, their gradients, optimizer state and buffers of a rank."""
        ...
