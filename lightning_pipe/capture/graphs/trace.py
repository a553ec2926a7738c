"""Tracing of a step into one graph of forward and backward.

AOTAutograd's joint graph of `StepFunction` under fake tensors of the target device: nothing is computed, nothing is
allocated, parameters may live on the meta device. The batch dimension is symbolic where the step allows it. Every truth
value that the step asks of a tensor is answered by a real run, where one is offered, else by trying (an answer with
which the step raises or returns no loss is wrong); the answer is a guard of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture import torch_private as private
from lightning_pipe.capture.graphs.joint_graph import JointGraph, describe
from lightning_pipe.capture.graphs.kept_traces import KeptTraces, Known, rebuilt
from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.graphs.sizes_read import sizes_in_texts
from lightning_pipe.capture.kept_graphs import KeptGraph
from lightning_pipe.capture.output.output_functions import output_noted
from lightning_pipe.capture.python.guards import PythonGuards, guards_of
from lightning_pipe.capture.python.places import same
from lightning_pipe.capture.steps.backward_hooks import backward_followed, refuse_hooked_modules
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.hazards import (
    Observer,
    Question,
    SizeDependentError,
    at,
    compare_calls,
    depends_on_data,
    hazard,
    no_files,
    no_random_numbers,
    no_seeding,
    random_line,
    user_line,
)
from lightning_pipe.capture.steps.module_tables import tables_restored
from lightning_pipe.capture.steps.other_ranks import no_collectives, no_training_state
from lightning_pipe.capture.steps.record import STAND_INS, LogCall, LoggerCall, ObjectCall, OutputCall
from lightning_pipe.capture.steps.step_function import StepFunction
from lightning_pipe.capture.steps.step_state import warn_of_checkpointed
from lightning_pipe.capture.steps.trees import branches, found_in
from lightning_pipe.collection import without_collection
from lightning_pipe.errors import CaptureError, StepError
from lightning_pipe.lightning_names import rank_zero_warn

_MOST_IN_A_ROW = 12  # guessed answers at one line, which layers may ask; a loop that waits for one never ends
_MAX_TRIES = 64
_NUMBERS = (bool, int, float)
_Prepared = tuple[StepFunction, dict[str, Any], tuple[torch.Tensor, ...], Any]


def trace(request: Request) -> JointGraph:
    """Trace a step, symbolically if that works, else for `request.samples` samples.

    Raises:
        CaptureError: naming the hazard and the user's line.
    """
    if request.samples is None or not request.symbolic:
        request = replace(request, symbolic=False, lengths=frozenset())
    if request.method == "training_step":
        refuse_hooked_modules(request.module)
    answers = request.answered
    first_error: CaptureError | None = None
    line, times = "", 0  # where the last questions were asked, and how many in a row
    for _ in range(_MAX_TRIES):
        try:
            return _trace_with(request, answers)
        except Question as question:
            line, times = question.line, times + 1 if question.line == line else 1
            if request.answers is None and times > _MOST_IN_A_ROW:
                raise hazard("it goes on until a tensor has a certain value", line) from None
            answers = _more_answers(request, answers, question)
        except CaptureError as error:
            first_error = first_error or error
            while answers and answers[-1]:
                answers = answers[:-1]
            if len(answers) <= len(request.answered) or request.answers is not None:
                raise first_error from (first_error.__cause__ if isinstance(first_error, StepError) else None)
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
        hazardous = symbolic.__cause__ is None and not isinstance(symbolic, SizeDependentError)
        if not request.symbolic or request.lengths or hazardous:
            raise  # a hazard: it would be one with a constant batch size too
        try:
            return _export(replace(request, symbolic=False), answers)
        except CaptureError:
            raise symbolic from symbolic.__cause__


def run_on_fakes(request: Request, answers: tuple[bool, ...], *, times: int = 1) -> StepFunction:
    """Run a step on fake tensors, which compute nothing; return it with what was seen.

    Args:
        request: the step.
        answers: truth values of its tensors.
        times: how often; what it keeps in Python state is seen the second time.

    Raises:
        CaptureError, Question: what the step does that no graph holds.
    """
    step, state, leaves, mode = _prepared(request, answers)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_collection())
        stack.enter_context(tables_restored(request.module))
        stack.enter_context(no_random_numbers(lambda: ""))
        stack.enter_context(_tracing(step, state, mode, request.device))
        stack.enter_context(private.enable_python_dispatcher())
        try:
            for _ in range(times):
                step(*leaves)
        except (CaptureError, Question):
            raise
        except Exception as error:
            raise _explain(error, step, request) from error
    return step


def _prepared(request: Request, answers: tuple[bool, ...]) -> _Prepared:
    """Return a step as a function, fake state and batch for it, and the mode that they live in."""
    step = StepFunction(
        request.module,
        method=request.method,
        structure=request.structure,
        arguments=request.arguments,
        answers=answers,
        context=request.context,
        varying=request.varying,
        may_skip=request.may_skip,
    )
    mode = private.FakeTensorMode(shape_env=private.ShapeEnv(), allow_non_fake_inputs=True)
    return step, _fake_state(step, request, mode), _fake_leaves(request, mode), mode


def _export(request: Request, answers: tuple[bool, ...]) -> JointGraph:
    prepared = _prepared(request, answers)
    if request.kept is None:
        return _exported(request, answers, prepared)
    with KeptTraces(request.kept, prepared[0], _asked(request, answers)) as traces:
        return _exported(request, answers, prepared, traces)


def _exported(
    request: Request, answers: tuple[bool, ...], prepared: _Prepared, traces: KeptTraces | None = None
) -> JointGraph:
    step, state, leaves, mode = prepared

    def run_again() -> str:
        found: list[str] = []
        with contextlib.suppress(Exception), random_line(found), mode, private.reparametrize(step, state):
            step(*leaves)
        return found[0] if found else ""

    known: KeptGraph | None = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(tables_restored(request.module))
        stack.enter_context(no_random_numbers(run_again))
        stack.enter_context(_tracing(step, state, mode, request.device))
        try:
            module = private.aot_export_joint_with_descriptors(stack, step, leaves).graph_module
        except Known as found:
            known = found.kept
        except (CaptureError, Question):
            raise
        except Exception as error:
            _compare_runs(step)
            raise _explain(error, step, request) from error
    if known is not None and traces is not None:
        same = rebuilt(known, step, mode=mode, guards=_guards(step, request))
        if isinstance(same, JointGraph):
            return traces.identified(same)
        traces.forget(same)
        return _export(request, answers)
    assert len(step.recordings) > 1, "the tracer ran the step once; its Python values could not be compared"
    _compare_runs(step)
    warn_of_checkpointed(request.method, step.checkpointed.names)
    guards = _guards(step, request)
    _write_dtypes(module.graph)
    joint = describe(
        module,
        step,
        samples=request.count,
        leaves=leaves,
        lengths=request.lengths,
        env=mode.shape_env,
        guards=guards,
    )
    return joint if traces is None else traces.keep(joint)


def _write_dtypes(graph: torch.fx.Graph) -> None:
    """Give operations that make tensors their dtype: the step's context sets the default; the graph runs outside it."""
    for node in graph.nodes:
        made = node.meta.get("val")
        is_made = isinstance(node.target, private.OpOverload) and isinstance(made, torch.Tensor)
        if is_made and made.is_floating_point() and not any(_is_floating(source) for source in node.all_input_nodes):
            arguments = [argument.name for argument in node.target._schema.arguments]
            if "dtype" in arguments[len(node.args) :] and node.kwargs.get("dtype") is None:
                node.update_kwarg("dtype", made.dtype)


def _is_floating(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _asked(request: Request, answers: tuple[bool, ...]) -> tuple[Any, ...]:
    """Return what a request asks for, beside the module, as plain values."""
    leaves = [(tuple(leaf.shape), leaf.dtype) for leaf in request.structure.leaves]
    counts = (request.samples, request.batch_dim, request.symbolic, request.may_skip, sorted(request.lengths))
    return (request.method, leaves, request.arguments[1:], *counts, request.device, answers)


def _guards(step: StepFunction, request: Request) -> PythonGuards:
    """Guard what the step has read; its module is as it was before."""
    return guards_of(
        request.module,
        numbers=step.numbers,
        slots=step.reads.slots(),
        varying=request.varying,
        unread=step.state.unread,
        filled=step.state.filled,
        constants=step.observers[-1].constants.values(),
    )


@contextlib.contextmanager
def _tracing(step: StepFunction, state: dict[str, Any], mode: Any, device: torch.device) -> Iterator[None]:
    """Everything that must hold while the tracer runs the step."""
    own_device = step.model._device
    with (
        no_collectives(),
        no_training_state(step.model),
        backward_followed(step.model, step.reading, step.observing, step.reads_nodes),
        mode,
        private.reparametrize(step, state),
        private.fx_traceback.preserve_node_meta(),
        private.compiling_state(),
        private.fused_recurrent_kernels(),
        private.symbolic_grids(),
        private.quick_symbols(),
        private.parameters_in_new_lists(),
        private.numbered_checkpoints(step.checkpointed.noted),
        torch.random.fork_rng(devices=[]),
        no_seeding(),
        no_files(),
        sizes_in_texts(),
        output_noted(_output_of_backward),
    ):
        step.model._device = device
        try:
            yield
        finally:
            step.model._device = own_device


def _output_of_backward(path: str, method: str, *args: Any, **kwargs: Any) -> None:
    """Warn of what Python in a backward prints, such as hooks on tensors: a graph has no such output."""
    rank_zero_warn(f"What the backward of the step prints{at(user_line(3))} is not shown. capture='replay' shows it.")


def _fake_state(step: StepFunction, request: Request, mode: Any) -> dict[str, Any]:
    """Return fake parameters and buffers on the target device; a parameter has one for every place it hangs in."""

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
    for i, leaf in enumerate(request.structure.leaves):
        shape = list(leaf.shape)
        dynamic = [private.DimDynamic.STATIC] * len(shape)
        if len(shape) > request.batch_dim:
            shape[request.batch_dim] = request.samples or shape[request.batch_dim]
            if request.symbolic and request.samples is not None:
                dynamic[request.batch_dim] = private.DimDynamic.DUCK
        if request.symbolic:
            for dim in (dim for index, dim in request.lengths if index == i):
                dynamic[dim] = private.DimDynamic.DYNAMIC
        tensor = torch.empty(shape, dtype=leaf.dtype, device="meta")
        context: Any = private.StatelessSymbolicContext(dynamic_sizes=dynamic)
        fake = mode.from_tensor(tensor, source=private.ConstantSource(f"leaf_{i}"), symbolic_context=context)
        leaves.append(_on(fake, request.device, mode))
    return tuple(leaves)


def _on(fake: torch.Tensor, device: torch.device, mode: Any) -> torch.Tensor:
    with mode:
        return torch.empty_like(fake, device=device)


def _explain(error: Exception, step: StepFunction, request: Request) -> CaptureError:
    """Turn what the tracer raised into a refusal that names the user's line."""
    line = next((o.calls[-1][1] for o in reversed(_observers(step)) if o.calls), "")
    kind = type(error).__name__
    first = (str(error).strip().splitlines() or [""])[0][:300].rstrip(".")
    if data := depends_on_data(error):
        return hazard(data, line)
    if _WRITES_IN_BACKWARD in first:
        return hazard("its backward writes to a tensor that is kept (a hook on a gradient, say)", line)
    if _SWITCHES in first:
        return CaptureError(
            f"{request.method} switches requires_grad of a parameter{at(line)}, on which its graph would depend. Where "
            "gradients must not reach a module, call it with other values of its parameters: "
            "torch.func.functional_call(module, {name: p.detach() for name, p in module.named_parameters()}, inputs)."
        )
    return StepError(f"{request.method} raises {kind}{at(line)}: {first}.", _parts(request))


_WRITES_IN_BACKWARD = "mutating a non-functional tensor with a functional tensor"  # of an assertion inside torch
_SWITCHES = "change requires_grad flags of leaf variables"  # what torch says where one is switched off


def _parts(request: Request) -> str:
    """Say that a step ran with fewer samples than a batch has, where it did; it may need more."""
    if request.count >= request.total:
        return ""
    return (
        f"It was traced with {request.count} of the {request.total} samples of a batch, as micro-batches have fewer; "
        "a step that needs more trains with fewer micro-batches (microbatches=1 for whole batches)."
    )


def _observers(step: StepFunction) -> list[Observer]:
    return [*step.observers, *([step.current] if step.current is not None else [])]


def _compare_runs(step: StepFunction) -> None:
    """Refuse a step whose last two runs were not the same."""
    if len(step.recordings) > 1:
        compare_calls(step.observers[-2].calls, step.observers[-1].calls)
        compare_recordings(step.recordings[-2], step.recordings[-1])


def compare_recordings(first: StepRecording, second: StepRecording) -> None:
    """Refuse Python numbers that change from call to call, and objects, in what is logged."""
    for one, two in zip(first.calls, second.calls, strict=False):
        if type(one) is not type(two) or one.name != two.name:
            raise hazard("it logs something else from call to call", one.line)
        if any(map(_changes, _leaves(one), _leaves(two))):
            raise hazard(f"it logs a Python number that changes from call to call ({one.name!r})", one.line)
        if isinstance(one, LoggerCall) and not _is_plain([one.args, one.kwargs]):
            raise hazard(f"it gives {one.name}() what is neither a tensor nor a number or text", one.line)
    for one, two in zip_longest(first.outputs, second.outputs):
        if one is None or two is None or _prints_another(one, two):
            raise hazard("it prints something else from call to call", next(filter(None, (one, two))).line)
    if len(first.calls) != len(second.calls):
        raise hazard("it logs something else from call to call", max(first.calls, second.calls, key=len)[-1].line)


def _prints_another(one: OutputCall, two: OutputCall) -> bool:
    """Return whether two calls print other texts, or plain numbers; sizes may be symbols in one, and numbers in two."""
    leaves, others = ([*found_in((o.args, o.kwargs), (*STAND_INS, *_NUMBERS, str))] for o in (one, two))
    if one.name != two.name:
        return True
    pairs = zip(leaves, others, strict=False) if len(leaves) == len(others) else ()
    return any(not isinstance(a, STAND_INS) and type(a) is type(b) and not same(a, b) for a, b in pairs)


def _is_plain(value: Any) -> bool:
    """Return whether a value is made of stand-ins, numbers and texts."""
    inside = branches(value)
    if inside is None:
        return isinstance(value, (*STAND_INS, bool, int, float, str, type(None)))
    return all(map(_is_plain, inside.values()))


def _leaves(call: LogCall | ObjectCall) -> Iterator[Any]:
    said = call.value if isinstance(call, LogCall) else (call.args, call.kwargs)
    return found_in(said, (*STAND_INS, *_NUMBERS))


def _changes(one: Any, two: Any) -> bool:
    return isinstance(one, _NUMBERS) and isinstance(two, _NUMBERS) and one != two and not same(one, two)
