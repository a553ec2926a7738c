"""A graph may be cut anywhere: stages compute what the step computes."""

from __future__ import annotations

import copy
import random
import resource
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture.sequential import run_stages
from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.capture.stages.split import check_slices
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.core.program import Layout
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.evaluation.resolve import transfer_cuts

KEY = RandomKey(seed=1, step=0, microbatch=0)


class Net(pl.LightningModule):
    """Convolution, batch norm, a skip connection, a shared linear layer, tied weights, dropout, an unused tail."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.shared = nn.Linear(6, 6)
        self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.dropout = nn.Dropout(dropout)

    def shared_step(self, batch):
        x, y = batch
        h = self.norm(self.conv(x)).transpose(1, 2)
        skip = self.first(h)
        for _ in range(2):
            h = h + torch.tanh(self.shared(self.dropout(h)))
        logits = self.last(h + skip).flatten(0, 1)
        return F.cross_entropy(logits, y.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.shared_step(batch), batch_size=batch[0].size(0))


def batch(samples: int = 4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 4, 5, generator=generator), torch.randint(0, 6, (samples, 5), generator=generator)


def captured(module: pl.LightningModule, method: str = "training_step") -> Capture:
    return capture_step(Request(module, method, flatten(batch())[1], samples=4))


def all_cuts(capture: Capture, *, stages: int, seed: int) -> tuple[int, ...]:
    places = [k for k in range(1, len(capture.graph.nodes)) if k not in capture.graph.uncuttable]
    return tuple(sorted(random.Random(seed).sample(places, stages - 1)))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    module = Net().train()
    return module, captured(module)


def autograd(module: Net, samples: int = 4):
    module = copy.deepcopy(module)
    module.log = lambda *args, **kwargs: None
    loss = module.training_step(batch(samples), 0)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in module.named_parameters()}, dict(module.named_buffers())


def leaves(capture, samples=4):
    """Return the tensors of a batch as stages read them."""
    own = batch(samples)
    return capture.with_totals(own, cut=(False,) * len(own), sizes=(samples,), buffers={})[0]


@pytest.mark.parametrize("samples", [4, 3, 1])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_equal_autograd_for_any_cut_and_any_number_of_samples(net, stages, samples):
    module, capture = net
    loss, gradients, buffers = autograd(module, samples)
    for seed in range(3):
        copied = copy.deepcopy(module)
        split = capture.split(all_cuts(capture, stages=stages, seed=seed))
        results, found = run_stages(split, copied, leaves(capture, samples), key=KEY, weight=1.0)
        if samples == 1:  # some processors multiply a single row by another kernel outside of autograd
            torch.testing.assert_close(results[capture.record.loss], loss, rtol=1e-6, atol=0)
        else:
            assert torch.equal(results[capture.record.loss], loss)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            partial = name in ("first.weight", "shared.weight", "shared.bias")  # sums over stages
            if partial or samples == 1:  # autograd's convolution has other strides for one sample
                torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(found[name], gradient), name
        assert all(torch.equal(b, buffers[n]) for n, b in copied.named_buffers())


def test_exact_ties_keep_the_order_of_all_sums(net):
    module, capture = net
    loss, gradients, _ = autograd(module)
    for stages in (2, 3, 4):
        split = capture.split(all_cuts(capture, stages=stages, seed=stages), exact_ties=True)
        results, found = run_stages(split, copy.deepcopy(module), leaves(capture), key=KEY, weight=1.0)
        assert torch.equal(results[capture.record.loss], loss)
        assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


def test_what_crosses_has_the_declared_shape(net):
    module, capture = net
    for samples in (4, 2):
        split = capture.split(all_cuts(capture, stages=4, seed=5))
        values = {}
        for program in split.stages:
            values |= {n: split.values[n].size(samples) for names in program.sends.values() for n in names}
        results, _ = run_stages(split, copy.deepcopy(module), leaves(capture, samples), key=KEY, weight=1.0)
        assert values
        for name, tensor in results.items():
            assert tuple(tensor.shape) == split.values[name].size(samples)


def test_a_tied_parameter_is_reduced_over_its_stages_and_no_other(net):
    _, capture = net
    names = [node.name for node in capture.graph.nodes]
    split = capture.split((next(k for k, node in enumerate(capture.graph.nodes) if "shared" in node.module),))
    shared = {
        p
        for parameters, bucket in zip(split.bucket_parameters, split.traffic.buckets, strict=True)
        if len(bucket.stages) > 1
        for p in parameters
    }
    assert shared == {"first.weight"}, names


def test_gradients_of_parameters_do_not_travel(net):
    """Once they were charged to stage 0 because autograd's number pointed at a repeated view of the parameter."""
    _, capture = net
    split = capture.split(all_cuts(capture, stages=3, seed=2))
    parameters = set(split.bucket_parameters[0])
    assert parameters
    for edge in split.traffic.edges:
        assert edge.direction == "F" or edge.fixed_bytes == 0


def test_terms_of_the_gradient_of_a_shared_parameter_do_not_travel(net):
    """Once they travelled for every micro-batch to the addition of a plain step, which no stage runs."""
    _, capture = net
    uses = [k for k, node in enumerate(capture.graph.nodes) if "shared.weight" in node.parameters]
    split = capture.split((uses[-1],))
    assert all("shared.weight" in stage.gradients.values() for stage in split.stages)
    assert [edge.fixed_bytes for edge in split.traffic.edges if edge.direction == "B"] == [0]


def test_the_last_stage_computes_the_input_gradient_without_the_weight_gradients(net):
    _, capture = net
    last = capture.split((capture.graph.position("norm"),)).stages[-1]
    assert last.input_grad is not None and last.weight_grad is not None
    early = {name for value, name in last.gradients.items() if value in last.input_grad.outputs}
    assert early == {"norm.weight", "norm.bias"}, "one operation makes them together with the input gradient"
    assert set(last.gradients) <= {*last.input_grad.outputs, *last.weight_grad.outputs}


def test_dropout_does_not_depend_on_the_layout():
    torch.manual_seed(0)
    module = Net(dropout=0.5).train()
    capture = captured(module)
    state = torch.get_rng_state()
    runs = []
    for cuts in ((), all_cuts(capture, stages=2, seed=0), all_cuts(capture, stages=3, seed=1)):
        results, _ = run_stages(capture.split(cuts), copy.deepcopy(module), leaves(capture), key=KEY, weight=1.0)
        runs.append(results[capture.record.loss])
    other = RandomKey(seed=1, step=1, microbatch=0)
    later, _ = run_stages(capture.split(()), copy.deepcopy(module), leaves(capture), key=other, weight=1.0)
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], later[capture.record.loss])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("layout", "fits"),
    [
        (Layout(((0,), (1,))), True),
        (Layout(((0, 1), (2, 3))), True),
        (Layout(((0, 1), (2,))), False),
        (Layout(((0, 1), (2, 3)), frozenset({0})), False),
        (Layout(((0, 1), (2, 3)), frozenset({0, 1})), True),
        (Layout(((0, 1), (2, 3)), weights=((3, 1), (1, 1))), False),
        (Layout(((0, 1), (2, 3)), weights=((3, 1), (1, 3))), False),
        (Layout(((0, 1), (2, 3)), weights=((3, 1), (6, 2))), True),
    ],
)
def test_what_cannot_be_sliced_crosses_between_stages_that_share_samples_alike_only(net, layout, fits):
    _, capture = net
    split = capture.split(all_cuts(capture, stages=2, seed=1))
    joined = {name: replace(value, batch_dim=None, combine="cat") for name, value in split.values.items()}
    split = replace(split, values=joined)
    if fits:
        check_slices(split, layout)
        return
    with pytest.raises(PlanError, match="same number of ranks, with the same share and weights, or move the cut"):
        check_slices(split, layout)


def test_cuts_out_of_order_are_refused(net):
    with pytest.raises(PlanError, match="ascending"):
        net[1].split((5, 3))


def test_a_cut_through_overwritten_state_is_refused():
    class Moving(Net):
        def training_step(self, batch, batch_idx):
            old = self.norm.running_mean.clone()
            return super().training_step(batch, batch_idx) + old.sum() * 0

    capture = captured(Moving().train())
    assert capture.graph.uncuttable
    with pytest.raises(PlanError, match="overwritten"):
        capture.split((min(capture.graph.uncuttable),))


def test_the_fingerprint_is_that_of_the_step(net):
    module, capture = net
    assert captured(module).graph.fingerprint == capture.graph.fingerprint
    assert captured(module, "validation_step").graph.fingerprint != capture.graph.fingerprint


def test_validation_reads_parameters_where_training_holds_them(net):
    module, capture = net
    module.eval()
    try:
        validation = captured(module, "validation_step")
    finally:
        module.train()
    for seed in range(5):
        cuts = all_cuts(capture, stages=3, seed=seed)
        transferred = transfer_cuts(capture.graph, cuts, validation.graph)
        held = [set(p.parameters.values()) for p in capture.split(cuts).stages]
        read = [set(p.parameters.values()) for p in validation.split(transferred.cuts).stages]
        for stage in range(3):
            assert read[stage] - held[stage] == set(transferred.missing.get(stage, ()))


def test_batch_statistics_are_found(net):
    _, capture = net
    assert list(capture.flow.coupled.values()) == ["batch statistics"]


def test_a_model_on_the_meta_device_is_captured_without_memory():
    with torch.device("meta"):
        module = Net()
        module.first = nn.Linear(6, 40_000)  # with its twin below, 40,000 x 40,000: 6.4 GB of parameters
        module.last = nn.Linear(40_000, 40_000)
        module.shared = nn.Linear(6, 6)

    class Big(type(module)):
        def training_step(self, batch, batch_idx):
            h = self.norm(self.conv(batch[0])).transpose(1, 2)
            return self.last(self.first(h)).mean()

    module.__class__ = Big
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    capture = captured(module.train())
    split = capture.split((len(capture.graph.nodes) // 2,))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sum(b.bytes for b in split.traffic.buckets) > 6.4e9
    assert grown_kib < 1_000_000
    assert all(p.is_meta for p in module.parameters())


class PerSample(Net):
    """Python counts the samples."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        weights = torch.ones(len(range(x.shape[0])))
        return (self.conv(x).flatten(1).mean(1) * weights).mean()


def test_a_step_that_fixes_the_number_of_samples_is_cut_and_holds_for_such_batches():
    capture = captured(PerSample().train())
    assert not any(capture.misfit(samples) for samples in (4, 3, 2, 1))
    assert capture.misfit_of_results(4) == ""
    assert "fixed to 4" in capture.misfit_of_results(3)


def test_batch_statistics_of_one_value_are_refused():
    class Flat(Net):
        def training_step(self, batch, batch_idx):
            return self.norm(self.conv(batch[0]).mean(2)).square().mean()

    capture = captured(Flat().train())
    assert capture.misfit(2) == ""
    assert "single value per channel in norm" in capture.misfit(1)
