"""A step is seen as units: what they read through glue, what escapes, what stays behind; nothing is left changed."""

from __future__ import annotations

import pickle
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipe.capture import Request, flatten
from lightning_pipe.capture.recording.unit_choice import UnitCall, choose
from lightning_pipe.capture.recording.unit_trace import trace_units
from lightning_pipe.capture.recording.units import UnitTrace
from lightning_pipe.errors import CaptureError

X, Y = torch.randn(7, 4), torch.randn(7)
NOTHING = frozenset()


def unit(*numbers):
    return frozenset(("unit", k) for k in numbers)


def leaf(*numbers):
    return frozenset(("leaf", i) for i in numbers)


def traced(module: pl.LightningModule, batch=(X, Y), *, samples=3, parts=2, method="training_step") -> UnitTrace:
    tensors, structure = flatten(batch)
    request = Request(module, method, structure, samples=samples)
    return pickle.loads(pickle.dumps(trace_units(request, tensors, parts=parts)))


class Plain(pl.LightningModule):
    """Three layers; what happens between them is the test's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.position = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.zeros(4))
        self.seen, self.hidden, self.history = 0, None, []
        self.accuracy = MulticlassAccuracy(num_classes=2)

    def error(self, h, y):
        return F.mse_loss(self.c(h).squeeze(-1), y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.error(self.b(self.a(x)), y)


def step(body, **methods) -> pl.LightningModule:
    return type("Module", (Plain,), {"training_step": body, **methods})()


def reads(trace: UnitTrace):
    return [u.reads for u in trace.units]


def test_a_unit_reads_the_unit_before_it_and_the_loss_reads_the_last():
    trace = traced(Plain())
    assert [u.path for u in trace.units] == ["a", "b", "c"]
    assert reads(trace) == [leaf(0), unit(0), unit(1)]
    assert trace.tail == unit(2) | leaf(1)
    assert (trace.escapes, trace.changes, trace.is_random, trace.combine) == ((), (), False, "mean")
    assert trace.trained == {f"{m}.{p}" for m in "abc" for p in ("weight", "bias")}
    assert trace.loss == torch.float32 and trace.samples == 3
    first = trace.units[0]
    (output,) = first.outputs
    assert (output.shape, output.batch_dim, output.rows, output.has_gradient) == ((3, 4), 0, 1, True)
    assert (first.flops, first.parameters, first.is_fixed) == (2 * 3 * 4 * 4, ("a.weight", "a.bias"), True)
    assert first.forward_s > 0 and first.backward_s > 0


def test_a_skip_and_a_parameter_of_glue_are_sources_through_any_operations():
    def body(self, batch, batch_idx):
        x, y = batch
        h = self.a(x) + self.position
        return self.error(torch.cat([h, self.b(h.relu())], dim=1)[:, 2:6], y)

    trace = traced(step(body))
    assert reads(trace) == [leaf(0), unit(0) | {("parameter", "position")}, unit(0, 1) | {("parameter", "position")}]
    assert "position" in trace.trained


def test_no_gradient_flows_through_what_was_detached_but_it_is_read():
    def body(self, batch, batch_idx):
        x, y = batch
        return self.error(self.b(self.a(x).detach()), y)

    trace = traced(step(body))
    assert reads(trace)[1] == unit(0)
    assert [u.outputs[0].has_gradient for u in trace.units] == [False, True, True]
    assert "a.weight" in trace.trained  # another batch may train it; where none does, it has no gradient


@pytest.mark.parametrize("relu", [F.relu_, lambda h: h.view(-1).data.relu_()], ids=["itself", "a view of its data"])
def test_an_output_that_glue_changes_in_place_is_overwritten(relu):
    def body(self, batch, batch_idx):
        x, y = batch
        h = self.a(x)
        relu(h)
        return self.error(self.b(h), y)

    trace = traced(step(body))
    assert [u.outputs[0].is_overwritten for u in trace.units] == [True, False, False]
    assert reads(trace)[1] == unit(0)


def test_what_is_written_into_memory_is_a_source_of_it():
    def body(self, batch, batch_idx):
        x, y = batch
        h = torch.zeros(len(x), 4)
        view = h[:, :2]
        view.copy_(self.a(x)[:, :2])
        return self.error(self.b(x) + h, y)

    assert reads(traced(step(body)))[2] == unit(0, 1)


def test_a_unit_that_returns_its_input_makes_nothing_else_depend_on_it():
    class Through(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x) * mask, mask

    def body(self, batch, batch_idx):
        x, y = batch
        mask = x > 0
        h, _ = self.through(x, mask)
        return self.error(self.b(x * mask) + h, y)

    module = step(body)
    module.through = Through(4, 4)
    trace = traced(module)
    assert reads(trace) == [leaf(0), leaf(0), unit(0, 1)]
    assert [o.dtype for o in trace.units[0].outputs] == [torch.float32, torch.bool]


def test_packed_sequences_are_read_as_a_whole_and_have_no_fixed_shape():
    def body(self, batch, batch_idx):
        x, lengths, y = batch
        packed = pack_padded_sequence(self.a(x), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.error(padded.sum(1), y)

    module = step(body)
    module.rnn = nn.GRU(4, 4, batch_first=True)
    trace = traced(module, (torch.randn(7, 5, 4), torch.tensor([5, 2, 3, 1, 2, 5, 1]), Y))
    assert [u.path for u in trace.units] == ["a", "rnn", "c"]
    assert reads(trace) == [leaf(0), unit(0) | leaf(1), unit(1) | leaf(1)]
    assert [u.is_fixed for u in trace.units] == [True, False, True]
    assert [(e.before, e.reads) for e in trace.escapes] == [(1, unit(0) | leaf(1))]


def by_item(h):
    return h / max(1.0, h.detach().norm().item())


def by_truth(h):
    return h * 2 if h.sum() > 0 else h


def by_numpy(h):
    return h * float(h.detach().numpy().max())


def by_array(h):
    return h * float(np.asarray(h.detach()).max())


def by_list(h):
    return h * h.tolist()[0][0]


def by_mask(h):
    return h + h[h > 0].sum()


@pytest.mark.parametrize("use", [by_item, by_truth, by_numpy, by_array, by_list, by_mask])
def test_values_that_python_or_a_shape_depends_on_escape_with_their_line(use):
    def body(self, batch, batch_idx):
        x, y = batch
        return self.error(self.b(use(self.a(x))), y)

    (escape,) = set(traced(step(body)).escapes)
    assert (escape.before, escape.reads) == (1, unit(0))
    assert f"test_unit_trace.py:{use.__code__.co_firstlineno + 1} in {use.__name__}" in escape.line


def test_choosing_by_integers_is_no_escape():
    def body(self, batch, batch_idx):
        x, y = batch
        return self.error(self.b(self.a(x)[torch.randperm(len(x))]), y)

    trace = traced(step(body))
    assert trace.escapes == () and trace.is_random


def test_random_states_are_as_before_however_the_step_draws():
    def body(self, batch, batch_idx):
        x, y = batch
        share = np.random.beta(0.4, 0.4) * random.random()
        return self.error(self.b(self.a(share * x + (1 - share) * x[torch.randperm(len(x))])), y)

    module = step(body)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert traced(module).is_random
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])


def test_state_that_glue_changes_is_named_with_what_it_is_made_of_and_put_back():
    def body(self, batch, batch_idx):
        x, y = batch
        self.seen += 1
        h = self.a(x) if self.hidden is None else self.a(x) + self.hidden.mean()
        self.mean.lerp_(h.detach().mean(0), 0.1)
        h = self.b(h)
        self.hidden = h.detach()
        loss = self.error(h - self.mean, y)
        self.history.append(loss.detach())
        return loss

    module = step(body)
    trace = traced(module)
    changes = [(c.name, c.before, c.reads, c.is_tensor) for c in trace.changes]
    old = ("state", "mean"), ("state", "hidden")
    assert changes == [("mean", 1, unit(0) | {*old}, True)], "attributes are put back before every play"
    assert all("test_unit_trace.py:" in c.line for c in trace.changes)
    assert trace.whole == "what it keeps in the buffer mean depends on the samples"
    assert unit(1) | {("state", "mean")} <= trace.tail, "the last stage can say what is kept"
    assert reads(trace)[1] == unit(0) | {("state", "hidden")}, "the hidden state of the steady step is read"
    assert reads(trace)[2] >= unit(0, 1)
    assert (module.seen, module.hidden, module.history) == (0, None, [])
    assert torch.equal(module.mean, torch.zeros(4))


def test_a_counter_inside_a_unit_belongs_to_its_owner():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    module = Plain()
    module.b = Counting(4, 4)
    assert traced(module).changes == ()
    assert module.b.calls == 0


def test_parameters_that_glue_moves_are_changes_and_put_back():
    def body(self, batch, batch_idx):
        x, y = batch
        self.b.weight.data = self.b.weight.data * 0.9 + self.a.weight.data * 0.1
        with torch.no_grad():
            self.b.bias.mul_(0.5)
        return self.error(self.b(self.a(x)), y)

    module = step(body)
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()}
    trace = traced(module)
    found = {c.name: (c.before, c.reads, c.is_tensor) for c in trace.changes}
    weights = frozenset({("parameter", "a.weight"), ("parameter", "b.weight")})
    assert found == {"b.weight": (0, weights, False), "b.bias": (0, frozenset({("parameter", "b.bias")}), False)}
    for name, p in module.named_parameters():
        same, where, content = before[name]
        assert p is same and p.data_ptr() == where and torch.equal(p, content), name


def test_batch_statistics_gradients_and_modes_are_as_before():
    module = Plain()
    module.b = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout(0.5).eval())
    module.a.weight.grad = gradient = torch.ones(4, 4)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    modes = [m.training for m in module.modules()]
    trace = traced(module, parts=1)
    names = ("b.0.num_batches_tracked", "b.0.running_mean", "b.0.running_var")
    assert tuple(sorted(n for u in trace.units for n in u.mutations)) == names
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert module.a.weight.grad is gradient and torch.equal(gradient, torch.ones(4, 4))
    assert module.b[1].weight.grad is None
    assert [m.training for m in module.modules()] == modes


def tree(*inner: UnitCall, parameters: int = 100, seconds: float = 100.0) -> UnitCall:
    return UnitCall("", parameters, seconds, list(inner))


def test_nested_blocks_are_opened_where_there_are_more_parts():
    layers = [
        UnitCall(f"{b}.{i}", 10, 10.0, [UnitCall(f"{b}.{i}.{j}", 5, 5.0) for j in "qo"]) for b in "xyz" for i in "123"
    ]
    blocks = [UnitCall(b, 30, 30.0, [layer for layer in layers if layer.path.startswith(b)]) for b in "xyz"]
    assert choose(tree(*blocks), 1) == choose(tree(*blocks), 3) == {"x", "y", "z"}
    assert choose(tree(*blocks), 2) == {"x.1", "x.2", "x.3", "y.1", "y.2", "y.3", "z"}  # two against one are uneven
    assert choose(tree(*blocks), 8) == {call.path for layer in layers for call in layer.inner}
    assert choose(tree(*blocks), 1, frozenset({"y"})) == {"x", "y.1", "y.2", "y.3", "z"}


def test_a_call_without_parameters_is_glue_unless_it_takes_time():
    calls = [UnitCall("linear", 100, 50.0), UnitCall("relu", 0, 4.0), UnitCall("spectrum", 0, 30.0)]
    assert choose(tree(*calls), 2) == {"linear", "spectrum"}
    quick = [UnitCall(call.path, call.parameters, call.seconds / 1e6) for call in calls]
    assert choose(tree(*quick, seconds=1e-4), 2) == {"linear"}


def test_a_large_module_that_does_its_work_itself_is_a_unit():
    assert choose(tree(UnitCall("attention", 100, 80.0, [UnitCall("attention.drop", 0, 2.0)])), 4) == {"attention"}


def test_every_call_of_a_shared_module_is_a_unit():
    def body(self, batch, batch_idx):
        x, y = batch
        return self.error(self.b(self.a(self.b(x))), y)

    trace = traced(step(body))
    assert [u.path for u in trace.units] == ["b", "a", "b", "c"]
    assert reads(trace)[2] == unit(1)


def test_a_tied_parameter_has_its_canonical_name_everywhere():
    def body(self, batch, batch_idx):
        x, y = batch
        return self.error(F.linear(self.b(self.a(x)), self.b.weight), y)

    module = step(body)
    module.b.weight = module.a.weight
    trace = traced(module)
    assert trace.units[1].parameters == ("a.weight", "b.bias")
    assert reads(trace)[2] == unit(1) | {("parameter", "a.weight")}


class Gate(nn.Linear):
    def forward(self, x):
        scores = super().forward(x).softmax(-1)
        self.balance = scores.square().mean()
        return scores


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.inside = Gate(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.inside(x) * self.gate(x)


def test_a_unit_is_opened_if_glue_reads_what_it_keeps_in_an_attribute():
    def body(self, batch, batch_idx):
        x, y = batch
        return self.error(self.block(self.a(x)), y) + self.block.gate.balance

    module = step(body)
    module.block = Gated()
    trace = traced(module, parts=1)
    gate = {("parameter", "block.gate.weight"), ("parameter", "block.gate.bias")}
    assert [u.path for u in trace.units] == ["a", "block.inside", "c"]
    assert reads(trace) == [leaf(0), unit(0), unit(0, 1) | gate]
    assert trace.tail == unit(0, 2) | leaf(1) | gate
    assert trace.head == "holds"  # which keeps it once per batch
    assert not hasattr(module.block.gate, "balance")


def test_a_step_that_differentiates_through_all_its_units_has_none():
    def body(self, batch, batch_idx):
        x = batch[0].requires_grad_()
        u = self.c(self.a(x).tanh())
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return slope.square().mean()

    with pytest.raises(CaptureError, match=r"calls no sub-module.*a, c compute without returning"):
        traced(step(body))


def test_alignment_losses_escape_where_their_lengths_are_read():
    def body(self, batch, batch_idx):
        x, lengths, y = batch
        scores = self.b(self.a(x)).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, lengths, torch.full((len(x),), 2), zero_infinity=True)

    batch = torch.randn(7, 5, 4), torch.full((7,), 5), torch.randint(1, 4, (7, 2))
    trace = traced(step(body), batch)
    assert [(e.before, e.reads) for e in trace.escapes] == [(2, unit(1) | leaf(1, 2))]
    assert trace.tail == unit(1) | leaf(1, 2) and trace.combine == "mean"


def by_dice(self, batch, batch_idx):
    x, y = batch
    return self.error(self.b(x) if random.random() < 0.5 else self.a(x), y)


def test_what_is_called_in_some_runs_only_is_glue_and_trained():
    random.seed(1)
    trace = traced(step(by_dice))
    assert [unit.path for unit in trace.units] == ["c"]
    assert {"a.weight", "b.weight", "c.weight"} <= trace.trained


def test_a_step_that_calls_all_units_in_some_runs_only_is_refused_with_the_first():
    random.seed(1)
    with pytest.raises(
        CaptureError, match=r"call 0 was [ \w]+ in one run and [ \w]+ in another.* cannot be a pipeline"
    ):
        traced(step(lambda self, batch, _: (self.b if random.random() < 0.5 else self.a)(batch[0]).mean()))


def loss_sum(e):
    return e.square().sum()


def loss_sum_of_terms(e):
    return torch.stack([e.square().sum(), e.abs().sum()]).sum() * 0.5


def loss_over_samples(e):
    return e.square().sum() / len(e)


def loss_mean(e):
    return -2 * e.square().mean() + e.abs().mean()


def loss_mixed(e):
    return e.square().sum() + e.abs().mean()


def loss_function(e):
    return F.mse_loss(e, torch.zeros_like(e), reduction="sum")


LOSSES = {
    loss_sum: "sum",
    loss_sum_of_terms: "sum",
    loss_function: "sum",
    loss_over_samples: "mean",
    loss_mean: "mean",
    loss_mixed: "mean",
}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_of_microbatches_are_added_only_if_they_are_sums(loss):
    def body(self, batch, batch_idx):
        x, y = batch
        return loss(self.c(self.a(x)).squeeze(-1) - y)

    assert traced(step(body)).combine == LOSSES[loss]


def test_dimensions_of_samples_and_their_order_in_memory_are_found():
    def body(self, batch, batch_idx):
        x, y = batch
        time_first = self.a(x).transpose(0, 1)
        flat = self.b(time_first.reshape(-1, 4))
        tall = self.table(torch.arange(5))
        return self.error(flat, y.repeat(5)) + self.turned(x).mean() + tall.mean()

    class Turned(nn.Linear):
        def forward(self, x):
            return super().forward(x).transpose(0, 2)

    module = step(body)
    module.table, module.turned = nn.Embedding(5, 2), Turned(4, 4)
    trace = traced(module, (torch.randn(7, 5, 4), Y))
    found = {u.path: [(o.batch_dim, o.rows, o.order) for o in u.outputs] for u in trace.units}
    assert found == {
        "a": [(0, 1, ())],
        "b": [(0, 5, ())],
        "table": [(None, 0, ())],
        "c": [(0, 5, ())],
        "turned": [(2, 1, (2, 1, 0))],
    }


def test_a_batch_that_cannot_be_cut_is_traced_as_it_is():
    trace = traced(Plain(), samples=None)
    assert trace.samples == 7
    assert all(u.is_fixed and u.outputs[0].batch_dim is None and u.outputs[0].shape[0] == 7 for u in trace.units)


@pytest.mark.parametrize("samples", [1, 2])
def test_few_samples_are_compared_with_more(samples):
    trace = traced(Plain(), (X[:samples], Y[:samples]), samples=samples)
    assert [u.outputs[0].batch_dim for u in trace.units] == [0, 0, 0]


def test_a_checkpoint_around_units_keeps_nothing_and_is_run_again():
    def body(self, batch, batch_idx):
        x, y = batch
        return self.error(checkpoint(lambda h: self.b(self.a(h).tanh()), x, use_reentrant=False), y)

    trace = traced(step(body))
    assert [u.path for u in trace.units] == ["a", "b", "c"]
    assert "a.weight" in trace.trained


def test_what_autograd_keeps_is_counted_without_inputs_and_parameters():
    class Squashed(nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh().exp()

    module = Plain()
    module.b = Squashed(4, 4)
    rows = 3 * 4 * 4
    kept = {u.path: u.saved_bytes for u in traced(module).units}
    assert kept == {"a": 0, "b": 2 * rows, "c": 0}, "a linear layer keeps its input only; tanh and exp keep results"


def test_an_evaluation_has_no_loss_and_its_metrics_and_logs_are_the_tail():
    def body(self, batch, batch_idx):
        x, y = batch
        h = self.a(x)
        self.accuracy(h[:, :2], (y > 0).long())
        self.log("accuracy", self.accuracy)
        self.log("mean", self.b(x).mean())

    module = step(body, validation_step=body)
    module.eval()
    trace = traced(module, method="validation_step")
    assert [u.path for u in trace.units] == ["a", "b"]
    assert trace.tail == unit(0, 1) | leaf(1)
    assert (trace.loss, trace.trained, trace.units[0].backward_s) == (None, NOTHING, 0.0)


class WithoutLength(tuple):
    """A collection of the user's that has no length (e3nn's irreps have items of this kind)."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_collection_without_length_is_state_like_any_other():
    class Net(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = WithoutLength([torch.ones(4)])

        def training_step(self, batch, batch_idx):
            (scale,) = iter(self.kinds)
            return self.error(self.b(self.a(batch[0]) * scale), batch[1])

    assert len(traced(Net()).units) == len(traced(Plain()).units)


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 64)

    def forward(self, data):
        data["lengths"] = self.inner(data["places"] @ data["cell"])
        return data


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 1)

    def forward(self, data):
        data["energy"] = self.inner(torch.tanh(data["lengths"])).sum()
        return data


class Forces(nn.Module):
    """An energy and its gradients, as potentials of molecules have them."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths, self.energy = Lengths(), Energy()

    def forward(self, places):
        with torch.enable_grad():
            data = {"places": places.detach().requires_grad_(), "cell": torch.eye(4, requires_grad=True)}
            data = self.energy(self.lengths(data))  # which pass their inputs on
            inputs = [data["places"], data["cell"]]
            return torch.autograd.grad(data["energy"], inputs, create_graph=True)[0]


def test_sub_modules_through_which_their_parent_differentiates_are_one_unit():
    class Net(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.potential = Forces()

        def training_step(self, batch, batch_idx):
            return self.error(self.a(self.potential(batch[0])), batch[1])

    assert [unit.path for unit in traced(Net()).units] == ["potential", "a", "c"]
