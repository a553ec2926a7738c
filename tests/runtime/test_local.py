"""The hub: order on a channel, wrong shapes, and ranks that wait for each other."""

import pytest
import torch

from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import Wait, Walk, drive_together


def test_a_channel_keeps_the_order_of_messages_whoever_posts_first() -> None:
    hub = Hub()
    left, right = hub.endpoint(0), hub.endpoint(1)
    buffers = [torch.zeros(()) for _ in range(3)]
    handles = [right.receive([buffers[0]], peer=0)]
    for number in range(3):
        left.send([torch.tensor(float(number))], peer=1)
    handles += [right.receive([buffer], peer=0) for buffer in buffers[1:]]
    assert all(handle.wait(0) for handle in reversed(handles))
    assert [buffer.item() for buffer in buffers] == [0, 1, 2]


def test_a_message_of_another_shape_than_announced_is_refused() -> None:
    hub = Hub()
    hub.endpoint(0).send([torch.zeros(2, 3)], peer=1)
    with pytest.raises(PipelineError, match=r"Rank 0 sent .*\(2, 3\).* rank 1, which expected .*\(3, 2\)"):
        hub.endpoint(1).receive([torch.zeros(3, 2)], peer=0)


def test_sums_and_broadcasts_reach_all_members() -> None:
    hub = Hub()
    ends = [hub.endpoint(rank) for rank in range(3)]
    tensors = [torch.tensor([float(rank)]) for rank in range(3)]
    handles = [end.all_reduce(tensor, group=(0, 1, 2)) for end, tensor in zip(ends, tensors, strict=True)]
    assert all(handle.wait(0) for handle in handles) and [t.item() for t in tensors] == [3, 3, 3]
    words = [torch.tensor(rank) for rank in range(3)]
    handles = [end.broadcast(word, source=2, group=(0, 1, 2)) for end, word in zip(ends, words, strict=True)]
    assert all(handle.wait(0) for handle in handles) and [w.item() for w in words] == [2, 2, 2]


def test_ranks_that_wait_for_each_other_are_named() -> None:
    hub = Hub()

    def wait(rank: int) -> Walk[None]:
        yield Wait(hub.endpoint(rank).receive([torch.zeros(1)], peer=1 - rank), f"a word of rank {1 - rank}")

    with pytest.raises(PipelineError, match="rank 0 waits for a word of rank 1; rank 1 waits for a word of rank 0"):
        drive_together([wait(0), wait(1)])
