"""Hooks and callbacks that users write do what they do on one device, or end with one clear error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed import all_reduce

from lightning_pipe.errors import UnsupportedError
from models.parity import make_loader
from ranks.world import Raised, World
from strategy.fits import Losses, dapple, make_trainer

NAME = "parameter_groups"
ROUTES = ["joint", "replay"]
TWO = {"layout": "1-1", "microbatches": 2}


class Net(pl.LightningModule):
    """Four layers; `noted` is what hooks have seen."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7)).double()
        self.noted: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none").mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fitted(module: pl.LightningModule, options: dict[str, Any] | None, **trainer: Any) -> tuple[Any, ...]:
    """Return losses, parameters, what hooks have noted, and metrics."""
    losses = Losses()
    own = trainer.pop("callbacks", [])
    fit = make_trainer(
        "auto" if options is None else dapple(**options), max_epochs=2, callbacks=[losses, *own], **trainer
    )
    fit.fit(module, make_loader(NAME, dtype=torch.float64))
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return losses.losses, state, module.noted, {k: float(v) for k, v in fit.callback_metrics.items()}


def assert_as_on_one_device(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    texts: list[list[str]] = [[], []]

    def without_texts(value: Any, seen: list[str]) -> Any:
        return apply_to_collection(value, (str, torch.dtype), lambda text: seen.append(str(text)) or 0)

    one, two = (without_texts(values, seen) for values, seen in zip((found, expected), texts, strict=True))
    assert texts[0] == texts[1]
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


def _scale(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(parameter.grad.abs().max())


class Hooked(Net):
    """Hooks on gradients: a linear one, one that is not, one on the sum, and one that is removed again."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net[0].parameters():
            parameter.register_hook(lambda g: g / (g.norm() + 1))
        self.net[4].weight.register_hook(lambda g: g * 0.5)
        self.net[4].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        self.net[2].weight.register_post_accumulate_grad_hook(_scale)

    def on_train_start(self) -> None:
        self.handle = self.net[2].bias.register_hook(lambda g: g.sign() * 0.01)

    def on_train_epoch_end(self) -> None:
        self.handle.remove()


class ReadsGradients(pl.Callback):
    """Note the norms of gradients, where a hook of this name is called."""

    def __init__(self, hook: str) -> None:
        self.norms: list[float] = []
        setattr(self, hook, self._note)

    def _note(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.norms.append(sum(float(p.grad.norm()) for p in module.parameters() if p.grad is not None))


def read_on(rank: int | None, hook: str, layout: str) -> list[float]:
    """Train with a callback on this rank alone, or on all."""
    reader = ReadsGradients(hook)
    callbacks = [reader] if rank in (None, dist.get_rank()) else []
    fitted(Net(), {"layout": layout}, accumulate_grad_batches=2, callbacks=callbacks)
    return reader.norms


@pytest.mark.parametrize("layout", ["1-1", "2"])
@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step"])
def test_a_callback_of_one_rank_reads_the_gradients_of_all(hook: str, layout: str) -> None:
    everywhere = World(2).run(read_on, None, hook, layout)
    assert everywhere[0] == pytest.approx(everywhere[1], rel=1e-12)
    assert everywhere[0]
    assert World(2).run(read_on, 1, hook, layout) == [[], everywhere[1]]


def fit_hooked(options: dict[str, Any] | None, trainer: dict[str, Any]) -> tuple[Any, ...]:
    return fitted(Hooked(), options, **trainer)


def test_a_hook_on_a_gradient_runs_before_a_step_that_may_be_taken_back() -> None:
    for clip in (0.05, 5.0):
        expected = fit_hooked(None, {"gradient_clip_val": clip})
        options = {**TWO, "post_validation": True, "capture": "joint"}
        for found in World(2).run(fit_hooked, options, {"gradient_clip_val": clip}):
            assert_as_on_one_device(found, expected)


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("trainer", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}], ids=["", "more"])
@pytest.mark.parametrize(("route", "layout"), [("joint", "1-1"), ("joint", "2-1"), ("replay", "1-1")])
def test_a_hook_on_a_gradient_runs_once_per_batch(route: str, layout: str, trainer: dict[str, Any]) -> None:
    expected = fit_hooked(None, trainer)
    options = {"layout": layout, "microbatches": 2, "capture": route}
    for found in World(sum(map(int, layout.split("-")))).run(fit_hooked, options, trainer):
        assert_as_on_one_device(found, expected)


class Editing(Net):
    """Gradients are changed, measured and clipped by hand; weights are changed by hand in a hook."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        weight = self.net[2].weight
        weight.grad = weight.grad.clamp(-0.1, 0.1) + 0.001 * weight.grad.sign()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.noted.append(self.trainer.strategy.grad_norm() if hasattr(self.trainer.strategy, "grad_norm") else None)
        if self.noted[-1] is None:
            grads = [p.grad for p in self.parameters()]
            self.noted[-1] = torch.nn.utils.get_total_norm(grads)


class Measuring(Net):
    """Norms as Lightning's documentation logs them, and clipping as torch's does."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, 2)
        self.log_dict(norms)
        self.noted.append({name: float(norm) for name, norm in norms.items()})
        self.noted.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2)))
        self.noted.append(sum(p.numel() for p in self.parameters() if p.grad is not None))


class Watching(pl.Callback):
    """What callbacks ask of parameters and batches without their values."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        parameters = dict(module.named_parameters())
        count = sum(p.numel() for p in module.parameters() if p.requires_grad)
        shapes = [(name, tuple(p.shape), p.dtype, str(p.device), p.nbytes, p.dim()) for name, p in parameters.items()]
        assert all(p is q for p, q in zip(parameters.values(), module.parameters(), strict=True))
        assert len(set(parameters.values())) == len({repr(p) for p in parameters.values()}) == 6
        assert all(p == p for p in parameters.values() if type(p) is not nn.Parameter)
        module.noted.append((count, shapes, len(batch[0]), tuple(batch[1].shape), str(batch[0].device)))
        module.log("rows", float(batch[0].size(0)))


def fit_kind(kind: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    return fitted(KINDS[kind](), options, callbacks=[Watching()])


KINDS: dict[str, Callable[[], Net]] = {"editing": Editing, "measuring": Measuring}


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("route", "layout"), [("joint", "1-1"), ("joint", "2-1"), ("replay", "1-1")])
def test_hooks_have_the_same_effect(kind: str, route: str, layout: str) -> None:
    expected = fit_kind(kind, None)
    options = {"layout": layout, "microbatches": 2, "capture": route}
    for found in World(sum(map(int, layout.split("-")))).run(fit_kind, kind, options):
        assert_as_on_one_device(found, expected)


class ModuleHooked(Net):
    """Backward hooks of sub-modules that change gradients, sample by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_full_backward_hook(lambda module, given, made: None)
        self.net[2].register_full_backward_hook(lambda module, given, made: (given[0] * 0.5,))
        self.net[4].register_full_backward_pre_hook(lambda module, made: (made[0].clamp(-0.01, 0.01),))


class ModuleWatched(Net):
    """A backward hook that only looks: batches need not be whole for it."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_full_backward_hook(lambda module, given, made: None)


class TensorHooked(Net):
    """The step registers a hook on what its sub-modules compute."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.net[:2](batch[0])
        hidden.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
        return F.cross_entropy(self.net[2:](hidden), batch[1])


class Gathering(Net):
    """What Lightning offers for several ranks gives what it gives on one device."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.all_gather(self.net(batch[0]), sync_grads=True)
        return F.cross_entropy(logits.reshape(-1, 7), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append(float(self.all_gather(outputs["loss"]).mean()))


KINDS |= {"module hooks": ModuleHooked, "watching": ModuleWatched, "tensor hooks": TensorHooked, "gathering": Gathering}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("kind", "route", "layout"),
    [
        ("module hooks", "auto", "1-1"),
        ("module hooks", "auto", "1-1-1"),
        ("module hooks", "replay", "2-1"),
        ("tensor hooks", "joint", "1-1"),
        ("tensor hooks", "joint", "1-2"),
        ("gathering", "joint", "1-1"),
        ("gathering", "replay", "1-1"),
    ],
)
def test_backward_hooks_and_gathering_have_the_same_effect(kind: str, route: str, layout: str) -> None:
    expected = fit_kind(kind, None)
    options = {"layout": layout, "microbatches": 2, "capture": route}
    for found in World(sum(map(int, layout.split("-")))).run(fit_kind, kind, options):
        assert_as_on_one_device(found, expected)


class Reducing(Net):
    """The step sums over ranks itself, as a library for several devices does."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        all_reduce(loss.detach().clone())
        return loss


class Waiting(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trainer.strategy.barrier()
        return super().training_step(batch, batch_idx)


class ParameterHooked(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return super().training_step(batch, batch_idx)


class WholeHooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.register_full_backward_hook(lambda module, given, made: None)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0].requires_grad_()), batch[1])


class Clamping(Net):
    """The step clamps a weight that it trains."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            self.net[2].weight.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class Teaching(Net):
    """The step moves a teacher that it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            for parameter, slow in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                slow.lerp_(parameter, 0.1)
        return super().training_step(batch, batch_idx) + (self.net(batch[0]) - self.teacher(batch[0])).square().mean()


class Remembering(Net):
    """The step moves centers of classes, which it does not train, to its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found, kinds = self.net(batch[0]), batch[1] % 4
        with torch.no_grad():
            self.centers.index_put_((kinds,), found[:, :4].detach())
        return super().training_step(batch, batch_idx) + 0.1 * (found[:, :4] - self.centers[kinds]).square().mean()


KINDS |= {"teaching": Teaching, "remembering": Remembering}
REFUSED = {
    "writes to the parameter net.2.weight": Clamping,
    "all_reduce": Reducing,
    "trainer.strategy.barrier": Waiting,
    "hook on a parameter": ParameterHooked,
    "hook on a tensor": TensorHooked,
    "has a hook on its backward": ModuleHooked,
}
KINDS |= REFUSED


@pytest.mark.parametrize(
    ("words", "routes"),
    [
        ("all_reduce", ["joint", "replay", "auto"]),
        ("trainer.strategy.barrier", ["auto"]),
        ("hook on a parameter", ["joint", "replay"]),
        ("hook on a tensor", ["replay"]),
        ("has a hook on its backward", ["joint"]),
        ("writes to the parameter net.2.weight", ["joint"]),
    ],
)
def test_what_ranks_cannot_do_alike_is_refused_on_all_of_them(words: str, routes: list[str]) -> None:
    for route in routes:
        for result in World(2).results(fit_kind, words, {**TWO, "capture": route}, deadline_s=40):
            assert isinstance(result, Raised) and result.kind in ("CaptureError", "UncapturedError"), result
            assert words in result.text and result.text.count("calls the collective") < 2


class WholeWriting(Net):
    """What a callback writes to weights before the forward."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


KINDS |= {"zeroing": WholeWriting}


def warned(kind: str, options: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(dapple(**options), max_epochs=1)
        warnings.simplefilter("always")
        trainer.fit(KINDS[kind](), make_loader(NAME, dtype=torch.float64))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("watching", "The hook on the backward of net.0 runs once for each micro-batch"),
        ("zeroing", "on_before_zero_grad is called before the forward"),
        ("measuring", "trainer.strategy.grad_norm() is the norm of all"),
    ],
)
def test_what_differs_from_one_device_is_said_once(kind: str, words: str) -> None:
    first, other = World(2).run(warned, kind, TWO)
    assert len([text for text in first if words in text]) == 1
    assert not [text for text in other if words in text]


def test_a_parameter_that_moves_with_weights_alone_does_so_once_per_batch() -> None:
    """It was said to move for every micro-batch."""
    options = {"layout": "1", "microbatches": 2, "capture": "joint"}
    assert not [text for text in warned("teaching", options) if "writes to the parameter" in text]
    assert_as_on_one_device(fitted(Teaching(), options), fitted(Teaching(), None))


def remembered(options: dict[str, Any] | None) -> tuple[Any, ...]:
    return fitted(Remembering(), options)


def test_a_parameter_that_moves_with_samples_does_so_once_per_batch() -> None:
    """Every micro-batch moved it for its own samples."""
    expected = remembered(None)
    for found in World(2).run(remembered, TWO):
        assert_as_on_one_device(found, expected)


def test_a_module_may_write_to_its_weights_if_batches_stay_whole() -> None:
    kind = "writes to the parameter net.2.weight"
    expected = fit_kind(kind, None)
    for found in World(2).run(fit_kind, kind, {"layout": "1-1", "microbatches": 1}):
        assert_as_on_one_device(found, expected)


def test_hooks_on_the_backward_of_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, given, made: None)
    try:
        with pytest.raises(UnsupportedError, match="backward of all modules"):
            fitted(Net(), {})
    finally:
        handle.remove()


class Global(torch.optim.SGD):
    """Divide by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()
        return loss


class Signs(torch.optim.Optimizer):
    """Step by the signs of gradients, with some noise: every parameter by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.power = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for parameter in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            self.state[parameter].setdefault("noise", torch.rand_like(parameter))
            parameter.add_(parameter.grad.sign(), alpha=-0.01 * self.power)
        return loss


class WithGlobal(Net):
    def configure_optimizers(self) -> Any:
        return Global(self.parameters(), lr=0.1)


class WithSigns(Net):
    def configure_optimizers(self) -> Any:
        optimizer = Signs(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


KINDS |= {"global": WithGlobal, "signs": WithSigns}


def test_an_optimizer_of_the_users_own_may_not_couple_parameters() -> None:
    for result in World(2).results(fit_kind, "global", TWO):
        assert isinstance(result, Raised) and result.kind == "UnsupportedError", result
        assert "Global steps a parameter differently" in result.text
    expected = fit_kind("signs", None)
    for found in World(2).run(fit_kind, "signs", TWO):
        assert_as_on_one_device(found, expected)
