"""Hazards of a frozen graph: what it would get wrong, with the user's line that causes it.

A graph repeats what the step did once. Anything that Python decides again on every call must therefore be seen:

* Python values that change: counters and learning rates are tracked (`capture.tracked.tracked_number`), everything else
  that the step reads is guarded (`capture.python.reads`). Besides, the tracer runs the step twice, and the two
  sequences of torch calls must be equal, numbers included.
* Python and NumPy random numbers: both generators' states before and after the step.
* Branches on data (`if loss > 3`, `.item()`, `.tolist()`): every read of a tensor's value into Python is intercepted.
  A read of a truth value is answered, and the answer becomes a guard that is checked on every run.
* State that the step keeps (a counter, a hidden state): everything that it might change, before and after
  (`step_state`).
"""

from __future__ import annotations

import builtins
import contextlib
import io
import operator
import pathlib
import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from lightning_pipe.capture.output.late_texts import assumed_answer, late_text
from lightning_pipe.capture.output.output_conditions import condition_at
from lightning_pipe.capture.output.printed_tensors import TooLarge, as_printed, is_too_large, kind_of
from lightning_pipe.capture.output.text_uses import use_of_text
from lightning_pipe.capture.python.described_calls import described
from lightning_pipe.capture.python.users_code import is_library, users_frame
from lightning_pipe.capture.steps.keyed_random import PythonRandomness
from lightning_pipe.capture.steps.record import Applied
from lightning_pipe.capture.torch_private import (
    SET_MULTITHREADING,
    assert_async,
    assert_now,
    has_no_data,
    is_real,
    tag_nodes,
)
from lightning_pipe.capture.tracked.number_inputs import has_tracked, with_inputs
from lightning_pipe.errors import CaptureError, remember

_HELP = (
    "A pipeline repeats one captured graph, so this would be frozen. Move it out of the step, or pass it as a tensor "
    "in the batch."
)


class SizeDependentError(CaptureError):
    """The graph of a step holds for one number of samples only."""


def hazard(what: str, line: str, module: str = "", *, kind: type[CaptureError] = CaptureError) -> CaptureError:
    """Build the refusal that names the hazard and the user's line."""
    inside = f" (in module {module})" if module else ""
    return kind(f"The step cannot be captured: {what}{at(line)}{inside}. {_HELP}")


def at(line: str) -> str:
    """Return the words that name a line of the user's, "" where none was found."""
    return f" at {line}" if line else ""


def user_line(skip: int = 1) -> str:
    """Return `file:line in function` of the innermost frame that belongs to no library."""
    frame = users_frame(sys._getframe(skip))
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class Question(Exception):
    """Ask for the truth value of a tensor that the trace cannot know."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line
        remember(self)


_DATA = ("DataDependent", "DynamicOutputShape", "PendingUnbacked", "UnbackedSymInt", "FunctionalTensor", "FakeTensor")


def depends_on_data(error: Exception) -> str:
    """Return what a step does that only a trace cannot, as torch has raised this; "" if it raises that in any run."""
    kind = type(error).__name__
    if any(word in kind or word in str(error) for word in _DATA):
        return f"a shape or a branch depends on the values of tensors (data-dependent: {kind})"
    return ""


def unknown_text(value: Any, form: Callable[..., str], *args: str) -> str:
    """Return what stands for the text of a value, `form(value, *args)`.

    Raises:
        CaptureError: if it is not only said.
    """
    if use_of_text(sys._getframe(1)) == "used":
        raise hazard("a tensor's value is made a text, and that is more than printed", user_line(2))
    return late_text(value, form, *args)


class TracedNumber:
    """Stand for `tensor.item()` while tracing: it can be logged, kept and printed, and nothing else.

    It claims to be the number that it would be when the step asks (`isinstance`).

    Attributes:
        tensor: the tensor.
        line: the user's line.
        applied: what output makes of the number; None for the number itself.
    """

    def __init__(self, tensor: torch.Tensor, line: str, applied: Applied | None = None) -> None:
        self.tensor = tensor
        self.line = line
        self.applied = applied

    def _kind(self) -> type:
        return complex if self.tensor.is_complex() else float if self.tensor.is_floating_point() else int

    __class__ = property(_kind)

    def __format__(self, spec: str) -> str:
        return unknown_text(self, format, spec)

    def __repr__(self) -> str:
        return unknown_text(self, repr)

    def _refuse(self, *_: Any) -> Any:
        raise hazard("a tensor's value is read into Python by .item() and then used", self.line)

    __float__ = __int__ = __index__ = __hash__ = _refuse

    def __bool__(self) -> bool:
        answer = assumed_answer(sys._getframe(1), lambda: self)
        return self._refuse() if answer is None else answer


def _output_of(function: Callable[..., Any], *, is_reflected: bool = False, asks: bool = False) -> Callable[..., Any]:
    def call(self: TracedNumber, *others: Any) -> Any:
        operands = (*others, self) if is_reflected else (self, *others)
        number = TracedNumber(self.tensor, self.line, Applied(function, operands))
        if asks and (answer := assumed_answer(sys._getframe(1), lambda: number)) is not None:
            return answer
        is_output = use_of_text(sys._getframe(1)) == "said" and not any(isinstance(o, torch.Tensor) for o in others)
        return number if is_output else self._refuse()

    return call


for _name in "add sub mul truediv floordiv mod pow".split():
    setattr(TracedNumber, f"__{_name}__", _output_of(getattr(operator, _name)))
    setattr(TracedNumber, f"__r{_name}__", _output_of(getattr(operator, _name), is_reflected=True))
for _name in "neg abs".split():
    setattr(TracedNumber, f"__{_name}__", _output_of(getattr(operator, _name)))
for _name in "lt le gt ge eq ne".split():
    setattr(TracedNumber, f"__{_name}__", _output_of(getattr(operator, _name), asks=True))
setattr(TracedNumber, "__round__", _output_of(round))  # noqa: B010


_NODE: Any = torch.Tensor.grad_fn  # a property, which types take for what it returns
_TRUTH = (torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero)
_EQUAL = (torch.equal, torch.Tensor.equal)
_UNCOUNTED = (  # tracing, and what watches the step, may call them once more or less
    *(torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min),
    torch.Tensor.is_inference,
    SET_MULTITHREADING,
)
_CLOSE = (torch.allclose, torch.Tensor.allclose)
_TEXTS: dict[Any, Callable[..., str]] = {torch.Tensor.__format__: format, torch.Tensor.__repr__: repr}
_LISTS = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy"}


def _classes_hold(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor | None:
    """Return whether `one_hot` takes a tensor; None if it looks for the number of classes itself."""
    return None if num_classes < 0 else ((input >= 0) & (input < num_classes)).all()


_REQUIRED: dict[Any, Callable[..., torch.Tensor | None]] = {
    torch.nn.functional.one_hot: _classes_hold,
    assert_async: lambda tensor, *_: tensor,
}
_TELLING: dict[Any, Callable[..., Any]] = {  # decompositions that raise -> what tells instead whether they would
    **dict.fromkeys((torch.linalg.inv, torch.inverse, torch.Tensor.inverse), torch.linalg.inv_ex),
    torch.linalg.solve: torch.linalg.solve_ex,
    torch.linalg.cholesky: torch.linalg.cholesky_ex,
}
_OF_NUMBER = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
_READS: dict[Any, str] = {
    torch.Tensor.__float__: "float()",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__index__: "used as an index by Python",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__array__: "numpy.asarray()",
}


def printed(tensor: torch.Tensor) -> Any:
    """Return a tensor as it is now, with what its text says of autograd; of a large one what its shape is."""
    if is_too_large(tensor):
        return Applied(TooLarge, (tuple(tensor.shape), str(tensor.dtype)))
    kind, content = kind_of(tensor), tensor.detach().clone()
    return Applied(as_printed, (content, kind)) if kind else content


class Observer(TorchFunctionMode):
    """Watch every torch call of the step: its line, its module, its numbers, and reads of values into Python.

    Attributes:
        calls: one entry per torch call: what it was called with, and the user's line.
        answers: truth values with which the first questions are answered; the next one raises `Question`.
        guards: (tensor that is 1.0 where the answer was wrong, answer, line) per question, in order.
        constants: real tensors that entered calls, with the user's line, by identity.
        reads_nodes: whether it was asked for the node of autograd that has made a tensor.
        numbers: vector from which the graph reads tracked numbers; None where there is no graph.
    """

    def __init__(
        self, answers: tuple[bool, ...], module_path: Callable[[], str], *, numbers: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.answers = answers
        self.module_path = module_path
        self._numbers = numbers
        self.calls: list[tuple[Any, str]] = []
        self.guards: list[tuple[torch.Tensor, bool, str]] = []
        self.constants: dict[int, tuple[torch.Tensor, str]] = {}
        self.reads_nodes = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call and answer reads of values."""
        kwargs = kwargs or {}
        line = user_line(2)
        if func in _TRUTH:
            return self._ask(args[0], line)
        if func in _EQUAL:
            left, right = args
            return bool(left.shape == right.shape) and self._ask(torch.eq(left, right).all(), line)
        if func in _CLOSE:
            return self._ask(torch.isclose(*args, **kwargs).all(), line)
        if func is torch.Tensor.item:
            if args[0].dtype == torch.bool:
                return self._ask(args[0], line)
            return TracedNumber(args[0], line)
        if func in _TEXTS and has_no_data(args[0]):
            return unknown_text(printed(args[0]), _TEXTS[func], *args[1:])
        if func in _LISTS and has_no_data(args[0]) and use_of_text(sys._getframe(1)) == "said":
            values = operator.methodcaller(_LISTS[func])
            return TracedNumber(args[0], line, Applied(values, (args[0].detach().clone(),)))
        if func in _REQUIRED and has_no_data(args[0]):
            self._require(_REQUIRED[func](*args, **kwargs), RuntimeError(f"{func.__name__} refuses such values"), line)
        if func in _TELLING and has_no_data(args[0]):
            return self._decomposed(_TELLING[func], args, kwargs, line)
        if func is assert_now:
            return self._require(args[0], AssertionError(*args[1:]), line)
        if func in _READS and has_no_data(args[0]):
            raise hazard(f"a tensor's value is read into Python ({_READS[func]})", line, self.module_path())
        if kwargs.get("generator") is not None:
            raise hazard("it draws random numbers from a generator of its own", line, self.module_path())
        name = getattr(func, "__name__", str(func))
        self.reads_nodes |= func == _NODE.__get__
        if name != "__get__" and func not in _UNCOUNTED:
            self.calls.append((described(name, args, kwargs), line))
            self._note_constants(name, args, kwargs, line)
        tag_nodes(self.module_path(), line)
        if self._numbers is not None and has_tracked(args, kwargs):
            return with_inputs(func, args, kwargs, self._numbers)
        func, args, kwargs = with_size_as_number(func, args, kwargs)
        tracer = sys.gettrace()
        sys.settrace(None)  # no code of the user's runs in here; following torch's own would double the time
        try:
            return func(*args, **kwargs)
        except Exception as error:
            if data := depends_on_data(error):
                raise hazard(data, line, self.module_path()) from error
            raise
        finally:
            sys.settrace(tracer)

    def _note_constants(self, name: str, args: Any, kwargs: Any, line: str) -> None:
        """Remember real tensors, which the graph takes as they are.

        Raises:
            CaptureError: if the call writes to one.
        """
        for place, value in enumerate((*args, *kwargs.values())):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if is_real(tensor):
                    if place == 0 and _writes(name):
                        raise hazard("it writes to a tensor that is no buffer of the module", line, self.module_path())
                    self.constants.setdefault(id(tensor), (tensor, line))

    def _decomposed(self, func: Any, args: Any, kwargs: Any, line: str) -> torch.Tensor:
        """Return the result of a decomposition, which a matrix must have."""
        tag_nodes(self.module_path(), line)
        result, fault = func(*args, **kwargs)
        says = f"{func.__name__.removesuffix('_ex')} has no result for a matrix"
        self._require((fault == 0).all(), torch.linalg.LinAlgError(says), line)  # type: ignore[attr-defined]
        found: torch.Tensor = result
        return found

    def _require(self, holds: torch.Tensor | None, error: Exception, line: str) -> None:
        """Ask for what an operation checks of the values that it gets, which a graph would not; raise as it does."""
        if holds is not None and not self._ask(holds, line):
            raise error

    def _ask(self, tensor: torch.Tensor, line: str) -> bool:
        if (assumed := assumed_answer(sys._getframe(2), tensor.detach().clone)) is not None:
            return assumed
        asked = len(self.guards)
        if asked == len(self.answers):
            raise Question(line)
        answer = self.answers[asked]
        tag_nodes(self.module_path(), line)
        wrong = torch.ne(tensor.detach().reshape(()).to(torch.bool), answer).to(torch.float32)
        self.guards.append((wrong, answer, line))
        return answer


def with_size_as_number(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return a call that makes a tensor of a size, `torch.tensor(len(x))`, so that the size stays a symbol."""
    if func not in _OF_NUMBER or not args or not isinstance(args[-1], torch.SymInt | torch.SymFloat):
        return func, args, kwargs
    *like, number = args
    if not like:
        kind = torch.int64 if isinstance(number, torch.SymInt) else torch.get_default_dtype()
        return torch.full, ((), number), {**kwargs, "dtype": kwargs.get("dtype") or kind}
    return torch.Tensor.new_full, (*like, (), number), kwargs


class Answerer(TorchFunctionMode):
    """Answer the questions of a step by running it on real tensors; `answers` holds them in order."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call; remember what it says if it is a question."""
        result = func(*args, **(kwargs or {}))
        if func in _TELLING or (func in _REQUIRED and _REQUIRED[func](*args, **(kwargs or {})) is not None):
            self.answers.append(True)  # else it had raised
        asks = func in _TRUTH or func in _CLOSE or (func is torch.Tensor.item and isinstance(result, bool))
        asks = asks or (func in _EQUAL and args[0].shape == args[1].shape)
        if asks and condition_at(sys._getframe(1)) is None:
            self.answers.append(bool(result))
        return result


_WRITES = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__".split()
)


def _writes(name: str) -> bool:
    """Return whether a call of this name writes to its first argument."""
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def compare_calls(first: list[tuple[Any, str]], second: list[tuple[Any, str]]) -> None:
    """Check that two runs of the step made the same torch calls.

    Raises:
        CaptureError: naming the first call that differs.
    """
    for (one, line), (two, _) in zip(first, second, strict=False):
        if one != two:
            raise hazard(f"a Python value that changes from call to call enters {one[0]}()", line)
    if len(first) != len(second):
        line = (first if len(first) > len(second) else second)[min(len(first), len(second))][1]
        raise hazard("its sequence of operations changes from call to call", line)


@contextlib.contextmanager
def no_random_numbers(find_line: Callable[[], str]) -> Iterator[None]:
    """Refuse a step that draws Python or NumPy random numbers (both generators are restored)."""
    with restored_generators() as drawn:
        failure: CaptureError | None = None
        try:
            yield
        except CaptureError as error:
            failure = error
        if drawn():
            raise hazard(_RANDOM, find_line()) from failure
        if failure is not None:
            raise failure


@contextlib.contextmanager
def restored_generators() -> Iterator[Callable[[], bool]]:
    """Give Python's and NumPy's generators their states back; the yielded function says whether they moved."""
    before = PythonRandomness.now()
    try:
        yield lambda: PythonRandomness.now() != before
    finally:
        before.restore()


def no_seeding() -> contextlib.AbstractContextManager[None]:
    """Refuse a step that seeds torch's generators itself; a graph draws from keys of its own."""

    def refuse(name: str) -> None:
        raise hazard(f"it calls {name}()", user_line(3))

    return noticing_seeding(refuse)


@contextlib.contextmanager
def noticing_seeding(note: Callable[[str], Any]) -> Iterator[None]:
    """Call `note` with the name of the function by which the user's code in this thread seeds torch's generators."""
    thread = get_ident()

    def noticed(function: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread and not is_library(sys._getframe(1).f_code.co_filename):
                note(function.__name__)
            return function(*args, **kwargs)

        return seed

    places = [(owner, name) for owner in (torch, torch.random) for name in ("manual_seed", "seed", "set_rng_state")]
    places += [(torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "set_rng_state")]
    with contextlib.ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, noticed(getattr(owner, name))))
        yield


@contextlib.contextmanager
def no_files() -> Iterator[None]:
    """Refuse a step that opens a file: its content may change, and a graph would neither read nor write it again.

    Other threads (of loggers, of monitors) may.
    """
    opened, thread = builtins.open, get_ident()

    def refusing(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if get_ident() == thread and (not is_library(caller) or caller == pathlib.__file__):
            raise hazard(f"it opens the file {args[0] if args else ''}", user_line(2))
        return opened(*args, **kwargs)

    with mock.patch.object(builtins, "open", refusing), mock.patch.object(io, "open", refusing):
        yield


_RANDOM = "it draws Python or NumPy random numbers"


@contextlib.contextmanager
def random_line(found: list[str]) -> Iterator[None]:
    """Append to `found` the user's line inside which the first Python or NumPy random number is drawn."""
    with restored_generators() as drawn:
        current = ""

        def watch(frame: Any, event: str, _: Any) -> Any:
            nonlocal current
            file = frame.f_code.co_filename
            if found or is_library(file) or file.startswith("<"):
                return None
            if drawn():
                found.append(current)
            current = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
            return watch

        before = sys.gettrace()
        sys.settrace(watch)
        try:
            yield
        finally:
            sys.settrace(before)
            if drawn() and not found:
                found.append(current)
