"""Steps that go by the number of their samples: they do something else for a micro-batch than for the whole batch.

    if len(x) == 64: ...                    decides by it
    [f"{n}_{k}" for k in range(len(x))]     names, texts and lists are made of it
    self.log(f"loss_{len(x)}", loss)        and so is what is logged

A graph that is traced with the samples of a micro-batch does what the step does for so many. So the step runs on
tensors that compute nothing: with a symbol for the number of samples, to see what it asks about that, and with those of
the whole batch, to see what it says. A step that goes by the number of its samples takes whole batches.

Numbers may depend on the samples: what they are for a whole batch is known (`Sized`), and has to be what the step says.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import sympy
import torch

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.graphs.trace import run_on_fakes
from lightning_pipe.capture.python.users_code import is_library
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.hazards import Question, at, user_line
from lightning_pipe.capture.steps.record import (
    STAND_INS,
    BatchText,
    KeptState,
    LogCall,
    ObjectCall,
    Read,
    Ref,
    Sized,
    StepRecord,
)
from lightning_pipe.capture.steps.trees import branches, found_in
from lightning_pipe.errors import CaptureError, StepError

_CLOSE = 1e-3  # as kernels round otherwise for other numbers of samples
_WORDS = (bool, str, bytes, type(None))  # which no sum or mean is made of
Decision: TypeAlias = "tuple[sympy.Basic, bool, str]"  # a condition of a size, what it was, the user's line


def needs_all(request: Request) -> str:
    """Return why a step does not run with some samples of its batch but with all, in words after "since"; else "".

    Args:
        request: the step, which is refused with the samples of a micro-batch.
    """
    if request.samples is None or request.total in (0, request.samples):
        return ""
    few, of_all = (_refusal(request, samples) for samples in (request.samples, request.total))
    return f"with the first {request.samples} of their samples, {few}" if few and not of_all else ""


def _refusal(request: Request, samples: int) -> str:
    """Return what a step raises with so many samples, on tensors that compute nothing; "" if nothing is known."""
    constant = replace(request, samples=samples, symbolic=False, lengths=frozenset(), kept=None)
    try:
        run_on_fakes(constant, request.answered)
    except StepError as error:
        return error.said.rstrip(".")
    except CaptureError as error:
        return str(error).rstrip(".")
    except Question:  # it cannot be tried
        return ""
    return ""


def goes_by_count(request: Request, joint: JointGraph) -> str:
    """Return why the whole batch of a request must not be cut, in words after "since"; "" if nothing speaks against it.

    Args:
        request: the step, with the samples of a micro-batch.
        joint: its graph.
    """
    total = request.total
    if request.samples is None or total in (0, request.samples):
        return ""
    answers = tuple(bool(guard.expected) for guard in joint.record.guards)
    if joint.fits(total):  # else whatever is asked about the samples has the same answers
        with _decisions() as decisions, contextlib.suppress(CaptureError, Question):  # until it needs a number, say
            run_on_fakes(replace(request, lengths=frozenset()), answers)
        for condition, outcome, line in decisions:
            if _outcome(condition, total) not in (outcome, None):
                return f"it goes by the number of samples{at(line)}"
    constant = replace(request, samples=total, symbolic=False, lengths=frozenset())
    try:
        whole = run_on_fakes(constant, answers, times=2 if joint.record.kept else 1).recordings[-1]
    except (CaptureError, Question):  # it cannot be tried; what the graph holds for is known
        return ""
    return unlike_said(joint.record, whole, total) or _of_other_sizes(request, joint, whole.results)


def _of_other_sizes(request: Request, joint: JointGraph, whole: Sequence[torch.Tensor]) -> str:
    """Return why results of a graph of constant size are not those of the batch: more of it were picked, say.

    A graph with a symbol for the number of samples is judged by its operations (`derived_results`).
    """
    if joint.symbol is not None:
        return ""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    for name, found in zip(joint.results[: len(joint.results) - len(joint.record.guards)], whole, strict=False):
        own = tuple(nodes[name].meta["val"].shape)
        grown = [k for k, (few, many) in enumerate(zip(own, found.shape, strict=False)) if few != many]
        is_by_row = len(grown) == 1 and own[grown[0]] * request.total == found.shape[grown[0]] * joint.samples
        if len(own) != found.ndim or (grown and not is_by_row):
            return f"of {request.total} samples it gives other sizes than of {joint.samples}"
    return ""


def unlike_said(record: StepRecord, whole: StepRecord | StepRecording, samples: int) -> str:
    """Return what of a record goes by the number of samples, as it is not what was said of so many; "" if nothing."""
    if _unlike(record.returned, whole.returned, samples):
        return "what it returns goes by the number of samples"
    if call := _unlike_call(record.calls, whole.calls, samples):
        return f"what it gives to {call.name!r} goes by the number of samples{at(call.line)}"
    if kept := _unlike_kept(record.kept, whole.kept, samples):
        return f"what it keeps in {kept.name} goes by the number of samples"
    return ""


def parts_say_otherwise(parts: Sequence[StepRecording], whole: StepRecording, *, has_lists: bool) -> str:
    """Return what a step says of some samples that is not what it says of parts of them, in words after "since".

    Tensors and numbers are left to `said_roles`, but for those in lists with an item per sample, which are joined.

    Args:
        parts: what it said of the parts, in their order.
        whole: what it said of all.
        has_lists: whether the batch has lists with an item per sample, from which numbers in such lists may come.
    """
    if _differ([part.returned for part in parts], whole.returned, has_lists):
        return "what it returns goes by the number of samples"
    for number, call in enumerate(whole.calls):
        others = [part.calls[number] for part in parts if number < len(part.calls)]
        if len(others) < len(parts) or any((one.name, type(one)) != (call.name, type(call)) for one in others):
            return f"what it logs goes by the number of samples{at(call.line)}"
        if _differ([*map(_said_by, others)], _said_by(call), has_lists):
            return f"what it gives to {call.name!r} goes by the number of samples{at(call.line)}"
    return ""


def _said_by(call: LogCall | ObjectCall) -> Any:
    return {"value": call.value if isinstance(call, LogCall) else call.args, "kwargs": call.kwargs}


def _differ(parts: Sequence[Any], whole: Any, has_lists: bool) -> bool:
    """Return whether what was said of parts does not make what was said of all: the first counts, lists are joined."""
    said = [*parts, whole]
    if any(isinstance(one, STAND_INS) for one in said):
        return False
    if all(isinstance(one, list | tuple) for one in said) and len(whole) > len(parts[0]):
        joined = [item for part in parts for item in part]
        pairs = zip(joined, whole, strict=False)
        return len(joined) != len(whole) or any(_is_other_item(*pair, has_lists) for pair in pairs)
    inside = [branches(one) for one in said]
    if any(one is not None for one in inside):
        first = inside[-1] or {}
        if any(one is None or one.keys() != first.keys() for one in inside):
            return True
        return any(_differ([(one or {})[key] for one in inside[:-1]], first[key], has_lists) for key in first)
    return isinstance(whole, _WORDS) and _are_other_words(parts[0], whole)


def _is_other_item(one: Any, two: Any, has_lists: bool) -> bool:
    """Return whether two items are not what is said of the same sample."""
    if isinstance(one, STAND_INS) or isinstance(two, STAND_INS):
        return False
    inside, others = branches(one), branches(two)
    if inside is not None and others is not None:
        return inside.keys() != others.keys() or any(_is_other_item(v, others[k], has_lists) for k, v in inside.items())
    if isinstance(one, _WORDS) or isinstance(two, _WORDS):
        return _are_other_words(one, two)
    are_numbers = isinstance(one, int | float) and isinstance(two, int | float)
    return are_numbers and not has_lists and not math.isclose(one, two, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _are_other_words(one: Any, two: Any) -> bool:
    return type(one) is not type(two) or bool(one != two)


@contextlib.contextmanager
def _decisions() -> Iterator[list[Decision]]:
    """Note what code of the user asks about sizes that are symbols."""
    found: list[Decision] = []
    usual = torch.SymBool.__bool__

    def ask(condition: torch.SymBool) -> bool:
        asked = condition.node.expr  # which is known by its outcome afterwards
        outcome = bool(usual(condition))  # type: ignore[no-untyped-call]  # torch's has no types
        if not is_library(sys._getframe(1).f_code.co_filename):
            found.append((asked, outcome, user_line(2)))
        return outcome

    with mock.patch.object(torch.SymBool, "__bool__", ask):
        yield found


def _outcome(condition: sympy.Basic, samples: int) -> bool | None:
    """Return what a condition is for a number of samples; None if it depends on something else."""
    symbols = getattr(condition, "free_symbols", ())
    value = condition.xreplace(dict.fromkeys(symbols, sympy.Integer(samples))) if len(symbols) == 1 else None
    return bool(value) if value in (sympy.true, sympy.false) else None


def _unlike(one: Any, whole: Any, samples: int) -> bool:
    """Return whether what is said of a micro-batch, as a function of the samples, is not what is said of so many.

    Stand-ins for tensors, texts of the batch and the like are left to those who combine them.
    """
    one = one.of(samples) if isinstance(one, Sized) else one
    if isinstance(one, STAND_INS) or isinstance(whole, STAND_INS):
        return False
    inside, others = branches(one), branches(whole)
    if inside is not None and others is not None:
        if inside.keys() != others.keys():  # lists of what belongs to the samples are joined
            is_list = isinstance(one, list | tuple)
            return not is_list or next(found_in((one, whole), (Ref, Read, BatchText)), None) is None
        return any(_unlike(item, others[key], samples) for key, item in inside.items())
    if isinstance(one, _WORDS) or isinstance(whole, _WORDS):
        return _are_other_words(one, whole)
    if isinstance(one, int | float) and isinstance(whole, int | float):
        return not math.isclose(one, whole, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(one, np.ndarray | np.generic):
        return not np.array_equal(one, whole)
    return type(one) is not type(whole)


def _unlike_call(
    calls: Sequence[LogCall | ObjectCall], others: Sequence[LogCall | ObjectCall], samples: int
) -> LogCall | ObjectCall | None:
    for one, two in zip_longest(calls, others):
        if one is None or two is None:
            return one or two
        first, second = ([c.value if isinstance(c, LogCall) else c.args, c.kwargs] for c in (one, two))
        if one.name != two.name or type(one) is not type(two) or _unlike(first, second, samples):
            return one
    return None


def _unlike_kept(kept: Sequence[KeptState], others: Sequence[KeptState], samples: int) -> KeptState | None:
    for one, two in zip_longest(kept, others):
        if one is None or two is None:
            return one or two
        if (one.name, one.how) != (two.name, two.how) or _unlike(one.value, two.value, samples):
            return one
    return None
