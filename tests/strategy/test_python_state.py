"""Whatever the Python of a step reads and changes: training is that of one device, or is refused before it begins."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from lightning_pipe.errors import CaptureError, PipelineError, PlanError, UnsupportedError
from ranks.world import World
from strategy.fits import dapple, make_trainer
from strategy.python_steps import EPOCHS, STEPS, batches

ROUNDING = 1e-5  # of losses and weights; a number that is one batch late makes a thousand times that
REFUSED_BY_JOINT = {
    *("PythonRandom", "NumpyRandom", "TorchRandom", "CountsAtBothEnds", "CountsCalls", "Iterates", "DefaultArgument"),
    *("CallbackMetrics", "ArrayInBatch"),  # arrays become tensors on their way to the step
    *("CollectsByValue", "CollectsTexts", "LogsByText"),
    *("FrozenByStep", "ReadsGradient", "ReadsMomentum"),
    *("SkippedWhereNotANumber", "SkippedWhereNotANumberAndCounted"),  # another answer ends joint training there
}


CALLS_OTHER_MODULES = {"LateEpoch", "EveryThirdBatch", "MethodReplaced"}  # from time to time, which replay cannot


@dataclass
class Trained:
    """What a fit leaves: losses and logged values per batch, state, and what the step has left on its module."""

    seen: list[Any]
    state: dict[str, torch.Tensor]
    kept: dict[str, Any]


class Seen(pl.Callback):
    """Note the loss and the logged values after every batch."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"] if outputs else None
        self.batches.append((loss, {name: float(value) for name, value in trainer.callback_metrics.items()}))


def plainly(value: Any) -> Any:
    return apply_to_collection(value, torch.Tensor, lambda tensor: tensor.detach().tolist())


def trained(name: str, options: dict[str, Any] | None) -> Trained:
    """Fit on one device, or as a pipeline on the ranks of this world."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = STEPS[name]().double()
    for function in (type(module).training_step,):
        for default in function.__defaults__ or ():
            default.clear()
    seen = Seen()
    strategy = "auto" if options is None else dapple(witness=True, cache="off", **options)
    trainer = make_trainer(strategy, max_epochs=EPOCHS, callbacks=[seen], num_sanity_val_steps=0)
    data = batches(STEPS[name])
    loaders = [DataLoader(data, batch_size=None) for _ in ("train", "validate")]
    try:
        trainer.fit(module, *loaders)
    except (CaptureError, PlanError, UnsupportedError) as error:
        if trainer.global_step:
            raise RuntimeError(f"refused after {trainer.global_step} steps: {error}") from error
        raise
    kept = {key: plainly(getattr(module, key)) for key in module.KEPT}
    return Trained(plainly(seen.batches), {k: v.detach().clone() for k, v in module.state_dict().items()}, kept)


@functools.cache
def plain(name: str) -> Trained:
    return trained(name, None)


def assert_same(found: Trained, expected: Trained) -> None:
    assert _rounded(found.seen) == pytest.approx(_rounded(expected.seen), rel=ROUNDING, nan_ok=True)
    assert found.state.keys() == expected.state.keys()
    for name, value in expected.state.items():
        torch.testing.assert_close(
            found.state[name], value, rtol=ROUNDING, atol=ROUNDING, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert _rounded(found.kept) == pytest.approx(_rounded(expected.kept), rel=ROUNDING, nan_ok=True)


def _rounded(value: Any) -> list[Any]:
    """Return the numbers and texts of nested values in one flat list of numbers, texts as their hashes."""
    if isinstance(value, dict):
        return [part for key, item in value.items() for part in (*_rounded(key), *_rounded(item))]
    if isinstance(value, (list, tuple)):
        return [float(len(value)), *(part for item in value for part in _rounded(item))]
    return [float(value)] if isinstance(value, (int, float)) else [float(hash(value) % 1000)]


def refusal(name: str, options: dict[str, Any]) -> str:
    """Train as a pipeline and compare; return the text of the refusal, "" if there is none."""
    try:
        found = trained(name, options)
    except (CaptureError, PlanError, UnsupportedError) as error:
        return str(error)
    except PipelineError as error:
        if not re.search("captured with the answer|calls its modules in another order", str(error)):
            raise
        return str(error)
    assert_same(found, plain(name))
    return ""


def assert_named(text: str) -> None:
    assert re.search(
        r"python_steps\.py:\d+|self\.\w+|training_step\.|optimizers\[0\]|(calls|uses what) \w+(, \w+)* (where|compute)",
        text,
    ), f"names no line and no attribute: {text}"


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", STEPS)
def test_one_graph_trains_as_one_device_or_is_refused_by_name(name: str, microbatches: int) -> None:
    text = refusal(name, {"capture": "joint", "microbatches": microbatches})
    assert bool(text) == (name in REFUSED_BY_JOINT), text
    if text:
        assert_named(text)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", STEPS)
def test_replay_trains_as_one_device_or_is_refused_by_name(name: str, microbatches: int) -> None:
    text = refusal(name, {"capture": "replay", "microbatches": microbatches})
    assert ("in another order" in text) == (name in CALLS_OTHER_MODULES)
    if text:
        assert_named(text)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", [*sorted(REFUSED_BY_JOINT), "Attribute", "LateStep"])  # others go as by joint
def test_by_default_training_is_that_of_one_device_or_is_refused_by_name(name: str, microbatches: int) -> None:
    if text := refusal(name, {"microbatches": microbatches}):
        assert_named(text)


ON_TWO_RANKS = (
    "FilledByOthers",
    "Cosine",
    "HyperParameter",
    "Collects",
    "CollectsInValidation",
    "CountsCalls",
    "NumberInBatch",
    "ReadInBackward",
    "Schedulers",
)
LEAVES_A_STAGE = ("WarmUp", "ListItem")  # both stages train all weights at first, and then one of them does


def all_trained(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, Trained]:
    """Train several steps one after the other on all ranks of this world; a worker function."""
    return {name: trained(name, options) for name in names}


@pytest.mark.parametrize("route", ["auto", pytest.param("replay", marks=pytest.mark.slow)])
def test_every_rank_of_two_stages_has_what_one_device_has(route: str) -> None:
    options = {"layout": "1-1", "microbatches": 2, "capture": route}
    names = (
        (*ON_TWO_RANKS, "FillsByHooks", "ClearedAndFilled") if route == "auto" else ON_TWO_RANKS
    )  # replay: it uses what stages compute
    for found in World(2).run(all_trained, names, options):
        for name, one in found.items():
            assert_same(one, plain(name))


@pytest.mark.parametrize("name", LEAVES_A_STAGE)
def test_copies_of_a_weight_stay_equal_when_a_later_graph_trains_it_in_one_stage(name: str) -> None:
    for found in World(2).run(all_trained, (name,), {"layout": "1-1", "microbatches": 2, "capture": "joint"}):
        assert_same(found[name], plain(name))
