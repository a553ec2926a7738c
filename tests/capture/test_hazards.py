"""A step that a frozen graph would get wrong is refused with the hazard and the user's line."""

from __future__ import annotations

import random
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipe.capture import Request, capture_step, flatten, real_answers
from lightning_pipe.errors import CaptureError

BATCH = (torch.randn(6, 4), torch.randn(6))
COUNTER = [0]


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.temperature = 1.0
        self.generator = np.random.default_rng(0)

    def error(self, batch):
        x, y = batch
        return F.mse_loss(self.linear(x).squeeze(-1), y)

    def training_step(self, batch, batch_idx):
        return self.error(batch) * self.temperature


def capture(module: pl.LightningModule, **options):
    return capture_step(Request(module, "training_step", flatten(BATCH)[1], samples=3, **options))


def step(body):
    """Make a module class with this training step."""
    return type("Module", (Plain,), {"training_step": body})


def by_step(self, batch, batch_idx):
    return self.error(batch) * min(1.0, self.global_step / 100)


def by_epoch(self, batch, batch_idx):
    return self.error(batch) * (0.5**self.current_epoch)


def by_index(self, batch, batch_idx):
    return self.error(batch) * (1 + batch_idx)


def by_counter_of_the_program(self, batch, batch_idx):
    COUNTER[0] += 1
    return self.error(batch) * COUNTER[0]


def by_python_random(self, batch, batch_idx):
    return self.error(batch) * random.random()


def by_python_random_branch(self, batch, batch_idx):
    return self.error(batch) if random.random() < 2 else self.error(batch) * 2


def by_numpy_random(self, batch, batch_idx):
    return self.error(batch) * np.random.beta(1.0, 1.0)


def by_generator_object(self, batch, batch_idx):
    return self.error(batch) * self.generator.random()


def by_item(self, batch, batch_idx):
    loss = self.error(batch)
    return loss * (2 if loss.item() > 3 else 1)


def by_float(self, batch, batch_idx):
    loss = self.error(batch)
    return loss / float(loss.detach())


def by_list(self, batch, batch_idx):
    return self.error(batch) * max(batch[1].tolist())


def by_numpy(self, batch, batch_idx):
    return self.error(batch) * float(batch[1].numpy().max())


def by_shape(self, batch, batch_idx):
    x, y = batch
    return self.error((x[y > 0], y[y > 0]))


def by_state(self, batch, batch_idx):
    self.calls = getattr(self, "calls", 0) + 1
    return self.error(batch)


def by_hidden_state(self, batch, batch_idx):
    self.hidden = self.linear(batch[0]).detach()
    return self.error(batch)


def by_logged_number(self, batch, batch_idx):
    self.log("step", float(self.global_step))
    return self.error(batch)


def by_logged_sometimes(self, batch, batch_idx):
    loss = self.error(batch)
    if batch_idx % 10 == 0:
        self.log("loss", loss)
    return loss


def by_nothing_returned(self, batch, batch_idx):
    self.error(batch)


HAZARDS = {
    by_step: "global_step",
    by_epoch: "current_epoch",
    by_index: "changes from call to call",
    by_counter_of_the_program: "changes from call to call",
    by_python_random: "random numbers",
    by_python_random_branch: "random numbers",
    by_numpy_random: "random numbers",
    by_generator_object: "changes from call to call",
    by_item: "item",
    by_float: "float",
    by_list: "read into Python",
    by_numpy: "numpy",
    by_shape: "data-dependent",
    by_state: "state",
    by_hidden_state: "state",
    by_logged_number: "global_step",
    by_logged_sometimes: "logs something else",
}


@pytest.mark.parametrize("body", HAZARDS, ids=lambda body: body.__name__)
def test_a_step_that_would_be_frozen_is_refused_with_its_line(body):
    before = random.getstate(), np.random.get_state()[1].copy()
    module = step(body)()
    with pytest.raises(CaptureError, match=HAZARDS[body]) as caught:
        capture(module)
    if body is not by_state and body is not by_hidden_state:
        assert f"{__file__}:" in str(caught.value)
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_a_step_without_a_loss_is_refused():
    with pytest.raises(CaptureError, match="returned NoneType"):
        capture(step(by_nothing_returned)())


def test_a_frozen_model_is_refused():
    with pytest.raises(CaptureError, match="nothing to train"):
        capture(Plain().requires_grad_(False))


def test_the_line_of_a_state_assignment_is_found():
    class Counting(Plain):
        def training_step(self, batch, batch_idx):
            self.calls = getattr(self, "calls", 0) + 1
            return self.error(batch)

    with pytest.raises(CaptureError, match=r"test_hazards.py:\d+ in Counting"):
        capture(Counting())


def by_truth(self, batch, batch_idx):
    loss = self.error(batch)
    if torch.isnan(loss):
        return None
    assert batch[0].max() < 1e6
    return loss


def test_truth_values_become_guards_with_the_answers_that_give_a_loss():
    record = capture(step(by_truth)()).record
    assert [guard.expected for guard in record.guards] == [False, True]
    assert all("in by_truth" in guard.line for guard in record.guards)


def by_either(self, batch, batch_idx):
    loss = self.error(batch)
    return loss * 2 if batch[0].sum() > 0 else loss


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_real_run_answers_truth_values_and_leaves_no_trace(sign):
    module = step(by_either)()
    tensors, structure = flatten((sign * BATCH[0].abs(), BATCH[1]))
    request = Request(module, "training_step", structure, samples=3)
    request = Request(**{**vars(request), "answers": partial(real_answers, request, tensors)})
    state = torch.get_rng_state()
    assert [g.expected for g in capture_step(request).record.guards] == [sign > 0]
    assert torch.equal(torch.get_rng_state(), state)


def test_item_can_be_logged():
    def body(self, batch, batch_idx):
        loss = self.error(batch)
        self.log("loss", loss.item())
        return loss

    record = capture(step(body)()).record
    assert record.calls[0].value.name == record.loss


def test_an_attribute_that_somebody_sets_between_steps_is_seen():
    module = Plain()
    captured = capture(module)
    assert captured.changed() == ""
    module.temperature = 2.0
    assert "temperature" in captured.changed()


def test_attributes_that_the_step_does_not_read_may_change():
    module = Plain()
    module.best = 0.0
    captured = capture(module)
    module.best = 1.0
    assert captured.changed() == ""


def test_capture_leaves_the_module_as_it_was():
    module = Plain()
    attributes, kinds = dict(vars(module)), [type(m) for m in module.modules()]
    parameters = {n: (id(p), p.detach().clone()) for n, p in module.named_parameters()}
    torch_state = torch.get_rng_state()
    capture(module)
    assert dict(vars(module)) == attributes
    assert [type(m) for m in module.modules()] == kinds
    assert {n: id(p) for n, p in module.named_parameters()} == {n: i for n, (i, _) in parameters.items()}
    assert all(torch.equal(p, parameters[n][1]) for n, p in module.named_parameters())
    assert torch.equal(torch.get_rng_state(), torch_state)
