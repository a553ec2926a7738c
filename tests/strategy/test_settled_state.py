"""State that settles in the first call of a step: the step is one graph from its first batch on, as on one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.errors import CaptureError
from ranks.world import World
from strategy.fits import Losses, checked, make_trainer

WIDTH, CLASSES, ROUNDING = 6, 5, 1e-9


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, 12).double(), nn.Linear(12, CLASSES).double()

    def out(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Config:
    problem_type: str | None = None


class ByConfig(Net):
    """As classifiers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if self.config.problem_type is None:
            self.config.problem_type = "classes" if y.dtype == torch.long else "regression"
        if self.config.problem_type == "classes":
            return F.cross_entropy(self.out(x), y)
        return F.mse_loss(self.out(x)[:, 0], y)


class ByMask(Net):
    mask: torch.Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if self.mask is None:
            self.mask = torch.linspace(0.5, 1.0, CLASSES, dtype=torch.float64, device=x.device).cumprod(0)
        return F.cross_entropy(self.out(x) * self.mask, y)


class ByTable(Net):
    """Logs too, and keeps a table per width."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1], device=x.device).double() / x.shape[1]
        loss = F.cross_entropy(self.out(x + self.tables[x.shape[1]]), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.training_step(batch, batch_idx))


class BySamples(Net):
    """One device writes down the samples of its first batch, and not those of a micro-batch."""

    samples: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if self.samples is None:
            self.samples = len(x)
        return F.cross_entropy(self.out(x), y, reduction="sum") / self.samples


class Counting(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(self.out(batch[0]), batch[1]) * self.calls


class AnotherFirst(Net):
    """What settles has changed the loss of the first batch."""

    is_first = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.out(batch[0]), batch[1])
        if self.is_first:
            self.is_first = False
            return 3 * loss
        return loss


class DetachedFirst(Net):
    """The loss of the first batch is the same, and its gradient is another."""

    is_first = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.one(batch[0])
        if self.is_first:
            self.is_first, hidden = False, hidden.detach()
        return F.cross_entropy(self.two(torch.tanh(hidden)), batch[1])


class ActNorm(nn.Module):
    """Sets its parameters by its first batch, and a buffer that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = (nn.Parameter(torch.zeros(12).double()) for _ in range(2))
        self.register_buffer("initialized", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.initialized.item() == 0:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / x.std(0))
                self.initialized.fill_(1)
        return (x + self.shift) * self.scale


class ByFirstBatch(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ActNorm()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.two(torch.tanh(self.norm(self.one(batch[0])))), batch[1])


SETTLING = [ByConfig, ByMask, ByTable, BySamples]


def fit(kind: type[Net], strategy: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (24,), generator=generator)
    module, seen = kind(), Losses()
    loader = DataLoader(list(zip(x, y, strict=True)), batch_size=8)
    validation = loader if "validation_step" in vars(kind) else None
    make_trainer(strategy, max_epochs=1, callbacks=[seen]).fit(module, loader, validation)
    return seen.losses, {name: value.clone() for name, value in module.state_dict().items()}


def fit_cut(kind: type[Net], capture: str, layout: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return fit(kind, checked(capture=capture, layout=layout, microbatches=2))


def fit_each() -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Fit all that settle as one graph of two stages; a worker function."""
    return [fit_cut(kind, "joint", "1-1") for kind in SETTLING]


def test_a_step_whose_state_settles_is_one_graph() -> None:
    expected = [fit(kind, "auto") for kind in SETTLING]
    for fitted in World(2).run(fit_each):
        torch.testing.assert_close(fitted, expected, rtol=ROUNDING, atol=ROUNDING)


def fit_whole() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Fit in two stages, with whole batches; a worker function."""
    return fit(ByFirstBatch, checked(layout="1-1", microbatches=1))


def test_what_the_first_batch_sets_is_the_same_on_the_rank_that_has_it() -> None:
    """The buffer of rank 1 was not known to change, so that of rank 0 was saved: a resumed run began anew."""
    expected = fit(ByFirstBatch, "auto")
    assert expected[1]["norm.initialized"] == 1
    for fitted in World(2).run(fit_whole):
        torch.testing.assert_close(fitted, expected, rtol=ROUNDING, atol=ROUNDING)
    with pytest.raises(CaptureError, match=r"sets norm.* in its first call"):
        fit_cut(ByFirstBatch, "replay", "1")


@pytest.mark.parametrize("kind", [Counting, AnotherFirst, DetachedFirst])
def test_state_that_does_not_settle_or_changes_the_first_batch_is_replayed(kind: type[Net]) -> None:
    with pytest.raises(CaptureError, match="reads it again in the next call"):
        fit_cut(kind, "joint", "1")
    torch.testing.assert_close(fit_cut(kind, "auto", "1"), fit(kind, "auto"), rtol=ROUNDING, atol=ROUNDING)


def test_the_page_on_hugging_face_fine_tunes_and_saves(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the models of libraries need the extra `libraries`")
    page = (Path(__file__).parents[2] / "docs" / "hugging_face.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    given: dict[str, Any] = {}
    exec(code, given)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "plain")
    ids = torch.randint(20, (16, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2} for row in ids]
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    loader = DataLoader(rows, batch_size=8)
    module = given["fine_tune"](tmp_path / "plain", loader, tmp_path / "tuned", devices=1, max_epochs=1, **quiet)
    tuned = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    torch.testing.assert_close(tuned.state_dict(), module.model.state_dict())


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_classifiers_of_transformers_are_one_graph(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the models of libraries need the extra `libraries`")
    sizes = {"Bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}}
    names = {"GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}}
    config = getattr(transformers, f"{name}Config")(vocab_size=20, num_labels=3, **{**sizes, **names}[name])
    torch.manual_seed(0)

    class Classifier(Net):
        def __init__(self) -> None:
            super().__init__()
            self.model = getattr(transformers, f"{name}ForSequenceClassification")(config).double().eval()

        def on_train_start(self) -> None:
            self.model.eval()  # without dropout

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.model(input_ids=batch[0].abs().mul(5).long() + 1, labels=batch[1] % 3).loss

    torch.manual_seed(0)
    expected = fit(Classifier, "auto")
    torch.manual_seed(0)
    torch.testing.assert_close(fit_cut(Classifier, "joint", "1"), expected, rtol=ROUNDING, atol=ROUNDING)
