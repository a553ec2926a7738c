"""Laws of the notation: text and program are inverse, and what cannot be read is named."""

from __future__ import annotations

import random

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
)
from lightning_pipe.errors import PlanError, ProgramError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.formats.text import format_order, format_program, parse, parse_order, parse_program


def random_instruction(rng: random.Random) -> Instruction:
    s, t, m, r = (rng.randrange(1000) for _ in range(4))
    message = Message(rng.choice("FB"), s, t, m, Samples(rng.randrange(50), rng.randrange(50, 99)))
    return rng.choice(
        [
            Compute(s, rng.choice("FBIW"), m),
            Joined(s, tuple(rng.sample(range(99), rng.randint(2, 5)))),
            Load(s, m),
            Send(message, r),
            Recv(message, r),
            Reduce(s, rng.random() < 0.5),
            Step(),
            Free(s, m),
            Evict(s, m),
            Vacate(s, m),
            Fetch(s, m),
        ]
    )


def random_program(rng: random.Random) -> Program:
    stages = tuple(tuple(rng.sample(range(9), rng.randint(1, 3))) for _ in range(rng.randint(1, 5)))
    edges = tuple(
        Edge(rng.choice("FB"), rng.randrange(5), rng.randrange(5), rng.random() * 1e9, rng.randrange(2**40))
        for _ in range(rng.randrange(4))
    )
    return Program(
        ranks=tuple(tuple(random_instruction(rng) for _ in range(rng.randrange(20))) for _ in range(rng.randint(1, 6))),
        sizes=tuple(rng.randrange(1, 99) for _ in range(rng.randint(1, 7))),
        layout=Layout(
            stages,
            frozenset(rng.sample(range(len(stages)), rng.randrange(2))),
            tuple(tuple(rng.randint(1, 9) for _ in ranks) for ranks in stages) if rng.random() < 0.5 else (),
        ),
        traffic=Traffic(
            edges,
            tuple(Bucket(tuple(rng.sample(range(5), 2)), rng.randrange(2**40)) for _ in range(rng.randrange(3))),
            tuple(range(rng.randrange(3))),
            tuple(range(rng.randrange(3))),
            tuple(range(rng.randrange(3))),
        ),
        training=rng.random() < 0.5,
        synchronise=rng.random() < 0.5,
    )


def test_parse_is_the_inverse_of_str():
    rng = random.Random(0)
    for _ in range(500):
        instruction = random_instruction(rng)
        assert parse(str(instruction)) == instruction


def test_parse_program_is_the_inverse_of_format_program():
    rng = random.Random(1)
    for _ in range(100):
        program = random_program(rng)
        assert parse_program(format_program(program)) == program


def test_lowered_programs_survive_the_round_trip(small_case, build):
    program = build(small_case)
    assert parse_program(format_program(program)) == program


TEXT = """\
sizes 2 1      # three samples
layout 0 | 1
whole
loads 0
training false
synchronise true
edge F 0>1 bytes_per_sample=8.0 fixed_bytes=0
rank 1: 1RECV_F0<0@0[0:2] 1F0
    1FREE0     # an indented line goes on
rank 0: 0F0
"""


def test_weights_and_offloads_are_written_where_there_are_any():
    program = parse_program(TEXT)
    assert program.layout.weights == program.traffic.offloads == ()
    assert not [line for line in format_program(program).splitlines() if line.startswith(("weights", "offloads"))]
    program = parse_program(TEXT.replace("layout 0 | 1", "layout 0,2 | 1\nweights 3,1 | 1\noffloads 1"))
    assert program.layout.weights == ((3, 1), (1,))
    assert program.traffic.offloads == (1,)


def test_ranks_may_be_in_any_order_and_spread_over_lines():
    program = parse_program(TEXT)
    assert program.ranks[0] == (Compute(0, "F", 0),)
    assert program.ranks[1][-1] == Free(1, 0)
    assert len(program.ranks[1]) == 3


@pytest.mark.parametrize(
    ("found", "instead", "message"),
    [
        ("1F0", "1G0", "found instruction '1G0'; instructions are written 2F0"),
        ("1F0", "F0", "found instruction 'F0'"),
        ("1F0", "1F0x", "found instruction '1F0x'"),
        ("sizes 2 1", "size 2 1", "line 1: found 'size'; lines begin with sizes"),
        ("sizes 2 1", "sizes 2 one", "cannot read sizes '2 one'"),
        ("sizes 2 1      # three samples\n", "", "found 0 lines that begin with 'sizes'"),
        ("layout 0 | 1", "layout 0 | ", "cannot read layout"),
        ("training false", "training no", "expected true or false"),
        ("rank 0:", "rank 2:", r"ranks \[1, 2\]"),
        ("rank 0:", "rank 1:", "each rank once"),
        ("fixed_bytes=0", "", "found edge"),
        ("=8.0", "=many", "cannot read bytes_per_sample 'many'"),
    ],
)
def test_what_cannot_be_read_is_named(found, instead, message):
    with pytest.raises(ProgramError, match=message):
        parse_program(TEXT.replace(found, instead, 1))


def test_an_order_is_read_as_it_was_written():
    order = order_of("1f1b", layout=Layout(((0,), (1,), (0,))), microbatches=3)
    assert parse_order(format_order(order)) == order
    copying = ((*order[0][:1], Vacate(0, 0), Fetch(0, 0), *order[0][1:]), order[1])
    assert parse_order(format_order(copying)) == copying
    with pytest.raises(PlanError, match="found '0SEND1' in the order of rank 1; expected computes such as 2F0"):
        parse_order(["0F0", "0SEND1"])
