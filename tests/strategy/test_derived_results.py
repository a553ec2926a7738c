"""What a step makes of numbers that are reduced over its samples is made of those of the whole batch.

Logged and returned results, and the gradients of a graph, are those of one device, however the batch is cut. A
replayed step makes its gradients micro-batch by micro-batch: where such numbers make its loss, and do not make it alike
of all micro-batches, that is said.
"""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.fits import checked, make_trainer

SAMPLES, WIDTH = 10, 4

DERIVED = {
    "exponential": lambda o, y: each(o, y).mean().exp(),
    "root": lambda o, y: F.mse_loss(o, torch.zeros_like(o)).sqrt(),
    "square": lambda o, y: each(o, y).mean().square(),
    "decibel": lambda o, y: 10 * torch.log10(1 / o.pow(2).mean()),
    "ratio of means": lambda o, y: o.pow(2).mean() / o.abs().mean(),
    "ratio of sums": lambda o, y: o.pow(2).sum() / (o.abs().sum() + 1),
    "dice": lambda o, y: 1 - 2 * o.sigmoid()[:, 0].sum() / (o.sigmoid().sum() + 1),
    "f1": lambda o, y: (lambda p, r: 2 * p * r / (p + r + 1))(
        hits(o, y).mean(), hits(o, y)[:, None].expand(-1, 2).mean()
    ),
    "clamp that acts": lambda o, y: each(o, y).mean().clamp(max=0.5),
    "absolute": lambda o, y: (each(o, y).mean() - 1.4).abs(),
    "larger mean": lambda o, y: torch.maximum(o[:, 0].mean(), o[:, 1].mean()),
    "free bits": lambda o, y: o.pow(2).mean(0).clamp(min=0.2).sum(),
    "norm of a mean": lambda o, y: o.mean(0).norm(),
    "largest mean": lambda o, y: o.mean(0).max(),
    "softmax of means": lambda o, y: o.mean(0).softmax(0)[0],
    "extremes": lambda o, y: (o.max() - o.min()).log(),
    "one sample less": lambda o, y: o.pow(2).sum() / (len(y) - 1),
    "by samples": lambda o, y: o.pow(2).mean().sqrt() * len(y),
    "whether large": lambda o, y: (each(o, y).mean() > 1.4).double(),
    "deviation": lambda o, y: o.std(),
    "norm": lambda o, y: o.norm(),
    "hardest": lambda o, y: each(o, y).topk(2)[0].sum().sqrt(),
    "drawn": lambda o, y: each(o, y).mean().exp() + 0 * torch.rand((), dtype=o.dtype),
}


def each(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(o, y, reduction="none")


def hits(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (o.argmax(-1) == y).double()


class Module(pl.LightningModule):
    def __init__(self, logs, loss=lambda o, y: each(o, y).mean()) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.logs, self.loss, self.seen = [logs], [loss], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        o = self.layers(x)
        for name, made in self.logs[0].items():
            self.log(name, made(o, y))
        loss = self.loss[0](o, y)
        return {"loss": loss, "said": {name: made(o, y).detach() for name, made in self.logs[0].items()}}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        o = self.layers(x)
        self.log_dict({f"val {name}": made(o, y) for name, made in self.logs[0].items()})

    def on_train_batch_end(self, outputs, batch, batch_idx):
        said = {f"said {name}": value for name, value in outputs["said"].items()}
        now = {"loss": outputs["loss"], **said, **self.trainer.callback_metrics}
        gradients = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}
        self.seen.append(({name: float(value) for name, value in now.items()}, gradients))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches(same: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return two batches: of samples that are all the same, so that cutting changes nothing, and of others or not."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(WIDTH, (2 * SAMPLES,), generator=generator)
    alike = slice(0, None if same else SAMPLES)
    x[alike], y[alike] = x[0].clone(), 0
    return list(zip(x, y, strict=True))


def fit(strategy, logs, *, same=False, **options):
    """Train both batches, and validate; return what was seen, and what was said of micro-batches."""
    torch.manual_seed(0)
    module = Module(logs, **options).double()
    data = DataLoader(batches(same), batch_size=SAMPLES)
    trainer = make_trainer(strategy, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data, data)
    final = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [*module.seen, (final, {})], [str(w.message) for w in caught if "icro-batches" in str(w.message)]


def fit_on_ranks(layout):
    """Return the results of a fit on the ranks of this world; a worker function."""
    return results(fit(checked(capture="joint", microbatches=3, layout=layout), DERIVED)[0])


def results(seen):
    return [said for said, _ in seen]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        wrong = {name: (one[name], other[name]) for name in one if one[name] != pytest.approx(other[name], rel=1e-9)}
        assert not wrong


def test_results_made_of_reduced_numbers_are_those_of_the_whole_batch():
    found, said = fit(checked(capture="joint", microbatches=3), DERIVED)
    assert_same(results(found), results(fit("auto", DERIVED)[0]))
    assert not said


BENT = {
    "flooding": lambda o, y: (each(o, y).mean() - 1.45).abs() + 1.45,
    "hinge": lambda o, y: F.relu(each(o, y).mean() - 1.45),
    "clamp": lambda o, y: each(o, y).mean().clamp(max=1.45),
    "maximum": lambda o, y: torch.maximum(each(o, y).mean(), 1.45 + 0.1 * o.pow(2).mean()),
    "where": lambda o, y: (lambda loss: torch.where(loss > 1.45, loss, 2 * loss))(each(o, y).mean()),
}


def differs(one, other) -> bool:
    """Return whether a gradient is another."""
    (_, gradients), (_, wanted) = one, other
    return any(not torch.allclose(gradients[name], wanted[name], rtol=1e-9, atol=1e-12) for name in wanted)


def cut_in_five(capture):
    return checked(capture=capture, microbatches=5, schedule="gpipe")


@pytest.mark.sampled
@pytest.mark.parametrize("name", BENT)
@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_a_loss_that_bends_for_some_micro_batches_is_that_of_the_whole_batch(name, capture):
    (found, said), (expected, _) = (fit(strategy, {}, loss=BENT[name]) for strategy in (cut_in_five(capture), "auto"))
    assert_same(results(found), results(expected))
    assert not any(differs(*both) for both in zip(found, expected, strict=True)) and not said


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("capture", ["joint", "replay"])
@pytest.mark.parametrize("name", BENT)
def test_nothing_is_said_of_a_loss_that_bends_for_all_or_for_none(name, capture):
    (found, said), (expected, _) = (
        fit(strategy, {}, loss=BENT[name], same=True) for strategy in (cut_in_five(capture), "auto")
    )
    assert not any(differs(*both) for both in zip(found, expected, strict=True)) and not said


def test_a_question_about_a_mean_is_asked_of_that_of_the_batch():
    def asked(o, y):
        loss = each(o, y).mean()
        return loss if loss > 1.45 else 2 * loss

    (found, _), (expected, _) = (fit(one, {}, loss=asked) for one in (cut_in_five("joint"), "auto"))
    assert not any(differs(*both) for both in zip(found, expected, strict=True))


@pytest.mark.parametrize("layout", ["2", "1-1"])
def test_all_ranks_have_them(layout):
    expected = results(fit("auto", DERIVED)[0])
    for found in World(2).run(fit_on_ranks, layout):
        assert_same(found, expected)
