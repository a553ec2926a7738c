"""Prices in round numbers, for drawings, tests and closed formulas: every compute of a kind takes the same time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipe.core.effects import OwnWork, effects_of
from lightning_pipe.core.program import AnyCompute, Bucket, Message, Pass, Program, Vacate
from lightning_pipe.errors import PlanError


@dataclass(frozen=True)
class UnitPrices:
    """Same prices for every stage, rank and number of samples.

    Attributes:
        forward: seconds of F.
        input_grad: seconds of I.
        weight_grad: seconds of W; B takes `input_grad + weight_grad`.
        latency: seconds of every message.
        reduction: seconds of every reduction.
        pieces: in how many equal pieces it goes along with a W that makes them evenly.
        busy: the share of that in which it keeps its ranks from computing.
        step: seconds of the optimizer step.
        head: seconds of the head of the last stage.
        saved: bytes that a stage keeps for one micro-batch.
        offloaded: how many of these are copied to the host.
        swap: seconds of a copy to the host, or back.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    latency: float = 0.0
    reduction: float = 0.0
    pieces: int = 1
    busy: float = 0.0
    step: float = 0.0
    head: float = 0.0
    saved: int = 1
    offloaded: int = 0
    swap: float = 0.0

    def compute_s(self, compute: AnyCompute, rank: int, samples: int) -> float:
        """Return the seconds of a compute by its kind; joined W take as long as one after the other."""
        match compute.kind:
            case "F":
                return self.forward
            case "I":
                return self.input_grad
            case "W":
                return self.weight_grad * len(compute.microbatches)
            case "B":
                return self.input_grad + self.weight_grad

    def transfer_s(self, message: Message, sender: int, receiver: int) -> float:
        """Return the latency."""
        return self.latency

    def post_s(self, message: Message) -> float:
        """Return nothing."""
        return 0.0

    def reduce_s(self, bucket: int, program: Program) -> float:
        """Return the seconds of a reduction."""
        return self.reduction

    def piece_shares(self, bucket: Bucket) -> list[tuple[float, float]]:
        """Return equal pieces, made one after another."""
        return [((piece + 1) / self.pieces, 1 / self.pieces) for piece in range(self.pieces)]

    def sum_busy_share(self) -> float:
        """Return the share in which sums keep their ranks from computing."""
        return self.busy

    def piece_bytes(self, bucket: Bucket) -> int:
        """Return the bytes of a piece, or of one more that it is cut into by whole bytes."""
        return -(-bucket.bytes // self.pieces)

    def head_s(self, rank: int, samples: int) -> float:
        """Return the seconds of the head."""
        return self.head

    def head_bytes(self, samples: int) -> tuple[int, int]:
        """Return nothing: the head needs no memory."""
        return 0, 0

    def head_workspace_bytes(self, samples: int) -> int:
        """Return nothing: what the head makes takes no memory."""
        return 0

    def step_s(self, rank: int) -> float:
        """Return the seconds of the optimizer step."""
        return self.step

    def step_bytes(self, rank: int) -> int:
        """Return nothing: the step needs no memory."""
        return 0

    def saved_bytes(self, stage: int, samples: int) -> int:
        """Return the bytes of one micro-batch."""
        return self.saved

    def offloaded_bytes(self, stage: int, samples: int) -> int:
        """Return the bytes of one micro-batch that are copied to the host."""
        return self.offloaded

    def own_work_s(self, work: OwnWork, rank: int, samples: int) -> float:
        """Return the seconds of a copy; giving up the memory that was copied takes none.

        Raises:
            PlanError: if it is neither: these prices know no other own work.
        """
        _check_copy(work)
        return 0.0 if isinstance(work, Vacate) else self.swap

    def own_work_bytes(self, work: OwnWork, rank: int, samples: int) -> int:
        """Return the bytes of a copy.

        Raises:
            PlanError: if it is none.
        """
        _check_copy(work)
        return self.offloaded

    def kept_bytes(self, stage: int, samples: int) -> int:
        """Return the bytes of one micro-batch: W keeps what F saved."""
        return self.saved

    def result_bytes(self, stage: int, samples: int) -> int:
        """Return nothing."""
        return 0

    def workspace_bytes(self, compute: AnyCompute, samples: int) -> int:
        """Return nothing."""
        return 0

    def gradient_bytes(self, compute: AnyCompute, samples: int) -> int:
        """Return nothing."""
        return 0

    def message_bytes(self, message: Message) -> int:
        """Return nothing."""
        return 0

    def sent_bytes(self, stage: int, direction: Pass, samples: int) -> int:
        """Return nothing."""
        return 0

    def state_bytes(self, rank: int) -> int:
        """Return nothing."""
        return 0


def _check_copy(work: OwnWork) -> None:
    if not isinstance(work, Vacate) and effects_of(work).resource not in ("out", "back"):
        raise PlanError(f"The instruction {type(work).__name__} ({work}) is no copy, so it has no unit price.")
