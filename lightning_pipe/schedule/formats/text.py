"""Text format of programs: one line per rank, below lines that define what its instructions refer to.

    sizes 2 2 1
    layout 0,1 | 2
    whole
    weights 3,1 | 1                        only where replicas take unequal parts
    edge F 0>1 bytes_per_sample=8.0 fixed_bytes=0
    bucket 0 bytes=100
    loads 0
    offloads 0                             only where stages offload
    joinable 0 1                           only where stages can join W of several micro-batches
    head bytes_per_sample=8.0 fixed_bytes=0 holds_backwards=true        only where the last stage has a head
    training true
    synchronise true
    seam 4 | 3 2 1 0 | 3 2 1 0             only rounds of pipelines that are not flushed: batch, enters, leaves
    versions PIN                           only rounds that choose which weights computes read
    rank 0: 0LOAD0 0F0 0SEND_F0>1@2[0:1] …

`parse` is the inverse of `str(instruction)`, `parse_program` of `format_program`, `parse_order` of `format_order`. An
indented line continues the line above it; `#` starts a comment.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast, get_args

from lightning_pipe.core.effects import OWN_WORK, OwnWork
from lightning_pipe.core.milestones import MILESTONES, Milestone
from lightning_pipe.core.program import (
    Bucket,
    Compute,
    ComputeKind,
    CopyingOrder,
    Edge,
    HeadTraffic,
    HostCopy,
    Instruction,
    Joined,
    Layout,
    Message,
    Pass,
    Program,
    Recv,
    Reduce,
    Samples,
    Seam,
    Send,
    Step,
    Traffic,
)
from lightning_pipe.errors import PlanError, ProgramError

T = TypeVar("T")

_SAMPLES = r"\[(\d+):(\d+)\]"
_FORMS: tuple[tuple[re.Pattern[str], Callable[..., Instruction]], ...] = (
    (re.compile(r"(\d+)([FBIW])(\d+)"), lambda s, k, m: Compute(int(s), cast(ComputeKind, k), int(m))),
    (re.compile(r"(\d+)W(\d+(?:\+\d+)+)"), lambda s, ms: Joined(int(s), tuple(map(int, ms.split("+"))))),
    (
        re.compile(rf"(\d+)SEND_([FB])(\d+)>(\d+)@(\d+){_SAMPLES}"),
        lambda s, d, m, t, peer, a, b: Send(_message(d, s, t, m, a, b), int(peer)),
    ),
    (
        re.compile(rf"(\d+)RECV_([FB])(\d+)<(\d+)@(\d+){_SAMPLES}"),
        lambda t, d, m, s, peer, a, b: Recv(_message(d, s, t, m, a, b), int(peer)),
    ),
    (re.compile(r"REDUCE(\d+)(\+?)"), lambda bucket, along: Reduce(int(bucket), bool(along))),
    (re.compile(r"STEP"), lambda: Step()),
    (re.compile(r"([A-Z]{2,})"), lambda code: _milestone(code)()),
    (re.compile(r"(\d+)([A-Z]{2,})(\d+)"), lambda s, code, m: _own_work(code)(int(s), int(m))),
)
_EXAMPLES = (
    "2F0, 2W0+1, 2LOAD0, 1SEND_F0>2@3[0:2], 2RECV_F0<1@2[0:2], REDUCE1+, STEP, CONFIRM, 2FREE0, 2EVICT0, 2FETCH0"
)


def parse(text: str) -> Instruction:
    """Return the instruction whose `str()` is the text.

    Raises:
        ProgramError: if no instruction is written like this.
    """
    for pattern, build in _FORMS:
        if match := pattern.fullmatch(text):
            return build(*match.groups())
    raise ProgramError(f"found instruction {text!r}; instructions are written {_EXAMPLES}")


def _own_work(code: str) -> type[OwnWork]:
    if code not in OWN_WORK:
        raise ProgramError(f"found {code!r}; a rank's own work is written {', '.join(sorted(OWN_WORK))}")
    return OWN_WORK[code]


def _milestone(code: str) -> type[Milestone]:
    if code not in MILESTONES:
        raise ProgramError(
            f"found {code!r}; what stands once in a rank's list is STEP, {', '.join(sorted(MILESTONES))}"
        )
    return MILESTONES[code]


def format_order(order: CopyingOrder) -> tuple[str, ...]:
    """Return an order as text, a line per rank."""
    return tuple(" ".join(map(str, line)) for line in order)


def parse_order(lines: Sequence[str]) -> CopyingOrder:
    """Return the order of which `format_order` makes these lines.

    Raises:
        PlanError: if something in them is no compute, and no place of a copy to the host.
    """
    return tuple(tuple(_parse_ordered(text, rank) for text in line.split()) for rank, line in enumerate(lines))


def _parse_ordered(text: str, rank: int) -> Compute | HostCopy:
    match = _ORDERED.fullmatch(text)
    if match is None:
        raise PlanError(
            f"found {text!r} in the order of rank {rank}; expected computes such as 2F0, 2B0, 2I0, 2W0, and 2VACATE0 "
            "and 2FETCH0 where a micro-batch is offloaded"
        )
    stage, kind, microbatch = int(match[1]), match[2], int(match[3])
    if kind in _COPIES:
        return _COPIES[kind](stage, microbatch)
    return Compute(stage, cast(ComputeKind, kind), microbatch)


_COPIES: Mapping[str, type[HostCopy]] = {kind.code: kind for kind in get_args(HostCopy)}
_ORDERED = re.compile(r"(\d+)([FBIW]|VACATE|FETCH)(\d+)")


def _message(direction: str, source: str, target: str, microbatch: str, start: str, stop: str) -> Message:
    samples = Samples(int(start), int(stop))
    return Message(cast(Pass, direction), int(source), int(target), int(microbatch), samples)


def format_program(program: Program) -> str:
    """Return a program as text."""
    layout, traffic = program.layout, program.traffic
    lines = [
        _line("sizes", map(str, program.sizes)),
        _line("layout", [_format_stages(layout.stages)]),
        _line("whole", map(str, sorted(layout.whole))),
        *([_line("weights", [_format_stages(layout.weights)])] if layout.weights else []),
        *map(_format_edge, traffic.edges),
        *(f"bucket {','.join(map(str, bucket.stages))} bytes={bucket.bytes}" for bucket in traffic.buckets),
        _line("loads", map(str, traffic.loads)),
        *([_line("offloads", map(str, traffic.offloads))] if traffic.offloads else []),
        *([_line("joinable", map(str, traffic.joinable))] if traffic.joinable else []),
        *([] if traffic.head is None else [_format_head(traffic.head)]),
        f"training {str(program.training).lower()}",
        f"synchronise {str(program.synchronise).lower()}",
        *([] if program.seam is None else _format_seam(program.seam)),
        *(_line(f"rank {rank}:", map(str, line)) for rank, line in enumerate(program.ranks)),
    ]
    return "\n".join(lines) + "\n"


def _format_seam(seam: Seam) -> list[str]:
    numbers = (" ".join(map(str, row)) for row in ((seam.batch,), seam.enters, seam.leaves))
    return [f"seam {' | '.join(numbers)}", *([_line("versions", seam.work)] if seam.work else [])]


def _format_stages(stages: Iterable[tuple[int, ...]]) -> str:
    return " | ".join(",".join(map(str, numbers)) for numbers in stages)


def _format_edge(edge: Edge) -> str:
    ends = f"{edge.direction} {edge.source}>{edge.target}"
    return f"edge {ends} bytes_per_sample={edge.bytes_per_sample!r} fixed_bytes={edge.fixed_bytes}"


def _format_head(head: HeadTraffic) -> str:
    sizes = f"bytes_per_sample={head.bytes_per_sample!r} fixed_bytes={head.fixed_bytes}"
    return f"head {sizes} holds_backwards={str(head.holds_backwards).lower()}"


def _line(head: str, words: Iterable[str]) -> str:
    return " ".join([head, *words])


def parse_program(text: str) -> Program:
    """Return the program that a text describes. It is not verified.

    Raises:
        ProgramError: naming the line that cannot be read, or what is missing.
    """
    fields: dict[str, list[str]] = defaultdict(list)
    for number, line in _logical_lines(text):
        head, _, rest = line.partition(" ")
        if head not in _HEADS:
            raise ProgramError(f"line {number}: found {head!r}; lines begin with {', '.join(_HEADS)}")
        fields[head].append(rest.strip())
    return Program(
        ranks=_ranks(fields["rank"]),
        sizes=_only("sizes", fields, _integers),
        layout=Layout(
            _only("layout", fields, _stages),
            frozenset(_only("whole", fields, _integers)),
            _only("weights", fields, _stages) if fields["weights"] else (),
        ),
        traffic=Traffic(
            tuple(_edge(edge) for edge in fields["edge"]),
            tuple(_bucket(bucket) for bucket in fields["bucket"]),
            _only("loads", fields, _integers),
            _only("offloads", fields, _integers) if fields["offloads"] else (),
            _only("joinable", fields, _integers) if fields["joinable"] else (),
            _only("head", fields, _head) if fields["head"] else None,
        ),
        training=_only("training", fields, _flag),
        synchronise=_only("synchronise", fields, _flag),
        seam=_only("seam", fields, lambda text: _seam(text, fields)) if fields["seam"] else None,
    )


_HEADS = (
    "sizes",
    "layout",
    "whole",
    "weights",
    "edge",
    "bucket",
    "loads",
    "offloads",
    "joinable",
    "head",
    "training",
    "synchronise",
    "seam",
    "versions",
    "rank",
)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line without comments, continued by the indented lines below it."""
    number, collected = 0, ""
    for i, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].rstrip()
        if not line:
            continue
        if line[0].isspace() and collected:
            collected += " " + line.strip()
            continue
        if collected:
            yield number, collected
        number, collected = i, line.strip()
    if collected:
        yield number, collected


def _only(name: str, fields: Mapping[str, list[str]], read: Callable[[str], T]) -> T:
    found = fields[name]
    if len(found) != 1:
        raise ProgramError(f"found {len(found)} lines that begin with {name!r}; expected one")
    return _read(read, name, found[0])


def _read(read: Callable[[str], T], name: str, text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        if isinstance(error, ProgramError):
            raise
        raise ProgramError(f"cannot read {name} {text!r}: {error}") from None


def _ranks(lines: list[str]) -> tuple[tuple[Instruction, ...], ...]:
    ranks: dict[int, tuple[Instruction, ...]] = {}
    for line in lines:
        head, colon, rest = line.partition(":")
        rank = _read(int, "rank", head)
        if not colon or rank in ranks:
            raise ProgramError(f"found rank line {head!r}; expected `rank {len(ranks)}: …`, each rank once")
        ranks[rank] = tuple(parse(word) for word in rest.split())
    if sorted(ranks) != list(range(len(ranks))):
        raise ProgramError(f"found instructions for ranks {sorted(ranks)}; expected every rank from 0")
    return tuple(ranks[rank] for rank in range(len(ranks)))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())


def _stages(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(rank) for rank in ranks.split(",")) for ranks in text.split("|"))


def _seam(text: str, fields: Mapping[str, list[str]]) -> Seam:
    rows = [tuple(map(int, row.split())) for row in text.split("|")]
    if len(rows) != 3 or len(rows[0]) != 1:
        raise ValueError("expected e.g. `seam 4 | 1 0 | 1 0`: batch, and the forwards of each stage in flight")
    work = _only("versions", fields, lambda words: tuple(words.split())) if fields["versions"] else ()
    return Seam(rows[0][0], rows[1], rows[2], work)


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("expected true or false")
    return text == "true"


_EDGE = re.compile(r"([FB]) (\d+)>(\d+) bytes_per_sample=(\S+) fixed_bytes=(\d+)")
_BUCKET = re.compile(r"(\d+(?:,\d+)*) bytes=(\d+)")
_HEAD = re.compile(r"bytes_per_sample=(\S+) fixed_bytes=(\d+) holds_backwards=(\S+)")


def _edge(text: str) -> Edge:
    match = _EDGE.fullmatch(text)
    if not match:
        raise ProgramError(f"found edge {text!r}; expected e.g. `edge F 0>1 bytes_per_sample=8.0 fixed_bytes=0`")
    direction, source, target, per_sample, fixed = match.groups()
    size = _read(float, "bytes_per_sample", per_sample)
    return Edge(cast(Pass, direction), int(source), int(target), size, int(fixed))


def _bucket(text: str) -> Bucket:
    match = _BUCKET.fullmatch(text)
    if not match:
        raise ProgramError(f"found bucket {text!r}; expected e.g. `bucket 0,2 bytes=100`")
    return Bucket(tuple(int(stage) for stage in match[1].split(",")), int(match[2]))


def _head(text: str) -> HeadTraffic:
    match = _HEAD.fullmatch(text)
    if not match:
        raise ProgramError(
            f"found head {text!r}; expected e.g. `head bytes_per_sample=8.0 fixed_bytes=0 holds_backwards=true`"
        )
    return HeadTraffic(
        _read(float, "bytes_per_sample", match[1]), int(match[2]), _read(_flag, "holds_backwards", match[3])
    )
