"""Messages and sums within a host: every size arrives whole and in order; a lost peer is told."""

import contextlib
import gc
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.runtime.callers import TOKEN_BYTES, hello
from lightning_pipe.runtime.transport import same_host
from lightning_pipe.runtime.transport.gloo import GlooTransport
from lightning_pipe.runtime.transport.host_channel import INLINE_BYTES
from lightning_pipe.runtime.transport.same_host import MESSAGES, Passage, SameHost, _Listing
from lightning_pipe.runtime.waiting import Handle
from ranks.strangers import strangers
from ranks.world import Raised, World

BYTES = torch.uint8
ROOM = 50  # of a listener for calls that are not yet answered
SIZES = (1, INLINE_BYTES, INLINE_BYTES + 1, 0, 3, 2**20, 7 * 2**20 + 5, INLINE_BYTES + 2, 2**21, 12)


def transport_between(ranks: int, channels: list[tuple[int, int]]) -> GlooTransport:
    transport = GlooTransport(rank=dist.get_rank(), ranks=ranks, timeout_s=60)
    transport.open(channels=channels, groups=[])
    return transport


def settle(handle: Handle) -> None:
    while not handle.wait(0.2):
        pass


def content(size: int, *, seed: int) -> torch.Tensor:
    return torch.randint(256, (size,), dtype=BYTES, generator=torch.Generator().manual_seed(seed))


def swap_every_size(order: str) -> tuple[list[bool], bool]:
    """Send all sizes in both directions, three times over; return what arrived whole, and whether sockets were used."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    transport = transport_between(2, [(0, 1), (1, 0)])
    good, used = [], False
    for number in range(3):
        sends = [transport.send([content(n, seed=number + n + rank)], peer=peer) for n in SIZES]
        buffers = [torch.zeros(n, dtype=BYTES) for n in SIZES]
        receives = [transport.receive([buffer], peer=peer) for buffer in buffers]
        used = used or any(isinstance(handle, Passage) for handle in receives)
        for handle in receives if order == "in order" else reversed(receives):
            settle(handle)
        for handle in sends:
            settle(handle)
        good += [bool(torch.equal(b, content(len(b), seed=number + len(b) + peer))) for b in buffers]
        assert all(handle.landed() for handle in (*sends, *receives))
    transport.close()
    return good, used


@pytest.mark.parametrize("order", ["in order", "last first"])
def test_every_size_arrives_whole_whoever_is_waited_for_first(order: str) -> None:
    for good, used in World(2).run(swap_every_size, order):
        assert all(good) and used


def test_who_calls_for_a_later_opening_first_is_not_taken_for_an_earlier_one() -> None:
    """A rank may be heard late: it has connected, and what it says first is read after what it says next."""
    host = SameHost(1)
    host._listings = [_Listing("", bytes([rank]) * TOKEN_BYTES) for rank in range(2)]
    host._listings[1] = _Listing(host._listen(2), bytes([1]) * TOKEN_BYTES)
    lines = {}
    for opening in (2, 1):
        lines[opening] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        lines[opening].connect(host._listings[1].address)
        lines[opening].sendall(hello(host._listings[0].token, 0, opening))
    for opening in (1, 2):
        host._openings = opening
        met = host._met({}, {0})
        lines[opening].sendall(bytes([opening]))
        assert met[0].recv(1) == bytes([opening])
        met[0].close()
        lines[opening].close()
    host.close()


def swap_without_sockets() -> tuple[list[bool], bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_host.socket, "socket", no_socket)
        return swap_every_size("last first")


def no_socket(*_: object) -> socket.socket:
    raise OSError("there are none here")


def test_where_no_socket_reaches_messages_go_another_way() -> None:
    for good, used in World(2).run(swap_without_sockets):
        assert all(good) and not used


def many_before_anybody_reads() -> bool:
    """Fill the socket many times over before the first is expected; a large message stands among them."""
    peer = 1 - dist.get_rank()
    transport = transport_between(2, [(0, 1), (1, 0)])
    sizes = [INLINE_BYTES] * 300 + [2**20] + [5] * 900
    sends = [transport.send([content(n, seed=i)], peer=peer) for i, n in enumerate(sizes)]
    was_full = not all(handle.landed() for handle in sends)
    dist.barrier()
    buffers = [torch.zeros(n, dtype=BYTES) for n in sizes]
    receives = [transport.receive([buffer], peer=peer) for buffer in buffers]
    for handle in (*reversed(sends), *receives):
        settle(handle)
    transport.close()
    assert all(torch.equal(b, content(len(b), seed=i)) for i, b in enumerate(buffers))
    return was_full


def test_what_finds_no_room_waits_for_it_and_keeps_its_place() -> None:
    assert all(World(2).run(many_before_anybody_reads))


def a_message_of_very_many_tensors() -> bool:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    transport = transport_between(2, [(0, 1), (1, 0)])
    handle = transport.send([torch.tensor([rank, i], dtype=torch.int16) for i in range(1500)], peer=peer)
    buffers = [torch.zeros(2, dtype=torch.int16) for _ in range(1500)]
    settle(transport.receive(buffers, peer=peer))
    settle(handle)
    transport.close()
    return [b.tolist() for b in buffers] == [[peer, i] for i in range(1500)]


def test_a_message_may_have_more_tensors_than_a_system_call_takes() -> None:
    assert all(World(2).run(a_message_of_very_many_tensors))


def slots_of_changing_sizes() -> tuple[int, int]:
    """Return how many slots were made for messages of many sizes, one after another, and open files left by them."""
    rank, before = dist.get_rank(), len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    transport = transport_between(2, [(0, 1)])
    for i in range(60):
        size = INLINE_BYTES + 1 + 10_000 * (i % 17)
        if rank == 0:
            settle(transport.send([content(size, seed=i)], peer=1))
        else:
            buffer = torch.zeros(size, dtype=BYTES)
            settle(transport.receive([buffer], peer=0))
            assert torch.equal(buffer, content(size, seed=i))
        dist.barrier()
    host = transport._same_host
    made = len(host._outboxes[MESSAGES, 1]._slots) if rank == 0 else len(host._inboxes[MESSAGES, 0]._slots)
    transport.close()
    del host
    gc.collect()
    return made, (len(os.listdir("/proc/self/fd")) if before else 0) - before


def test_slots_are_used_again_and_nothing_stays_open() -> None:
    for made, left in World(2).run(slots_of_changing_sizes):
        assert made == 1 and left <= 0


def validate_then_train() -> bool:
    """Send a message under `inference_mode`, then others outside of it."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    transport = transport_between(2, [(0, 1), (1, 0)])
    good = []
    for is_inference in (True, False, True):
        with torch.inference_mode(is_inference):
            send = transport.send([content(2**16, seed=rank)], peer=peer)
            buffer = torch.zeros(2**16, dtype=BYTES)
            settle(transport.receive([buffer], peer=peer))
            settle(send)
            good.append(torch.equal(buffer, content(2**16, seed=peer)))
    transport.close()
    return all(good)


def test_slots_serve_validation_and_training() -> None:
    assert all(World(2).run(validate_then_train))


def an_empty_message_behind_one_without_room() -> list[bool]:
    """Return whether a message without room, and an empty one behind it, have left before anybody reads."""
    rank = dist.get_rank()
    transport = transport_between(2, [(0, 1)])
    if rank == 0:
        sends = [transport.send([content(INLINE_BYTES, seed=0)], peer=1) for _ in range(300)]
        sends.append(transport.send([torch.zeros(0)], peer=1))
        left = [handle.landed() for handle in sends[-2:]]
    dist.barrier()
    if rank == 0:
        handles: list[Handle] = [*sends]
    else:
        buffers = [torch.zeros(INLINE_BYTES, dtype=BYTES) for _ in range(300)]
        handles = [transport.receive([buffer], peer=0) for buffer in (*buffers, torch.zeros(0))]
    for handle in handles:
        settle(handle)
    transport.close()
    return left if rank == 0 else []


def test_an_empty_message_does_not_overtake() -> None:
    assert World(2).run(an_empty_message_behind_one_without_room)[0] == [False, False]


def sums_beside_messages() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Post sums of two groups, a broadcast and a message, which ranks begin in different order."""
    rank = dist.get_rank()
    transport = GlooTransport(rank=rank, ranks=3, timeout_s=60)
    transport.open(channels=[(0, 2)], groups=[(0, 1, 2), (0, 2)])
    large, small, word = torch.full((2**19,), 0.1 + rank), torch.full((7,), 0.1 + rank), torch.tensor([rank])
    letter = torch.full((3,), float(rank))
    message = [lambda: transport.send([letter], peer=2)] if rank == 0 else []
    message += [lambda: transport.receive([letter], peer=0)] if rank == 2 else []
    sums = [lambda: transport.all_reduce(large, group=(0, 1, 2)), lambda: transport.all_reduce(small, group=(0, 1, 2))]
    sums.append(lambda: transport.broadcast(word, source=1, group=(0, 1, 2)))
    pair = torch.tensor([2**40 + rank])
    if rank != 1:
        sums.append(lambda: transport.all_reduce(pair, group=(0, 2)))
    handles = [post() for post in ([*sums, *message] if rank == 0 else [*message, *sums])]
    for handle in reversed(handles) if rank == 1 else handles:
        settle(handle)
    transport.close()
    return large, small, pair, word.item() == 1 and (rank != 2 or bool(letter.eq(0).all()))


def test_sums_of_groups_are_bit_equal_on_all_members_and_apart_from_messages() -> None:
    (large, small, pair, good), *others = World(3).run(sums_beside_messages)
    assert torch.equal(small, torch.full((7,), 0.1) + torch.full((7,), 1.1) + torch.full((7,), 2.1))
    assert torch.equal(pair, torch.tensor([2**41 + 2])) and torch.equal(pair, others[1][2])
    torch.testing.assert_close(large, torch.full((2**19,), 3.3))
    assert good and all(their_good for *_, their_good in others)
    assert all(torch.equal(small, theirs) and torch.equal(large, all_of) for all_of, theirs, *_ in others)


LARGE = (2**18 + 1, 5 * 2**20, 2**20 + 7, 4 * 2**20, 3, 2**22, 3 * 2**21 + 5, 1000, 2**21)  # and small ones among them


def many_large_sums(dtype: torch.dtype) -> tuple[list[torch.Tensor], int]:
    """Begin more sums than may be under way at once, and wait in an order of one's own; return them and slots made."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = tuple(range(ranks))
    transport = GlooTransport(rank=rank, ranks=ranks, timeout_s=60)
    transport.open(channels=[], groups=[group])
    tensors = []
    for number in range(3):
        tensors = [term(size, rank, seed=i, dtype=dtype) for i, size in enumerate(LARGE)]
        handles = [transport.all_reduce(tensor, group=group) for tensor in tensors]
        for handle in reversed(handles) if (rank + number) % 2 else handles:
            settle(handle)
        assert all(handle.landed() for handle in handles)
        dist.barrier()
    made = max(len(outbox._slots) for outbox in transport._same_host._outboxes.values())
    transport.close()
    return tensors, made


def term(size: int, rank: int, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((size,), generator=torch.Generator().manual_seed(100 * rank + seed)).mul(50).to(dtype)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("ranks", "dtype"), [(3, torch.float32), (2, torch.bfloat16)])
def test_large_sums_are_bit_equal_on_all_members(ranks: int, dtype: torch.dtype) -> None:
    (first, made), *others = World(ranks).run(many_large_sums, dtype)
    for i, size in enumerate(LARGE):
        terms = [term(size, rank, seed=i, dtype=dtype) for rank in range(ranks)]
        if ranks == 2:
            assert torch.equal(first[i], terms[0] + terms[1])
        torch.testing.assert_close(first[i], torch.stack(terms).sum(0), rtol=1e-5, atol=1e-4)
        assert all(torch.equal(first[i], theirs[i]) for theirs, _ in others)
    assert made <= 2 * len(LARGE)


def lend_and_keep() -> tuple[bool, int, int]:
    """Receive messages of which some are kept; return whether all are right, and slots made and memory copied into."""
    rank, peer, size = dist.get_rank(), 1 - dist.get_rank(), (3, 2**10, 2**9)
    transport = transport_between(2, [(0, 1), (1, 0)])
    kept: list[torch.Tensor] = []
    good, moved = [], 0
    for number in range(12):
        value = torch.full(size, float(number + 100 * rank))
        send = transport.send([value.permute(1, 0, 2).contiguous(), torch.tensor([number])], peer=peer)
        owner, small = torch.empty_permuted(size, (1, 0, 2)), torch.zeros(1, dtype=torch.int64)
        before = owner.data_ptr()
        receive = transport.receive([owner.permute(1, 0, 2), small], peer=peer, owners=[owner, small])
        settle(receive)
        settle(send)
        moved += owner.data_ptr() != before
        good.append(bool(owner.eq(number + 100 * peer).all()) and small.item() == number)
        if number % 3 == 0:
            kept.append(owner[1])  # a view keeps what it is a view of
        owner.add_(1)  # nobody else sees it
        del owner, receive
        dist.barrier()
    good += [bool(view.eq(3 * i + 100 * peer + 1).all()) for i, view in enumerate(kept)]
    made = len(transport._same_host._inboxes[MESSAGES, peer]._slots)
    transport.close()
    good += [bool(view.eq(3 * i + 100 * peer + 1).all()) for i, view in enumerate(kept)]
    return all(good), made, moved


def test_a_large_message_is_not_copied_and_its_slot_is_the_receivers_until_it_lets_go() -> None:
    for good, made, moved in World(2).run(lend_and_keep):
        assert good and moved == 12
        assert 5 <= made <= 6  # four are kept; one or two are on their way


def trim_and_go_on() -> tuple[bool, int]:
    """Let a transport give up memory while one message is kept; return whether all are right, and bytes given up."""
    rank, peer, size = dist.get_rank(), 1 - dist.get_rank(), 2**23
    transport = transport_between(2, [(0, 1), (1, 0)])
    kept, good, shared = [], [], []
    for number in range(4):
        owner = torch.empty(size, dtype=BYTES)
        send = transport.send([content(size, seed=number + 100 * rank)], peer=peer)
        receive = transport.receive([owner], peer=peer, owners=[owner])
        settle(receive)
        settle(send)
        good.append(torch.equal(owner, content(size, seed=number + 100 * peer)))
        if number == 0:
            kept.append(owner)
        del owner, receive
        token = torch.zeros(1, dtype=BYTES)
        told = transport.receive([token], peer=peer)  # what was let go is told the sender on the way
        settle(transport.send([torch.ones(1, dtype=BYTES)], peer=peer))
        settle(told)
        dist.barrier()
        if number == 2:
            shared.append(shared_bytes())
            dist.barrier()
            transport.trim()
            dist.barrier()
            shared.append(shared_bytes())
    good.append(torch.equal(kept[0], content(size, seed=100 * peer)))
    transport.close()
    return all(good), shared[0] - shared[1]


def shared_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssShmem:")) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given up on Linux only")
def test_a_transport_gives_up_the_memory_of_messages_that_nobody_has() -> None:
    for good, given_up in World(2).run(trim_and_go_on):
        assert good and given_up >= 2 * 2**23, "a slot of this rank, and one of the other"


def land_without_a_compute_that_asks() -> bool:
    """Wait as a program does that was given up: for receives to land, with no compute that takes them."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    transport = transport_between(2, [(0, 1), (1, 0)])
    buffers = [torch.zeros(n, dtype=BYTES) for n in SIZES]
    receives = [transport.receive([buffer], peer=peer) for buffer in buffers]
    sends = [transport.send([content(n, seed=n + rank)], peer=peer) for n in SIZES]
    for handle in (*receives, *sends):
        settle(handle)
    transport.close()
    return all(torch.equal(b, content(len(b), seed=len(b) + peer)) for b in buffers)


def test_messages_land_also_if_nothing_takes_them() -> None:
    assert all(World(2).run(land_without_a_compute_that_asks))


def strangers_then_peer() -> bool:
    """Let more connect who are no ranks than the listener has room for, before the sender does."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        call = same_host.SameHost._line_to

        def after_strangers(self: same_host.SameHost, peer: int) -> socket.socket | None:
            def connect() -> socket.socket:
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                stranger.setblocking(False)
                stranger.connect(self._listings[peer].address)
                return stranger

            assert stack.enter_context(strangers(connect, 1000)) == ROOM + 1
            return call(self, peer)

        patch.setattr(same_host.SameHost, "_line_to", after_strangers)
        patch.setattr(same_host.socket, "SOMAXCONN", ROOM)
        transport = transport_between(2, [(0, 1)])
    tensor = torch.full((4,), 7.0) if rank == 0 else torch.zeros(4)
    settle(transport.send([tensor], peer=1) if rank == 0 else transport.receive([tensor], peer=0))
    transport.close()
    return bool(tensor.eq(7).all())


def test_strangers_are_turned_away() -> None:
    assert all(World(2).run(strangers_then_peer))


def wait_for_one_who_dies(size: int) -> None:
    transport = transport_between(2, [(0, 1), (1, 0)])
    if dist.get_rank() == 0:
        os._exit(3)
    receive = transport.receive([torch.zeros(size)], peer=0)
    settle(receive)


@pytest.mark.parametrize("size", [3, 2**20])
def test_who_waits_for_a_dead_rank_is_told(size: int) -> None:
    told = World(2).results(wait_for_one_who_dies, size)[1]
    assert isinstance(told, Raised) and told.kind == "RuntimeError" and "onnection" in told.text
