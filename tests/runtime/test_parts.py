"""Cutting and joining lose nothing, and are each other's transposes, so that gradients stay exact."""

from itertools import pairwise

import pytest
import torch

from lightning_pipe.capture.steps.stage_program import Value
from lightning_pipe.core.program import Samples
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.exchanges.slicing import buffer_for, cut, from_tensor, join, to_tensor

ROWS = Value("x", torch.float64, lambda samples: (2, 3 * samples), 1, rows=3, combine="cat")
LOCAL = Samples(2, 8)
CUTS = [[2, 8], [2, 5, 8], [2, 3, 7, 8]]


def number(how: str) -> Value:
    return Value("g", torch.float64, lambda samples: (), None, combine=how)


def parts_of(edges: list[int]) -> list[Samples]:
    return [Samples(*edge) for edge in pairwise(edges)]


@pytest.mark.parametrize("edges", CUTS)
def test_joining_the_parts_of_rows_gives_the_rows(edges: list[int]) -> None:
    whole = torch.arange(36.0, dtype=torch.float64).view(2, 18)
    parts = [(p, cut(whole, ROWS, local=LOCAL, part=p)) for p in parts_of(edges)]
    assert [tuple(tensor.shape) for _, tensor in parts] == [ROWS.size(len(samples)) for samples, _ in parts]
    assert torch.equal(join(parts[::-1], ROWS, local=LOCAL), whole)


@pytest.mark.parametrize("how", ["mean", "same", "max", "min", "sum"])
@pytest.mark.parametrize("edges", CUTS)
def test_joining_the_parts_of_one_number_gives_the_number(edges: list[int], how: str) -> None:
    whole = torch.tensor(5.0, dtype=torch.float64)
    parts = [(p, cut(whole, number(how), local=LOCAL, part=p)) for p in parts_of(edges)]
    torch.testing.assert_close(join(parts, number(how), local=LOCAL), whole, rtol=1e-15, atol=0)


@pytest.mark.parametrize("edges", CUTS)
def test_shares_of_a_gradient_add_up_to_it(edges: list[int]) -> None:
    """One producer's gradient from several consumers is their sum; one consumer's goes to producers by share."""
    gradient = torch.tensor(5.0, dtype=torch.float64)
    shares = [(p, cut(gradient, number("sum"), local=LOCAL, part=p)) for p in parts_of(edges)]
    assert [share.item() for _, share in shares] == pytest.approx([5 * len(p) / 6 for p in parts_of(edges)])
    assert join(shares, number("sum"), local=LOCAL).item() == pytest.approx(5.0, rel=1e-15)


def test_a_mean_of_replicas_is_weighted_by_their_samples() -> None:
    parts = [(Samples(2, 3), torch.tensor(7.0)), (Samples(3, 8), torch.tensor(1.0))]
    assert join(parts, number("mean"), local=LOCAL).item() == pytest.approx(2.0)


@pytest.mark.parametrize("edges", [[3, 8], [2, 7], [2, 9]])
def test_parts_that_do_not_cover_the_samples_are_refused(edges: list[int]) -> None:
    parts = [(p, torch.zeros(ROWS.size(len(p)))) for p in parts_of(edges)]
    with pytest.raises(PipelineError, match=r"x is needed for samples \[2:8\]"):
        join(parts, ROWS, local=LOCAL)


def test_python_numbers_travel_as_tensors() -> None:
    value = Value("n", None, lambda samples: (), None)
    sent = to_tensor(2**40, device=torch.device("cpu"))
    buffer = buffer_for(value, 3, device=torch.device("cpu"))
    assert (buffer.shape, buffer.dtype) == (sent.shape, sent.dtype)
    assert from_tensor(buffer.copy_(sent), value) == 2**40
