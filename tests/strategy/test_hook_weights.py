"""Laws of weights in hooks: code that knows no rank finds in hooks what one device has; all ranks do so together."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.nn import functional as F

from lightning_pipe.errors import AbsentError
from lightning_pipe.strategy.parameters import hook_weights
from lightning_pipe.strategy.parameters.stand_ins import Guarded
from models.parity import make_loader, make_module
from ranks.world import Raised, Returned, World
from strategy.fits import dapple, make_trainer

Options = dict[str, Any]


class Net(pl.LightningModule):
    """Layers for two stages, and a teacher that no optimizer trains; `noted` is what its hooks have seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            *(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        ).double()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.noted: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def _loss(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            goal = self.teacher(x.flip(1))
        found = self(x)
        return F.mse_loss(found, goal) + found.square().mean()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def note(self, *tensors: torch.Tensor) -> None:
        self.noted += [float(tensor.detach().double().sum()) for tensor in tensors]


class Teacher(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        for slow, quick in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data = slow.data * 0.9 + quick.data * 0.1


class TeacherAfterStep(Net):
    def optimizer_step(self, *arguments: Any, **options: Any) -> None:
        super().optimizer_step(*arguments, **options)
        with torch.no_grad():
            torch._foreach_lerp_([*self.teacher.parameters()], [*self.net.parameters()], 0.1)


class Measured(Net):
    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note(nn.utils.parameters_to_vector(self.net.parameters()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(
            *(p.norm() for p in self.net.parameters()), torch.from_numpy(self.net[4].weight.detach().cpu().numpy())
        )


class Clamped(Net):
    def on_train_batch_start(self, *_: Any) -> None:
        for p in self.net.parameters():
            p.data.clamp_(-0.1, 0.1)


class Sampled(Net):
    def on_validation_epoch_end(self) -> None:
        self.note(self(torch.ones(2, 6, dtype=torch.float64, device=self.device)))


class Kept(Net):
    """Copies, saves, and goes back to what it was."""

    def on_train_start(self) -> None:
        self.first = {name: value.clone() for name, value in self.state_dict().items()}

    def on_train_epoch_end(self) -> None:
        file = io.BytesIO()
        torch.save(self.state_dict(), file)
        file.seek(0)
        self.note(*copy.deepcopy(self.net).parameters(), *torch.load(file).values())
        if self.current_epoch == 0:
            self.load_state_dict(self.first)

    def on_train_end(self) -> None:
        self.note(*self.parameters())


class Replaced(Net):
    def on_train_epoch_end(self) -> None:
        torch.manual_seed(1)
        self.net[2].reset_parameters()
        nn.init.orthogonal_(self.net[4].weight)
        with torch.no_grad():
            self.net[0].weight[0] = self.net[2].weight[0, :6]


class Noisy(Net):
    """Random numbers in hooks, which the rank that loads has drawn for its samples, too."""

    @torch.no_grad()
    def on_train_batch_start(self, *_: Any) -> None:
        for p in self.net.parameters():
            p.add_(torch.randn_like(p), alpha=0.01)

    def on_train_epoch_end(self) -> None:
        nn.init.normal_(self.net[4].weight)


class Compared(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        same = [torch.equal(a, b) for a, b in zip(self.net.parameters(), self.teacher.parameters(), strict=True)]
        self.noted += [float(one) for one in same]
        self.note(self.net[0].weight == self.teacher[0].weight)


class Scheduled(Net):
    """Its only hook is not called `on_...`."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.note(*self.net.parameters())
        scheduler.step()


class Lent(pl.Callback):
    """Validate with averages of the weights."""

    def on_train_start(self, trainer: Any, module: Net) -> None:
        self.average = {name: p.detach().clone() for name, p in module.net.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Net, *_: Any) -> None:
        for name, p in module.net.named_parameters():
            self.average[name].lerp_(p.detach(), 0.1)

    def on_validation_epoch_start(self, trainer: Any, module: Net) -> None:
        if hasattr(self, "average"):
            self.own = {name: p.detach().clone() for name, p in module.net.named_parameters()}
            for name, p in module.net.named_parameters():
                p.data.copy_(self.average[name])

    def on_validation_epoch_end(self, trainer: Any, module: Net) -> None:
        for name, p in module.net.named_parameters() if hasattr(self, "average") else ():
            p.data.copy_(self.own[name])

    def on_save_checkpoint(self, trainer: Any, module: Net, checkpoint: dict[str, Any]) -> None:
        module.note(*module.net.parameters())


class Averaged(Net):
    def configure_callbacks(self) -> list[pl.Callback]:
        return [Lent()]

    def on_train_epoch_end(self) -> None:
        self.note(*self.net.parameters())
        self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/last.ckpt")
        self.note(*self.net.parameters())


class Normalised(Net):
    """Buffers that training changes, of which it keeps the stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
        self.net = nn.Sequential(*layers).double()

    def on_train_batch_end(self, *_: Any) -> None:
        buffers = [*self.net.buffers()]
        self.note(*buffers)
        buffers[0].mul_(0.5)


class InAMode(Teacher):
    """It enters a function mode in one hook, and leaves it in another."""

    def on_train_epoch_start(self) -> None:
        self.mode = torch.device("cpu")
        self.mode.__enter__()

    def on_train_epoch_end(self) -> None:
        self.mode.__exit__(None, None, None)


class Explicit(Teacher):
    """It says itself what it needs, after it has touched something."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(*self.net.parameters())
        with getattr(self.trainer.strategy, "whole_module", contextlib.nullcontext)():
            super().on_train_batch_end()
            self.note(*self.teacher.parameters())
        self.note(*self.teacher.parameters())


KINDS = (
    Teacher,
    TeacherAfterStep,
    Measured,
    Clamped,
    Sampled,
    Kept,
    Replaced,
    Noisy,
    Compared,
    Scheduled,
    Averaged,
    Normalised,
    InAMode,
    Explicit,
)


class Drawn(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of random numbers that are drawn when they are loaded."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(6, dtype=torch.float64) + index / 10


def fit(kind: type[Net], folder: str, options: Options | None, trainer: Options) -> tuple[Any, ...]:
    """Fit on one device, or on all ranks of this world; return state, logged values and what hooks have seen."""
    module = kind().train()
    torch.manual_seed(3)
    data = torch.utils.data.DataLoader(Drawn(), batch_size=8, shuffle=True)
    strategy = "auto" if options is None else dapple(**options)
    used = make_trainer(strategy, max_epochs=2, default_root_dir=folder, **trainer)
    used.fit(module, data, data)
    return {**module.state_dict(), **used.callback_metrics}, module.noted


SETTINGS: dict[str, tuple[int, Options, Options]] = {
    "two stages": (2, {"layout": "1-1"}, {}),
    "accumulated": (2, {"layout": "1-1"}, {"accumulate_grad_batches": 2}),
    "replayed": (2, {"layout": "1-1", "capture": "replay"}, {"gradient_clip_val": 0.5}),
    "replicas": (3, {"layout": "2-1"}, {}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_find_what_one_device_has_and_what_they_write_stays(kind: type[Net], setting: str, tmp_path: Any) -> None:
    ranks, options, trainer = SETTINGS[setting]
    if kind is Normalised and setting == "replicas":
        pytest.skip("replicas have batch statistics of their own samples")
    expected = fit(kind, str(tmp_path), None, trainer)
    options = {"microbatches": 1 if kind is Normalised else 2, **options}
    for found in World(ranks).run(fit, kind, str(tmp_path), options, trainer):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def fit_counted(kind: type[Net]) -> tuple[list[str], int]:
    """Return the warnings, and how often all ranks got everything."""
    filled: list[str] = []
    usual = hook_weights.WeightsInHooks._fill

    def counting(self: hook_weights.WeightsInHooks) -> None:
        filled.append("")
        usual(self)

    hook_weights.WeightsInHooks._fill = counting  # type: ignore[method-assign]
    trainer = make_trainer(dapple(layout="1-1", microbatches=2), max_epochs=2)
    data = torch.utils.data.DataLoader(torch.randn(24, 6, dtype=torch.float64), batch_size=8)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer.fit(kind(), data)
    finally:
        hook_weights.WeightsInHooks._fill = usual  # type: ignore[method-assign]
    return [str(w.message) for w in told if "reads or writes parameters" in str(w.message)], len(filled)


class Formal(Net):
    """It asks for everything but values."""

    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters():
            self.noted += [p.numel(), len(p.shape), p.requires_grad, p.device.type == "cpu", p.grad is None]
            assert repr(p)
        self.net[0].requires_grad_(True)
        self.zero_grad()


def test_ranks_meet_once_between_two_steps_and_only_for_values() -> None:
    for (told, filled), rank in zip(World(2).run(fit_counted, Teacher), range(2), strict=True):
        assert filled == 6, "once per batch"
        assert len(told) == (1 if rank == 0 else 0)
        assert all("test_hook_weights.py:" in text and "in on_train_batch_end" in text for text in told)
    assert World(2).run(fit_counted, Formal) == [([], 0), ([], 0)]


def look_alone(module: Net) -> None:
    """Read what this rank holds, and find that it does not hold the rest."""
    absent = [p for p in module.parameters() if isinstance(p, Guarded)]
    own = [p for p in module.parameters() if not isinstance(p, Guarded)]
    module.note(own[0])
    with pytest.raises(AbsentError, match="whole_module"):
        module.note(absent[0])


class OnFirstRank(Net):
    @rank_zero_only
    def on_train_batch_end(self, *_: Any) -> None:
        look_alone(self)


class WhereRankIsZero(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        is_first = self.trainer.is_global_zero
        with self.trainer.strategy.whole_module():
            pass
        if is_first:
            look_alone(self)


class AsksTorch(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        if dist.get_rank() == 0:
            look_alone(self)


class AsksForTheSize(Measured):
    """It asks how many ranks there are, which is the same everywhere."""

    def on_train_batch_end(self, *_: Any) -> None:
        assert not dist.is_initialized() or dist.get_world_size() > 1
        super().on_train_batch_end()


class ThenATeacher(Teacher):
    """One hook knows the rank, another does not."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_rank == 0:
            look_alone(self)


class OfALogger(Net):
    """A logger does something on the first rank, and nothing on others."""

    def on_train_batch_end(self, *_: Any) -> None:
        if dist.distributed_c10d._get_default_group().rank() == 0:
            code = compile("def log(look, module): look(module)", "/site-packages/wandb/sdk.py", "exec")
            exec(code, found := {})  # type: ignore[var-annotated]
            found["log"](look_alone, self)


def fit_noting(kind: type[Net]) -> list[float]:
    return fit(kind, ".", {"layout": "1-1", "microbatches": 2, "deadline_s": 20}, {})[1]


@pytest.mark.parametrize("kind", [OnFirstRank, WhereRankIsZero, AsksTorch, OfALogger, ThenATeacher])
def test_code_of_one_rank_finds_what_that_rank_has(kind: type[Net]) -> None:
    first, second = World(2).run(fit_noting, kind)
    assert len(first) == 6 and not second


class Secret(Net):
    """It finds its rank where nobody hears."""

    def on_train_batch_end(self, *_: Any) -> None:
        if dist.distributed_c10d._get_default_group().rank() == 0:
            self.note(*self.parameters())


def test_code_that_one_rank_runs_in_secret_is_named_on_all_ranks() -> None:
    for result in World(2).results(fit_noting, Secret):
        assert isinstance(result, Raised) and "Ranks wait for different things" in result.text
        assert "test_hook_weights.py:" in result.text and "all ranks must come there" in result.text


def test_how_many_ranks_there_are_is_no_question_for_the_rank() -> None:
    first, second = World(2).run(fit_noting, AsksForTheSize)
    assert first and first == second


class Gradients(Net):
    """It looks at weights, then at gradients."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(*self.net.parameters())
        assert all(p.grad is not None for p in self.net.parameters())
        assert 0 < sum(isinstance(p.grad, Guarded) for p in self.net.parameters()) < 6
        with pytest.raises(AbsentError, match="gradient of the parameter"):
            sum(float(p.grad.abs().sum()) for p in self.net.parameters())  # type: ignore[union-attr]
        for p in self.net.parameters():
            p.grad = p.grad.clamp(-1, 1)  # type: ignore[union-attr]
            assert p.grad is not None
        absent = next(p for p in self.net.parameters() if isinstance(p.grad, Guarded))
        with pytest.raises(AbsentError, match="gradient of the parameter"):
            absent.grad = torch.zeros_like(absent)
        for p in self.net.parameters():
            p.grad = None
            assert p.grad is None


def test_gradients_stay_where_they_are_and_are_not_taken_for_missing() -> None:
    assert all(len(noted) == 36 for noted in World(2).run(fit_noting, Gradients))


def fit_without_room() -> str:
    usual = hook_weights._free_bytes
    hook_weights._free_bytes = lambda device: 1000 * dist.get_rank()  # of the first rank alone
    try:
        fit_noting(Teacher)
    finally:
        hook_weights._free_bytes = usual
    return ""


def test_where_one_rank_has_no_room_for_all_values_all_ranks_find_stand_ins() -> None:
    for result in World(2).results(fit_without_room):
        assert not isinstance(result, Returned)
        assert isinstance(result, Raised) and "AbsentError" in (result.kind + result.text)


class SavesOptimizer(pl.Callback):
    """A callback that keeps the state of the optimizer itself."""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.state = trainer.optimizers[0].state_dict()


def said_of_optimizer(layout: str) -> list[str]:
    """Return what is said of a callback that reads the optimizer's state; a worker function."""
    trainer = make_trainer(dapple(layout=layout), max_epochs=2, callbacks=[SavesOptimizer()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(make_module("gpt_tied"), make_loader("gpt_tied"))
        trainer.strategy.optimizer_state(trainer.optimizers[0])
    return [str(one.message) for one in caught if "asks for the state of the optimizer" in str(one.message)]


@pytest.mark.parametrize(("layout", "times"), [("1-1", 1), ("2", 0)])
def test_code_that_reads_a_part_of_the_optimizers_state_is_told(layout: str, times: int) -> None:
    for said in World(2).run(said_of_optimizer, layout):
        assert len(said) == times
        assert all("test_hook_weights.py" in text and "trainer.save_checkpoint" in text for text in said)
