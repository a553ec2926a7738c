"""What a step prints appears once per batch, on rank 0, as on one device; no step is captured again for it."""

# ruff: noqa: T201

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import sysconfig
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from tqdm import tqdm

from lightning_pipe.capture.output.output_functions import output_noted
from lightning_pipe.strategy.steps.step_capture import StepCapture
from ranks.world import World
from strategy.small import Small, loader, run

log = logging.getLogger(__name__)
SPLIT: dict[str, Any] = {"layout": "1-1", "microbatches": 2, "cache": "off"}
LAYOUTS = [SPLIT, {**SPLIT, "capture": "replay"}, {"cache": "off", "microbatches": 2}]
IDS = ["split", "replayed", "one rank"]


class Prints(Small):
    """It prints in its step and in the evaluations, in every way that it may."""

    data = staticmethod(lambda: loader(20, 4))
    validation = staticmethod(lambda: loader(12, 4))

    def say(self, batch: Any, batch_idx: int, kind: str) -> torch.Tensor:
        loss = self.loss(batch)
        x = batch[0]
        print(f"{kind} {batch_idx}: {loss.item():.4f} {loss:.3e} {x.mean():.5f} {x.shape} {len(x)}")
        print("{} is {:.3f}".format("loss", loss.item()), loss, x.shape, batch_idx, x[:, 0])
        self.print("percent", round(100 * loss.item(), 2), x.sum(1).tolist())
        log.warning("logged %.4f of %d", loss.item(), batch_idx)
        warnings.warn(f"warned {kind} {batch_idx} {loss.item():.4f}", stacklevel=1)
        rank_zero_info(f"informed {loss:.4f}")
        tqdm.write(f"tqdm {loss:.4f}")
        sys.stdout.write(f"written {loss:.4f}\n")
        text = f"text {self.last.bias.sum():.4f}"
        print(text, file=sys.stderr)
        if batch_idx % 2 == 0:
            print("even", batch_idx)
        if batch_idx > 0 and not (loss.item() > 1.2 or batch_idx == 3):
            print(f"low {loss.item():.4f}")
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.say(batch, batch_idx, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.say(batch, batch_idx, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.say(batch, batch_idx, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.say(batch, batch_idx, "predict")


class Evaluated(Prints):
    """It is given one loader."""

    validation = None


class Part(nn.Linear):
    """A sub-module that prints rows of samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        print("inside", y.sum(1), x.shape)
        return y


class InParts(Small):
    """It prints in sub-modules, and in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Part(4, 8).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print("before", batch_idx)
        loss = self.loss(batch)
        print("after", loss)
        return loss


def output(name: str, options: dict[str, Any] | None, functions: tuple[str, ...] = ("fit",)) -> tuple[str, str, int]:
    """Return what a rank writes to its two streams, and how often it captures a step; a worker function."""
    streams, kind, handler = (io.StringIO(), io.StringIO()), globals()[name], logging.StreamHandler()
    with (
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
        warnings.catch_warnings(),
        mock.patch.object(StepCapture, "capture", autospec=True, side_effect=StepCapture.capture) as capture,
        mock.patch.object(logging.root, "handlers", [handler]),
    ):
        handler.setStream(sys.stderr)
        warnings.simplefilter("default", UserWarning)
        for function in functions:
            run(kind, options, function=function, num_sanity_val_steps=0)
    return streams[0].getvalue(), streams[1].getvalue(), capture.call_count


def lines(text: str) -> list[str]:
    """Return the lines of a step, with fewer digits than rounding leaves."""
    words = "train|val|test|predict|loss|percent|logged|.*warned|informed|tqdm|written|text|even|low"
    words += "|before|inside|after"
    found = re.findall(rf"^(?:{words})\b.*(?:\n  .*)*", text, flags=re.MULTILINE)
    return [re.sub(r"(\.\d{6})\d+", r"\1", line) for line in found]


def ranks_of(options: dict[str, Any]) -> int:
    return 2 if "layout" in options else 1


@pytest.mark.parametrize("options", LAYOUTS, ids=IDS)
def test_a_step_prints_once_per_batch_as_on_one_device(options: dict[str, Any]) -> None:
    """A trace printed "loss nan" three times, and every batch was captured again for its index."""
    out, err, _ = output("Prints", None)
    first, *others = World(ranks_of(options)).run(output, "Prints", options)
    assert lines(first[0]) == lines(out) and lines(first[1]) == lines(err)
    assert len([line for line in lines(out) if line.startswith("train")]) == 10
    assert [lines(one[0] + one[1]) for one in others] == [[] for _ in others]
    assert first[2] == 2, "a training and a validation step, once each"


@pytest.mark.parametrize("options", LAYOUTS[:2], ids=IDS[:2])
@pytest.mark.parametrize("function", ["test", "predict"])
def test_other_evaluations_print_as_on_one_device(function: str, options: dict[str, Any]) -> None:
    out, err, _ = output("Evaluated", None, (function,))
    first, other = World(2).run(output, "Evaluated", options, (function,))
    assert lines(first[0]) == lines(out) and lines(first[1]) == lines(err)
    assert lines(other[0] + other[1]) == []


@pytest.mark.parametrize("options", LAYOUTS, ids=IDS)
def test_sub_modules_print_for_the_whole_batch(options: dict[str, Any]) -> None:
    out, _, _ = output("InParts", None)
    first, *_ = World(ranks_of(options)).run(output, "InParts", options)
    assert lines(first[0]) == lines(out) and len(lines(out)) == 30


def test_a_warning_of_a_package_is_no_output_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Python shows it in the first run alone: a trace compares what two runs output."""
    source = "import warnings\ndef warn():\n    warnings.warn('of a package')\n"
    package: dict[str, Any] = {"__name__": "a_package"}
    exec(compile(source, f"{sysconfig.get_paths()['purelib']}/a_package.py", "exec"), package)
    noted: list[Any] = []
    with warnings.catch_warnings(), output_noted(lambda *arguments, **_: noted.append(arguments)):
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)  # which pytest takes over
        package["warn"]()
    assert not noted and "of a package" in capsys.readouterr().err
