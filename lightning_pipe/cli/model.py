"""Models named on the command line: built, given a batch, and captured as a graph with costs.

The model is built on the meta device, so that one that is larger than this machine can be planned. A model that needs
values to be built, or whose step reads them, is built with real parameters instead, which is said.

What Lightning would do before training is done: `setup("fit")`, `configure_model()`, and `prepare_data()` where the
batch comes from the model's own loader. There is no trainer, so a step that uses one cannot be captured here.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.cli.options import StepOptions
from lightning_pipe.cli.priced_step import PricedStep
from lightning_pipe.core.profile import Profile
from lightning_pipe.cost.counted import counted
from lightning_pipe.errors import BatchError, CaptureError, ConfigError
from lightning_pipe.foreign_names import expected_names
from lightning_pipe.lightning_names import HalfPrecision, MixedPrecision, Precision, is_overridden, pl
from lightning_pipe.profiler.timing.operators import profile_capture

SHIPPED = {f"gpt-{size}": f"lightning_pipe.examples.gpt:gpt_{size}" for size in ("125m", "1b3", "13b", "175b")}
_MOST_PER_RANK = 8  # micro-batches per rank for which operations are timed


def captured(
    options: StepOptions, *, ranks: int, model: Callable[..., Any] | None = None, batch: Any = None
) -> PricedStep:
    """Return the training step of the model that the options name, with its costs.

    Args:
        options: model, batch, precision and kind of costs.
        ranks: number of ranks, which decides how small micro-batches are when operations are timed.
        model: a module, which stays as it is, or what makes one, in the place of the named one.
        batch: in the place of the named one.

    Raises:
        ConfigError: if model or batch cannot be imported or made.
        CaptureError: if the step cannot be captured.
        BatchError: if the batch has no samples.
    """
    assert options.model is not None
    if isinstance(model, pl.LightningModule):
        model = partial(copy.deepcopy, model)
    make = partial(_called, model or _imported(options.model, "model"), options.model, **options.model_args)
    if options.batch is not None:
        batch = _called(_imported(options.batch, "batch"), options.batch)
    try:
        with torch.device("meta"):
            module = _built(make, options.model)
        capture, samples = _captured(module, batch, options)
    except (CaptureError, ConfigError, BatchError) as error:
        module = _built(make, options.model)
        capture, samples = _captured(module, batch, options)
        Console(stderr=True).print(
            f"{options.model} was built with real parameters, as it cannot be planned without them: {error}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    costs, count = _costs(capture, samples, options, ranks=ranks), sum(p.numel() for p in module.parameters())
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return PricedStep(capture.graph, costs, samples, _tokens(module, options), kind, count)


def _tokens(module: pl.LightningModule, options: StepOptions) -> int:
    """Return the tokens of a sample that the model states; 0 if it states none."""
    tokens = getattr(module, "tokens_per_sample", 0)
    if not isinstance(tokens, int) or tokens < 0:
        raise ConfigError(f"found tokens_per_sample={tokens!r} in {options.model}; expected an integer of at least 0")
    return tokens


def _precision(options: StepOptions) -> Precision:
    """Return the plug-in by which Lightning gives a model its precision."""
    name = options.precision
    if name == "32-true":
        return Precision()
    return MixedPrecision("bf16-mixed", device=_device(options).type) if name == "bf16-mixed" else HalfPrecision(name)  # type: ignore[arg-type]


def _costs(capture: Capture, samples: int, options: StepOptions, *, ranks: int) -> Profile:
    config = options.config
    if config.costs == "counted":
        return counted(capture.graph)
    counts = (1, ranks, _MOST_PER_RANK * ranks) if config.microbatches is None else (1, config.microbatches)
    sizes = sorted({max(1, samples // count) for count in counts})
    return profile_capture(
        capture, device=capture.device, sizes=sizes, cache=config.cache_dir, progress=True, compiled=config.compile
    )


def _device(options: StepOptions) -> torch.device:
    """Return the device for which the step is captured: the one on which it is measured, if it is."""
    is_measured_on_gpu = options.costs == "measured" and torch.cuda.is_available()
    return torch.device("cuda" if is_measured_on_gpu else "cpu")


def _captured(module: pl.LightningModule, batch: Any, options: StepOptions) -> tuple[Capture, int]:
    precision = _precision(options)
    structure = flatten(precision.convert_input(_own_batch(module, options) if batch is None else batch))[1]
    samples = options.samples or structure.samples(options.batch_dim)
    precision.convert_module(module)  # in place
    request = Request(
        module.train(),
        "training_step",
        structure,
        samples=max(2, samples),  # a symbolic number of samples is traced with two or more
        batch_dim=options.batch_dim,
        device=_device(options),
        context=precision.train_step_context,
    )
    return capture_step(request), samples


def _built(make: Callable[[], Any], name: str) -> pl.LightningModule:
    """Build a model, and what it builds in its hooks."""
    module = make()
    if not isinstance(module, pl.LightningModule):
        raise ConfigError(f"{name} returned {type(module).__name__}; expected a LightningModule (package `lightning`)")
    _called(partial(module.setup, "fit"), f"{name}.setup")
    _called(module.configure_model, f"{name}.configure_model")
    return module


def _own_batch(module: pl.LightningModule, options: StepOptions) -> Any:
    """Return the first batch of the module's own loader, or its example input."""
    name = str(options.model)
    if is_overridden("train_dataloader", module):
        _called(module.prepare_data, f"{name}.prepare_data")
        return _called(lambda: next(iter(module.train_dataloader())), f"{name}.train_dataloader")
    if module.example_input_array is not None:
        return module.example_input_array
    raise ConfigError(
        f"found no batch for {name}, which has neither train_dataloader nor example_input_array; expected "
        "batch=package.module:name of a function that returns one batch"
    )


def _imported(name: str, option: str) -> Callable[..., Any]:
    """Import a function or class, also from the directory in which the command runs."""
    path, colon, attribute = SHIPPED.get(name, name).partition(":")
    if not (path and colon and attribute):
        expected = "expected package.module:name of a function"
        if option == "model":
            expected = expected_names(name, SHIPPED, words="package.module:name of a LightningModule, or one of")
        raise ConfigError(f"found {option}={name!r}; {expected}")
    if "" not in sys.path and os.getcwd() not in sys.path:  # a console script does not see where it is started
        sys.path.insert(0, os.getcwd())
    module = _called(partial(importlib.import_module, path), f"the import of {path} for {option}={name}")
    found: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(found) or isinstance(found, torch.nn.Module):
        kind = "nothing" if found is None else type(found).__name__
        raise ConfigError(f"found {kind} as {attribute!r} in {path}; expected a class or a function")
    return found


def _called(function: Callable[..., Any], name: str, **arguments: Any) -> Any:
    """Call what belongs to the user.

    Raises:
        ConfigError: with the error that it raised, and the line where it did.
    """
    try:
        return function(**arguments)
    except Exception as error:  # whatever the user's code raises
        frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if _is_of_user(f.filename)]
        line = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise ConfigError(f"{name} raised {type(error).__name__}: {error}{line}") from error


def _is_of_user(file: str) -> bool:
    """Return whether a file of a traceback is neither Python's own nor that of an installed package."""
    return not file.startswith("<") and not {"site-packages", "importlib"} & set(Path(file).parts)
