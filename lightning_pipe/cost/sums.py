"""When the gradients of a stage are made along its last W, in the pieces in which they are summed (`core.sharding`).

The pieces are runs of parameters in the order in which W makes the last term of each gradient, as the runtime forms
them. What I has made before, and what is recomputed in W, is there in the order of its operations, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.sharding import pieces
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


def pieces_of(sizes: Mapping[str, int], made: Mapping[str, float]) -> tuple[Piece, ...]:
    """Return the pieces of a bucket in the order in which they are made.

    Args:
        sizes: bytes of its parameters, in the order of the module.
        made: share of the seconds of W after which each gradient is made; at its end by default.
    """
    names = sorted(sizes, key=lambda name: made.get(name, 1.0))
    runs = pieces([sizes[name] for name in names])
    return tuple(Piece(made.get(names[run[-1]], 1.0), sum(sizes[names[i]] for i in run)) for run in runs)


def made_after(
    work: StageWork, names: Collection[str], *, seconds: NDArray[np.float64], maker: Numbers
) -> dict[str, float]:
    """Return, by parameter, the share of the seconds of W after which its gradient is made; 0 if I makes it.

    Args:
        work: the stage.
        names: the parameters, which are no other stage's.
        seconds: of every operation of the graph.
        maker: operation that makes each tensor.
    """
    operations = list(work.weight_grad.operations)
    passed = np.cumsum(seconds[operations]) if operations else np.zeros(0)
    total = float(passed[-1]) if len(passed) else 0.0
    place = {o: i for i, o in enumerate(operations)}
    found = dict.fromkeys(names, 0.0)
    for tensor, name in work.gradients:
        at = place.get(int(maker[tensor]))
        if at is not None and name in found:
            found[name] = max(found[name], float(passed[at]) / total if total else 1.0)
    return found
