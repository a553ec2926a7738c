"""A gradient is added once, and memory of others is never taken for it."""

from __future__ import annotations

import torch

from lightning_pipe.runtime.exchanges.gradient_sums import Sums


def test_a_first_gradient_is_taken_and_later_ones_are_added_to_it():
    parameters = {"w": torch.ones(3)}
    first, second = torch.full((3,), 2.0), torch.full((3,), 5.0)
    Sums(parameters, []).add("w", first)
    assert parameters["w"].grad is first
    Sums(parameters, []).add("w", second)
    assert parameters["w"].grad is first and first.tolist() == [7.0] * 3 and second.tolist() == [5.0] * 3


def test_what_was_given_or_is_returned_too_is_copied():
    parameters = {"w": torch.ones(3), "v": torch.ones(3)}
    given, made = torch.full((3,), 2.0), torch.full((3,), 5.0)
    sums = Sums(parameters, [given])
    sums.add("w", given)
    sums.add("v", made)
    sums.part_from([made])
    for name, content in (("w", given), ("v", made)):
        assert torch.equal(parameters[name].grad, content) and parameters[name].grad.data_ptr() != content.data_ptr()


def test_one_gradient_of_two_parameters_is_not_shared():
    parameters = {"w": torch.ones(3), "v": torch.ones(3)}
    sums, made = Sums(parameters, []), torch.full((3,), 2.0)
    sums.add("w", made)
    sums.add("v", made)
    parameters["w"].grad.add_(1.0)
    assert parameters["v"].grad.tolist() == [2.0] * 3


def test_terms_are_added_in_their_order():
    parameters = {"w": torch.ones(1)}
    terms = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    Sums(parameters, []).add("w", *terms)
    assert parameters["w"].grad.tolist() == [((terms[0] + terms[1]) + terms[2]).item()]
