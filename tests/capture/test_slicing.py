"""Laws of cutting the graph of a whole batch: whatever the micro-batches, every number is that of the uncut graph."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from capture.sliced_runs import Runs, deviation, deviation_of_parts, worst_value
from lightning_pipe.capture import Capture, Request, capture_step
from lightning_pipe.capture.allocations import Allocations, highest
from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.trace import trace
from lightning_pipe.capture.slicing.rules import RULES
from lightning_pipe.capture.slicing.slicing import Slicing
from lightning_pipe.capture.slicing.whole_batch import of_whole_batch
from lightning_pipe.capture.steps.batch import Structure, flatten
from lightning_pipe.capture.steps.stage_program import FIRST_KEY
from lightning_pipe.capture.steps.step_function import NUMBERS
from lightning_pipe.capture.tracked.number_expressions import Situation
from models.kept import GRAPHS
from models.sample_losses import entries
from zoo import ZOO

SAMPLES, SIZES = 13, (5, 5, 3)
OTHER_SIZES = ((13,), (7, 6), (2, 2, 2, 2, 2, 2, 1), (11, 1, 1), (1,) * 13)
NO_SAMPLES = {"volume_of_one", "gcn_index_add"}  # a batch of one sample; a graph, whose nodes are no samples
ENTRIES = {name: entry for name, entry in ZOO.items() if entry.expected == "joint" and name not in NO_SAMPLES}
ENTRIES |= entries()
OWN_PRECISION = {
    **{"moe_dense": 1e-7, "autocast_inside": 1e-6, "llama": 1e-5},  # they compute in float32, or in bfloat16
    **{"simclr": 1e-10, "batch_norm": 1e-10},  # some of their gradients are small differences of large numbers
}

# What needs all samples before a gradient: all others keep 1F1B.
HEADS = {
    *"simclr moe_dense moe_capacity unet_resnet_encoder info_nce sim_clr supervised_contrastive triplet_hard".split(),
    *"barlow_twins whitened vicreg cox ranking ohem_topk norm_of_outputs correlation centred_features".split(),
    *"dice root_of_a_mean flooding free_bits moe_balance".split(),
}
# A gradient needs all samples in the middle of a model, or of all backwards: these take those of a micro-batch.
IN_THE_MIDDLE = {"moe_capacity", "centred_features", "embedding_bag_offsets"}
OF_A_WEIGHT = {"nested_batch"}  # only the gradient of a weight needs all samples
EVERY_TIME = (
    "mean ignore_index sim_clr barlow_twins flooding ohem_topk mixup f1_logged picks_returned batch_norm".split()
)
EVERY_TIME += ["vae", "whitened"]


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def made(name: str) -> tuple[pl.LightningModule, list[torch.Tensor], Structure]:
    """Return a module and a batch in double precision."""
    torch.manual_seed(0)
    module = ENTRIES[name].make_module().double().train()
    torch.manual_seed(1)
    leaves, structure = flatten(ENTRIES[name].make_batch(SAMPLES))
    leaves = [leaf.double() if leaf.dtype is torch.float32 else leaf for leaf in leaves]
    _, structure = flatten(structure.fill(leaves))
    return module, leaves, structure


@functools.cache
def traced(name: str, symbolic: bool = False) -> tuple[JointGraph, dict[str, Any]]:
    """Return the graph of a batch, and what it is given."""
    module, leaves, structure = made(name)
    joint = trace(Request(module, "training_step", structure, samples=SAMPLES, symbolic=symbolic))
    joint = of_whole_batch(joint)
    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    numbers = torch.tensor(joint.guards.numbers.vector(Situation((0,))), dtype=torch.float64)
    inputs: dict[str, Any] = {}
    for node in joint.module.graph.nodes:
        if node.op == "get_attr":
            inputs[node.name] = functools.reduce(getattr, str(node.target).split("."), joint.module)
        elif node.name in joint.leaves:
            inputs[node.name] = leaves[joint.leaves[node.name]]
        elif node.op == "placeholder":
            own = {**joint.parameters, **joint.buffers}.get(node.name)
            value = node.meta["val"]
            ones = torch.ones(value.shape, dtype=value.dtype) if own is None else None
            inputs[node.name] = ones if own is None else numbers if own == NUMBERS else state[own].detach().clone()
    return joint, inputs


def names(few: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in few else pytest.mark.slow) for name in ENTRIES]


@pytest.mark.parametrize("name", names(EVERY_TIME))
def test_micro_batches_change_no_number(name: str) -> None:
    """Loss, gradients, results and state are those of the uncut graph; so is every value that micro-batches make."""
    joint, inputs = traced(name)
    slicing = Slicing(joint, SAMPLES)
    assert slicing.has_barrier == (name in HEADS)
    limit = OWN_PRECISION.get(name, 1e-11)
    assert max(deviation(Runs(slicing, SIZES, inputs)).values()) < limit
    off, operator = worst_value(Runs(slicing, SIZES, inputs))
    assert off < max(1e-9, limit), operator


@functools.cache
def captured(name: str) -> tuple[Capture, Request, list[torch.Tensor]]:
    """Return a step as stages run it, and a batch."""
    module, leaves, structure = made(name)
    request = Request(module, "training_step", structure, samples=SIZES[0], kept=GRAPHS)
    return capture_step(request), request, leaves


@pytest.mark.parametrize("name", names(EVERY_TIME))
def test_stages_of_micro_batches_have_the_numbers_of_the_plain_step(name: str) -> None:
    """Loss and gradients of the stages are those of autograd on all samples, but for the declared exceptions."""
    capture, request, leaves = captured(name)
    assert capture.is_exact == (name not in IN_THE_MIDDLE)
    if not capture.is_exact or capture.graph.coupled:
        return  # with a warning they take what a micro-batch has: in the middle of a model, and batch statistics
    assert (capture.graph.head is not None) == (name in HEADS | OF_A_WEIGHT)
    for sizes in (SIZES, *OTHER_SIZES):
        if any(capture.misfit(size) for size in sizes):
            continue
        found = deviation_of_parts(capture, request, leaves, sizes=sizes)
        assert found < max(1e-9, 1e2 * OWN_PRECISION.get(name, 0.0)), sizes


class Ranked(pl.LightningModule):
    """What it returns and what it logs read the same square matrix of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        score, higher = self.net(batch)[:, 0], (batch[:, :1] > batch[:, 0]).double()
        apart = torch.nn.functional.softplus(score - score[:, None]) * higher
        self.log("most", apart.amax())
        return apart.sum() / higher.sum()


def test_a_value_of_the_batch_is_handed_out_once_however_many_results_are_made_of_it() -> None:
    captured = capture_step(Request(Ranked(), "training_step", flatten(torch.zeros(6, 3))[1], samples=3))
    clones = captured.joint.module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    copied = [node.args[0] for node in clones]
    assert copied and len(copied) == len(set(copied))


class Drawn(pl.LightningModule):
    """A buffer that is drawn by what all samples make."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 4)
        self.register_buffer("bank", torch.zeros(4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        scores = self.net(batch)
        self.bank.copy_(torch.nn.functional.dropout(scores.detach().mean(0).abs().sqrt()))
        return scores.square().mean()


def test_what_the_graph_cannot_give_is_told() -> None:
    """The new content of a buffer was left out where nothing could make it."""
    request = Request(Drawn(), "training_step", flatten(torch.zeros(6, 3))[1], samples=3, whole_batch="exact")
    capture = capture_step(request)
    assert re.search(r"test_slicing.py:\d+ in training_step needs more than the forwards", capture.whole)
    assert "bank" in capture.joint.mutations


class Sparse(pl.LightningModule):
    """A table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(7, 4, sparse=True), torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(self.table(batch)).square().mean()


def test_sparse_gradients_of_micro_batches_add_up() -> None:
    places = torch.arange(12).reshape(6, 2) % 7
    request = Request(Sparse(), "training_step", flatten(places)[1], samples=3, whole_batch="exact")
    capture = capture_step(request)
    assert capture.is_exact
    assert capture.graph.head is None
    assert deviation_of_parts(capture, request, [places], sizes=(3, 2, 1)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("sizes", OTHER_SIZES, ids=len)
@pytest.mark.parametrize("name", ENTRIES)
def test_it_does_not_matter_how_samples_are_cut(name: str, sizes: tuple[int, ...]) -> None:
    """One part, unequal parts, parts of one sample, of which a batch norm makes nothing but rounding."""
    if min(sizes) == 1 and name == "distillation_frozen_teacher":
        pytest.skip("its batch norms divide what rounding has left of one sample")
    joint, inputs = traced(name)
    assert max(deviation(Runs(Slicing(joint, SAMPLES), sizes, inputs)).values()) < OWN_PRECISION.get(name, 1e-11)


@pytest.mark.parametrize("name", names(["sim_clr", "vae"]))
def test_a_rule_less_changes_no_number(name: str) -> None:
    """Without half of the rules, or any, what is cut less waits more."""
    joint, inputs = traced(name)
    chance = random.Random(name)
    for share in (0.5, 0.5, 1.0):
        without = [rule for rule in sorted(RULES) if chance.random() < share]
        runs = Runs(Slicing(joint, SAMPLES, without_rules=without), SIZES, inputs)
        assert max(deviation(runs).values()) < OWN_PRECISION.get(name, 1e-11)


@pytest.mark.parametrize("name", names(["nanogpt_tied", "masked_spans"]))
def test_a_symbol_for_the_samples_changes_nothing(name: str) -> None:
    """Where the number of samples is a symbol of the graph, the same has to wait."""
    joint, inputs = traced(name, symbolic=True)
    slicing = Slicing(joint, SAMPLES)
    assert slicing.has_barrier == (name in HEADS)
    assert max(deviation(Runs(slicing, SIZES, inputs)).values()) < OWN_PRECISION.get(name, 1e-11)


@pytest.mark.parametrize("name", ["sim_clr", "simclr", "ranking"])
def test_a_head_is_given_no_constants_and_takes_the_memory_that_it_is_priced_at(name: str) -> None:
    module, _, structure = made(name)
    captured = capture_step(Request(module, "training_step", structure, samples=5))
    split, work = captured.split(()), captured.graph.head
    (stage,) = split.stages
    assert stage.head is not None and work is not None
    has_fields = any(leaf.startswith("batch_") for leaf in stage.leaves)
    assert has_fields == (name == "ranking"), "only that compares a field of the batch with itself"

    def content(value_name: str) -> torch.Tensor:
        if value_name in stage.parameters:
            return module.get_parameter(stage.parameters[value_name]).detach()
        if value_name in stage.tangents:
            return torch.ones(())
        value = split.values[value_name]
        return torch.ones(value.shape(SAMPLES, SAMPLES), dtype=value.dtype)

    inputs = [content(value_name) for value_name in stage.head.half.inputs]
    for _ in range(2):  # the first run allocates constants
        with torch.no_grad(), Allocations() as seen:
            stage.head.half.run(SAMPLES, FIRST_KEY, *inputs)
    assert highest(seen.changes) == work.workspace_bytes


def test_most_steps_keep_one_forward_one_backward() -> None:
    """At least 85 of the graphs wait for nothing; the head of a mean that is flooded is given no rows."""
    assert len(ENTRIES) - len(HEADS) >= 85
    flooded = Slicing(traced("flooding")[0], SAMPLES)
    assert not flooded.gathered
    assert {node.meta["val"].numel() for node in flooded.added} == {1}
    contrastive = Slicing(traced("sim_clr")[0], SAMPLES)
    assert contrastive.numbers_per_sample() <= 48
