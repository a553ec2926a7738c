"""A batch that is cut into micro-batches has the loss and the gradients of the whole batch, or it is said that not.

Whatever the loss: sums, terms of several kinds, means over what is not ignored. Where it cannot be (a loss that
compares samples, or a replayed step that counts), nothing is trained in silence.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_pipe.errors import CaptureError, PipelineError
from lightning_pipe.strategy.parameters.stand_ins import Guarded
from ranks.world import World
from slow import slow_but
from strategy.fits import checked, make_trainer
from strategy.losses import COUNTED, MEANS, MIXED, SAMPLES, SUMS, TERMS, Module, batch, each, fit, fit_cut, worst

ROUNDING = 1e-6  # of float64 sums in another order
EXACT = {**SUMS, **TERMS, **COUNTED, **MEANS}


@functools.cache
def plain(name: str, targets: str = "uneven"):
    return fit({**EXACT, **MIXED}[name], targets=targets)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("name", EXACT)
def test_the_loss_of_a_graph_is_that_of_the_whole_batch(name):
    found = fit_cut(EXACT[name])
    assert worst(found, plain(name)) < ROUNDING, (found, plain(name))
    assert not found.warned


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", [*SUMS, *MEANS])
def test_a_replayed_sum_or_mean_is_that_of_the_whole_batch(name):
    found = fit_cut(EXACT[name], capture="replay")
    assert worst(found, plain(name)) < ROUNDING, (found, plain(name))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", [*TERMS, *COUNTED])
def test_any_other_replayed_loss_is_that_of_the_whole_batch(name):
    found = fit_cut(EXACT[name], capture="replay")
    assert worst(found, plain(name)) < ROUNDING, (found, plain(name))


class Auxiliary(torch.autograd.Function):
    """Adds a term to the gradient that the loss does not show, as auxiliary losses of experts do."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient - 1.1 / gradient.numel()


def test_a_gradient_that_the_loss_does_not_show_is_that_of_the_whole_batch():
    def loss(m, o, y):
        return Auxiliary.apply(o).mean()

    found = fit_cut(loss)
    assert worst(found, fit(loss)) < ROUNDING and not found.warned


@pytest.mark.sampled
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["python's sum", "uncertainty", "ignore_index", "masked mean, mean and penalty"])
def test_that_holds_for_any_number_of_micro_batches(name, microbatches):
    assert worst(fit_cut(EXACT[name], microbatches=microbatches), plain(name)) < ROUNDING


@pytest.mark.parametrize("name", ["ignore_index", "class weights", "masked mean", "masked mean, clamped"])
def test_a_batch_without_a_target_does_what_it_does_on_one_device(name):
    assert worst(fit_cut(EXACT[name], targets="all"), plain(name, "all")) == 0.0


def loader(targets: str) -> DataLoader:
    return DataLoader(batch(targets=targets), batch_size=SAMPLES)


BY_MICROBATCH = "batch statistics"  # which a graph takes of micro-batches, as accumulation does


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("capture", ["joint", "replay"])
@pytest.mark.parametrize("name", sorted(MIXED.keys() - {BY_MICROBATCH}))
def test_a_loss_that_needs_all_samples_is_that_of_the_whole_batch(name, capture):
    found, expected = fit_cut(MIXED[name], capture=capture), plain(name)
    assert found.losses == pytest.approx(expected.losses, rel=ROUNDING) and not found.warned
    for parameter, gradient in expected.gradients.items():  # some are zero but for rounding
        torch.testing.assert_close(found.gradients[parameter], gradient, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.sampled
@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_what_batch_statistics_change_is_said(capture):
    found = fit_cut(MIXED[BY_MICROBATCH], capture=capture)
    assert worst(found, plain(BY_MICROBATCH)) > 1e-3 and found.warned


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_a_loss_that_is_no_number_for_a_micro_batch_is_that_of_the_batch(capture):
    def of_some(m, o, y):
        return torch.nanmean(torch.where(y != -100, F.cross_entropy(o, y, reduction="none"), torch.nan))

    assert worst(fit_cut(of_some, capture=capture), fit(of_some)) < ROUNDING


def test_numbers_overrule_what_operations_seem_to_say():
    def normalised(m, o, y):
        weights = y + 101.0
        return (F.cross_entropy(o, y.clamp(min=0), reduction="none") * (weights / weights.sum() * len(y))).mean()

    found = fit_cut(normalised)
    assert worst(found, fit(normalised)) < ROUNDING
    assert not found.warned


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_random_numbers_do_not_count_as_a_change(capture):
    noisy = fit_cut(lambda m, o, y: (o + torch.randn_like(o)).square().mean(), capture=capture, dropout=0.5)
    assert not noisy.warned


@pytest.mark.parametrize("capture", ["joint", "replay", "auto"])
def test_a_loss_that_trains_nothing_is_refused_with_the_line_that_detaches_it(capture):
    with pytest.raises(CaptureError, match=r"nothing to train. It is detached at .*test_losses.py:"):
        fit_cut(lambda m, o, y: o.detach().square().mean(), capture=capture)


def test_a_batch_whose_proven_loss_becomes_another_is_run_whole():
    """Its first targets are all valid, so that its loss was proven a mean over samples."""
    torch.manual_seed(0)
    module = Module(EXACT["ignore_index"]).double()
    trainer = make_trainer(checked(capture="replay", microbatches=4), max_epochs=1)
    batches = DataLoader([*batch(targets="none"), *batch(targets="uneven")], batch_size=SAMPLES)
    with pytest.warns(UserWarning, match="takes whole batches from now on.*micro-batches make its loss"):
        trainer.fit(module, batches)
    expected = plain("ignore_index").gradients
    for name, gradient in expected.items():
        torch.testing.assert_close(module.gradients[name], gradient, rtol=ROUNDING, atol=ROUNDING)


BECOMING = ("sum", "dot", "ignore_index", "masked mean", "norm", "square of a mean", "contrastive", "flipped")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("capture", ["joint", "replay", "auto"])
@pytest.mark.parametrize("name", slow_but(BECOMING, {**EXACT, **MIXED}))
def test_a_mean_that_becomes_another_loss_is_that_of_the_whole_batch_or_its_difference_is_said(name, capture):
    """Numbers have told of the loss of the first batch only."""
    later = {**EXACT, **MIXED}[name]

    def becoming(m, o, y):
        return (MEANS["mean"] if m.global_step == 0 else later)(m, o, y)

    try:
        found = fit_cut(becoming, capture=capture, batches=2)
    except (CaptureError, PipelineError):
        return
    assert found.warned or worst(found, plain(name)) < ROUNDING, (found, plain(name))
    if name in SUMS.keys() - {"einsum"} and capture == "joint":
        assert not found.warned and worst(found, plain(name)) < ROUNDING, (found, plain(name))


def test_another_loss_behind_a_question_is_that_of_the_whole_batch():
    def asking(m, o, y):
        loss = each(o, y).mean()
        return loss + o.norm() if y.sum() > 0 and m.global_step > 0 else loss

    found = fit_cut(asking, capture="auto", batches=2, targets="none")
    assert worst(found, fit(asking, batches=2, targets="none")) < ROUNDING


def fit_two_ranks(name: str, capture: str):
    """Train one batch on two ranks; a worker function."""
    found = fit_cut(EXACT[name], capture=capture)
    return found.losses, {n: g for n, g in found.gradients.items() if not isinstance(g, Guarded)}


@pytest.mark.parametrize(
    ("name", "capture"), [("ignored and penalty", "joint"), ("class weights", "joint"), ("sum", "replay")]
)
def test_two_ranks_have_the_losses_and_gradients_of_one_device(name, capture):
    expected, trained = plain(name), {}
    for losses, gradients in World(2).run(fit_two_ranks, name, capture):
        assert losses == pytest.approx(expected.losses, rel=ROUNDING)
        trained |= gradients
    for parameter, gradient in trained.items():
        torch.testing.assert_close(gradient, expected.gradients[parameter], rtol=ROUNDING, atol=ROUNDING)
    assert trained.keys() == expected.gradients.keys()


def test_a_language_model_weighs_micro_batches_by_their_tokens():
    transformers = pytest.importorskip("transformers", reason="the models of libraries need the extra `libraries`")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    ids = torch.randint(32, (8, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row, end in enumerate((12, 9, 0, 0, 7, 12, 3, 5)):  # the second micro-batch has no label at all
        labels[row, end:] = -100

    class Language(Module):
        def __init__(self) -> None:
            super().__init__(lambda *_: None)
            self.model = transformers.GPT2LMHeadModel(config)

        def training_step(self, batch, batch_idx):
            return self.model(input_ids=batch["ids"], labels=batch["labels"]).loss

    def gradients(strategy):
        torch.manual_seed(0)
        module = Language().double()
        data = [{"ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
        make_trainer(strategy, max_epochs=1).fit(module, DataLoader(data, batch_size=8))
        return module.gradients

    expected, found = gradients("auto"), gradients(checked(microbatches=4, capture="joint"))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert float((found[name] - gradient).abs().max()) <= ROUNDING * scale, name
