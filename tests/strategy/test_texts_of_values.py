"""Steps that say values and sizes are one graph; those that decide by such texts train as one device, too."""

# ruff: noqa: T201

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.capture.output import text_uses
from lightning_pipe.errors import CaptureError
from strategy.fits import Losses, dapple, make_trainer

log = logging.getLogger(__name__)
ROUNDING = 1e-9


class Net(pl.LightningModule):
    """Its loss has a factor that a subclass decides on; what a buffer holds changes in the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4)
        self.register_buffer("number", torch.tensor(0.0))
        self.register_buffer("vector", torch.zeros(2))

    def on_train_epoch_start(self) -> None:
        self.number.fill_(self.current_epoch)
        self.vector.fill_(self.current_epoch)

    def factor(self, batch: torch.Tensor, loss: torch.Tensor) -> float:
        raise NotImplementedError

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        return loss * self.factor(batch, loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


Factor = Callable[[Net, torch.Tensor, torch.Tensor], float]
SAYS: dict[str, Factor] = {}
DECIDES: dict[str, Factor] = {}
BY_SIZE: dict[str, Factor] = {}


def says(function: Factor) -> Factor:
    return SAYS.setdefault(function.__name__, function)


def decides(function: Factor) -> Factor:
    return DECIDES.setdefault(function.__name__, function)


def decides_by_size(function: Factor) -> Factor:
    return BY_SIZE.setdefault(function.__name__, function)


def described(loss: torch.Tensor) -> str:
    return f"loss {loss:.3f}"


@says
def prints(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    print(f"loss {loss:.3f}", str(net.vector), f"{loss.item()}", batch.shape[0], f"{len(batch)}")
    return 1.0


@says
def prints_tensors(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    print(
        loss,
        batch,
        "of",
        net.vector,
    )
    return 1.0


@says
def tells_a_logger(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    log.warning("%s of %s samples", loss.item(), len(batch))
    log.warning(f"{loss.detach()}")
    return 1.0


@says
def prints_a_variable(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    text = f"loss {loss:.2f}"
    text += str(net.number.item())
    if net.training:
        print(text)
    return 1.0


@says
def prints_what_a_function_says(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    print(described(loss), end="\r"); print(described(net.number))  # noqa: E702  # fmt: skip
    return 1.0


@says
def asks_for_the_type(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    is_right = isinstance(loss.item(), float) and isinstance((loss > 3).sum().item(), int)
    return 1.0 if is_right and not isinstance(loss.item(), int) else 0.5


@decides
def looks_up(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    return {"1": 0.5}.get(f"{net.number:.0f}", 1.0)


@decides
def looks_up_a_number(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    return {"1.0": 0.5}.get(str(net.number.item()), 1.0)


@decides
def compares(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    return 0.5 if f"{net.number:.0f}" == "1" else 1.0


@decides
def compares_a_tensor(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    return 0.5 if str(net.vector) == "tensor([1., 1.])" else 1.0


@decides
def compares_in_one_line(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    if repr(net.number.item()) == "1.0": print(loss); return 0.5  # noqa: E701, E702  # fmt: skip
    return 1.0


@decides
def compares_what_it_prints(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    text = f"{net.number:.0f}"
    print(text)
    return 0.5 if text == "1" else 1.0


@decides
def compares_while_it_prints(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    print(text := f"{net.number:.0f}")
    return 0.5 if text == "1" else 1.0


@decides
def compares_what_a_function_says(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    return 0.5 if "1.0" in described(net.number) else 1.0


@decides
def asks_for_its_beginning(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    return 0.5 if "{:.0f}".format(net.number).startswith("1") else 1.0  # noqa: UP032


@decides
def asks_whether_it_is_no_number(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    return 0.5 if "nan" in f"{loss}" else 1.0


@decides
def asserts(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    try:
        assert f"{net.number:.0f}" != "1"
    except AssertionError:
        return 0.5
    return 1.0


@decides
def has_it_as_a_key(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    table = {f"{net.number:.0f}": 0.5}
    return table.get("1", 1.0)


@decides
def keeps_it(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    net.text = f"{net.number:.0f}"
    return 0.5 if net.text == "1" else 1.0


@decides
def collects_it(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    texts: list[str] = []
    texts.append(f"{net.number:.0f}")
    return 0.5 if texts == ["1"] else 1.0


@decides
def has_it_from_inside(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    text = ""

    def ask() -> None:
        nonlocal text
        text = f"{net.number:.0f}"

    ask()
    return 0.5 if text == "1" else 1.0


@decides_by_size
def looks_up_a_size(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    return {"1": 0.5}.get(f"{batch.shape[0]}", 1.0)


@decides_by_size
def compares_a_size(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    return 0.5 if str(len(batch)) == "1" else 1.0


@decides_by_size
def compares_a_shape(net: Net, batch: torch.Tensor, loss: torch.Tensor) -> float:
    return 0.5 if repr(batch.shape) == "torch.Size([1, 4])" else 1.0


def losses(factor: Factor, options: dict[str, Any] | None) -> list[float]:
    """Return the losses of five samples in batches of two, for two epochs."""
    net = type("Factored", (Net,), {"factor": factor})()
    data = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    seen = Losses()
    strategy = "auto" if options is None else dapple(cache="off", witness=True, microbatches=1, **options)
    make_trainer(strategy, max_epochs=2, callbacks=[seen]).fit(net, DataLoader(data, batch_size=2))
    return seen.losses


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", SAYS)
def test_what_is_only_said_is_no_part_of_the_graph(name: str) -> None:
    assert losses(SAYS[name], {"capture": "joint"}) == pytest.approx(losses(SAYS[name], None), rel=ROUNDING)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", DECIDES)
def test_a_step_that_decides_by_the_text_of_a_value_is_replayed(name: str) -> None:
    """The text of a trace was "nan" for every value: such a step trained by another number, without a word."""
    with pytest.raises(CaptureError, match=rf"made a text.* at .*{__name__.rpartition('.')[2]}\.py:\d+ in \w+"):
        losses(DECIDES[name], {"capture": "joint"})
    assert losses(DECIDES[name], {}) == pytest.approx(losses(DECIDES[name], None), rel=ROUNDING)


def test_lines_alone_tell_that_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.10 has no columns."""
    monkeypatch.setattr(text_uses, "_place", lambda frame: (frame.f_lineno, None))
    for factor in DECIDES.values():
        with pytest.raises(CaptureError, match="made a text"):
            losses(factor, {"capture": "joint"})
    assert losses(prints_tensors, {"capture": "joint"}) == pytest.approx(losses(prints_tensors, None), rel=ROUNDING)


@pytest.mark.parametrize("name", BY_SIZE)
def test_a_step_that_decides_by_the_text_of_a_size_is_traced_for_each(name: str) -> None:
    """The text of a trace was a symbol for every size."""
    assert losses(BY_SIZE[name], {"capture": "joint"}) == pytest.approx(losses(BY_SIZE[name], None), rel=ROUNDING)
