"""When the gradients of a stage are made along its last W, in the pieces in which they are summed (`core.pieces`).

The pieces are runs of parameters in the order in which W makes the last term of each gradient, as the runtime forms
them. What I has made before, and what is recomputed in W, is there in the order of its operations, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.pieces import pieces
from lightning_pipe.cost.stage import StageWork
from lightning_pipe.cost.tables import Numbers


@dataclass(frozen=True)
class Piece:
    """A piece of a bucket.

    Attributes:
        made: share of the seconds of W after which its last gradient is made.
        bytes: of its gradients.
    """

    made: float
    bytes: int


def pieces_along(
    work: StageWork, sizes: Mapping[str, int], *, seconds: NDArray[np.float64], maker: Numbers
) -> tuple[Piece, ...]:
    """Return the pieces of a stage's own gradients in the order in which its last W makes them.

    Args:
        work: the stage.
        sizes: bytes of the parameters that are summed, which are no other stage's, in the order of the module.
        seconds: of every operation of the graph.
        maker: operation that makes each tensor.
    """
    made = _made_after(work, sizes, seconds, maker)
    names = sorted(made, key=made.__getitem__)
    runs = pieces([sizes[name] for name in names])
    return tuple(Piece(made[names[run[-1]]], sum(sizes[names[i]] for i in run)) for run in runs)


def largest_piece(sizes: Iterable[int]) -> int:
    """Return the bytes of the largest piece of parameters of these bytes."""
    found = [*sizes]
    return max((sum(found[i] for i in run) for run in pieces(found)), default=0)


def _made_after(
    work: StageWork, sizes: Mapping[str, int], seconds: NDArray[np.float64], maker: Numbers
) -> dict[str, float]:
    """Return, by parameter, the share of the seconds of W after which its gradient is made; 0 if I makes it."""
    operations = list(work.weight_grad.operations)
    passed = np.cumsum(seconds[operations]) if operations else np.zeros(0)
    total = float(passed[-1]) if len(passed) else 0.0
    place = {o: i for i, o in enumerate(operations)}
    found: dict[str, float] = defaultdict(float, dict.fromkeys(sizes, 0.0))
    for tensor, name in work.gradients:
        at = place.get(int(maker[tensor]))
        if at is not None and name in sizes:
            found[name] = max(found[name], float(passed[at]) / total if total else 1.0)
    return dict(found)
