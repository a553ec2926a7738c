"""The captured step on one device: as one stage, by micro-batches, as it would run in a pipeline."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from lightning_pipe.capture import Request, Route, canonical_names
from lightning_pipe.capture.steps.stage_program import RandomKey, Split
from lightning_pipe.capture.steps.step_function import NUMBERS
from lightning_pipe.errors import CaptureError, PipelineError
from lightning_pipe.once import OncePerObject
from lightning_pipe.runtime.exchanges.slicing import Content
from lightning_pipe.runtime.stage import Slice, Stage, State


def _one_stage(captured: Route) -> Split:
    return captured.split(())


one_stage = OncePerObject(_one_stage)
"""Return a captured step as one stage; to be forgotten when the last comparison is made."""


def run_captured(
    captured: Route,
    request: Request,
    tensors: Sequence[torch.Tensor],
    *,
    sizes: tuple[int, ...],
    key: RandomKey,
    role: str | None = None,
) -> tuple[list[Mapping[str, Content]], dict[str, torch.Tensor], torch.Tensor]:
    """Run the captured step as one stage, by micro-batches, whose gradients are added to those that are there.

    Args:
        captured: the step.
        request: what was captured.
        tensors: leaves of all samples.
        sizes: samples of the micro-batches.
        key: of the random numbers of the first.
        role: whether losses are combined as "mean" or "sum"; by default as the captured step says.

    Returns:
        Results of the micro-batches, gradients by canonical name, and the loss of all samples.
    """
    module, value = request.module, one_stage(captured).values[captured.record.loss or ""]
    stage, buffers = _whole_stage(captured, request, training=True)
    how = role or ("sum" if value.combine == "sum" else "mean")
    results: list[Mapping[str, Content]] = []
    total = torch.zeros((), dtype=torch.float64)
    cut = _parts(captured, request, tensors, sizes=sizes, buffers=buffers)
    for number, (samples, parts) in enumerate(zip(sizes, cut, strict=True)):
        weight = 1.0 if how == "sum" else samples / sum(sizes)
        own = Slice(samples, replace(key, microbatch=number), mean_weight=weight, sum_weight=weight)
        stage.load(number, dict(enumerate(parts)))
        try:
            stage.compute("F", number, own)
            results.append(stage.results(number))
            stage.compute("B", number, own)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            which = "a later" if number else "the first"
            if isinstance(error, PipelineError):  # it says what to do
                raise CaptureError(f"On {which} micro-batch of {samples} samples, {error}") from error
            raise CaptureError(
                f"{type(module).__name__}.{request.method}, captured by the route {captured.name}, raises "
                f"{type(error).__name__} on {which} micro-batch ({samples} samples), where the plain step does not: "
                f"{error}. {advice(captured)}"
            ) from error
        found_loss = results[-1][captured.record.loss or ""]
        assert isinstance(found_loss, torch.Tensor), "the loss is a tensor"
        loss = found_loss
        total = total + loss.detach().cpu().double() * weight
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(canonical_names(module).values())
    found = {name: grad for name in names if (grad := parameters[name].grad) is not None}
    return results, found, total.to(loss.dtype)


def run_forward(
    captured: Route, request: Request, tensors: Sequence[torch.Tensor], *, sizes: tuple[int, ...], key: RandomKey
) -> list[Mapping[str, Content]]:
    """Run the captured step as one stage, by micro-batches, without a backward; return their results.

    Arguments are those of `run_captured`.
    """
    stage, buffers = _whole_stage(captured, request, training=False)
    results: list[Mapping[str, Content]] = []
    for number, parts in enumerate(_parts(captured, request, tensors, sizes=sizes, buffers=buffers)):
        stage.load(number, dict(enumerate(parts)))
        stage.compute(
            "F", number, Slice(sizes[number], replace(key, microbatch=number), mean_weight=1.0, sum_weight=1.0)
        )
        results.append(stage.results(number))
    stage.finish()
    return results


def _whole_stage(captured: Route, request: Request, *, training: bool) -> tuple[Stage, dict[str, torch.Tensor]]:
    """Return the captured step as one stage that is ready for a batch, and the buffers that it reads, by name."""
    module, split = request.module, one_stage(captured)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    numbers = captured.begin(request.arguments, request.structure.template)
    buffers[NUMBERS] = torch.tensor(numbers, dtype=torch.float64, device=request.device)
    state = State(parameters, buffers, request.device)
    stage = Stage(split.stages[0], split.values, state=state, loss=captured.record.loss)
    stage.begin(Counter(), training=training)
    return stage, buffers


def _parts(
    captured: Route,
    request: Request,
    tensors: Sequence[torch.Tensor],
    *,
    sizes: tuple[int, ...],
    buffers: Mapping[str, torch.Tensor],
) -> Iterator[list[torch.Tensor]]:
    """Yield the leaves of every micro-batch as the stage reads them."""
    cut = (False,) * len(tensors) if len(sizes) == 1 else request.structure.cut(request.batch_dim)
    leaves, cut = captured.with_totals(tensors, cut=cut, sizes=sizes, buffers=buffers)
    for first, samples in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        yield [t.narrow(request.batch_dim, first, samples) if c else t for t, c in zip(leaves, cut, strict=True)]


def advice(captured: Route) -> str:
    """Return what can be done about a captured step that does not do what the plain one does."""
    instead = f'Set capture="{captured.fallback}", which runs the Python of the step itself, and please'
    report = f"{instead if captured.fallback else 'Please'} report this as a bug"
    return f"{report}; check=false trains with the captured step all the same."
