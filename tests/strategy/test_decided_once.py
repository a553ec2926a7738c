"""What is decided once, and when it is decided again."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.capture.graphs.witness import is_due
from lightning_pipe.capture.steps.batch import flatten, outline, same_besides_tensors
from lightning_pipe.errors import UnsupportedError
from lightning_pipe.strategy.parameters.replaced import ParameterWatch

X, Y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
BATCHES: dict[str, Any] = {
    "tensor": X,
    "tuple": (X, Y),
    "list": [X, Y],
    "dict": {"x": X, "y": Y},
    "other keys": {"y": X, "x": Y},
    "ordered": OrderedDict(x=X, y=Y),
    "nested": {"x": (X, Y)},
    "with a number": (X, Y, 3),
    "with a text": (X, Y, "three"),
    "with nothing": (X, Y, None),
}


@pytest.mark.parametrize("one", BATCHES)
@pytest.mark.parametrize("other", BATCHES)
def test_forms_are_equal_exactly_where_structures_hold_the_same_and_only_tensors(one: str, other: str) -> None:
    first, second = flatten(BATCHES[one])[1], flatten(BATCHES[other])[1]
    if first.form is None or second.form is None:
        assert "with" in one or "with" in other
        return
    is_same = same_besides_tensors(first.template, second.template) and first.leaves == second.leaves
    assert (first.form == second.form) == is_same
    assert (first.form[0] == second.form[0]) == (outline(first.template) == outline(second.template))


def test_a_structure_is_sent_alike_before_and_after_its_form_was_asked() -> None:
    """Ranks know structures by what is sent of them."""
    structure = flatten({"x": X, "y": Y})[1]
    sent = pickle.dumps(structure)
    assert structure.form is not None
    assert pickle.dumps(structure) == sent
    assert pickle.loads(sent) == structure


def test_witnesses_are_due_before_the_first_batch_and_powers_of_four() -> None:
    assert [batch for batch in range(5000) if is_due(batch)] == [0, 1, 4, 16, 64, 256, 1024, 4096]


def module() -> nn.Module:
    """Return a module of two layers."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_parameter_that_moves_to_the_next_module_is_noticed() -> None:
    """All parameters are there, in their order: only their tables are others."""
    layers = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(2)]), nn.ParameterList()])
    watch = ParameterWatch(layers)
    first, second = layers
    moved = first._parameters.popitem()[1]
    second._parameters["0"] = moved
    with pytest.raises(UnsupportedError, match="replaced, added or removed"):
        watch.refuse_others()


def test_a_module_as_it_was_is_not_refused_and_another_parameter_is() -> None:
    watched = module()
    watch = ParameterWatch(watched)
    watch.refuse_others()
    watched[0].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match=r"0\.weight"):
        watch.refuse_others()
