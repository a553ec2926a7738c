"""Values that a rank does not have are never read in silence; hooks that need them get the whole module."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipe.capture import flatten
from lightning_pipe.capture.steps.other_ranks import no_collectives
from lightning_pipe.errors import AbsentError
from lightning_pipe.strategy.parameters.stand_ins import StandIn, absent_batch, occupy, vacate
from models.parity import make_loader
from ranks.world import Raised, World
from strategy.fits import dapple, make_trainer
from strategy.test_hooks import Net, assert_as_on_one_device, fitted

REAL = torch.ones(3, 2)
ACCUMULATED = torch.ones(3, 2)
READS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    ".data": lambda p: p.data,
    "add": lambda p: p + 1,
    "radd": lambda p: REAL + p,
    "mul": lambda p: 2 * p,
    "matmul": lambda p: p @ torch.ones(2, 2),
    "item": lambda p: p.sum().item(),
    "pow": lambda p: p.pow(2),
    "norm": lambda p: p.norm(),
    "index": lambda p: p[0],
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "iteration": lambda p: list(p),
    "numpy": lambda p: p.numpy(),
    "tolist": lambda p: p.tolist(),
    "to": lambda p: p.to("cpu"),
    "float": lambda p: p.float(),
    "isnan": lambda p: torch.isnan(p),
    "histogram": lambda p: torch.histc(p, 10),
    "zeros_like": lambda p: torch.zeros_like(p),
    "equal values": lambda p: torch.equal(p, REAL),
    "eq": lambda p: p == REAL,
    "mul_": lambda p: p.mul_(0.9),
    "fill_": lambda p: p.fill_(0),
    "clamp_": lambda p: p.clamp_(0, 1),
    "init": lambda p: nn.init.zeros_(p),
    "copy_ into it": lambda p: p.copy_(REAL),
    "copy_ from it": lambda p: ACCUMULATED.copy_(p),
    "add_ from it": lambda p: ACCUMULATED.add_(p, alpha=0.1),
    "iadd from it": lambda p: ACCUMULATED.__iadd__(p),
    "lerp_ from it": lambda p: ACCUMULATED.lerp_(p, 0.1),
    "foreach": lambda p: torch._foreach_add_([ACCUMULATED], [p]),
    "foreach lerp": lambda p: torch._foreach_lerp_([ACCUMULATED], [p], 0.1),
    "stack": lambda p: torch.stack([REAL, p]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "deepcopy": lambda p: copy.deepcopy(p),
    "deepcopy of a layer": lambda p: copy.deepcopy(nn.ParameterList([p])),
    "pickle": lambda p: pickle.dumps(p),
    "torch.save": lambda p: torch.save({"weight": p}, io.BytesIO()),
    "state_dict": lambda p: nn.ParameterList([p]).state_dict(),
    "load_state_dict": lambda p: nn.ParameterList([p]).load_state_dict({"0": REAL}),
    "new_zeros": lambda p: p.new_zeros(2),
    "data_ptr": lambda p: p.data_ptr(),
    "bool": lambda p: bool(p),
    "as a gradient": lambda p: setattr(p, "grad", REAL),
    "setting data": lambda p: setattr(p, "data", REAL),
}
FACTS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: (p.shape, p.size(), p.size(0), p.stride(), p.ndim, p.dim(), len(p)),
    "sizes": lambda p: (p.numel(), torch.numel(p), p.nelement(), p.element_size(), p.nbytes, p.itemsize),
    "types": lambda p: (p.dtype, p.layout, p.is_floating_point(), torch.is_floating_point(p), p.is_complex()),
    "device": lambda p: (p.device, p.is_cuda, p.is_cpu, p.is_meta, p.is_sparse, p.is_quantized, p.get_device()),
    "flags": lambda p: (p.is_leaf, p.is_contiguous(), p.grad_fn, p.grad, torch.is_tensor(p)),
    "itself": lambda p: (p in [p], torch.equal(p, p), len({p, p}), p is p, isinstance(p, torch.Tensor), p == None),  # noqa: E711
    "type": lambda p: p.type(),
}


def made(kind: str) -> Any:
    """Make a stand-in for a parameter, or for a tensor of a batch."""
    if kind == "parameter":
        parameter = nn.Parameter(torch.ones(3, 2))
        vacate(parameter, "net.weight", ranks=(1, 2), rank=0, device=torch.device("cpu"))
        return parameter
    structure = flatten({"x": (torch.ones(3, 2),)})[1]
    return absent_batch(structure, ranks=(1, 2), rank=0, device=torch.device("cpu"))["x"][0]


def test_in_a_step_there_is_another_way_out() -> None:
    with no_collectives(), pytest.raises(AbsentError, match="replayed step") as said:
        made("parameter").sum()
    assert "whole_module" not in str(said.value), "which a step cannot enter"


@pytest.mark.parametrize("kind", ["parameter", "batch"])
def test_a_stand_in_refuses_to_read_and_to_write_values(kind: str) -> None:
    stand_in = made(kind)
    words = "parameter net.weight, .*rank 0.*whole_module" if kind == "parameter" else r"batch\['x'\]\[0\], .*Return"
    for name, read in READS.items():
        error = RuntimeError if name == "load_state_dict" else AbsentError  # Module collects errors in one of its own
        with pytest.raises(error, match=words):
            pytest.fail(f"{name} was done: {read(stand_in)}")
    assert torch.equal(ACCUMULATED, torch.ones(3, 2))


@pytest.mark.parametrize("kind", ["parameter", "batch"])
def test_a_stand_in_tells_everything_else_as_a_tensor_does(kind: str) -> None:
    stand_in, real = made(kind), nn.Parameter(torch.ones(3, 2)) if kind == "parameter" else torch.ones(3, 2)
    for name, ask in FACTS.items():
        assert ask(stand_in) == ask(real), name
    assert "net.weight" in repr(stand_in) if kind == "parameter" else "batch['x'][0]" in f"{stand_in}"
    assert not torch.equal(stand_in, real) if kind == "parameter" else True


def test_a_stand_in_is_the_users_own_parameter_with_its_hooks_and_flags() -> None:
    class Own(nn.Parameter):
        pass

    parameter = Own(torch.ones(3, 2))
    vacate(parameter, "weight", ranks=(1,), rank=0, device=torch.device("cpu"))
    assert type(parameter) is StandIn
    calls: list[Any] = []
    handle = parameter.register_hook(lambda gradient: gradient * 2)
    parameter.register_post_accumulate_grad_hook(calls.append)
    assert not parameter.requires_grad_(False).requires_grad
    parameter.requires_grad = True
    parameter.grad = None
    optimizer = torch.optim.AdamW([parameter])
    optimizer.zero_grad()
    optimizer.step()
    module = nn.ParameterList([parameter]).requires_grad_(True)
    module.zero_grad()
    occupy(parameter, torch.ones(3, 2))
    assert type(parameter) is Own and not vars(parameter)
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.full((3, 2), 2.0)) and calls == [parameter]
    handle.remove()


def whole(trainer: pl.Trainer) -> Any:
    return getattr(trainer.strategy, "whole_module", contextlib.nullcontext)()


class Averaged(Net):
    """An average of weights, a teacher, a decay, weights on loan for validation: by hand, in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = list(self.net.parameters())
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.average = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            expected = self.teacher(batch[0])
        found = self.net(batch[0])
        return F.cross_entropy(found, batch[1]) + (found - expected).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with whole(self.trainer):
            for parameter in self.net.parameters():
                parameter.data.mul_(0.99)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with whole(self.trainer), torch.no_grad():
            for name, parameter in self.net.named_parameters():
                self.average[name] = self.average[name].to(parameter.device).mul_(0.9).add_(parameter, alpha=0.1)
            for parameter, slow in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                slow.data.lerp_(parameter.data, 0.2)
            total = torch.zeros((), dtype=torch.float64, device=self.mine[0].device)
            for parameter in self.mine:
                total += parameter.pow(2).sum()
            self.noted.append(float(total))
            self.noted.append(torch.histc(self.net[0].weight.detach(), 5).tolist())

    def on_validation_start(self) -> None:
        with whole(self.trainer):
            self.kept = {name: value.clone() for name, value in self.net.state_dict().items()}
            self.net.load_state_dict(self.average)
            layer = copy.deepcopy(self.net[2])
            self.noted.append(float(layer.weight.detach().sum()))

    def on_validation_end(self) -> None:
        with whole(self.trainer):
            self.net.load_state_dict(self.kept)

    def on_train_epoch_end(self) -> None:
        with whole(self.trainer):
            self.log("norm", torch.linalg.vector_norm(torch.stack([p.detach().norm() for p in self.net.parameters()])))
            file = io.BytesIO()
            torch.save(self.state_dict(), file)
        file.seek(0)
        self.noted.append({name: value.tolist() for name, value in torch.load(file).items()})
        for name, parameter in self.net.named_parameters():
            if name.startswith("0."):
                parameter.requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average

    def val_dataloader(self) -> Any:
        return make_loader("parameter_groups", seed=1, dtype=torch.float64)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


def fit_averaged(options: dict[str, Any] | None) -> Any:
    module = Averaged()
    found = fitted(module, options, num_sanity_val_steps=0)
    return (*found, module.average, dict(module.kept))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("route", "layout"), [("joint", "1-1"), ("joint", "1-2"), ("replay", "1-1"), ("replay", "2-1")]
)
def test_hooks_that_need_the_whole_module_have_the_same_effect(route: str, layout: str) -> None:
    expected = fit_averaged(None)
    options = {"layout": layout, "microbatches": 2, "capture": route}
    for found in World(sum(map(int, layout.split("-")))).run(fit_averaged, options):
        assert_as_on_one_device(found, expected)


class Careless(Net):
    """The same habits without the whole module, in code that may do what other ranks do not; every error is noted."""

    asks = True

    def __init__(self) -> None:
        super().__init__()
        self.mine = list(self.net.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert not self.asks or self.global_rank >= 0
        habits: dict[str, Callable[[], Any]] = {
            "average": lambda: [
                torch.zeros(p.shape, dtype=p.dtype, device=p.device).mul_(0.9).add_(p) for p in self.net.parameters()
            ],
            "own list": lambda: sum(float(p.pow(2).sum()) for p in self.mine),
            "norm": lambda: torch.stack([p.norm() for p in self.net.parameters()]).norm(),
            "gradient norms": lambda: sum(float(p.grad.abs().sum()) for p in self.net.parameters()),
            "save": lambda: torch.save(self.state_dict(), io.BytesIO()),
            "copy": lambda: copy.deepcopy(self.net),
            "clamp": lambda: [p.data.clamp_(-1, 1) for p in self.net.parameters()],
            "forward": lambda: self.net(torch.ones(1, 4, dtype=torch.float64, device=self.device)),
            "batch": lambda: batch[0].mean(),
            "batch in place": lambda: torch.zeros((), device=self.device).add_(batch[0].sum()),
        }
        for name, habit in habits.items():
            try:
                habit()
            except AbsentError as error:
                self.noted.append((name, str(error)))


class Unaware(Careless):
    """The same in code that knows no rank."""

    asks = False


def fit_careless(options: dict[str, Any], kind: type[Careless] = Careless) -> Any:
    return fitted(kind(), options)[2]


@pytest.mark.parametrize("route", ["joint", "replay"])
def test_what_is_done_without_the_whole_module_is_an_error_on_every_rank_that_lacks_values(route: str) -> None:
    results = World(2).run(fit_careless, {"layout": "1-1", "microbatches": 2, "capture": route})
    weights = {"average", "own list", "norm", "gradient norms", "save", "copy", "clamp", "forward"}
    for rank, noted in enumerate(results):
        assert {name for name, _ in noted} == (weights if rank == 0 else weights | {"batch", "batch in place"})
        for name, text in noted:
            assert "test_stand_ins.py:" in text and f"this is rank {rank}" in text, text
            assert ("batch" in name) == ("Return what you need" in text)
            assert "grad_norm()" in text if name == "gradient norms" else True


@pytest.mark.parametrize("route", ["joint", "replay"])
def test_code_that_knows_no_rank_lacks_nothing_but_gradients_and_batches(route: str) -> None:
    results = World(2).run(fit_careless, {"layout": "1-1", "microbatches": 2, "capture": route}, Unaware)
    gradients, batches = {"gradient norms"}, {"batch", "batch in place"}
    assert [{name for name, _ in noted} for noted in results] == [gradients, gradients | batches]


def fit_raising(options: dict[str, Any]) -> Any:
    class Raising(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert self.global_rank in (0, 1)
            torch.save(self.state_dict(), io.BytesIO())

    make_trainer(dapple(**options), max_epochs=1).fit(Raising(), make_loader("parameter_groups", dtype=torch.float64))


def test_an_error_of_a_stand_in_ends_training_with_its_way_out() -> None:
    for result in World(2).results(fit_raising, {"layout": "1-1", "microbatches": 2}, deadline_s=40):
        assert isinstance(result, Raised) and result.kind in ("AbsentError", "PeerFailure"), result  # of either rank
        assert "AbsentError" in f"{result.kind}: {result.text}" and "whole_module" in result.text


class Normalised(Net):
    """Two layers of batch statistics, each in a stage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.net[0], nn.BatchNorm1d(8), nn.Tanh(), self.net[2], nn.BatchNorm1d(8), self.net[4])
        self.net.double()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not hasattr(self.trainer.strategy, "whole_module"):
            refused = 1
        else:
            refused = 0 * self.global_rank
            for norm in (self.net[1], self.net[4]):
                with contextlib.suppress(AbsentError):
                    float(norm.running_mean.sum())
                    refused -= 1
            refused += 2
        with whole(self.trainer):
            self.noted += [refused, float(self.net[1].running_mean.sum()), float(self.net[4].running_var.sum())]


def fit_normalised(options: dict[str, Any] | None) -> Any:
    return fitted(Normalised(), options)


@pytest.mark.parametrize("route", ["joint", "replay"])
def test_buffers_that_other_ranks_change_are_not_read_out_of_date(route: str) -> None:
    expected = fit_normalised(None)
    for found in World(2).run(fit_normalised, {"layout": "1-1", "microbatches": 1, "capture": route}):
        assert_as_on_one_device(found, expected)
