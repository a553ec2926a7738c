"""Unit trace of a step: its units and the values between them, recorded by running it on real tensors.

1  The tree of its calls of sub-modules is recorded, twice (the first run warms up), and units are chosen from it
   (`unit_choice`).
2  One run is followed (`unit_flow`), and its loss is differentiated. It is the step in its steady state: what the runs
   before it have left on the module is there.
3  Runs with another number of samples, on other slices of the batch, tell which dimensions follow the samples, and
   which outputs have shapes that nothing tells beforehand.
4  Runs on two parts of some samples and on both tell whether glue gives units of micro-batches what the batch gives
   them (`unit_inputs`). Where the batch's head cannot say what the step says, more of them tell how what is said of
   micro-batches is combined.

A unit past which glue reads (it keeps a tensor in an attribute, or glue differentiates through it) is opened, and the
step is followed again; units between which it cannot be followed become one. Afterwards the module is as it was:
parameters, buffers, attributes, gradients, and all random generators.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture.graphs.request import Request, takes_all_samples
from lightning_pipe.capture.recording.record_units import HALF, Run, UnitRecorder
from lightning_pipe.capture.recording.replay_state import is_inside, same_content, same_left
from lightning_pipe.capture.recording.unit_choice import UnitCall, around, choose, faster, units_of
from lightning_pipe.capture.recording.unit_inputs import GlueTrial, by_microbatch, head_of, without_head
from lightning_pipe.capture.recording.unit_loss import combine_of, is_proven
from lightning_pipe.capture.recording.unit_state import ModuleSnapshot, left_as_it_was, uncut_object
from lightning_pipe.capture.recording.units import Head, OutputRules, Source, Sources, Unit, UnitOutput, UnitTrace
from lightning_pipe.capture.steps.backward_hooks import check_hooked_units, hooked_modules
from lightning_pipe.capture.steps.hazards import restored_generators
from lightning_pipe.capture.steps.module_tables import buffers_inside, canonical_names
from lightning_pipe.capture.steps.numbers import is_number, proportional, rows_said
from lightning_pipe.capture.steps.step_state import warn_of_checkpointed
from lightning_pipe.errors import CaptureError

log = logging.getLogger(__name__)

_KEEPS_SIZES = "what it keeps from batch to batch is for one number of samples"
_RUNS, _RUNS_IF_RANDOM = 2, 6  # with other samples; Python that throws dice is given more chances to call other units


def trace_units(request: Request, tensors: Sequence[torch.Tensor], *, parts: int) -> UnitTrace:
    """Run a step on real tensors of the host and find its units.

    Args:
        request: the step; its module holds real parameters.
        tensors: leaves of a whole batch, of which `request.count` samples are taken.
        parts: number of parts among which the units will be divided.

    Raises:
        CaptureError: if the step has no units, or calls others every time, or differentiates through them itself.
    """
    runner, uncut = UnitRecorder(request, tensors), uncut_object(request.structure.template)
    devices = [request.device] if request.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        restored_generators() as drawn,
        left_as_it_was(request.module) as kept,
    ):
        with kept.keeper:
            first = runner.timed()
        cold, cold_buffers = kept.keeper.names(), kept.changed_buffers()
        tree = faster(first, runner.timed())
        steady = ModuleSnapshot(request.module)  # what the calls before have left is there
        opened = frozenset[str]()
        while True:
            chosen, run = _separated(runner, tree, parts, steady, opened)
            count = 0 if request.samples is None or uncut else _RUNS_IF_RANDOM if drawn() else _RUNS
            others, fits, only = _other_runs(runner, chosen, count, states=(steady, kept))
            calls = units_of(tree, chosen)
            called = [[call.path for call in calls], *([seen.path for seen in one.seen] for one in (run, *others))]
            if not (unsteady := _not_always_called(called)):
                break
            opened |= unsteady  # as glue they may be called or not
            if not choose(tree, parts, opened):
                _refuse_unsteady(called)
        once = _once([run, *others]) if others else frozenset[str]()
        if once & {name for names in run.mutated.values() for name in names}:  # a maximum, say, may be reached already
            with contextlib.suppress(CaptureError):
                once &= _once([runner.followed(chosen, kept, other=number) for number in (1, 2)])
        later = {name for names in run.mutated.values() for name in names} | {one.name for one in run.changes}
        if first_buffers := cold_buffers - later:
            with contextlib.suppress(CaptureError):  # then they may depend on the samples
                once |= _once([runner.followed(chosen, kept, other=number) for number in (1, 2)]) & first_buffers
        written = runner.writers([run, *others], chosen, kept)
        if drawn():  # dice may fall alike once
            run = replace(run, repeatable=frozenset())
        trace = _described(request, run, others, [call.seconds for call in calls])
        first_draws = [one.first_draw for one in (run, *others)]
        hooked = next((seen.path for one in (run, *others) for seen in one.seen if seen.is_hooked), "")
        head: Head = ""
        headless = ""
        if others and fits:
            head, headless = head_of(request, trace, first_draws, hooked=hooked, drawn=drawn())
        unlike = ""
        if others and fits and (compared := _with_glue(runner, trace, steady)) is not None:
            is_accumulated = request.whole_batch == "by_microbatch"
            trace, unlike = (compared[0], "") if drawn() or is_accumulated else compared
        elif head:
            head, headless = "", "its sub-modules are given tensors of other shapes for other samples"
        nonlinear = "" if not others or request.whole_batch == "by_microbatch" else runner.nonlinear(steady)
        steady.restore()
        in_python = drawn()
    warn_of_checkpointed(request.method, run.checkpointed)
    whole = _why_whole(request.module, trace.units, (run, *others), in_head=bool(head)) if others else ""
    if nonlinear:
        whole = (
            whole or f"{nonlinear} gets a gradient that is no multiple of the loss's, from a custom Function or a hook"
        )
    whole = (only or whole or unlike or without_head(request, trace, headless)) if fits else _KEEPS_SIZES
    whole = f"they hold a {uncut}, which is not cut into samples" if uncut and request.samples else whole
    if not whole and request.whole_batch == "exact" and (names := by_microbatch(request, replace(trace, once=once))):
        whole = takes_all_samples(names)
    return replace(
        trace,
        units=tuple(_with_first_writes(unit, first_buffers) for unit in trace.units),
        is_random_in_python=in_python,
        whole=whole,
        head="" if whole else head,
        headless="" if whole else headless,
        once=once,
        written=written,
        sets_first=(cold - later - trace.writes) | (first_buffers - once),
        is_for_one_count=bool(only),
    )


def _with_first_writes(unit: Unit, names: frozenset[str]) -> Unit:
    """Return a unit that changes buffers inside it too which only its first call writes to: only its rank has them."""
    buffers = tuple(name for name in unit.buffers if name in names)
    return replace(unit, mutations=(*unit.mutations, *buffers), is_repeatable=unit.is_repeatable and not buffers)


def _other_runs(
    runner: UnitRecorder, chosen: frozenset[str], count: int, *, states: tuple[ModuleSnapshot, ModuleSnapshot]
) -> tuple[list[Run], bool, str]:
    """Follow the step with other numbers of samples, if it runs with them.

    Args:
        runner: runs the step.
        chosen: paths of the units.
        count: how often.
        states: what earlier calls have left, which may be of so many samples as they had; and what was there before.

    Returns:
        The runs; whether they began with what earlier calls have left; why there are none although some were wanted.
    """

    def followed(state: ModuleSnapshot, number: int) -> Run:
        try:
            return runner.followed(chosen, state, other=number)
        except CaptureError:
            if number != HALF:
                raise
            return runner.followed(chosen, state, other=count + 1)

    why = ""
    for state in states:
        try:
            return [followed(state, number) for number in range(1, count + 1)], state is states[0], ""
        except CaptureError as error:
            why = why or str(error)
    return [], True, why


def _with_glue(runner: UnitRecorder, trace: UnitTrace, kept: ModuleSnapshot) -> tuple[UnitTrace, str] | None:
    """Return units with their blocks, and why batches must not be cut: glue gives units what it makes of all samples.

    None where that cannot be told: tensors have other shapes for other samples.

    Args:
        runner: runs the step.
        trace: its units.
        kept: content of the module that runs begin with.
    """
    if runner.total < 2 or runner.request.samples is None:
        return trace, ""
    trial = GlueTrial(trace, runner.request.module, runner.request.device)
    try:
        count = min(runner.request.count, runner.total - 1)
        trial.compare(lambda rows: runner.quietly(rows, kept), total=runner.total, count=count)
    except Exception as error:  # whatever the step raises for these samples
        log.debug("Whether sub-modules are given what is made of all samples is not known: %s", error)
        return None
    if trial.is_unknown:
        return None
    units = tuple(replace(unit, blocks=trial.blocks.get(k, 1)) for k, unit in enumerate(trace.units))
    why = f"what it gives {trial.unlike} is made of all samples" if trial.unlike else ""
    return replace(trace, units=units, mixing=tuple(trial.mixing)), why


def _separated(
    runner: UnitRecorder, tree: UnitCall, parts: int, kept: ModuleSnapshot, opened: frozenset[str]
) -> tuple[frozenset[str], Run]:
    """Choose units that glue does not read past, none of them opened, and follow the step once with them.

    Units between which the step cannot be followed, as it differentiates through several of them, become one.
    """
    closed = frozenset(hooked_modules(runner.request.module))
    while chosen := choose(tree, parts, opened, closed=closed):
        try:
            run = runner.followed(chosen, kept)
        except CaptureError:
            if (outside := around(tree, chosen)) <= closed:
                raise
            closed |= outside
            continue
        if not run.read_past:
            if runner.request.method == "training_step":
                check_hooked_units(runner.request.module, chosen)
            return chosen, run
        opened |= run.read_past
    request = runner.request
    runner.refuse_nothing()
    past = f" It uses what {', '.join(sorted(opened))} compute without returning it." if opened else ""
    raise CaptureError(
        f"{type(request.module).__name__}.{request.method} calls no sub-module that could run on a rank of its own."
        f"{past} Let it call sub-modules that hold the parameters, and use nothing of them but what they return."
    )


def _not_always_called(runs: Sequence[Sequence[str]]) -> frozenset[str]:
    """Return the paths of the units that some runs call more often than others, or at other places among them."""
    counts = [Counter(paths) for paths in runs]
    unequal = {path for count in counts for path in count if any(other[path] != count[path] for other in counts)}
    return frozenset(
        unequal or (path for paths in runs for path, first in zip(paths, runs[0], strict=True) if path != first)
    )


def _refuse_unsteady(runs: Sequence[Sequence[str]]) -> None:
    """Refuse a step of which all units are called in some runs only."""
    first, other = runs[0], next(paths for paths in runs if paths != runs[0])
    pairs = itertools.zip_longest(first, other, fillvalue="the end of the step")
    number, (one, two) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise CaptureError(
        f"The step calls other sub-modules every time: call {number} was {one} in one run and {two} in another. A step "
        "that calls other units every time cannot be a pipeline. Call them always, and let a tensor switch off what "
        "they return."
    )


def _described(request: Request, run: Run, others: Sequence[Run], seconds: Sequence[float]) -> UnitTrace:
    runs = (run, *others)
    total = sum(seconds) or 1.0
    mutated = (names for one in runs for names in one.mutated.values())
    written = {*itertools.chain.from_iterable(mutated), *(change.name for change in run.changes)}
    escapes = dict.fromkeys(escape for one in runs for escape in one.escapes)
    tail = frozenset[Source]().union(*(one.tail for one in runs))
    units = tuple(
        replace(_unit(request, k, runs), forward_s=s, backward_s=run.backward_s * s / total)
        for k, s in enumerate(seconds)
    )
    keeping = _keeping(run)
    writes = frozenset(written & {*canonical_names(request.module)})
    repeatable = frozenset() if writes else run.repeatable - keeping  # it is not followed who reads a parameter
    units = tuple(
        replace(unit, is_repeatable=k in repeatable and written.isdisjoint(unit.buffers))
        for k, unit in enumerate(units)
    )
    reads = [unit.reads for unit in units] + [one.reads for one in escapes] + [one.reads for one in run.changes]
    return UnitTrace(
        units=units,
        samples=request.count,
        tail=tail | _unread(request, [tail, *reads]),
        escapes=tuple(sorted(escapes, key=lambda escape: escape.before)),
        changes=run.changes,
        trained=run.trained | _trainable(request.module, units, [tail, *reads])
        if run.loss is not None
        else run.trained,
        loss=run.loss,
        combine=combine_of([one.reductions for one in runs if one.reductions is not None]),
        is_random=run.is_random,
        is_random_in_python=False,
        proportional=proportional([one.numbers for one in runs], [one.samples for one in runs]),
        writes=writes,
        rows=rows_said([one.sizes for one in runs], [one.samples for one in runs]),
        law=run.reductions
        if run.reductions is not None and is_proven([(o.samples, o.reductions) for o in runs if o.reductions])
        else None,
        keeping=keeping,
        output=_output_rules(runs),
        outputting=frozenset[int]().union(*(one.outputting for one in runs)),
        draws=tuple(dict.fromkeys(draw for one in runs for draw in one.draws)),
    )


def _output_rules(runs: Sequence[Run]) -> OutputRules:
    """Return what runs with different numbers of samples tell of what the step outputs."""
    counts = [one.samples for one in runs]
    if len({*counts}) < 2:
        return OutputRules()
    first, *others = (one.outputs for one in runs)
    numbers = [{place: float(one) for place, one in run.outputs.items() if is_number(one)} for run in runs]
    shapes = [{place: tuple(one) for place, one in run.outputs.items() if isinstance(one, torch.Size)} for run in runs]
    same = {place for place, one in first.items() if all(other.get(place) == one for other in others)}
    return OutputRules(frozenset(same), proportional(numbers, counts), rows_said(shapes, counts))


def _unread(request: Request, reads: Iterable[Sources]) -> Sources:
    """Return the tensors of the batch that nothing has read: what becomes of another batch may be made of them."""
    return frozenset(("leaf", i) for i in range(len(request.structure.leaves))).difference(*reads)


def _trainable(module: nn.Module, units: Sequence[Unit], reads: Iterable[Sources]) -> frozenset[str]:
    """Name the parameters that a batch may train, whether the first samples do or not: of units, and read by glue."""
    names = {name for unit in units for name in unit.parameters}
    names |= {str(name) for sources in reads for kind, name in sources if kind == "parameter"}
    return frozenset(name for name in names if module.get_parameter(name).requires_grad)


def _why_whole(module: nn.Module, units: Sequence[Unit], runs: Sequence[Run], *, in_head: bool) -> str:
    """Return why micro-batches would not do what the whole batch does; "" if they may.

    Args:
        module: of the step.
        units: its units.
        runs: with different samples.
        in_head: whether what is kept outside of units is kept once per batch.
    """
    if any(run.seeds for run in runs):
        return "it seeds torch's generators"
    first, *others = runs
    if writes := [change.name for change in first.changes if change.name not in first.buffers]:
        kind = "parameter" if writes[0] in dict(module.named_parameters()) else "tensor"
        return f"it writes to the {kind} {writes[0]}"
    for change in first.changes:
        is_made_of_samples = any(kind in ("leaf", "unit") for kind, _ in change.reads)  # if they say so now or not
        if change.name in first.buffers and (
            is_made_of_samples
            or not all(same_content(first.buffers[change.name], other.buffers.get(change.name)) for other in others)
        ):
            return f"what it keeps in the buffer {change.name} depends on the samples"
    if hidden := next((left for left in first.left if not left.path), None):
        raise CaptureError(
            f"The step changes {hidden.name}, which can neither be put back for the next micro-batch nor found by "
            "other ranks. Keep numbers, lists, dicts or generators of random numbers on the module instead."
        )
    for other in others:
        for one, two in itertools.zip_longest(first.left, other.left):
            if in_head and not any(is_inside(either, unit.path) for either in (one, two) if either for unit in units):
                continue
            if one is None or two is None or not same_left(one, two):
                return f"what it keeps in {(one or two).name} depends on the samples"
    return ""


def _once(runs: Sequence[Run]) -> frozenset[str]:
    """Return the buffers that change alike whatever the samples, in sub-modules (or glue) where all do."""
    first, *others = runs
    same = {n for n, b in first.buffers.items() if all(same_content(b, o.buffers.get(n)) for o in others)}
    same -= frozenset().union(*(run.of_samples for run in runs))
    changing = {name.rpartition(".")[0] for name in first.buffers if name not in same} - {""}
    return frozenset(name for name in same if name.rpartition(".")[0] not in changing)


def _keeping(run: Run) -> frozenset[int]:
    """Return the units inside which Python state has changed."""
    return frozenset(k for k, seen in enumerate(run.seen) if any(is_inside(left, seen.path) for left in run.left))


def _unit(request: Request, k: int, runs: Sequence[Run]) -> Unit:
    """Describe a unit, but for its seconds."""
    first, *others = (one.seen[k] for one in runs)
    template = _portable(first.template)
    outputs = [_output(request, runs, k, i) for i in range(len(first.outputs))]
    understood = all(seen.is_understood for seen in (first, *others)) and template is not None
    same = all(same_content(seen.template, first.template) and len(seen.outputs) == len(outputs) for seen in others)
    names, buffers = canonical_names(request.module), {name for name, _ in request.module.named_buffers()}
    mutated = dict.fromkeys(name for one in runs for name in one.mutated.get(k, ()))
    module = request.module.get_submodule(first.path)
    inside = (names[f"{first.path}.{name}"] for name, _ in module.named_parameters(remove_duplicate=False))
    return Unit(
        path=first.path,
        reads=first.reads.union(*(seen.reads for seen in others)),
        template=template,
        outputs=tuple(output for output, _ in outputs),
        parameters=tuple(dict.fromkeys(inside)),
        mutations=tuple(name for name in mutated if name in buffers),
        buffers=tuple(sorted(buffers_inside(request.module, first.path))),
        forward_s=0.0,
        backward_s=0.0,
        flops=runs[0].flops.get(k, 0),
        saved_bytes=sum(first.saved.values()),
        is_fixed=understood and same and all(fixed for _, fixed in outputs),
        is_given_as_is=all(seen.is_given_as_is for seen in (first, *others)),
    )


def _output(request: Request, runs: Sequence[Run], k: int, i: int) -> tuple[UnitOutput, bool]:
    """Describe the i-th output of unit k, and say whether its shape depends on the number of samples only."""
    dtype, shape, order = runs[0].seen[k].outputs[i]
    forms = [(run.samples, run.seen[k].outputs[i]) for run in runs if i < len(run.seen[k].outputs)]
    dims = [d for d in range(len(shape)) if any(len(s) == len(shape) and s[d] != shape[d] for _, (_, s, _) in forms)]
    fixed, along, rows = not dims, None, 0
    if len(dims) == 1:
        along, rows = dims[0], shape[dims[0]] // request.count
        fixed = all(s == (*shape[:along], rows * n, *shape[along + 1 :]) for n, (_, s, _) in forms)
    fixed = fixed and all(t == dtype and len(s) == len(shape) for _, (t, s, _) in forms)
    output = UnitOutput(
        dtype=dtype,
        shape=shape,
        batch_dim=along if fixed else None,
        rows=rows if fixed else 0,
        order=order,
        has_gradient=i in runs[0].seen[k].differentiated,
        is_detached=i in runs[0].seen[k].differentiable - runs[0].seen[k].differentiated,
        is_overwritten=any((k, i) in run.overwritten for run in runs),
    )
    return output, fixed


def _portable(template: Any) -> Any:
    """Return a template that can be told to other processes, None if it cannot."""
    try:
        pickle.dumps(template)
    except Exception:  # whatever an object's own way to be pickled raises
        return None
    return template
