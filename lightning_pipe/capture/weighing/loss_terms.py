"""Losses of several terms: means, sums and penalties in one loss are made one mean.

The loss of a batch of N samples, `mean of a + sum of b + penalty on weights`, is the mean over micro-batches of n_k
samples, weighted by n_k / N, of

    mean of a  +  N / n_k * sum of b  +  penalty

So every term that is a sum is multiplied by N / n_k where it meets terms of another kind; its incoming gradient is
multiplied too. A loss whose terms are all of one kind is left as it is: then the weight of the micro-batch is enough.

The gradient that comes into a term is what the backward operations of the term's own operation (those with its sequence
number of autograd) read from others. A sum of terms has no backward operation of its own; its terms are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import follow, leading_to
from lightning_pipe.capture.graphs.value_roles import Role
from lightning_pipe.capture.operators import Trait, takes_output, traits
from lightning_pipe.capture.slicing.insert import insert
from lightning_pipe.capture.stages.assign import sums_gradients
from lightning_pipe.capture.torch_private import is_backward
from lightning_pipe.capture.weighing.denominator_totals import samples_before

_aten = torch.ops.aten


def with_one_kind_of_term(joint: JointGraph) -> JointGraph:
    """Multiply sums by N / n_k where they meet other terms; in place, once, on a fresh graph that has totals."""
    if joint.totals is None:
        return joint
    while (term := _next_term(joint)) is not None:
        _weigh(term, joint, within=leading_to((joint.loss, *joint.results), joint))
    return joint


def _next_term(joint: JointGraph) -> fx.Node | None:
    """Return the first sum that meets other terms, and is used for nothing but such combinations."""
    roles, within = follow(joint).roles, leading_to((joint.loss, *joint.results), joint)
    for node in joint.module.graph.nodes:
        if node.name not in within or is_backward(node):
            continue
        if roles.get(node.name) != "linear" or Trait.ADDS not in traits(node):
            continue
        for operand in node.all_input_nodes:
            for term in _terms(operand, roles):
                if all(roles.get(user.name) != "cat" for user in term.users if not is_backward(user)):
                    return term
    return None


def _terms(node: fx.Node, roles: Mapping[str, Role]) -> Iterator[fx.Node]:
    """Yield the sums of which a sum is made by operations without a backward of their own.

    Whole numbers cannot be multiplied by N / n_k; what a result makes of them is made once more (`derived_results`).
    """
    if roles.get(node.name) != "sum" or not node.meta["val"].is_floating_point():
        return
    if Trait.PASSES_GRADIENT not in traits(node):
        yield node
        return
    for source in node.all_input_nodes:
        yield from _terms(source, roles)


def _weigh(term: fx.Node, joint: JointGraph, *, within: Set[str]) -> None:
    """Multiply a sum, and the gradient that comes into it, by N / n_k, for what the loss and results are made of."""
    after = term.next
    while takes_output(after):
        after = after.next
    vector = next(node for node in joint.module.graph.nodes if joint.is_of_whole_batch(node.name))
    samples = samples_before(after, joint)
    ratio = insert(
        after, _aten.div.Tensor, insert(after, _aten.select.int, vector, 0, 0, like=term), samples, like=term
    )
    ratio = insert(after, _aten._to_copy.default, ratio, like=term, dtype=term.meta["val"].dtype)
    weighed = insert(after, _aten.mul.Tensor, term, ratio, like=term)
    weighed.meta["role"] = "mean"
    own = _backward_of(term)
    others = (user for user in term.users if user is not weighed and user not in own)
    users = {user for user in others if is_backward(user) or user.name in within}
    term.replace_all_uses_with(weighed, delete_user_cb=lambda user: user in users)
    for backward in own:
        for gradient in backward.all_input_nodes:
            if _comes_in(gradient, term, own, joint):
                backward.replace_input_with(gradient, insert(backward, _aten.mul.Tensor, gradient, ratio))


def _backward_of(term: fx.Node) -> list[fx.Node]:
    """List the backward operations of a node."""
    sequence = term.meta.get("seq_nr")
    nodes = (node for node in term.graph.nodes if node.op == "call_function" and is_backward(node))
    return [node for node in nodes if node.meta.get("seq_nr") == sequence and not sums_gradients(node)]


def _comes_in(gradient: fx.Node, term: fx.Node, own: list[fx.Node], joint: JointGraph) -> bool:
    is_gradient = gradient.name in joint.tangents or is_backward(gradient)
    value = gradient.meta.get("val")
    shape = value.shape if isinstance(value, torch.Tensor) else None
    return is_gradient and gradient not in own and shape == term.meta["val"].shape
