"""An interpreter of rounds that knows nothing of seams' rules: a chain of numbers, channels and a step at every end.

Stage s multiplies its input by w_s; the loss is half the square of the last output. Every rank holds one stage. Lists
are run as they are: what a program asks for and is not there is an error, and what it computes is compared by its user.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import AnyCompute, Compute, Free, Instruction, Program, Recv, Send, Step

RATE = 0.01
Channels: TypeAlias = dict[tuple[int, int], deque[tuple[Send, float]]]  # sender, receiver
Posted: TypeAlias = dict[tuple[int, int], deque[Recv]]


class Broken(Exception):
    """The rounds do not run."""


@dataclass
class Rank:
    """What a rank holds. Micro-batches have the numbers of the round, and lose `batch` at its end."""

    stage: int
    weight: float
    older: float
    gradient: float = 0.0
    held: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    first: int = 0  # number of the round's first micro-batch, through all rounds
    history: list[float] = field(default_factory=list)  # weights before each step
    entered: dict[int, int] = field(default_factory=dict)  # steps before the first stage's forward; one for all ranks
    shared: dict[tuple[str, int], float] = field(default_factory=dict)  # predictions, by batch


def run(rounds: Sequence[Program], *, shared: int = 0) -> list[float]:
    """Run rounds; return the weights after each.

    Args:
        rounds: their programs.
        shared: micro-batches of a batch that read one prediction; 0 if each has its own.

    Raises:
        Broken: if something is not there, runs again, is left, or waits for ever.
    """
    ranks = [Rank(r, 1 - 0.05 * r, 1 - 0.05 * r) for r in range(len(rounds[0].ranks))]
    for rank in ranks:
        rank.entered = ranks[0].entered
    channels: Channels = defaultdict(deque)
    weights: list[float] = []
    for program in rounds:
        _run_round(program, ranks, channels, shared)
        for rank in ranks:
            rank.held = defaultdict(dict, {m - program.batch: held for m, held in rank.held.items() if held})
            if min(rank.held, default=0) < 0:
                raise Broken("something of the batch is left")
            rank.first += program.batch
        weights += [rank.weight for rank in ranks]
    if any(rank.held for rank in ranks) or any(channels.values()):
        raise Broken("something is left")
    return weights


def _run_round(program: Program, ranks: list[Rank], channels: Channels, shared: int) -> None:
    lines = [deque(line) for line in program.ranks]
    posted: Posted = defaultdict(deque)
    moved = True
    while any(lines) and moved:
        moved = False
        for r, line in enumerate(lines):
            while line and _try(line[0], r, ranks[r], channels, posted, len(ranks), shared):
                line.popleft()
                moved = True
        moved = _move(ranks, channels, posted) or moved
    if any(lines) or any(posted.values()):
        raise Broken("ranks wait for ever")
    if any(channels.values()):
        raise Broken("a message is not received in its round")


def _move(ranks: list[Rank], channels: Channels, posted: Posted) -> bool:
    """Move the messages of which both ends are there; return whether there were any."""
    found = [
        (pair, queue.popleft(), posted[pair].popleft()) for pair, queue in channels.items() if queue and posted[pair]
    ]
    for (_, receiver), (send, value), receive in found:
        if send.message != receive.message:
            raise Broken("another message came")
        _put(ranks[receiver], receive.message.microbatch, f"received {receive.message.direction}", value)
    return bool(found)


def _try(x: Instruction, r: int, rank: Rank, channels: Channels, posted: Posted, count: int, shared: int) -> bool:
    match x:
        case Recv(_, peer):
            posted[peer, r].append(x)
        case Send(message, peer):
            channels[r, peer].append((x, _taken(rank, message.microbatch, f"send {message.direction}")))
        case AnyCompute():
            return all(_compute(Compute(x.stage, x.kind, m), rank, count, posted, r) for m in x.microbatches)
        case Free(_, m):
            if rank.held.pop(m, {}).keys() & {"input", "output gradient", "send F", "send B", "received F"}:
                raise Broken("freed too early")
        case OwnWork(_, m):
            if x.code == "PIN":
                _put(rank, m, "pinned", rank.weight)
            elif x.code == "PINOLDER":
                _put(rank, m, "pinned", rank.older)
            elif x.code == "PINENTRY":
                steps = rank.entered.get(rank.first + m, len(rank.history) if rank.stage == 0 else None)
                if steps is None:
                    return False  # it has not entered
                _put(rank, m, "pinned", [*rank.history, rank.weight][steps])
            elif x.code in _READERS:
                _put(rank, m, f"predicted {_READERS[x.code]}", _predicted(rank, m, _READERS[x.code], shared))
        case Step():
            rank.history.append(rank.weight)
            rank.older, rank.weight, rank.gradient = rank.weight, rank.weight - RATE * rank.gradient, 0.0
    return True


_READERS = {"PREDICT": "F", "PREDICTBACK": "I"}


def _predicted(rank: Rank, m: int, kind: str, shared: int) -> float:
    """Go on as the last update went; further for F."""
    value = rank.weight + (1.0 if kind == "F" else 0.5) * (rank.weight - rank.older)
    if not shared:
        return value
    key = kind, (rank.first + m) // shared
    rank.shared = {other: x for other, x in rank.shared.items() if other[0] != kind or other == key}
    return rank.shared.setdefault(key, value)


def _compute(x: Compute, rank: Rank, count: int, posted: Posted, r: int) -> bool:
    held, m = rank.held[x.microbatch], x.microbatch
    weight = held.get(f"predicted {x.kind}", held.get("pinned", rank.weight))
    match x.kind:
        case "F":
            if rank.stage and "received F" not in held:
                return _awaited(posted, r - 1, r)
            value = _taken(rank, m, "received F") if rank.stage else 1 + 0.1 * ((7 * (rank.first + m)) % 5)
            _put(rank, m, "input", value)
            if rank.stage == 0:
                rank.entered[rank.first + m] = len(rank.history)
            held["send F" if rank.stage < count - 1 else "loss"] = value * weight
            held.pop("predicted F", None)
        case "I":
            if "input" not in held:
                raise Broken("no forward")
            if rank.stage < count - 1 and "received B" not in held:
                return _awaited(posted, r + 1, r)
            above = _taken(rank, m, "received B") if rank.stage < count - 1 else _taken(rank, m, "loss")
            _put(rank, m, "output gradient", above)
            if rank.stage:
                held["send B"] = above * weight
            held.pop("predicted I", None)
        case "W":
            rank.gradient += _taken(rank, m, "output gradient") * _taken(rank, m, "input")
    return True


def _awaited(posted: Posted, sender: int, r: int) -> bool:
    if not posted[sender, r]:
        raise Broken("nothing is posted for a compute")
    return False


def _put(rank: Rank, m: int, name: str, value: float) -> None:
    if rank.held[m].setdefault(name, value) is not value:
        raise Broken(f"{name} twice")


def _taken(rank: Rank, m: int, name: str) -> float:
    if name not in rank.held[m]:
        raise Broken(f"no {name}")
    return rank.held[m].pop(name)
