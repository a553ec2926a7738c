"""CSV format of orders in torch.distributed.pipelining: a row per rank, a cell per action.

    2F0 2B0 2I0 2W0         stage, kind, micro-batch: forward, backward, and its two halves
    1SEND_F0 2RECV_F0       stage that sends or receives, and micro-batch; F goes to the next stage, B to the one before
    (0F4;3B1)OVERLAP_F_B    a forward and a backward that run together; taken as one after the other
    1UNSHARD 1RESHARD 1REDUCE_GRAD      parameters of a stage are gathered, or dropped; its gradients are summed
    an empty cell           the rank is idle

After `_Action` and `_dump_csv` of torch 2.13 (torch/distributed/pipelining/schedules.py). An `Order` holds computes
only: messages of a text are checked and dropped, since lowering makes its own, and so are actions on parameters.

Legend: s stage, m micro-batch.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

from lightning_pipe.core.program import (
    AnyCompute,
    Compute,
    ComputeKind,
    Layout,
    Message,
    Order,
    Pass,
    Program,
    Recv,
    Send,
    VerifiedProgram,
)
from lightning_pipe.errors import ConfigError, ProgramError
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.rules import Dataflow

_COMPUTE = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_MOVE = re.compile(r"(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})")
_PARAMETERS = re.compile(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_FORMS = "2F0, 2B0, 2I0, 2W0, 2SEND_F0, 2RECV_B0, (0F4;3B1)OVERLAP_F_B, 2UNSHARD, 2RESHARD, 2REDUCE_GRAD or nothing"


@dataclass(frozen=True)
class _Move:
    """One end of a message, as torch names it."""

    stage: int
    verb: str
    direction: Pass
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.verb}_{self.direction}{self.microbatch}"


_Action: TypeAlias = tuple[str, Compute | _Move]  # where it stands in the text, and what it is


def load_csv(path: str) -> Order:
    """Return the computes of the schedule in a file.

    Raises:
        ConfigError: if the file cannot be read.
        ProgramError: as `read_csv`, with the path.
    """
    try:
        return read_csv(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the schedule {path}: {error}") from None
    except ProgramError as error:
        raise ProgramError(f"{path}: {error}") from None


def read_csv(text: str) -> Order:
    """Return the computes of a schedule that torch wrote, or that is written like its own.

    A text that has sends and receives must have those that its computes need, each once, behind the compute that makes
    the message and before the one that takes it.

    Args:
        text: content of the file.

    Raises:
        ProgramError: naming row, column, what was found and what was expected.
    """
    rows = [list(_actions(rank, row)) for rank, row in enumerate(_cells(text))]
    order = tuple(tuple(action for _, action in row if isinstance(action, Compute)) for row in rows)
    if not any(order):
        raise ProgramError("found no computes; expected a row of actions per rank, such as `0F0,0F1,,0B0,0B1`")
    if any(isinstance(action, _Move) for row in rows for _, action in row):
        layout = layout_of(order)
        flow = Dataflow(layout, sizes=(1,) * microbatches_of(order), traffic=chain(len(layout.stages)))
        for rank, row in enumerate(rows):
            _check_moves(row, rank=rank, flow=flow)
    return order


def _cells(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ProgramError(f"found a text that is not CSV ({error}); expected a row of actions per rank") from None


def _actions(rank: int, row: Sequence[str]) -> Iterator[_Action]:
    for column, cell in enumerate(row):
        place = f"row {rank + 1} (rank {rank}), column {column + 1}"
        yield from ((place, action) for action in _parsed(cell.strip(), place))


def _parsed(cell: str, place: str) -> tuple[Compute | _Move, ...]:
    if not cell or _PARAMETERS.fullmatch(cell):
        return ()
    if compute := _compute(cell):
        return (compute,)
    if match := _MOVE.fullmatch(cell):
        return (_Move(int(match[1]), match[2], cast(Pass, match[3]), int(match[4])),)
    if match := _PAIR.fullmatch(cell):
        return _pair(match[1], match[2], cell, place)
    raise ProgramError(f"{place}: found {cell!r}; expected {_FORMS}")


def _compute(text: str) -> Compute | None:
    match = _COMPUTE.fullmatch(text)
    return Compute(int(match[1]), cast(ComputeKind, match[2]), int(match[3])) if match else None


def _pair(first: str, second: str, cell: str, place: str) -> tuple[Compute, Compute]:
    forward, backward = _compute(first.strip()), _compute(second.strip())
    if forward is None or backward is None or (forward.direction, backward.direction) != ("F", "B"):
        raise ProgramError(f"{place}: found {cell!r}; expected a forward, then a backward: (0F4;3B1)OVERLAP_F_B")
    return forward, backward


def _check_moves(row: Sequence[_Action], *, rank: int, flow: Dataflow) -> None:
    """Check that the sends and receives of a rank are those that its computes need, each in its place."""
    computes = [action for _, action in row if isinstance(action, Compute)]
    wanted = {_end("RECV", it.message) for one in computes for it in flow.needs(one, rank=rank).receives}
    due: list[_Move] = []  # sends whose compute has run
    for place, action in row:
        if isinstance(action, Compute):
            missing = wanted.intersection(_end("RECV", it.message) for it in flow.needs(action, rank=rank).receives)
            if missing:
                raise ProgramError(f"{place}: found {action}; expected {missing.pop()} before it on this rank")
            due.extend(_end("SEND", send.message) for send in flow.gives(action, rank=rank))
        elif action in (places := due if action.verb == "SEND" else wanted):
            places.remove(action)
        else:
            where = "behind the compute that makes it" if action.verb == "SEND" else "before the compute that takes it"
            raise ProgramError(
                f"{place}: found {action}; expected sends and receives between neighbouring stages on different ranks "
                f"only, each once and {where}"
            )
    if due:
        raise ProgramError(f"row {rank + 1} (rank {rank}): found no {due[0]}; expected it behind its compute")


def _end(verb: str, message: Message) -> _Move:
    stage = message.source if verb == "SEND" else message.target
    return _Move(stage, verb, message.direction, message.microbatch)


def microbatches_of(order: Order) -> int:
    """Return the number of micro-batches of an order: one more than the largest number that is computed."""
    return 1 + max((compute.microbatch for line in order for compute in line), default=-1)


def layout_of(order: Order) -> Layout:
    """Return on which ranks the stages of an order are.

    A stage of which several ranks compute whole micro-batches in turn has them as its replicas; nothing else can be
    told from an order.

    Raises:
        ProgramError: if stages or ranks are missing, or several ranks share the micro-batches of a stage otherwise.
    """
    ranks: dict[int, dict[int, int]] = defaultdict(dict)  # by stage and micro-batch
    for rank, line in enumerate(order):
        if not line:
            raise ProgramError(f"rank {rank} computes nothing; expected computes on all {len(order)} ranks")
        for compute in line:
            known = ranks[compute.stage].setdefault(compute.microbatch, rank)
            if known != rank:
                raise ProgramError(
                    f"stage {compute.stage}, micro-batch {compute.microbatch}: found computes on ranks {known} and "
                    f"{rank}; expected all of them on one rank"
                )
    if sorted(ranks) != list(range(len(ranks))):
        raise ProgramError(f"found computes of the stages {sorted(ranks)}; expected every stage from 0")
    stages = tuple(_replicas(stage, ranks[stage]) for stage in range(len(ranks)))
    return Layout(stages, frozenset(stage for stage, replicas in enumerate(stages) if len(replicas) > 1))


def _replicas(stage: int, ranks: dict[int, int]) -> tuple[int, ...]:
    """Return the ranks that compute the micro-batches of a stage in turn."""
    if sorted(ranks) != list(range(len(ranks))):
        raise ProgramError(
            f"stage {stage}: found computes of the micro-batches {sorted(ranks)}; expected every one from 0"
        )
    in_turn = [rank for _, rank in sorted(ranks.items())]
    replicas = tuple(dict.fromkeys(in_turn))
    if any(rank != replicas[m % len(replicas)] for m, rank in enumerate(in_turn)):
        raise ProgramError(
            f"stage {stage}: found its micro-batches 0, 1, … on the ranks {in_turn}; expected one rank, or replicas "
            f"that take them in turn, such as {[replicas[m % len(replicas)] for m in range(len(in_turn))]}"
        )
    return replicas


def write_csv(order: Order) -> str:
    """Return the computes of an order as torch's CSV.

    torch takes every order in which each stage is on one rank (`_load_csv(path, format="compute_only")`).
    """
    return _written(order)


def write_csv_with_communication(program: VerifiedProgram) -> str:
    """Return a program as torch's CSV, with sends and receives (`_load_csv(path, format="compute_comms")`).

    Receives stand directly before their compute or, where the channel's order asks for it, before that of a later
    message: torch's dry run waits at a receive. The last weight gradient of a stage is followed by its `REDUCE_GRAD`,
    at which torch divides gradients by the number of micro-batches. Parameters are taken to be unsharded.

    Raises:
        ProgramError: if the program does something that torch has no action for: messages between stages that are not
            neighbours, slices of micro-batches, gradients summed over stages, offloading.
    """
    _check_expressible(program)
    return _written(_with_communication(program, rank) for rank in range(len(program.ranks)))


def _written(rows: Iterable[Iterable[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _check_expressible(program: Program) -> None:
    layout, traffic = program.layout, program.traffic
    far = [edge for edge in traffic.edges if abs(edge.source - edge.target) != 1]
    if far:
        raise ProgramError(f"found messages from stage {far[0].source} to {far[0].target}; torch has neighbours' only")
    sliced = [stage for stage, ranks in enumerate(layout.stages) if len(ranks) > 1 and stage not in layout.whole]
    if sliced:
        raise ProgramError(
            f"stage {sliced[0]} has replicas that share every micro-batch; torch's actions name no slice"
        )
    tied = [bucket.stages for bucket in traffic.buckets if len(bucket.stages) > 1]
    if tied:
        raise ProgramError(f"the stages {tied[0]} share parameters; torch sums the gradients of one stage at a time")
    if traffic.offloads:
        raise ProgramError(f"the stages {list(traffic.offloads)} offload; torch has no action for it")
    if joined := [one for line in program.ranks for one in line if isinstance(one, AnyCompute) and one.is_joined]:
        raise ProgramError(f"the program joins weight halves ({joined[0]}); torch has no action for it")


def _with_communication(program: Program, rank: int) -> Iterator[str]:
    line = program.ranks[rank]
    left = Counter(one.stage for one in line if isinstance(one, Compute) and one.kind in ("W", "B"))
    posted: list[Recv] = []
    for instruction in line:
        match instruction:
            case Recv():
                posted.append(instruction)
            case Send(message, _):
                yield str(_end("SEND", message))
            case Compute(stage, kind, _):
                taken = [receive for receive in posted if _takes(instruction, receive.message)]
                lasts = {receive.peer: posted.index(receive) for receive in taken}
                now = [receive for at, receive in enumerate(posted) if at <= lasts.get(receive.peer, -1)]
                posted = [receive for receive in posted if receive not in now]
                yield from (str(_end("RECV", receive.message)) for receive in now)
                yield str(instruction)
                left[stage] -= kind in ("W", "B")
                if kind in ("W", "B") and not left[stage] and program.synchronise:
                    yield f"{stage}REDUCE_GRAD"
            case _:
                pass  # loads, frees and the step are no actions of torch


def _takes(compute: Compute, message: Message) -> bool:
    at = (compute.stage, compute.direction, compute.microbatch)
    return at == (message.target, message.direction, message.microbatch)
