"""What a frozen graph would get wrong is tracked, guarded, or refused with the hazard and the user's line."""

from __future__ import annotations

import os
import random
import re
import threading
from functools import partial
from typing import ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_pipe.capture import Request, capture_step, flatten, real_answers
from lightning_pipe.capture.steps.other_ranks import no_training_state
from lightning_pipe.capture.tracked.number_expressions import Situation, evaluate
from lightning_pipe.errors import CaptureError, StepError

SAMPLES, SLICE = 6, 3  # of a batch, and of what is traced
BATCH = (torch.randn(SAMPLES, 4), torch.randn(SAMPLES))
COUNTER = [0]
NOW = Situation((0,))


def levels():
    while True:
        yield 1.0


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.temperature = 1.0
        self.generator = np.random.default_rng(0)
        self.losses = []
        self.levels = levels()
        next(self.levels)

    def error(self, batch):
        x, y = batch
        return F.mse_loss(self.linear(x).squeeze(-1), y)

    def training_step(self, batch, batch_idx):
        return self.error(batch) * self.temperature


def capture(module: pl.LightningModule, **options):
    return capture_step(Request(module, "training_step", flatten(BATCH)[1], samples=SLICE, **options))


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


def by_generator_function(self, batch, batch_idx):
    return self.error(batch) * next(self.levels)


def by_file(self, batch, batch_idx):
    with open(__file__) as file:
        return self.error(batch) * len(file.readline())


def by_seed(self, batch, batch_idx):
    torch.manual_seed(3)
    return self.error(batch) * torch.rand(())


def by_kept_list(self, batch, batch_idx):
    self.losses.append(self.error(batch))
    return torch.stack(self.losses).mean()


def by_clock_of_the_trainer(self, batch, batch_idx):
    return self.error(batch) * len(self.trainer.callback_metrics)


HAZARDS = {
    by_counter_of_the_program: r"changes COUNTER\[0\]|changes COUNTER and reads it again",
    by_python_random: "random numbers",
    by_python_random_branch: "random numbers",
    by_numpy_random: "random numbers",
    by_generator_object: "changes self.generator and reads it again",
    by_generator_function: "advances the generator levels",
    by_file: "opens the file",
    by_seed: r"manual_seed\(\)",
    by_kept_list: "changes self.losses and reads it again",
    by_clock_of_the_trainer: r"trainer.callback_metrics",
    by_item: "item",
    by_float: "float",
    by_list: "read into Python",
    by_numpy: "numpy",
    by_shape: "data-dependent",
    by_state: "state",
}


@pytest.mark.parametrize("body", HAZARDS, ids=lambda body: body.__name__)
def test_a_step_that_would_be_frozen_is_refused_with_its_line(body):
    before = random.getstate(), np.random.get_state()[1].copy()
    module = step(body)()
    module.trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    with pytest.raises(CaptureError, match=HAZARDS[body]) as caught:
        capture(module)
    if body not in (by_state, by_counter_of_the_program):  # nothing says which assignment it was
        assert f"{__file__}:" in str(caught.value)
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])


def test_what_other_threads_do_meanwhile_is_none_of_the_step():
    """A logger's thread may write its file, a monitor look at gradients, while the step is traced."""
    module = Plain()
    optimizer = torch.optim.Adam(module.parameters())
    errors, looks, over = [], [], threading.Event()

    def look():
        while not over.is_set():
            try:
                with open(__file__) as file:
                    file.readline()
                looks.append((module.linear.weight.grad, optimizer.state))
                torch.set_rng_state(torch.get_rng_state())
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(3):
            capture(module)
    finally:
        over.set()
        thread.join()
    assert not errors and looks


USES_OF_GRADIENTS = {
    "read": lambda module: module.linear.weight.grad,
    "clipped": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    "clipped by value": lambda module: nn.utils.clip_grad_value_(module.parameters(), 1.0),
    "measured by Lightning": lambda module: grad_norm(module, 2),
    "zeroed": lambda module: module.zero_grad(),
    "zeroed by an optimizer": lambda module: module.optimizer.zero_grad(),
    "written": lambda module: setattr(module.linear.weight, "grad", None),
}


@pytest.mark.parametrize("use", USES_OF_GRADIENTS)
def test_gradients_that_a_step_uses_by_itself_or_by_a_helper_are_refused_with_its_line(use):
    """A helper of torch clipped nothing in a pipeline, and an accumulation window on one device."""

    def body(self, batch, batch_idx):
        USES_OF_GRADIENTS[use](self)
        return self.error(batch)

    module = step(body)()
    module.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match=r"gradient of a parameter, which .* at .*test_hazards.py:\d+ in <lambda>"):
        capture(module)


def test_a_step_may_move_its_modules():
    """Moving looks whether gradients have to come along."""
    module = Plain()
    with no_training_state(module):
        module.to(torch.float32)


class Counters:
    """A trainer that has nothing but counters."""

    global_step = current_epoch = 0


COUNTED = {  # (step, epoch, index of the batch) -> what the graph reads
    by_step: {(0, 0, 0): 0.0, (50, 1, 3): 0.5},
    by_epoch: {(0, 0, 0): 1.0, (9, 3, 1): 0.125},
    by_index: {(0, 0, 0): 1.0, (9, 3, 6): 7.0},
}


@pytest.mark.parametrize("body", COUNTED, ids=lambda body: body.__name__)
def test_a_counter_is_an_input_of_the_graph(body):
    module, captured = step(body)(), None
    vars(module)["_trainer"] = trainer = Counters()
    for (steps, epoch, index), number in COUNTED[body].items():
        trainer.global_step, trainer.current_epoch = steps, epoch
        captured = captured or capture(module)
        assert captured.changed(Situation((index,))) == ""
        assert captured.numbers(Situation((index,))) == [number]


def test_a_comparison_with_a_counter_is_a_guard():
    module = step(by_step)()
    vars(module)["_trainer"] = trainer = Counters()
    captured = capture(module)
    trainer.global_step = 99
    assert captured.changed(Situation((0,))) == ""
    trainer.global_step = 100
    assert re.match(r"what depends on self.global_step was True and is False now \(at .*by_step", captured.changed(NOW))


def test_a_counter_that_is_logged_is_computed_for_every_batch():
    def body(self, batch, batch_idx):
        self.log("half", self.global_step / 2)
        return self.error(batch)

    module = step(body)()
    vars(module)["_trainer"] = trainer = Counters()
    captured = capture(module)
    trainer.global_step = 7
    assert captured.changed(NOW) == ""
    assert evaluate(captured.record.calls[0].value.expression, NOW) == 3.5


def test_a_counter_that_becomes_a_plain_number_is_a_guard():
    module = step(by_logged_number)()
    vars(module)["_trainer"] = trainer = Counters()
    captured = capture(module)
    trainer.global_step = 1
    assert "self.global_step was 0 and is 1 now" in captured.changed(NOW)


def test_what_is_logged_for_some_batches_only_is_captured_for_both_kinds():
    module = step(by_logged_sometimes)()
    for index, others, logged in ((0, (10, 20), 1), (3, (4, 9), 0)):
        captured = capture(module, arguments=(index,))
        assert len(captured.record.calls) == logged
        assert all(captured.changed(Situation((other,))) == "" for other in others)
        assert "batch_idx" in captured.changed(Situation((5 if index == 0 else 10,)))


def test_what_the_step_leaves_without_having_read_it_is_a_result():
    kept = capture(step(by_hidden_state)()).record.kept
    assert [(one.name, one.how) for one in kept] == [("self.hidden", "assign")]


def test_what_the_step_appends_without_having_read_it_is_a_result():
    def body(self, batch, batch_idx):
        loss = self.error(batch)
        self.losses.append(loss.detach())
        return loss

    module = step(body)()
    captured = capture(module)
    assert [(one.name, one.how, len(one.value)) for one in captured.record.kept] == [("self.losses", "extend", 1)]
    assert module.losses == []
    module.losses.append(1.0)
    assert captured.changed(NOW) == ""


class Settings:
    scale = 1.0


SETTINGS, BOX = Settings(), {"scale": 1.0}


def changed_by(change, body):
    module = step(body)()
    captured = capture(module)
    assert captured.changed(NOW) == ""
    change(module)
    return captured.changed(NOW)


def test_a_class_attribute_that_a_helper_inherits_is_guarded(monkeypatch):
    found = changed_by(
        lambda _: monkeypatch.setattr(Settings, "scale", 2.0),
        lambda self, batch, batch_idx: self.error(batch) * SETTINGS.scale,
    )
    assert found == "Settings.scale was 1.0 and is 2.0 now"


def test_a_closure_of_the_step_is_guarded():
    box = {"scale": 1.0}
    found = changed_by(lambda _: box.update(scale=2.0), lambda self, batch, batch_idx: self.error(batch) * box["scale"])
    assert "box['scale'] was 1.0 and is 2.0 now" in found


def test_a_global_is_guarded(monkeypatch):
    found = changed_by(
        lambda _: monkeypatch.setitem(BOX, "scale", 2.0),
        lambda self, batch, batch_idx: self.error(batch) * BOX["scale"],
    )
    assert found == "BOX['scale'] was 1.0 and is 2.0 now"


def test_the_environment_is_guarded(monkeypatch):
    monkeypatch.setenv("SCALE_OF_A_TEST", "1")
    found = changed_by(
        lambda _: monkeypatch.setenv("SCALE_OF_A_TEST", "2"),
        lambda self, batch, batch_idx: self.error(batch) * float(os.environ["SCALE_OF_A_TEST"]),
    )
    assert found.startswith("os.environ")


def test_a_method_that_is_replaced_is_seen():
    def change(module):
        module.error = lambda batch: batch[0].sum() * module.linear.weight.sum()

    assert changed_by(change, lambda self, batch, batch_idx: self.error(batch)).startswith("self.error was absent")


def test_a_forward_that_is_replaced_is_seen():
    def change(module):
        module.linear.forward = lambda x: F.linear(x, module.linear.weight * 2)

    found = changed_by(change, lambda self, batch, batch_idx: self.error(batch))
    assert found.startswith("self.linear.forward was absent")


def test_attributes_that_are_read_past_the_module_are_guarded():
    found = changed_by(
        lambda module: setattr(module, "temperature", 2.0),
        lambda self, batch, batch_idx: self.error(batch) * vars(self)["temperature"],
    )
    assert found == "self.temperature was 1.0 and is 2.0 now"


def test_the_default_dtype_is_guarded():
    try:
        found = changed_by(
            lambda _: torch.set_default_dtype(torch.float64), lambda self, batch, batch_idx: self.error(batch)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == "torch's default dtype was torch.float32 and is torch.float64 now"


def test_a_step_without_a_loss_is_refused():
    with pytest.raises(CaptureError, match="returned NoneType"):
        capture(step(by_nothing_returned)())


@pytest.mark.parametrize("needed", [4, 7])
def test_a_step_may_need_more_samples_than_a_micro_batch_has(needed):
    def hardest(self, batch, batch_idx):
        return F.mse_loss(self.linear(batch[0]).squeeze(-1), batch[1], reduction="none").topk(needed).values.mean()

    said = r"training_step raises RuntimeError at .*test_hazards.py:\d+ in hardest: k not in range"
    if needed <= SAMPLES:
        assert capture(step(hardest)()).graph.head is not None
    else:
        with pytest.raises(StepError, match=said):
            capture(step(hardest)())


def test_a_size_that_values_decide_is_refused_where_it_leaves_the_step():
    """It was taken for the number of samples."""

    def counted(self, batch, batch_idx):
        return {"loss": self.error(batch), "kinds": len(batch[1].round().unique())}

    with pytest.raises(CaptureError, match="a size that depends on the values of tensors leaves the step"):
        capture(step(counted)())


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
    assert captured.changed(NOW) == ""
    module.temperature = 2.0
    assert "temperature" in captured.changed(NOW)


@pytest.mark.parametrize(
    "use",
    [
        lambda self, error, nan: torch.where(error > 9e9, error.new_tensor(nan), error),
        lambda self, error, nan: torch.where(error > 9e9, torch.tensor([nan, 1j * nan]).real.sum(), error),
        lambda self, error, nan: self.log("worst", nan) or error,
        lambda self, error, nan: {"loss": error, "worst": nan},
        lambda self, error, nan: error * (1.0 if np.isnan(self.worst) else 2.0),
    ],
)
def test_not_a_number_is_a_constant_like_any_other(use):
    def body(self, batch, batch_idx):
        return use(self, self.error(batch), float("nan"))

    module = step(body)()
    module.worst = np.float32("nan")
    captured = capture(module)
    module.worst = np.float32("nan")
    assert not captured.changed(NOW)


def test_attributes_that_the_step_does_not_read_may_change():
    module = Plain()
    module.best = 0.0
    captured = capture(module)
    module.best = 1.0
    assert captured.changed(NOW) == ""


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


def test_capture_does_not_register_a_subclass():
    class Registering(Plain):
        known: ClassVar[list[str]] = []

        def __init_subclass__(cls) -> None:
            Registering.known.append(cls.__name__)

    class Registered(Registering):
        pass

    captured = capture(Registered())
    assert Registering.known == ["Registered"]
    assert captured.record.kept == ()


def until_a_tensor_says_so(self, batch, batch_idx):
    left, done = torch.full((len(batch[0]),), 3), False
    while not done:
        left = left - 1
        done = left.max() == 0
    return self.error(batch)


def test_a_loop_that_a_tensor_ends_is_not_followed_where_nobody_knows_the_answers():
    """Answers were guessed one after another, each by a longer trace, for minutes."""
    with pytest.raises(CaptureError, match="it goes on until a tensor has a certain value"):
        capture(step(until_a_tensor_says_so)())
