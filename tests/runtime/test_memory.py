"""Peaks are those of the allocations that were made, exactly; state is what tensors fill."""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.runtime.memory import PeakMemory, state_bytes

CPU = torch.device("cpu")
KIB = 2**10


def empty(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_the_peak_is_the_most_that_was_there_at_once() -> None:
    with PeakMemory(CPU) as peak:
        first, second = empty(100), empty(300)
        del first
        third = empty(50)
        del second, third
        fourth = empty(200)
        del fourth
    assert peak.bytes == 400 * KIB


def test_only_what_rises_above_the_start_counts() -> None:
    before = empty(1000)
    with PeakMemory(CPU) as peak:
        kept = empty(10)
        del before  # made outside the block
        other = empty(20)
    assert peak.bytes == 30 * KIB
    with PeakMemory(CPU) as peak:
        del kept
        again = empty(5)
    assert peak.bytes == 5 * KIB, "what was there before the block counts as if it had stayed"
    assert other.numel() + again.numel() == 25 * KIB


def test_what_comes_to_lie_where_something_of_an_earlier_block_lay_does_not_count() -> None:
    """Torch remembers the sizes of a block by address, and reports the end of what lies there later as that of it."""
    with PeakMemory(CPU):
        earlier = [empty(40) for _ in range(50)]
    addresses = {tensor.data_ptr() for tensor in earlier}
    del earlier
    before = [empty(40) for _ in range(50)]
    assert any(tensor.data_ptr() in addresses for tensor in before), "else this shows nothing"
    with PeakMemory(CPU) as peak:
        kept = empty(10)
        del before
        other = empty(20)
    assert peak.bytes == 30 * KIB
    assert kept.numel() + other.numel() == 30 * KIB


def test_what_an_operation_needs_for_itself_counts() -> None:
    """`mean` of a product makes the product; nothing of it is left."""
    x = torch.ones(256, 256)
    with PeakMemory(CPU) as peak:
        (x * x).mean()
    assert 256 * KIB <= peak.bytes <= 256 * KIB + 64
    with PeakMemory(CPU) as peak:
        torch.sort(x, dim=0)
    assert peak.bytes > (256 + 512) * KIB, "values and indices, and what sort itself needs"


def test_a_block_without_allocations_has_no_peak() -> None:
    with PeakMemory(CPU) as peak:
        pass
    assert peak.bytes == 0


def test_an_error_in_the_block_is_the_one_that_is_seen() -> None:
    with pytest.raises(KeyError, match="mine"), PeakMemory(CPU):
        raise KeyError("mine")


@pytest.mark.gpu
def test_the_peak_on_a_device_is_the_most_that_was_there_at_once() -> None:
    device = torch.device("cuda")
    with PeakMemory(device) as peak:
        first = torch.empty(2**20, dtype=torch.uint8, device=device)
        second = torch.empty(3 * 2**20, dtype=torch.uint8, device=device)
        del first
        third = torch.empty(2**20, dtype=torch.uint8, device=device)
        del second, third
    assert peak.bytes == 4 * 2**20


def test_state_is_parameters_buffers_gradients_and_what_the_optimizer_keeps() -> None:
    module = torch.nn.BatchNorm1d(10)
    parameters = sum(p.numel() for p in module.parameters()) * 4
    buffers = 2 * 10 * 4 + 8
    tensors = [*module.parameters(), *module.buffers()]
    assert state_bytes(tensors) == parameters + buffers
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(3, 10)).sum().backward()
    assert state_bytes(tensors, optimizers=[optimizer]) == 2 * parameters + buffers
    optimizer.step()
    steps = 2 * 4
    assert state_bytes(tensors, optimizers=[optimizer]) == 4 * parameters + steps + buffers


def test_memory_that_is_shared_counts_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(100))
    assert state_bytes([weight, weight, weight.data[10:]]) == 400
