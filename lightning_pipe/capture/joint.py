"""How is a step traced into one graph of forward and backward?

AOTAutograd's joint graph of `StepFunction` under fake tensors of the target device: nothing is computed, nothing is
allocated, parameters may live on the meta device. The batch dimension is symbolic where the step allows it. Every truth
value that the step asks of a tensor is answered by a real run, where one is offered, else by trying (an answer with
which the step raises or returns no loss is wrong); the answer is a guard of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import sympy
import torch
from torch import fx, nn

from lightning_pipe.capture import torch_private as private
from lightning_pipe.capture.batch import Structure
from lightning_pipe.capture.hazards import (
    Answerer,
    AttributeGuard,
    Question,
    Watched,
    compare_calls,
    hazard,
    no_random_numbers,
    random_line,
)
from lightning_pipe.capture.record import Guard, LogCall, MetricCall, Ref, StepRecord
from lightning_pipe.capture.step import Recording, StepFunction, recording_calls
from lightning_pipe.errors import CaptureError

Answers = Callable[[], tuple[bool, ...]]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
_MAX_TRIES = 64
_LAYOUT_CHOICE = "fake_impls.py"  # its conditions choose the predicted memory layout of a kernel, nothing else


@dataclass(frozen=True)
class Request:
    """What is to be captured.

    Attributes:
        module: the user's module, in the mode (train or eval) that is wanted.
        method: name of the step method.
        structure: the batch without its data, of any number of samples.
        arguments: positional arguments after the batch.
        samples: number of samples to trace with; at least 2 for a symbolic trace.
        batch_dim: dimension of the samples.
        device: device on which the step will run.
        context: made anew for every run of the step (autocast of the precision plug-in).
        answers: runs the step on real tensors and returns its truth values; None where no real run is possible.
        symbolic: whether the number of samples is a symbol of the graph.
    """

    module: pl.LightningModule
    method: str
    structure: Structure
    arguments: tuple[int, ...] = (0,)
    samples: int = 2
    batch_dim: int = 0
    device: torch.device = torch.device("cpu")
    context: Context = contextlib.nullcontext
    answers: Answers | None = None
    symbolic: bool = True


@dataclass(frozen=True)
class JointGraph:
    """A traced step. Names are those of the nodes of `module.graph`.

    Attributes:
        module: graph module; constants are its attributes.
        parameters, buffers: placeholder -> name in the user's module.
        leaves: placeholder -> index of the batch leaf.
        tangents: placeholders of the loss's gradient.
        loss: node of the loss, None without one.
        results: nodes of recorded values, in the order of the record's numbers.
        mutations: buffer name -> node of its new content.
        gradients: (node, parameter name) in model order.
        symbol: the number of samples, None if it is a constant of the graph.
        conditions: (expression over the symbol that must hold, where it comes from).
        record: what the step said.
        watched: attributes that the step read.
    """

    module: fx.GraphModule
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    leaves: Mapping[str, int]
    tangents: tuple[str, ...]
    loss: str | None
    results: tuple[str, ...]
    mutations: Mapping[str, str]
    gradients: tuple[tuple[str, str], ...]
    symbol: sympy.Symbol | None
    samples: int
    conditions: tuple[tuple[sympy.Basic, str], ...]
    record: StepRecord
    watched: Watched

    def fits(self, samples: int) -> str:
        """Return "" if the graph holds for this number of samples, else the condition that fails and its origin."""
        if self.symbol is None:
            return "" if samples == self.samples else f"the batch size is fixed to {self.samples} by the step"
        for condition, origin in self.conditions:
            if _LAYOUT_CHOICE in origin:
                continue
            if condition.xreplace({self.symbol: sympy.Integer(samples)}) == sympy.false:
                return f"{condition} ({origin})"
        return ""


def trace(request: Request) -> JointGraph:
    """Trace a step, symbolically if that works, else for `request.samples` samples.

    Raises:
        CaptureError: naming the hazard and the user's line.
    """
    answers: tuple[bool, ...] = ()
    first_error: CaptureError | None = None
    for _ in range(_MAX_TRIES):
        try:
            return _trace_with(request, answers)
        except Question as question:
            answers = _more_answers(request, answers, question)
        except CaptureError as error:
            first_error = first_error or error
            while answers and answers[-1]:
                answers = answers[:-1]
            if not answers or request.answers is not None:
                raise first_error from None
            answers = (*answers[:-1], True)
    raise hazard(f"it asks more than {_MAX_TRIES} truth values of its tensors", "")


def _more_answers(request: Request, answers: tuple[bool, ...], question: Question) -> tuple[bool, ...]:
    if request.answers is None:
        return (*answers, False)
    real = request.answers()
    if len(real) <= len(answers):
        raise hazard("it asks other questions of its tensors when traced than when run", question.line)
    return real


def _trace_with(request: Request, answers: tuple[bool, ...]) -> JointGraph:
    """Trace once with these answers; retry with a constant batch size where the symbolic one fails."""
    try:
        return _export(request, answers)
    except CaptureError as symbolic:
        if not request.symbolic or symbolic.__cause__ is None:
            raise
        try:
            return _export(_static(request), answers)
        except CaptureError:
            raise symbolic from symbolic.__cause__


def _static(request: Request) -> Request:
    return Request(**{**vars(request), "symbolic": False})


def _export(request: Request, answers: tuple[bool, ...]) -> JointGraph:
    step = StepFunction(
        request.module,
        method=request.method,
        structure=request.structure,
        arguments=request.arguments,
        answers=answers,
        context=request.context,
    )
    mode = private.FakeTensorMode(shape_env=private.ShapeEnv(), allow_non_fake_inputs=True)
    state, leaves = _fake_state(step, request, mode), _fake_leaves(request, mode)
    watched = Watched(request.module)

    def run_again() -> str:
        found: list[str] = []
        with contextlib.suppress(Exception), random_line(found), mode, private.reparametrize(step, state):
            step(*leaves)
        return found[0] if found else ""

    with contextlib.ExitStack() as stack:
        stack.enter_context(no_random_numbers(run_again))
        stack.enter_context(watched.reading())
        stack.enter_context(_tracing(step, state, mode, request.device))
        try:
            module = private.aot_export_joint_with_descriptors(stack, step, leaves).graph_module
        except (CaptureError, Question):
            raise
        except Exception as error:
            _compare_runs(step)
            raise _explain(error, step) from error
    step.check_state()
    assert len(step.recordings) > 1, "the tracer ran the step once; its Python values could not be compared"
    _compare_runs(step)
    return _describe(module, step, request, leaves, mode.shape_env, watched)


@contextlib.contextmanager
def _tracing(step: StepFunction, state: dict[str, Any], mode: Any, device: torch.device) -> Any:
    """Everything that must hold while the tracer runs the step."""
    validate = torch.distributions.Distribution._validate_args
    own_device = step.model._device
    with (
        mode,
        private.reparametrize(step, state),
        private.fx_traceback.preserve_node_meta(),
        private.compiling_state(),
        private.fused_recurrent_kernels(),
        torch.random.fork_rng(devices=[]),
    ):
        torch.distributions.Distribution.set_default_validate_args(False)
        step.model._device = device
        try:
            yield
        finally:
            torch.distributions.Distribution.set_default_validate_args(validate)
            step.model._device = own_device


def _fake_state(step: StepFunction, request: Request, mode: Any) -> dict[str, Any]:
    """Return fake parameters and buffers on the target device, one per name (tied ones are separate)."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=request.device)

    with mode:
        parameters = {
            name: nn.Parameter(fake(p), requires_grad=p.requires_grad)
            for name, p in step.named_parameters(remove_duplicate=False)
        }
        return {**parameters, **{name: fake(b) for name, b in step.named_buffers(remove_duplicate=False)}}


def _fake_leaves(request: Request, mode: Any) -> tuple[torch.Tensor, ...]:
    """Return the batch's tensors with `request.samples` samples, a symbol where wanted."""
    leaves = []
    for leaf in request.structure.leaves:
        shape = list(leaf.shape)
        dynamic = [private.DimDynamic.STATIC] * len(shape)
        if len(shape) > request.batch_dim:
            shape[request.batch_dim] = request.samples
            if request.symbolic:
                dynamic[request.batch_dim] = private.DimDynamic.DUCK
        tensor = torch.empty(shape, dtype=leaf.dtype, device="meta")
        context = private.StatelessSymbolicContext(dynamic_sizes=dynamic)
        fake = mode.from_tensor(tensor, symbolic_context=context)
        leaves.append(_on(fake, request.device, mode))
    return tuple(leaves)


def _on(fake: torch.Tensor, device: torch.device, mode: Any) -> torch.Tensor:
    with mode:
        return torch.empty_like(fake, device=device)


def _explain(error: Exception, step: StepFunction) -> CaptureError:
    """Turn what the tracer raised into a refusal that names the user's line."""
    line = next((o.calls[-1][1] for o in reversed(_observers(step)) if o.calls), "")
    kind = type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0][:300]
    data = ("DataDependent", "DynamicOutputShape", "PendingUnbacked", "UnbackedSymInt")
    if any(word in kind or word in str(error) for word in data):
        return hazard(f"a shape or a branch depends on the values of tensors (data-dependent: {kind})", line)
    if step.reads and step.runs > 1:
        reads = ", ".join(f"{name} at {where}" for name, where in step.reads.items())
        return hazard(f"it raises {kind}: {first} when the counters it reads change ({reads})", line)
    return hazard(f"it raises {kind}: {first}", line)


def _observers(step: StepFunction) -> list[Any]:
    return [*step.observers, *([step.current] if step.current is not None else [])]


def _compare_runs(step: StepFunction) -> None:
    """Refuse a step whose last two runs, under different counters, were not the same."""
    if len(step.recordings) > 1:
        compare_calls(step.observers[-2].calls, step.observers[-1].calls, step.reads)
        _compare_recordings(step.recordings[-2], step.recordings[-1], step.reads)


def _compare_recordings(first: Recording, second: Recording, reads: dict[str, str]) -> None:
    """Refuse logged Python numbers that change from call to call."""
    because = "".join(f"; it reads {name} at {line}" for name, line in reads.items())
    for one, two in zip(first.calls, second.calls, strict=False):
        if isinstance(one, LogCall) and isinstance(two, LogCall) and _changes(one.value, two.value):
            raise hazard(f"it logs a Python number that changes from call to call ({one.name!r}){because}", one.line)
        if type(one) is not type(two) or _name(one) != _name(two):
            raise hazard(f"it logs something else from call to call{because}", one.line)
    if len(first.calls) != len(second.calls):
        longer = max(first.calls, second.calls, key=len)
        raise hazard(f"it logs something else from call to call{because}", longer[-1].line)


def _changes(one: Any, two: Any) -> bool:
    numbers = (bool, int, float)
    return isinstance(one, numbers) and isinstance(two, numbers) and one != two


def _name(call: LogCall | MetricCall) -> str:
    return call.name if isinstance(call, LogCall) else f"{call.path}.{call.method}"


def _describe(
    module: fx.GraphModule, step: StepFunction, request: Request, leaves: tuple[torch.Tensor, ...], env: Any, watched: Watched
) -> JointGraph:
    """Read inputs and outputs off the descriptors."""
    graph = module.graph
    _drop_detaches(graph)
    inputs = {node.name: node.meta["desc"] for node in graph.nodes if node.op == "placeholder"}
    output = graph.output_node()
    described = list(zip(output.args[0], output.meta["desc"], strict=True))
    plain = [value for value, desc in described if isinstance(desc, private.PlainAOTOutput)]
    has_loss = request.method == "training_step"
    loss = plain[0].name if has_loss else None
    results = tuple(_unclone(value).name for value in plain[has_loss:])
    gradients = tuple(
        (value.name, _own(desc.grad_of.target))
        for value, desc in described
        if isinstance(desc, private.GradAOTOutput) and value is not None and isinstance(desc.grad_of, private.ParamAOTInput)
    )
    if has_loss and not gradients:
        raise CaptureError("The loss does not depend on any parameter that requires a gradient; there is nothing to train.")
    symbols = {s for leaf in leaves for s in _symbols(leaf)}
    return JointGraph(
        module=module,
        parameters={n: _own(d.target) for n, d in inputs.items() if isinstance(d, private.ParamAOTInput)},
        buffers={n: _own(d.target) for n, d in inputs.items() if isinstance(d, private.BufferAOTInput)},
        leaves={n: d.idx for n, d in inputs.items() if isinstance(d, private.PlainAOTInput)},
        tangents=tuple(n for n, d in inputs.items() if isinstance(d, private.TangentAOTInput)),
        loss=loss,
        results=results,
        mutations={
            _own(desc.mutated_input.target): value.name
            for value, desc in described
            if isinstance(desc, private.InputMutationAOTOutput)
        },
        gradients=gradients,
        symbol=symbols.pop() if len(symbols) == 1 else None,
        samples=request.samples,
        conditions=tuple((guard.expr, str(guard.sloc.framework_loc)) for guard in env.guards),
        record=_record(step, loss, results),
        watched=watched,
    )


def _own(name: str) -> str:
    return name.removeprefix("model.")


def _symbols(leaf: torch.Tensor) -> set[Any]:
    return {s for size in leaf.shape if isinstance(size, torch.SymInt) for s in size.node.expr.free_symbols}


def _drop_detaches(graph: fx.Graph) -> None:
    """Remove `detach` nodes: the graph runs without autograd."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _unclone(node: fx.Node) -> fx.Node:
    """Return the node whose copy was made a result (a batch leaf keeps its copy, so that it has a place)."""
    if node.target is torch.ops.aten.clone.default and node.args[0].op == "call_function":
        return node.args[0]
    return node


def _record(step: StepFunction, loss: str | None, results: tuple[str, ...]) -> StepRecord:
    """Return the record of the last run with results named after their nodes."""
    recording, observer = step.recordings[-1], step.observers[-1]
    from_guards = len(recording.results)

    def name(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(loss or "") if value.name == "loss" else Ref(results[int(value.name)])
        if isinstance(value, tuple):
            return tuple(name(item) for item in value)
        if isinstance(value, list):
            return [name(item) for item in value]
        if isinstance(value, dict):
            return {key: name(item) for key, item in value.items()}
        return value

    calls: list[LogCall | MetricCall] = [
        LogCall(c.name, name(c.value), name(c.kwargs), c.line)
        if isinstance(c, LogCall)
        else MetricCall(c.path, c.method, name(c.args), name(c.kwargs), c.line)
        for c in recording.calls
    ]
    guards = tuple(
        Guard(Ref(results[from_guards + i]), answer, line) for i, (_, answer, line) in enumerate(observer.guards)
    )
    return StepRecord(tuple(calls), loss, name(recording.returned), guards)


def real_answers(request: Request, tensors: list[torch.Tensor]) -> tuple[bool, ...]:
    """Run the step on real tensors (no backward) and return the truth values it asked for; leave no trace.

    The module, its buffers and torch's random state are as before afterwards.
    """
    module = request.module
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    guard, answerer = AttributeGuard(module), Answerer()
    devices = [request.device] if request.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), request.context(), recording_calls(module, Recording()), answerer:
        getattr(module, request.method)(request.structure.fill(tensors), *request.arguments)
    guard.restore()
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
    return tuple(answerer.answers)
