"""Rows of the operator registry name operators that exist, and say nothing that contradicts itself or torch."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from lightning_pipe.capture.operators import _ROWS, Trait, draws, traits

aten = torch.ops.aten
UNALIASED_VIEWS = {"_to_copy", "_unsafe_view", "reshape", "getitem"}  # a cast, and what is run as a reshape


def node_of(name: str, overload: str = "") -> fx.Node:
    packet = getattr(torch.ops.aten, name)
    return fx.Graph().call_function(getattr(packet, overload or packet.overloads()[0]))


@pytest.mark.parametrize("name", sorted(_ROWS.keys() - {"getitem"}))
def test_a_row_names_an_operator_and_contradicts_neither_itself_nor_torch(name):
    node = node_of(name)
    known = traits(node)
    assert not (Trait.HEAVY in known and Trait.VIEW in known)
    if Trait.VIEW in known and name not in UNALIASED_VIEWS:
        assert any(result.alias_info for result in node.target._schema.returns), "torch's schema calls it no view"


def test_no_trait_is_without_an_operator():
    stated = Trait(0)
    for name in _ROWS.keys() - {"getitem"}:
        stated |= traits(node_of(name))
    assert stated == ~Trait(0)


Q = torch.randn(1, 2, 4, 8)
LSTM = (torch.randn(3, 1, 4), [torch.zeros(2, 1, 4)] * 2, [torch.randn(16, 4)] * 8, False, 2)


@pytest.mark.parametrize(
    ("operation", "args", "kwargs", "expected"),
    [
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q, Q, Q), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (Q, Q, Q, 0.0, True), {}, False),
        (aten._scaled_dot_product_flash_attention.default, (Q, Q, Q, 0.1), {}, True),
        (aten._scaled_dot_product_efficient_attention.default, (Q, Q, Q, None, True), {"dropout_p": 0.2}, True),
        (aten.native_dropout.default, (Q, 0.5, True), {}, True),
        (aten.rand_like.default, (Q,), {}, True),
        (aten.mul.Tensor, (Q, Q), {}, False),
    ],
    ids="default zero some named mask noise none".split(),
)
def test_attention_that_drops_nothing_draw_nothing(operation, args, kwargs, expected):
    assert draws(operation, args, kwargs) is expected


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_what_is_said_to_draw_is_what_moves_the_generator(rate):
    args = (*LSTM, rate, True, False, False)
    before = torch.get_rng_state()
    aten.lstm.input(*args)
    aten._scaled_dot_product_flash_attention_for_cpu(Q, Q, Q)
    assert draws(aten.lstm.input, args, {}) is not torch.equal(torch.get_rng_state(), before)
