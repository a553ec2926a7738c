"""The captured step on one device, by micro-batches and cut into a few stages, as it would run in a pipeline.

Where it is cut is no matter of the plan, which there is none of yet. Values of one stage come to another through the
memory that a message would have, so that what does not survive that is seen before training.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_pipe.capture import Request, Route, canonical_names
from lightning_pipe.capture.steps.stage_program import RandomKey, Split
from lightning_pipe.capture.steps.step_function import NUMBERS
from lightning_pipe.core.program import Layout, Pass, Samples
from lightning_pipe.errors import CaptureError, PipeError, faults_reported
from lightning_pipe.once import OncePerObject
from lightning_pipe.runtime.exchanges.batch_heads import BatchHeads
from lightning_pipe.runtime.exchanges.slicing import Content, buffer_for, combine, from_tensor, packed, to_tensor
from lightning_pipe.runtime.stage import Slice, Stage, State, changed_by_several
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.runtime.waiting import drive

_MOST_STAGES = 8


def _cut_up(captured: Route) -> Split:
    nodes = len(captured.graph.nodes)
    places = [k for k in range(1, nodes) if k not in captured.graph.uncuttable]
    wanted = [round(nodes * k / _MOST_STAGES) for k in range(1, _MOST_STAGES)]
    near = {min(places, key=lambda place: abs(place - k)) for k in wanted} if places else set[int]()
    return captured.split(tuple(sorted(near)))


cut_up = OncePerObject(_cut_up)
"""Return a captured step as a few stages; to be forgotten when the last comparison is made."""


@dataclass(frozen=True)
class CapturedRun:
    """What a run of a captured step gave.

    Attributes:
        results: of the micro-batches, by value name; those that are made of others are what guards ask for.
        batch: results of all samples, by value name.
        gradients: by canonical name.
        buffers: content of the buffers afterwards, by name.
    """

    results: list[Mapping[str, Content]]
    batch: Mapping[str, Content]
    gradients: dict[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


def run_captured(
    captured: Route,
    request: Request,
    tensors: Sequence[torch.Tensor],
    *,
    sizes: tuple[int, ...],
    key: RandomKey,
) -> CapturedRun:
    """Run the captured step by micro-batches, whose gradients are added to those that are there.

    Args:
        captured: the step.
        request: what was captured.
        tensors: leaves of all samples.
        sizes: samples of the micro-batches.
        key: of the random numbers of the first.
    """
    key = replace(key, batch_samples=sum(sizes))
    module, loss = request.module, captured.record.loss
    with faults_reported("its stages"):
        stages, buffers = _whole(captured, request, sizes=sizes, training=loss is not None)
    results: list[Mapping[str, Content]] = []
    is_sum = loss is not None and cut_up(captured).values[loss].combine == "sum"
    weights = [1.0 if is_sum else samples / sum(sizes) for samples in sizes]
    cut = _parts(captured, request, tensors, sizes=sizes, buffers=buffers, key=key)
    slices = [
        Slice(samples, replace(key, microbatch=number), mean_weight=weight, sum_weight=weight)
        for number, (samples, weight) in enumerate(zip(sizes, weights, strict=True))
    ]
    of_head: Mapping[str, Content] = {}
    for number, (samples, parts, own) in enumerate(zip(sizes, cut, slices, strict=True)):
        try:
            results.append(stages.forward(number, parts, own))
            if number == len(sizes) - 1:
                of_head = stages.head(sizes, key)
            for ready in stages.ready(number, of=len(sizes)) if loss is not None else ():
                stages.backward(ready, slices[ready])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            which = "a later" if number else "the first"
            if isinstance(error, PipeError):  # it says what to do
                raise CaptureError(f"On {which} micro-batch of {samples} samples: {error}") from error
            raise CaptureError(
                f"{type(module).__name__}.{request.method}, captured by the route {captured.name}, raises "
                f"{type(error).__name__} on {which} micro-batch ({samples} samples), where the plain step does not: "
                f"{error}. {advice(captured)}"
            ) from error
    stages.finish()
    batch = {**_of_batch(captured, results, sizes, weights), **of_head}
    buffers |= {late.state: batch[late.name] for late in captured.late_values if late.state}  # type: ignore[misc]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(canonical_names(module).values())
    found = {name: grad for name in names if (grad := parameters[name].grad) is not None}
    answers = {guard.ref.name: batch[guard.ref.name] for guard in captured.record.guards}
    return CapturedRun([{**result, **answers, **of_head} for result in results], batch, found, buffers)


def _of_batch(
    captured: Route, results: Sequence[Mapping[str, Content]], sizes: Sequence[int], weights: Sequence[float]
) -> dict[str, Content]:
    """Return the loss and the results of a batch from those of its micro-batches."""
    values, ends = cut_up(captured).values, list(itertools.accumulate(sizes))
    batch: dict[str, Content] = {}
    for name in results[0]:
        contents = [result[name] for result in results]
        tensors = [content for content in contents if isinstance(content, torch.Tensor)]
        if name == captured.record.loss:
            terms = [t.double() * weight for t, weight in zip(tensors, weights, strict=True)]
            batch[name] = torch.stack(terms).sum(0).to(tensors[0])
        elif len(tensors) == len(sizes):
            parts = [(Samples(end - n, end), t) for t, n, end in zip(tensors, sizes, ends, strict=True)]
            value = values[name]
            how = value.combine if value.combine != "cat" or value.batch_dim is not None else "last"
            batch[name] = combine(parts, value, how=how)
        else:
            batch[name] = contents[0]
    return batch | {one.name: one.of(batch, sum(sizes)) for one in captured.late_values}


class _Stages:
    """The stages of a split on one device.

    Args:
        split: the stages.
        state: parameters and buffers of all.
        loss: value name of the loss.
        samples: of the batch.
        microbatches: how many there are.
        training: whether a backward follows.
    """

    def __init__(
        self, split: Split, *, state: State, loss: str | None, samples: int, microbatches: int, training: bool
    ) -> None:
        self._values, self._device, self._batch_samples = split.values, state.device, samples
        apart = changed_by_several(split.stages)
        self._stages = [
            Stage(program, split.values, state=state, loss=loss, apart=apart[program.stage]) for program in split.stages
        ]
        for stage in self._stages:
            edges = [edge for edge in stage.program.sends if training or edge[0] == "F"]
            stage.begin(Counter((*edge, m) for edge in edges for m in range(microbatches)), training=training)
        layout, numbered = Layout(((0,),) * len(self._stages)), dict(enumerate(self._stages))
        self._heads = BatchHeads(split, numbered, layout=layout, transport=Hub().endpoint(0), device=state.device)

    def forward(self, microbatch: int, leaves: Sequence[torch.Tensor], own: Slice) -> Mapping[str, Content]:
        """Run all stages forward, and return the outputs of the step."""
        results: dict[str, Content] = {}
        for stage in self._stages:
            stage.load(microbatch, dict(enumerate(leaves)))
            stage.compute("F", microbatch, own)
            results |= stage.results(microbatch)
            self._send(stage, "F", microbatch, own.samples)
        return results

    def backward(self, microbatch: int, own: Slice) -> None:
        """Run all stages backward."""
        for stage in reversed(self._stages):
            stage.compute("B", microbatch, own)
            self._send(stage, "B", microbatch, own.samples)

    @property
    def holds(self) -> bool:
        """Return whether backwards wait for a head."""
        head = self._stages[-1].program.head
        return head is not None and head.holds_backwards

    def ready(self, microbatch: int, *, of: int) -> range:
        """Return the micro-batches whose backwards may run when the forwards of one have."""
        if not self.holds:
            return range(microbatch, microbatch + 1)
        return range(of if microbatch == of - 1 else 0)

    def head(self, sizes: tuple[int, ...], key: RandomKey) -> Mapping[str, Content]:
        """Run the head of the last stage, if it has one, and return its results."""
        if self._stages[-1].program.head is None:
            return {}
        whole = Slice(sum(sizes), key.of_batch, mean_weight=1.0, sum_weight=1.0)
        pieces = drive(self._heads.run(sizes, whole), wait=lambda pending: None)  # no replica to wait for
        return {name: piece.content for name, piece in pieces.items()}

    def finish(self) -> None:
        """Write what is left to be written of buffers."""
        for stage in self._stages:
            stage.finish()

    def _send(self, stage: Stage, direction: Pass, microbatch: int, samples: int) -> None:
        """Give other stages what a stage has made for them."""
        for way, target in stage.program.sends:
            if way == direction:
                sent = stage.outgoing(way, target, microbatch)
                arrived = {name: self._travelled(name, content, samples) for name, content in sent.items()}
                self._stages[target].receive(microbatch, arrived)

    def _travelled(self, name: str, content: Content, samples: int) -> Content:
        value, sent = self._values[name], to_tensor(content, device=self._device)
        size = sent.shape if value.sizes_travel else None
        buffer = buffer_for(value, samples, of=self._batch_samples, device=self._device, size=size)
        packed(buffer, value).copy_(packed(sent, value))
        return from_tensor(buffer, value)


def _whole(
    captured: Route, request: Request, *, sizes: tuple[int, ...], training: bool
) -> tuple[_Stages, dict[str, torch.Tensor]]:
    """Return the captured step as stages that are ready for a batch, and the buffers that they read, by name."""
    module = request.module
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    numbers = captured.begin(request.arguments, request.structure.template_of(sum(sizes), request.batch_dim))
    if captured.plays is not None:
        captured.plays.cut(sizes)
    buffers[NUMBERS] = torch.tensor(numbers, dtype=torch.float64, device=request.device)
    state = State(parameters, buffers, request.device)
    loss = captured.record.loss
    stages = _Stages(
        cut_up(captured), state=state, loss=loss, samples=sum(sizes), microbatches=len(sizes), training=training
    )
    return stages, buffers


def _parts(
    captured: Route,
    request: Request,
    tensors: Sequence[torch.Tensor],
    *,
    sizes: tuple[int, ...],
    buffers: Mapping[str, torch.Tensor],
    key: RandomKey,
) -> Iterator[list[torch.Tensor]]:
    """Yield the leaves of every micro-batch as the stage reads them."""
    cut = (False,) * len(tensors) if len(sizes) == 1 else request.structure.cut(request.batch_dim)
    leaves, cut = captured.with_totals(tensors, cut=cut, sizes=sizes, buffers=buffers, key=key)
    for first, samples in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        yield [t.narrow(request.batch_dim, first, samples) if c else t for t, c in zip(leaves, cut, strict=True)]


def advice(captured: Route) -> str:
    """Return what can be done about a captured step that does not do what the plain one does."""
    instead = 'Set capture="replay", which runs the Python of the step itself, and please'
    report = f"{instead if captured.plays is None else 'Please'} report this as a bug"
    return f"{report}; check=false trains with the captured step all the same."
