"""Laws of verify: what lowering makes passes, what breaks a dependency does not.

The interpreter below is a second, independent statement of what a program does. It runs a program on numbers that
depend on every input, in the way in which the instructions' docstrings say, and knows nothing of `schedule`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest

from lightning_pipe.core.program import (
    Bucket,
    Compute,
    Edge,
    Evict,
    Fetch,
    Free,
    Instruction,
    Joined,
    Layout,
    Load,
    Message,
    Program,
    Recv,
    Reduce,
    Samples,
    Send,
    Step,
    Traffic,
    Vacate,
    VerifiedProgram,
)
from lightning_pipe.errors import ProgramError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.formats.text import parse
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.forward_only import forward_only
from lightning_pipe.schedule.verification.verify import verify


class Broken(Exception):
    """The program does not compute what it should."""


@dataclass
class RankState:
    """What one rank holds while a program is interpreted."""

    position: int = 0
    loaded: dict = field(default_factory=dict)  # (s, m) -> samples
    inbox: dict = field(default_factory=dict)  # (s, direction, m, source, sample) -> value
    waiting: dict = field(default_factory=lambda: defaultdict(int))  # (s, direction, m) -> receives on their way
    made: dict = field(default_factory=dict)  # (s, kind, m, sample) -> value
    away: set = field(default_factory=set)  # (s, m) of which something is on the host
    leaving: set = field(default_factory=set)  # (s, m) of which something is copied there, and still held
    gradients: dict = field(default_factory=lambda: defaultdict(int))  # bucket -> sum
    posted: dict = field(default_factory=dict)  # bucket -> sum at the time of Reduce, or after what it goes along with
    along: int | None = None  # bucket that goes along with the next compute
    stepped: dict | None = None  # bucket -> sum that the optimizer saw


class Interpreter:
    """Run a program on numbers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.states = [RankState() for _ in program.ranks]
        self.channels: dict = defaultdict(lambda: ([], [], [0]))

    def run(self) -> list:
        """Return what every rank ends with: gradients at the optimizer step, and the last stage's values."""
        progress = True
        while progress:
            progress = False
            for rank, state in enumerate(self.states):
                line = self.program.ranks[rank]
                while state.position < len(line) and self.execute(line[state.position], rank, state):
                    state.position += 1
                    progress = True
        for rank, state in enumerate(self.states):
            if state.position < len(self.program.ranks[rank]):
                raise Broken(f"rank {rank} is stuck")
            if state.loaded or state.inbox or state.made or state.away or state.leaving:
                raise Broken(f"rank {rank} still holds something")
        for sends, receives, _ in self.channels.values():
            if len(sends) != len(receives):
                raise Broken("a message is left over")
        return [(dict(state.gradients), state.stepped) for state in self.states]

    def execute(self, instruction: Instruction, rank: int, state: RankState) -> bool:
        """Run one instruction; return False if it must wait."""
        if state.stepped is not None:
            raise Broken("something runs after the optimizer step")
        match instruction:
            case Load(s, m):
                state.loaded[s, m] = self.samples(s, m, rank)
            case Compute(s, kind, m):
                return self.compute(s, kind, m, rank, state) and self.post_along(state)
            case Joined(s, microbatches):
                return all(self.compute(s, "W", m, rank, state) for m in microbatches) and self.post_along(state)
            case Send(message, peer):
                kind = "F" if message.direction == "F" else "I"
                values = [self.get(state.made, (message.source, kind, message.microbatch, i)) for i in span(message)]
                self.channels[rank, peer][0].append((message, values))
                self.move(rank, peer)
            case Recv(message, peer):
                state.waiting[message.target, message.direction, message.microbatch] += 1
                self.channels[peer, rank][1].append(message)
                self.move(peer, rank)
            case Free(s, m):
                self.free(s, m, state)
            case Evict(s, m):
                if (s, "F", m) not in {key[:3] for key in state.made}:
                    raise Broken("nothing is there that could be evicted")
                state.away.add((s, m))
                state.leaving.add((s, m))
            case Vacate(s, m):
                if (s, m) not in state.leaving:
                    raise Broken("nothing is on its way that could be given up")
                state.leaving.remove((s, m))
            case Fetch(s, m):
                if (s, m) not in state.away:
                    raise Broken("nothing is away that could be fetched")
                state.away.remove((s, m))
            case Reduce(bucket, along=True):
                self.post_along(state)
                state.along = bucket
            case Reduce(bucket):
                state.posted[bucket] = state.gradients[bucket]
            case Step():
                self.post_along(state)
                return self.step(state)
        return True

    def post_along(self, state: RankState) -> bool:
        """Post the sum that went along with what has run."""
        if state.along is not None:
            state.posted[state.along] = state.gradients[state.along]
            state.along = None
        return True

    def compute(self, s: int, kind: str, m: int, rank: int, state: RankState) -> bool:
        if kind == "B":
            return self.compute(s, "I", m, rank, state) and self.compute(s, "W", m, rank, state)
        if kind == "I" and (s, m) in state.away | state.leaving:
            raise Broken("what it needs is on the host")
        direction = {"F": "F", "I": "B", "W": None}[kind]
        if direction and state.waiting[s, direction, m]:
            return False
        samples = self.samples(s, m, rank)
        for i in range(samples.start, samples.stop):
            own = {"F": None, "I": (s, "F", m, i), "W": (s, "I", m, i)}[kind]
            ingredients = [s, kind, m, i] + ([self.get(state.made, own)] if own else [])
            if kind == "F" and s in self.program.traffic.loads:
                ingredients.append(self.get(state.loaded, (s, m)).start <= i)
            for edge in self.program.traffic.edges:
                if direction and edge.direction == direction and edge.target == s:
                    ingredients.append(self.get(state.inbox, (s, direction, m, edge.source, i)))
            value = hash(tuple(ingredients))
            state.made[s, kind, m, i] = value
            self.keep(s, kind, m, i, value, rank, state)
        return True

    def keep(self, s: int, kind: str, m: int, i: int, value: int, rank: int, state: RankState) -> None:
        """Add weight gradients to their buckets; hand other values to stages on the same rank."""
        if kind == "W" or (kind == "F" and not self.program.training):
            for number, bucket in enumerate(self.program.traffic.buckets):
                if s in bucket.stages:
                    state.gradients[number] += value
        for edge in self.program.traffic.edges:
            made = "F" if edge.direction == "F" else "I"
            if edge.source == s and made == kind and rank in self.program.layout.stages[edge.target]:
                wanted = self.samples(edge.target, m, rank)
                if wanted.start <= i < wanted.stop:
                    state.inbox[edge.target, edge.direction, m, s, i] = value

    def move(self, sender: int, receiver: int) -> None:
        sends, receives, moved = self.channels[sender, receiver]
        while moved[0] < min(len(sends), len(receives)):
            (message, values), expected = sends[moved[0]], receives[moved[0]]
            if message != expected:
                raise Broken("a receive got another message")
            use = (message.target, message.direction, message.microbatch)
            self.states[receiver].waiting[use] -= 1
            for i, value in zip(span(message), values, strict=True):
                self.states[receiver].inbox[(*use, message.source, i)] = value
            moved[0] += 1

    def free(self, s: int, m: int, state: RankState) -> None:
        state.loaded.pop((s, m), None)
        state.inbox = {key: x for key, x in state.inbox.items() if (key[0], key[2]) != (s, m)}
        state.made = {key: x for key, x in state.made.items() if (key[0], key[2]) != (s, m)}

    def step(self, state: RankState) -> bool:
        holders = {
            b: {r for s in bucket.stages for r in self.program.layout.stages[s]}
            for b, bucket in enumerate(self.program.traffic.buckets)
        }
        if any(b not in self.states[r].posted for b in state.posted for r in holders[b]):
            return False
        reduced = {b: sum(self.states[r].posted[b] for r in holders[b]) for b in state.posted}
        state.stepped = {**state.gradients, **reduced}
        return True

    def samples(self, s: int, m: int, rank: int) -> Samples:
        replica = self.program.layout.stages[s].index(rank)
        return self.program.layout.samples(s, replica, m, self.program.sizes[m])

    @staticmethod
    def get(values: dict, key: tuple):
        if key not in values:
            raise Broken(f"{key} is not there")
        return values[key]


def span(message: Message) -> range:
    return range(message.samples.start, message.samples.stop)


def with_line(program: Program, rank: int, line: list[Instruction]) -> Program:
    return replace(program, ranks=(*program.ranks[:rank], tuple(line), *program.ranks[rank + 1 :]))


def test_every_lowered_program_is_verified(case, build):
    assert isinstance(verify(build(case)), VerifiedProgram)


def test_random_layouts_traffic_and_sizes_are_lowered_to_verified_programs():
    rng = random.Random(5)
    for _ in range(200):
        assert isinstance(verify(random_program(rng)), VerifiedProgram)


def random_program(rng: random.Random) -> Program:
    count, ranks, sizes = rng.randint(1, 5), rng.randint(1, 5), tuple(rng.choices(range(1, 7), k=rng.randint(1, 6)))
    layout = Layout(
        tuple(tuple(rng.sample(range(ranks), rng.randint(1, ranks))) for _ in range(count)),
        frozenset(s for s in range(count) if rng.random() < 0.3),
    )
    if rng.random() < 0.5:
        weights = [
            tuple(1 if s in layout.whole else rng.randint(1, 3) for _ in line) for s, line in enumerate(layout.stages)
        ]
        layout = replace(layout, weights=tuple(weights))
    skips = [(a, b) for a in range(count) for b in range(a + 1, count) if b == a + 1 or rng.random() < 0.3]
    edges = [Edge("F", a, b, 1.0) for a, b in skips] + [Edge("B", b, a, 1.0) for a, b in skips if rng.random() < 0.8]
    buckets = [Bucket(tuple(rng.sample(range(count), rng.randint(1, count))), 1) for _ in range(rng.randint(0, 4))]
    loads, offloads, joinable = (tuple(rng.sample(range(count), rng.randint(0, count))) for _ in range(3))
    traffic = Traffic(tuple(edges), tuple(buckets), loads, offloads, joinable)
    name, options = rng.choice([("gpipe", {}), *[("1f1b", {"warmup": w}) for w in ("pa", "pb", "1f1b*", 3)]])
    training = rng.random() < 0.8
    return lower(
        order_of(name, layout=layout, microbatches=len(sizes), options=options)
        if training
        else forward_only(layout, len(sizes)),
        layout=layout,
        sizes=sizes,
        traffic=traffic,
        training=training,
        synchronise=rng.random() < 0.8,
        early_release=rng.random() < 0.7,
        split=rng.random() < 0.8,
        join=rng.choice((1, 2, 9)),
    )


def test_every_lowered_program_computes_what_one_rank_computes(small_case, build):
    program = build(small_case)
    stages = ((0,),) * len(small_case.stages)
    alone = build(replace(small_case, stages=stages, whole=frozenset(), weights=()))
    expected = Interpreter(alone).run()[0]
    totals = defaultdict(int)
    for rank, (gradients, stepped) in enumerate(Interpreter(program).run()):
        for bucket, total in gradients.items():
            totals[bucket] += total
        assert stepped is None or {b: expected[1][b] for b in stepped} == stepped, f"rank {rank}"
    assert dict(totals) == expected[0]


def test_any_removed_instruction_is_detected(small_case, build):
    program = build(small_case)
    for rank, line in enumerate(program.ranks):
        for position in range(len(line)):
            with pytest.raises(ProgramError):
                verify(with_line(program, rank, [*line[:position], *line[position + 1 :]]))


def test_any_repeated_instruction_is_detected(small_case, build):
    program = build(small_case)
    for rank, line in enumerate(program.ranks):
        for position, instruction in enumerate(line):
            with pytest.raises(ProgramError):
                verify(with_line(program, rank, [*line[:position], instruction, *line[position:]]))


def test_any_instruction_on_another_rank_is_detected(small_case, build):
    program = build(small_case)
    for rank, line in enumerate(program.ranks):
        other = (rank + 1) % len(program.ranks)
        for position, instruction in enumerate(line):
            moved = with_line(program, rank, [*line[:position], *line[position + 1 :]])
            with pytest.raises(ProgramError):
                verify(with_line(moved, other, [instruction, *moved.ranks[other]]))


def test_a_swap_is_either_refused_or_harmless(small_case, build):
    program = build(small_case)
    expected = Interpreter(program).run()
    accepted = refused = 0
    for rank, line in enumerate(program.ranks):
        for i, j in pairs(len(line), random.Random(rank)):
            swapped = list(line)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            candidate = with_line(program, rank, swapped)
            try:
                verify(candidate)
            except ProgramError:
                refused += 1
                continue
            assert Interpreter(candidate).run() == expected, f"rank {rank}: {line[i]} with {line[j]}"
            accepted += 1
    assert accepted
    assert refused


def test_verify_refuses_no_more_than_the_interpreter_except_by_convention(small_case, build):
    """On adjacent swaps both agree; verify alone demands ascending buckets, Free after all else, and Step last."""
    program = build(small_case)
    expected = Interpreter(program).run()
    for rank, line in enumerate(program.ranks):
        for i in range(len(line) - 1):
            candidate = with_line(program, rank, [*line[:i], line[i + 1], line[i], *line[i + 2 :]])
            try:
                harmless = Interpreter(candidate).run() == expected
            except Broken:
                harmless = False
            convention = any(isinstance(x, (Reduce, Free, Step)) for x in line[i : i + 2])
            try:
                verify(candidate)
                verified = True
            except ProgramError:
                verified = False
            assert verified == harmless or (harmless and convention), f"rank {rank}: {line[i]} with {line[i + 1]}"


def pairs(count: int, rng: random.Random) -> list[tuple[int, int]]:
    adjacent = [(i, i + 1) for i in range(count - 1)]
    return adjacent + [tuple(sorted(rng.sample(range(count), 2))) for _ in range(3 * count)] if count > 1 else []


def test_a_deadlock_names_the_circle_of_ranks():
    """Warm-up depths that grow along the stages wait for each other."""
    order = (
        tuple(Compute(0, kind, m) for kind, m in [("F", 0), ("B", 0), ("F", 1), ("B", 1)]),
        tuple(Compute(1, kind, m) for kind, m in [("F", 0), ("F", 1), ("B", 0), ("B", 1)]),
    )
    layout = Layout(((0,), (1,)))
    traffic = Traffic((Edge("F", 0, 1, 1.0), Edge("B", 1, 0, 1.0)), ())
    program = lower(order, layout=layout, sizes=(1, 1), traffic=traffic)
    with pytest.raises(ProgramError, match=r"deadlock.*rank 0, .*0I0 waits for rank 1; rank 1, .*1F1 waits for rank 0"):
        verify(program)


def test_a_channel_out_of_order_names_both_messages():
    program = build_two_stages()
    line = list(program.ranks[1])
    i, j = [k for k, x in enumerate(line) if isinstance(x, Recv)][:2]
    line[i], line[j] = line[j], line[i]
    with pytest.raises(ProgramError, match=r'law "channel".*0SEND_F0>1@1\[0:1\] but received by .*1RECV_F1<0@0\[0:1\]'):
        verify(with_line(program, 1, line))


def build_two_stages() -> Program:
    order = tuple(tuple(Compute(s, kind, m) for kind in "FB" for m in range(2)) for s in range(2))
    traffic = Traffic((Edge("F", 0, 1, 1.0), Edge("B", 1, 0, 1.0)), (Bucket((0,), 1), Bucket((1,), 1)))
    return lower(order, layout=Layout(((0,), (1,))), sizes=(1, 1), traffic=traffic)


def test_buckets_out_of_order_are_refused():
    """Ranks that post shared buckets in different orders hang on transports that run one after the other."""
    layout = Layout(((0, 1),))
    traffic = Traffic((), (Bucket((0,), 1), Bucket((0,), 1)))
    order = order_of("gpipe", layout=layout, microbatches=1)
    program = lower(order, layout=layout, sizes=(2,), traffic=traffic, split=False)
    line = list(program.ranks[1])
    assert line[-3:] == [Reduce(0), Reduce(1), Step()]
    with pytest.raises(ProgramError, match=r'rank 1, .*REDUCE0: law "gradients": it comes after bucket 1'):
        verify(with_line(program, 1, [*line[:-3], Reduce(1), Reduce(0), Step()]))


def test_a_sum_goes_along_with_the_last_weight_half_of_its_only_stage_alone():
    """One that is posted before another compute, before an earlier W, or for two stages would sum what is not made."""
    layout = Layout(((0, 1), (0, 1)))
    edges = (Edge("F", 0, 1, 1.0), Edge("B", 1, 0, 1.0))
    traffic = Traffic(edges, (Bucket((0,), 1), Bucket((1,), 1), Bucket((0, 1), 1)))
    order = order_of("gpipe", layout=layout, microbatches=2)
    program = lower(order, layout=layout, sizes=(2, 2), traffic=traffic)
    line = list(program.ranks[0])
    first = Reduce(0, along=True)
    assert line[line.index(first) + 1] == Compute(0, "W", 1)
    assert str(first) == "REDUCE0+" and Reduce(1, along=True) not in line  # in rising order: 1 is complete before 0
    rest = [x for x in line if x != first]
    for place, why in [
        (Compute(0, "I", 1), "before it goes along with the last W of its stage"),
        (Compute(0, "W", 0), "it goes along with the last W of a bucket's only stage"),
        (Free(0, 1), "it goes along with the last W of a bucket's only stage"),
    ]:
        at = rest.index(place)
        with pytest.raises(ProgramError, match=f'law "gradients": .*{why}'):
            verify(with_line(program, 0, [*rest[:at], first, *rest[at:]]))
    tied = [x for x in line if x != Reduce(2)]
    at = tied.index(Compute(0, "W", 1))
    with pytest.raises(ProgramError, match=r'REDUCE2\+: law "gradients"'):
        verify(with_line(program, 0, [*tied[:at], Reduce(2, along=True), *tied[at:]]))


def test_a_message_that_is_not_sent_is_named():
    program = build_two_stages()
    line = [x for x in program.ranks[0] if str(x) != "0SEND_F1>1@1[0:1]"]
    with pytest.raises(ProgramError, match=r"0FREE1: law \"free\": not before it: 0SEND_F1>1@1"):
        verify(with_line(program, 0, line))


def test_an_error_names_rank_position_instruction_and_law():
    program = build_two_stages()
    line = list(program.ranks[1])
    i, j = [k for k, x in enumerate(line) if str(x) in ("1RECV_F0<0@0[0:1]", "1F0")]
    line[i], line[j] = line[j], line[i]
    with pytest.raises(ProgramError, match=rf'rank 1, position {i}, 1F0: law "inputs": it waits for 1RECV_F0<0@0'):
        verify(with_line(program, 1, line))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0F0", "0EVICT0"), r'rank 0, position 1, 0EVICT0: law "offload": it needs 0F0 before it'),
        (("0EVICT0", "0FETCH0"), r'0FETCH0: law "offload": it needs 0EVICT0 before it'),
        (("0FETCH0", "0I0"), r'0I0: law "offload": it needs 0VACATE0 before it'),
        (("0EVICT0", "0VACATE0"), r'0VACATE0: law "offload": it needs 0EVICT0 before it'),
        (("0VACATE0", "0I0"), r'0I0: law "offload": it needs 0VACATE0 before it'),
        (("0VACATE0", ""), r'0I0: law "offload": it needs 0VACATE0 before it'),
        (("0F0", "0VACATE0"), r'0VACATE0: law "offload": it needs 0EVICT0 before it'),
        (("", "0VACATE0"), r'0VACATE0: law "offload": it is vacated twice, or this rank offloads no such samples'),
        (("0FETCH0", ""), r'0I0: law "offload": it needs 0FETCH0 before it'),
        (("0EVICT0", ""), r'0FETCH0: law "offload": it needs 0EVICT0 before it'),
        (("", "1EVICT0"), r'1EVICT0: law "offload": it is evicted twice, or this rank offloads no such samples'),
        (("", "0FETCH0"), r'0FETCH0: law "offload": it is fetched twice, or this rank offloads no such samples'),
    ],
)
def test_what_is_evicted_must_be_there_and_come_back_before_it_is_used(change, message):
    """Instructions are exchanged, the first is left out (nothing instead), or the second is added at the end."""
    layout = Layout(((0,), (0,)))
    order = order_of("gpipe", layout=layout, microbatches=1)
    program = lower(order, layout=layout, sizes=(1,), traffic=Traffic((), (), offloads=(0,)))
    line = [str(x) for x in program.ranks[0]]
    assert line[:6] == ["0LOAD0", "0F0", "0EVICT0", "0FETCH0", "1F0", "1I0"] and "0VACATE0" in line
    first, second = change
    if not first:
        line.insert(-1, second)
    elif not second:
        line.remove(first)
    else:
        i, j = line.index(first), line.index(second)
        line[i], line[j] = line[j], line[i]
    with pytest.raises(ProgramError, match=message):
        verify(with_line(program, 0, [parse(text) for text in line]))


def test_a_forward_only_program_offloads_nothing():
    layout = Layout(((0,),))
    traffic = Traffic((), (), offloads=(0,))
    program = lower(forward_only(layout, 1), layout=layout, sizes=(1,), traffic=traffic, training=False)
    assert [str(x) for x in verify(program).ranks[0]] == ["0LOAD0", "0F0", "0FREE0"]
    with pytest.raises(ProgramError, match=r'0EVICT0: law "offload"'):
        verify(with_line(program, 0, [*program.ranks[0][:2], Evict(0, 0), *program.ranks[0][2:]]))


@pytest.mark.parametrize(
    ("layout", "traffic", "sizes", "message"),
    [
        (Layout(((0, 0),)), Traffic((), ()), (1,), "different ranks"),
        (Layout(((0,), ())), Traffic((), ()), (1,), "one or more"),
        (Layout(((0,),), frozenset({1})), Traffic((), ()), (1,), "whole"),
        (Layout(((0,),)), Traffic((), ()), (1, 0), "at least 1"),
        (Layout(((0,), (1,))), Traffic((Edge("F", 1, 0, 1.0),), ()), (1,), "later stage"),
        (Layout(((0,), (1,))), Traffic((Edge("F", 0, 2, 1.0),), ()), (1,), "leaves the 2 stages"),
        (Layout(((0,), (1,))), Traffic((Edge("F", 0, 1, 1.0),) * 2, ()), (1,), "twice"),
        (Layout(((0,),)), Traffic((), (Bucket((1,), 1),)), (1,), "bucket 0"),
        (Layout(((0,),)), Traffic((), (), loads=(3,)), (1,), "read the batch"),
        (Layout(((0,),)), Traffic((), (), offloads=(1,)), (1,), r"stages \(1,\) offload; the layout has 1"),
        (Layout(((0,),), weights=((1,), (1,))), Traffic((), ()), (1,), "weights of 2 stages; the layout has 1"),
        (Layout(((0,),), weights=((1, 2),)), Traffic((), ()), (1,), r"weights \(1, 2\); expected 1 whole"),
        (Layout(((0,),), weights=((0,),)), Traffic((), ()), (1,), r"weights \(0,\); expected 1 whole numbers from 1"),
        (Layout(((0, 1),), frozenset({0}), ((1, 2),)), Traffic((), ()), (1,), "in turn, so expected equal weights"),
        (Layout(((0,), (2,))), Traffic((), ()), (1,), "layout has 3"),
    ],
)
def test_a_frame_that_makes_no_sense_is_refused(layout, traffic, sizes, message):
    program = Program(((), ()) if len(layout.stages) == 2 else ((),), sizes, layout, traffic)
    with pytest.raises(ProgramError, match=message):
        verify(program)
