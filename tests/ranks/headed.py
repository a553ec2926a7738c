"""Hand-made stages whose loss needs all samples at once, with the plain batch's gradients to compare.

Every stage is `tanh(h @ w)`. The losses:

    contrast    InfoNCE of the rows: each against all rows, scaled by a parameter of the last stage
    root        the square root of a sum of squares, of which every micro-batch has a term
    mean        a mean of squares, whose backwards need no head; the head tells the largest row norm
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import cross_entropy

from lightning_pipe.capture.steps.stage_program import BatchHead, Half, RandomKey, Split, StageProgram, Value
from lightning_pipe.core.program import Bucket, Edge, HeadTraffic, Layout, Traffic, VerifiedProgram
from lightning_pipe.runtime.executor import Executor
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.forward_only import forward_only
from lightning_pipe.schedule.registry import options_with_forwards_first, order_of
from lightning_pipe.schedule.verification.verify import verify

WIDTH = 3
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class HeadCase:
    """A loss, the ranks of its stages, and the micro-batches."""

    loss: str
    stages: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    schedule: str = "gpipe"
    weights: tuple[tuple[int, ...], ...] = ()
    whole: frozenset[int] = frozenset()
    offloads: tuple[int, ...] = ()
    join: int = 1

    @property
    def layout(self) -> Layout:
        return Layout(self.stages, self.whole, self.weights)

    @property
    def last(self) -> int:
        return len(self.stages) - 1


def parameters_of(case: HeadCase) -> dict[str, torch.Tensor]:
    """Return the parameters, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    made = {
        f"weight{s}": torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        for s in range(len(case.stages))
    }
    made["scale"] = torch.tensor(2.0, dtype=torch.float64)
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def batch_of(case: HeadCase) -> Tensors:
    """Return inputs and targets, the same on every call."""
    generator = torch.Generator().manual_seed(1)
    samples = sum(case.sizes)
    x, y = (torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def contrast(z: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return cross_entropy(scale * z @ z.T, torch.arange(len(z)))


def plain(case: HeadCase) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
    """Return gradients and loss of the whole batch by autograd (`mean`: and what the head tells in its place)."""
    parameters, (h, y) = parameters_of(case), batch_of(case)
    for s in range(len(case.stages)):
        h = torch.tanh(h @ parameters[f"weight{s}"])
    losses = {
        "contrast": lambda: contrast(h, parameters["scale"]),
        "root": lambda: (h - y).square().sum().sqrt(),
        "mean": lambda: (h - y).square().mean(),
    }
    loss = losses[case.loss]()
    loss.backward()
    told = h.norm(dim=1).max() if case.loss == "mean" else loss
    return {name: parameter.grad for name, parameter in parameters.items()}, told.detach()


def split_of(case: HeadCase) -> Split:
    """Return the stages."""
    rows = {f"{letter}{s}" for letter in "hg" for s in range(case.last + 2)}
    values = {
        name: Value(name, torch.float64, lambda samples: (samples, WIDTH), 0, combine="cat") for name in (*rows, "y")
    }
    values |= {
        name: Value(name, torch.float64, lambda samples: (), None, combine=how)
        for name, how in (("term", "sum"), ("slope", "same"), ("of_scale", "same"), ("told", "same"), ("loss", "same"))
    }
    edges = [
        edge for s in range(case.last) for edge in (Edge("F", s, s + 1, 8.0 * WIDTH), Edge("B", s + 1, s, 8.0 * WIDTH))
    ]
    traffic = Traffic(
        tuple(edges),
        tuple(Bucket((s,), 8) for s in range(case.last + 1)),
        loads=(0, case.last),
        offloads=case.offloads,
        joinable=tuple(range(case.last + 1)),
        head=HeadTraffic(8.0 * WIDTH, 8, holds_backwards=case.loss != "mean"),
    )
    stages = tuple(_middle(case, s) for s in range(case.last))
    buckets = [(f"weight{s}",) for s in range(case.last)] + [(f"weight{case.last}", "scale")]
    return Split((*stages, _last(case)), values, traffic, tuple(buckets), {"told": case.last})


def _layer(samples: int, key: RandomKey, w: torch.Tensor, h: torch.Tensor) -> Tensors:
    return (torch.tanh(h @ w),)


def _input_half(samples: int, key: RandomKey, w: torch.Tensor, z: torch.Tensor, g: torch.Tensor) -> Tensors:
    inner = g * (1 - z.square())
    return inner @ w.T, inner


def _weight_half(samples: int, key: RandomKey, h: torch.Tensor, inner: torch.Tensor) -> Tensors:
    return (h.T @ inner,)


def _middle(case: HeadCase, s: int) -> StageProgram:
    h, z, g, w, dw, inner = f"h{s}", f"h{s + 1}", f"g{s + 1}", f"w{s}", f"dw{s}", f"inner{s}"
    return StageProgram(
        stage=s,
        parameters={w: f"weight{s}"},
        buffers={},
        leaves={} if s else {h: 0},
        tangents=(),
        forward=Half((w, h), (z,), _layer),
        input_grad=Half((w, z, g), (f"g{s}", inner), _input_half),
        weight_grad=Half((h, inner), (dw,), _weight_half, along={h: 0, inner: 0}),
        receives={("B", s + 1): (g,)} | ({("F", s - 1): (h,)} if s else {}),
        sends={("F", s + 1): (z,)} | ({("B", s - 1): (f"g{s}",)} if s else {}),
        mutations={},
        gradients={dw: f"weight{s}"},
        results=(),
        offloaded=frozenset({h, z}) if s in case.offloads else frozenset(),
    )


def _last(case: HeadCase) -> StageProgram:
    s = case.last
    program = _middle(case, s)
    h, z, g, w = f"h{s}", f"h{s + 1}", f"g{s + 1}", f"w{s}"
    make: dict[str, Callable[[], StageProgram]] = {
        "contrast": lambda: _contrasting(program, h, z, g),
        "root": lambda: _of_terms(program, w, h, z),
        "mean": lambda: _of_means(program, w, h, z),
    }
    made = make[case.loss]()
    receives = {edge: names for edge, names in program.receives.items() if edge[0] == "F"}
    sends = {edge: names for edge, names in program.sends.items() if edge[0] == "B"}
    return replace(made, leaves={**program.leaves, "y": 1}, receives=receives, sends=sends, results=("told",))


def _contrasting(program: StageProgram, h: str, z: str, g: str) -> StageProgram:
    """Gradients of rows come from the head; that of its parameter is multiplied by shares in W."""

    def head(samples: int, key: RandomKey, rows: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> Tensors:
        assert (samples, key.microbatch, key.first_sample) == (len(rows), -1, 0)
        with torch.enable_grad():
            rows, scale = rows.detach().requires_grad_(), scale.detach().requires_grad_()
            loss = contrast(rows, scale)
            of_rows, of_scale = torch.autograd.grad(loss, (rows, scale))
        return of_rows * weight, of_scale, loss.detach()

    def weight_half(samples, key, h, inner, of_scale, share):
        return h.T @ inner, of_scale * share

    assert program.weight_grad is not None
    (dw,) = program.gradients
    return replace(
        program,
        parameters={**program.parameters, "scale": "scale"},
        tangents=("tangent",),
        weight_grad=Half(
            (*program.weight_grad.inputs, "of_scale", "tangent"),
            (dw, "dscale"),
            weight_half,
            along=program.weight_grad.along,
        ),
        gradients={**program.gradients, "dscale": "scale"},
        head=BatchHead(Half((z, "scale", "tangent"), (g, "of_scale", "told"), head)),
    )


def _of_terms(program: StageProgram, w: str, h: str, z: str) -> StageProgram:
    """Terms are added for the head, which gives all micro-batches one number."""

    def forward(samples, key, w, h, y):
        z = torch.tanh(h @ w)
        return z, (z - y).square().sum()

    def head(samples: int, key: RandomKey, total: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return weight / total.sqrt(), total.sqrt()

    def input_half(samples, key, w, z, y, slope):
        return _input_half(samples, key, w, z, slope * (z - y))

    assert program.input_grad is not None
    return replace(
        program,
        tangents=("tangent",),
        forward=Half((w, h, "y"), (z, "term"), forward),
        input_grad=Half((w, z, "y", "slope"), program.input_grad.outputs, input_half),
        head=BatchHead(Half(("term", "tangent"), ("slope", "told"), head)),
    )


def _of_means(program: StageProgram, w: str, h: str, z: str) -> StageProgram:
    """Backwards need no head; it tells something of all rows."""

    def head(samples: int, key: RandomKey, rows: torch.Tensor) -> Tensors:
        return (rows.norm(dim=1).max(),)

    def input_half(samples, key, w, z, y, share):
        return _input_half(samples, key, w, z, share * 2 * (z - y) / z.numel())

    assert program.input_grad is not None
    return replace(
        program,
        tangents=("tangent",),
        input_grad=Half((w, z, "y", "tangent"), program.input_grad.outputs, input_half),
        head=BatchHead(Half((z,), ("told",), head), holds_backwards=False),
    )


def program_of(
    case: HeadCase, *, training: bool = True, synchronise: bool = True, milestones: bool = False
) -> VerifiedProgram:
    """Return the verified program of the case."""
    count = len(case.sizes)
    if training:
        options = options_with_forwards_first(case.schedule)
        order = order_of(case.schedule, layout=case.layout, microbatches=count, options=options)
    else:
        order = forward_only(case.layout, count)
    traffic = split_of(case).traffic
    lowered = lower(
        order,
        layout=case.layout,
        sizes=case.sizes,
        traffic=traffic,
        training=training,
        synchronise=synchronise,
        confirms=milestones,
        publishes=milestones,
        join=case.join,
    )
    verify(lowered, launches="late")  # as on a device that carries messages itself
    return verify(lowered)


def job_of(case: HeadCase, **changes: float) -> BatchInput:
    """Return the job of the batch."""
    offsets = tuple(sum(case.sizes[:m]) for m in range(len(case.sizes)))
    return BatchInput(batch_of(case), (True, True), offsets, **changes)  # type: ignore[arg-type]


def executor_of(case: HeadCase, parameters: dict[str, torch.Tensor], transport: Transport) -> Executor:
    """Return the executor of one rank."""
    state = State(parameters, {}, torch.device("cpu"))
    return Executor(split_of(case), case.layout, state=state, transport=transport, loss="loss")
