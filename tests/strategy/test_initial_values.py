"""A module that is built without its values gets those of one device later, on the ranks that hold them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe.errors import AbsentError, UnsupportedError
from lightning_pipe.strategy.parameters import initial_values
from lightning_pipe.strategy.parameters.building import building
from lightning_pipe.strategy.parameters.meta_modules import adopt, without_origin
from lightning_pipe.strategy.parameters.pending import Pending, converting
from lightning_pipe.strategy.refusals import refuse_parts
from models.parity import PARITY, make_loader, make_module
from ranks.world import Raised, World
from strategy.built_late import Construction, Late, Start
from strategy.fits import Losses, dapple, drawn_on_host, make_trainer
from zoo import ZOO

F64 = {"dtype": torch.float64}
TWO = {"layout": "1-1", "microbatches": 2}
BUILT = """
    nanogpt_tied lstm_dropout resnet_batchnorm vit swin_windows bert_mlm llama seq2seq_transformer lora_frozen_base
    byol_buffers distillation_frozen_teacher spectral_and_weight_norm vqvae_ema demo_transformer
""".split()


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    named = (module.named_parameters, module.named_buffers)
    return {name: tensor for list_ in named for name, tensor in list_(remove_duplicate=False)}


def built_twice(make: Any) -> tuple[nn.Module, nn.Module]:
    """Build a module with its values and without; both leave the generator alike."""
    torch.manual_seed(3)
    plain, after = make(), torch.rand(1)
    torch.manual_seed(3)
    with building():
        late = make()
    assert torch.equal(after, torch.rand(1))
    return plain, late


def assert_made_alike(plain: nn.Module, late: nn.Module) -> None:
    expected, found = state_of(plain), state_of(late)
    assert expected.keys() == found.keys()
    for name in reversed(expected):  # in another order than they were built
        initial_values.make([found[name]], device=torch.device("cpu"))
        assert torch.equal(expected[name], found[name]), name
        assert expected[name].stride() == found[name].stride(), name


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", BUILT)
def test_what_is_made_late_is_what_one_device_makes(name: str) -> None:
    plain, late = built_twice(ZOO[name].make_module)
    assert sum(isinstance(parameter, Pending) for parameter in late.parameters()) > 1
    assert_made_alike(plain, late)


def test_constructors_may_do_what_they_want() -> None:
    plain, late = built_twice(Construction)
    assert isinstance(late.recurrent.weight_hh_l1, Pending)
    assert late.tied.weight is late.first.weight
    assert torch.equal(plain.tables[0], late.tables[0]) and torch.equal(plain.tables[1][0], late.tables[1][0])
    assert torch.equal(plain.view, late.view) and late.view.data_ptr() == late.seen.data_ptr()
    assert plain.rates == late.rates
    assert_made_alike(plain, late)


def test_only_what_a_parameter_depends_on_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    with building():
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    tape = module[3].weight.absence.tape
    played = []
    play = type(tape)._play
    monkeypatch.setattr(type(tape), "_play", lambda self, act, made: played.append(act) or play(self, act, made))
    initial_values.make([module[3].weight], device=torch.device("cpu"))
    assert len(played) == 1  # `uniform_`; what is empty needs no playing


def test_values_that_are_not_there_yet_are_not_read_and_writes_are_kept() -> None:
    plain = nn.Linear(3, 2)
    with building():
        late = nn.Linear(3, 2)
    with pytest.raises(AbsentError, match="has none before it is known which rank needs them"):
        late.weight.sum()
    assert (late.weight.shape, late.weight.device, late.weight.is_meta) == ((2, 3), torch.device("cpu"), False)
    late.load_state_dict(plain.state_dict())
    nn.init.zeros_(late.bias)
    with torch.no_grad():
        plain.bias.zero_()
    assert_made_alike(plain, late)


def test_a_tensor_that_changes_before_it_is_used_is_an_error() -> None:
    table = torch.ones(3)
    with building():
        module = nn.Linear(3, 3)
        with torch.no_grad():
            module.bias.copy_(table)
    table.zero_()
    with pytest.raises(UnsupportedError, match="has changed before they were made"):
        initial_values.make([module.bias], device=torch.device("cpu"))


def train(name: str, options: dict[str, Any] | None, in_context: bool = False) -> dict[str, Any]:
    """Fit a module that is built late; a worker function."""
    torch.manual_seed(7 if options is None or dist.get_rank() == 0 else 1000)  # the values are those of rank 0
    losses, start = Losses(), Start()
    strategy = "auto" if options is None else dapple(**options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[losses, start])
    if in_context:
        with trainer.init_module(empty_init=options is not None):
            module = drawn(name)
    else:
        module = Late(lambda: drawn(name))
    trainer.fit(module, make_loader(name, **F64))
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    return {"start": start.values, "pending": start.pending, "losses": losses.losses, "parameters": parameters}


def drawn(name: str) -> pl.LightningModule:
    """Make a module of the parity tests from the random state as it is."""
    return PARITY[name].module(dropout=0.0).double().train()


@pytest.mark.sampled(every=2)
@drawn_on_host
@pytest.mark.parametrize("in_context", [False, True], ids=["configure_model", "init_module"])
def test_ranks_make_what_they_hold_and_train_as_one_device(in_context: bool) -> None:
    expected = train("gpt_tied", None, in_context)
    found = World(2).run(train, "gpt_tied", TWO, in_context)
    for rank in found:
        assert rank["pending"] == sum(p.nbytes for p in expected["parameters"].values())
        assert 0 < len(rank["start"]) < len(expected["start"])  # no rank had all
        for name, value in rank["start"].items():
            assert torch.equal(value, expected["start"][name]), name
        torch.testing.assert_close(rank["losses"], expected["losses"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(rank["parameters"], expected["parameters"], rtol=1e-9, atol=1e-9)
    assert {name for rank in found for name in rank["start"]} == {*expected["start"]}


def start_of_zoo(name: str, ranks: int) -> dict[str, torch.Tensor]:
    """Return the parameters that this rank has when training begins; those of one device for no ranks."""
    torch.manual_seed(7)
    start = Start()
    layout = {"layout": "-".join("1" * ranks), "planner": "uniform"} if ranks > 1 else {}
    late = {"costs": "counted", "microbatches": 1, "cache": "off", "check": False}
    trainer = make_trainer(dapple(**layout, **late) if ranks else "auto", max_steps=1, callbacks=[start])
    module = Late(ZOO[name].make_module)
    torch.manual_seed(7)
    trainer.fit(module, torch.utils.data.DataLoader(_Samples(ZOO[name].make_batch(2)), batch_size=None))
    assert ranks < 2 or start.pending > 0
    return start.values


class _Samples(torch.utils.data.Dataset[Any]):
    """One batch."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self._batch


@drawn_on_host
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", BUILT)
def test_modules_of_the_zoo_have_the_values_of_one_device_on_any_number_of_ranks(name: str, ranks: int) -> None:
    expected = start_of_zoo(name, 0)
    found = World(ranks).run(start_of_zoo, name, ranks) if ranks > 1 else [start_of_zoo(name, 1)]
    for rank in found:
        for parameter, value in rank.items():
            assert torch.equal(value, expected[parameter]), parameter
    assert {parameter for rank in found for parameter in rank} == {*expected}
    assert ranks < 4 or any(len(rank) < len(expected) for rank in found)


class OfItsRank(pl.LightningModule):
    """A module that is another one on every rank."""

    def configure_model(self) -> None:
        self.layer = nn.Linear(4, 4 + dist.get_rank())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_of_its_rank() -> None:
    make_trainer(dapple(**TWO), max_steps=1).fit(OfItsRank(), torch.utils.data.DataLoader(torch.ones(8, 4), 4))


def test_ranks_that_build_different_modules_are_told_so() -> None:
    results = World(2).results(fit_of_its_rank)
    assert all(isinstance(one, Raised) and "have built another module than rank 0" in one.text for one in results)


def fit_test_fit(options: dict[str, Any] | None, path: str) -> list[Any]:
    """Fit, save, validate and fit again, so that no rank gets the whole module between; a worker function."""
    losses, strategy = Losses(), "auto" if options is None else dapple(**options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[losses])
    with trainer.init_module(empty_init=options is not None):
        module = make_module("dict_batch", **F64).train()
    trainer.fit(module, make_loader("dict_batch", **F64))
    here = sum(type(parameter) is nn.Parameter for parameter in module.parameters())
    trainer.save_checkpoint(path)
    (tested,) = trainer.validate(module, make_loader("dict_batch", seed=1, **F64), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, make_loader("dict_batch", **F64))
    with contextlib.nullcontext() if options is None else strategy.whole_module():
        return [here, losses.losses, tested, {n: p.detach().clone() for n, p in module.named_parameters()}]


@pytest.mark.sampled(every=2)
@drawn_on_host
@pytest.mark.parametrize("restore", ["none", "first"])
def test_a_module_that_stays_apart_can_be_saved_tested_and_trained_further(restore: str, tmp_path: Path) -> None:
    count, *expected = fit_test_fit(None, str(tmp_path / "one.ckpt"))
    found = World(2).run(fit_test_fit, {**TWO, "restore": restore}, str(tmp_path / "two.ckpt"))
    (first, *_), (second, *_) = found
    assert 0 < second < count and first == (count if restore == "first" else count - second)
    for _, *rest in found:
        torch.testing.assert_close(rest, expected, rtol=1e-9, atol=1e-9)
    one, two = (torch.load(tmp_path / name, weights_only=True)["state_dict"] for name in ("one.ckpt", "two.ckpt"))
    torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-9)


class Configured(pl.LightningModule):
    """A module with hyper-parameters, an initialiser of its own, a buffer and a table."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))
        self.register_buffer("scale", torch.linspace(1, 2, width))
        self.table = torch.arange(3.0)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)


class Unknown(Configured):
    """A module that cannot be built again."""

    def __init__(self, width: int, layer: nn.Module) -> None:
        pl.LightningModule.__init__(self)
        self.layers = layer


def test_a_module_of_the_meta_device_is_built_again_by_its_hyperparameters() -> None:
    torch.manual_seed(3)
    plain = Configured(5)
    torch.manual_seed(3)
    with torch.device("meta"):
        late = Configured(5)
    first = late.layers[0].weight
    adopt(late)
    assert isinstance(first, Pending) and without_origin(late) == []
    assert_made_alike(plain, late)
    assert torch.equal(plain.table, late.table) and late.layers[0].weight is first


def test_a_module_that_cannot_be_built_again_needs_the_values_of_a_file() -> None:
    plain = nn.Linear(3, 2)
    with torch.device("meta"):
        late = Unknown(5, nn.Linear(3, 2))
    adopt(late)
    assert without_origin(late) == ["layers.weight", "layers.bias"]
    with pytest.raises(UnsupportedError, match=r"layers\.weight of Unknown has no values"):
        refuse_parts(late)
    late.layers.load_state_dict(plain.state_dict())
    refuse_parts(late)
    assert_made_alike(plain, late.layers)


def test_values_follow_a_conversion_of_the_module() -> None:
    torch.manual_seed(3)
    plain = nn.Linear(3, 2).double()
    torch.manual_seed(3)
    with building():
        late = nn.Linear(3, 2)
    with converting(late.parameters()):
        late.double()
    assert late.weight.dtype == torch.float64
    assert_made_alike(plain, late)
