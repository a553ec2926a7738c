"""Accumulation, clipping, batch statistics, dropout: what a trainer does around a step is the same in a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import Case, Fitted, Losses, assert_same, dapple, fit, fit_as_pipeline, fitted, make_trainer

ROUNDING = 1e-9
TWO = {"layout": "1-1", "microbatches": 2}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("layout", "trainer"),
    [
        ("1-1", {"accumulate_grad_batches": 2}),
        ("2-1", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "max_steps": 3}),
        ("1-1", {"gradient_clip_val": 0.05}),
        ("1-1", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        ("2-1", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        ("1-1", {"fast_dev_run": 2}),
        ("2-1", {"overfit_batches": 1}),
        (
            "2-1",
            {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0, "val_check_interval": 1},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_options_of_the_trainer_mean_the_same(layout: str, trainer: dict[str, Any]) -> None:
    case = Case("parameter_groups", {"layout": layout, "microbatches": 2}, trainer)
    expected = fit(case)
    for found in World(sum(map(int, layout.split("-")))).run(fit_as_pipeline, case):
        assert_same(found, expected, rtol=ROUNDING)


def test_clipping_scales_by_the_very_norm_of_one_device() -> None:
    trainer = {"gradient_clip_val": 0.05, "limit_val_batches": 0}
    case = Case("unet_skips", {"microbatches": 2}, trainer, dtype=torch.float32)
    expected = fit(case, dapple(**case.options))
    for found in World(2).run(fit_as_pipeline, replace(case, options=TWO)):
        assert all(torch.equal(found.parameters[name], value) for name, value in expected.parameters.items())


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{"layout": "1-1"}, {"layout": "1-1-1", "schedule": "gpipe"}], ids=str)
@pytest.mark.parametrize("name", ["custom_function", "unet_skips"])  # the sum of a tied gradient changes its order
def test_neither_layout_nor_schedule_changes_a_bit_not_even_of_dropout(name: str, options: dict[str, Any]) -> None:
    trained_only = {"limit_val_batches": 0}
    alone = Case(name, {"microbatches": 4, "seed": 3}, trained_only, epochs=1, dtype=torch.float32, dropout=0.3)
    expected = fit(alone, dapple(**alone.options))
    case = replace(alone, options={**alone.options, **options})
    for found in World(len(options["layout"]) // 2 + 1).run(fit_as_pipeline, case):
        assert found.losses == expected.losses
        assert all(torch.equal(found.parameters[n], value) for n, value in expected.parameters.items())


def accumulated(case: Case, microbatches: int) -> Fitted:
    """Train one device with every batch cut into micro-batches, by hand."""
    module, losses = make_module(case.name, dtype=case.dtype).train(), []
    trainer = make_trainer("auto", max_epochs=0)
    trainer.fit(module, make_loader(case.name, dtype=case.dtype))
    optimizer = module.configure_optimizers()
    module.log = lambda *_, **__: None
    for _ in range(case.epochs):
        for batch in make_loader(case.name, dtype=case.dtype):
            total = len(batch[0])
            optimizer.zero_grad()
            loss, old = 0.0, {name: buffer.clone() for name, buffer in module.named_buffers()}
            means = {name: torch.zeros_like(buffer) for name, buffer in old.items()}
            for part in zip(*(torch.tensor_split(leaf, microbatches) for leaf in batch), strict=True):
                share = module.training_step(part, 0) * (len(part[0]) / total)
                share.backward()
                loss += float(share)
                for name, buffer in module.named_buffers():
                    is_mean = buffer.is_floating_point()
                    means[name] = means[name] + buffer * (len(part[0]) / total) if is_mean else buffer.clone()
                    buffer.copy_(old[name])
            for name, buffer in module.named_buffers():
                buffer.copy_(means[name])
            optimizer.step()
            losses.append(loss)
    return fitted(trainer, module, losses)


def test_batch_statistics_are_those_of_gradient_accumulation() -> None:
    case = Case("resnet_batchnorm", {"layout": "1-1", "microbatches": 2}, {"limit_val_batches": 0})
    expected = accumulated(case, 2)
    for found in World(2).run(fit_as_pipeline, case):
        assert_same(replace(found, metrics={}), replace(expected, metrics={}), rtol=ROUNDING)


class OwnSteps(pl.Callback):
    """Write down in which order hooks are called, and what they see."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if (name.startswith("on_") and "grad" in name) or "backward" in name or "optimizer_step" in name:
            self.calls.append(name)
        return super().__getattribute__(name)


def hooks(options: dict[str, Any] | None) -> list[str]:
    watcher = OwnSteps()
    strategy = "auto" if options is None else dapple(**options)
    trainer = make_trainer(strategy, max_steps=2, accumulate_grad_batches=2, callbacks=[watcher], limit_val_batches=0)
    trainer.fit(make_module("dict_batch"), make_loader("dict_batch"))
    return watcher.calls


def test_the_same_hooks_are_called_as_often() -> None:
    expected = hooks(None)
    assert len(expected) > 8
    for found in World(2).run(hooks, TWO):
        assert sorted(found) == sorted(expected)


def evaluate(
    options: dict[str, Any] | None,
) -> tuple[list[dict[str, float]], list[torch.Tensor], list[dict[str, float]]]:
    """Validate before training, predict and validate after it; a worker function."""
    strategy = "auto" if options is None else dapple(**options)
    module = make_module("gpt_tied", dtype=torch.float64)
    loader, other = (make_loader("gpt_tied", seed=s, dtype=torch.float64) for s in (0, 1))
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[Losses()])
    before = trainer.validate(module, other, verbose=False)
    trainer.fit(module, loader)
    predictions = trainer.predict(module, other)
    return before, predictions, trainer.validate(module, other, verbose=False)


def test_validation_and_prediction_stand_alone_too() -> None:
    before, predictions, after = evaluate(None)
    for found_before, found, found_after in World(2).run(evaluate, TWO):
        for one, two in [*zip(found_before, before, strict=True), *zip(found_after, after, strict=True)]:
            assert one == pytest.approx(two, rel=1e-9)
        assert len(found) == len(predictions)
        assert all(torch.equal(one, two) for one, two in zip(found, predictions, strict=True))
