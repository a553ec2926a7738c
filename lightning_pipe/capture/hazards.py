"""What would a frozen graph get wrong? Find it, and name the user's line.

A graph repeats what the step did once. Anything that Python decides anew on every call must therefore be seen:

* Python values that change (`global_step`, `batch_idx`, epoch, learning rates, a global counter): the tracer runs the
  step twice, under different counters, and the two sequences of torch calls must be equal, numbers included.
* Python and NumPy random numbers: both generators' states before and after the step.
* Branches on data (`if loss > 3`, `.item()`, `.tolist()`): every read of a tensor's value into Python is intercepted.
  A read of a truth value is answered, and the answer becomes a guard that is checked on every run.
* State that the step keeps on the module (a counter, a hidden state): attributes before and after.
* Attributes that others set between steps (a callback's temperature): those that the step reads are remembered, to be
  compared before every step.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import random
import sys
import sysconfig
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from torch.overrides import TorchFunctionMode

from lightning_pipe.capture.torch_private import has_no_data, tag_nodes
from lightning_pipe.errors import CaptureError

_LIBRARIES = ("/torch/", "/lightning/pytorch/", "/lightning/fabric/", "/lightning_pipe/", "/torchmetrics/")
_OF_PYTHON = sysconfig.get_paths()["stdlib"] + "/"
_HELP = (
    "A pipeline repeats one captured graph, so this would be frozen. Move it out of the step, or pass it as a tensor "
    "in the batch."
)


def hazard(what: str, line: str, module: str = "") -> CaptureError:
    """Build the refusal that names the hazard and the user's line."""
    where = f" at {line}" if line else ""
    inside = f" (in module {module})" if module else ""
    return CaptureError(f"The step cannot be captured: {what}{where}{inside}. {_HELP}")


def user_line(skip: int = 1) -> str:
    """Return `file:line in function` of the innermost frame that belongs to no library."""
    frame = sys._getframe(skip)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith("<") and not is_library(path):
            return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def is_library(path: str) -> bool:
    """Return whether a file belongs to Python, torch, Lightning or this package, not to the user."""
    of_python = path.startswith(_OF_PYTHON) and "-packages/" not in path
    return of_python or any(part in path for part in _LIBRARIES)


class Question(Exception):
    """Ask for the truth value of a tensor that the trace cannot know."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


class TracedNumber:
    """Stand for `tensor.item()` while tracing: it can be logged and printed, and nothing else."""

    def __init__(self, tensor: torch.Tensor, line: str) -> None:
        self.tensor = tensor
        self.line = line

    def __format__(self, spec: str) -> str:
        return "nan"

    __repr__ = __str__ = lambda self: "nan"

    def _refuse(self, *_: Any) -> Any:
        raise hazard("a tensor's value is read into Python by .item() and then used", self.line)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __neg__ = __abs__ = __float__ = __int__ = __index__ = __bool__ = __round__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __floordiv__ = __mod__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


_TRUTH = (torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero)
_EQUAL = (torch.equal, torch.Tensor.equal)
_SIZES = (torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min)  # tracing may call them once more or less
_CLOSE = (torch.allclose, torch.Tensor.allclose)
_READS: dict[Any, str] = {
    torch.Tensor.__float__: "float()",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__index__: "used as an index by Python",
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.__array__: "numpy.asarray()",
}


class Observer(TorchFunctionMode):
    """Watch every torch call of the step: its line, its module, its numbers, and reads of values into Python.

    Attributes:
        calls: one entry per torch call: what it was called with, and the user's line.
        answers: truth values with which the first questions are answered; the next one raises `Question`.
        guards: (tensor that is 1.0 where the answer was wrong, answer, line) per question, in order.
    """

    def __init__(self, answers: tuple[bool, ...], module_path: Callable[[], str]) -> None:
        super().__init__()
        self.answers = answers
        self.module_path = module_path
        self.calls: list[tuple[Any, str]] = []
        self.guards: list[tuple[torch.Tensor, bool, str]] = []

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
        if func is torch.Tensor.__format__ and has_no_data(args[0]):
            return format(TracedNumber(args[0], line))
        if func in _READS and has_no_data(args[0]):
            raise hazard(f"a tensor's value is read into Python ({_READS[func]})", line, self.module_path())
        name = getattr(func, "__name__", str(func))
        if name != "__get__" and func not in _SIZES:
            self.calls.append(((name, _describe(args), _describe(kwargs)), line))
        tag_nodes(self.module_path(), line)
        return func(*args, **kwargs)

    def _ask(self, tensor: torch.Tensor, line: str) -> bool:
        asked = len(self.guards)
        if asked == len(self.answers):
            raise Question(line)
        answer = self.answers[asked]
        tag_nodes(self.module_path(), line)
        wrong = torch.ne(tensor.detach().reshape(()).to(torch.bool), answer).to(torch.float32)
        self.guards.append((wrong, answer, line))
        return answer


class Answerer(TorchFunctionMode):
    """Answer the questions of a step by running it on real tensors; `answers` holds them in order."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call; remember what it says if it is a question."""
        result = func(*args, **(kwargs or {}))
        asks = func in _TRUTH or func in _CLOSE or (func is torch.Tensor.item and isinstance(result, bool))
        if asks or (func in _EQUAL and args[0].shape == args[1].shape):
            self.answers.append(bool(result))
        return result


def _describe(value: Any) -> Any:
    """Return something comparable that changes when a number, or a constant tensor's content, changes."""
    if isinstance(value, torch.Tensor):
        if has_no_data(value) or value.device.type != "cpu" or not value.is_contiguous():
            return ("tensor", str(value.dtype), value.ndim)
        data = ctypes.string_at(value.data_ptr(), value.numel() * value.element_size())
        return ("constant", str(value.dtype), tuple(value.shape), zlib.crc32(data))
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, zlib.crc32(value.tobytes()))
    if isinstance(value, (tuple, list)):
        return tuple(_describe(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _describe(item)) for key, item in value.items())
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return type(value).__name__


def compare_calls(first: list[tuple[Any, str]], second: list[tuple[Any, str]], reads: dict[str, str]) -> None:
    """Check that two runs of the step under different counters made the same torch calls.

    Raises:
        CaptureError: naming the first call that differs, and the counters that the step reads.
    """
    for (one, line), (two, _) in zip(first, second, strict=False):
        if one != two:
            because = reading(reads, line)
            raise hazard(f"a Python value that changes from call to call enters {one[0]}(){because}", line)
    if len(first) != len(second):
        line = (first if len(first) > len(second) else second)[min(len(first), len(second))][1]
        raise hazard(f"its sequence of operations changes from call to call{reading(reads, line)}", line)


def reading(reads: dict[str, str], here: str) -> str:
    """Say which counters the step reads, and where if not here."""
    return "".join(f"; it reads {name}" + (f" at {line}" if line != here else "") for name, line in reads.items())


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
    python, numpy = random.getstate(), np.random.get_state()

    def moved() -> bool:
        same = all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy, strict=True))
        return random.getstate() != python or not same

    try:
        yield moved
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


_RANDOM = "it draws Python or NumPy random numbers"


@contextlib.contextmanager
def random_line(found: list[str]) -> Iterator[None]:
    """Append to `found` the user's line inside which the first Python or NumPy random number is drawn."""
    with restored_generators() as drawn:
        current = ""

        def watch(frame: Any, event: str, _: Any) -> Any:
            nonlocal current
            if found or any(part in frame.f_code.co_filename for part in _LIBRARIES):
                return None
            if drawn():
                found.append(current)
            current = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            return watch

        before = sys.gettrace()
        sys.settrace(watch)
        try:
            yield
        finally:
            sys.settrace(before)
            if drawn() and not found:
                found.append(current)


class AttributeGuard:
    """Undo what a step does to the attributes of the module and to collections among them, and say what it did.

    torchmetrics objects are left alone: their calls are recorded instead of made.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._owners = [
            (path, owner)
            for path, owner in module.named_modules()
            if not isinstance(owner, (torchmetrics.Metric, torchmetrics.MetricCollection))
        ]
        self._before = [attributes_of(owner) for _, owner in self._owners]
        self._inside = [
            {name: value.copy() for name, value in before.items() if type(value) in _COLLECTIONS}
            for before in self._before
        ]

    def restore(self) -> list[str]:
        """Restore all attributes; return `path.name` of those that the step had changed."""
        changed = []
        for (path, owner), before, inside in zip(self._owners, self._before, self._inside, strict=True):
            prefix = f"{path}." if path else ""
            changed += [prefix + name for name, content in inside.items() if refill(before[name], content)]
            now = attributes_of(owner)
            names = [n for n in {**before, **now} if n not in before or n not in now or now[n] is not before[n]]
            for name in names:
                if name in before and name in now and _equal_scalars(before[name], now[name]):
                    continue
                changed.append(prefix + name)
                if name in before:
                    owner.__dict__[name] = before[name]
                else:
                    del owner.__dict__[name]
        return changed


def refill(collection: Any, content: Any) -> bool:
    """Give a list, dict, set or queue its content back; return whether it had another."""
    same = len(collection) == len(content) and all(a is b for a, b in zip(collection, content, strict=True))
    if same and not (isinstance(content, dict) and any(collection[key] is not content[key] for key in content)):
        return False
    collection.clear()
    (collection.extend if isinstance(collection, (list, deque)) else collection.update)(content)
    return True


_COLLECTIONS = (list, dict, OrderedDict, set, deque)  # hooks are in ordered ones
_INTERNAL = frozenset({"_parameters", "_buffers", "_modules", "training", "_trainer", "log", "log_dict"})
_RECURRENT = frozenset({"_flat_weights", "_flat_weight_refs"})  # views of its parameters that nn.RNNBase refreshes
_LIGHTNING = frozenset(vars(pl.LightningModule()))


def attributes_of(owner: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes that a user's step may change: not those that torch and Lightning keep on a module."""
    hidden = _INTERNAL | _LIGHTNING if isinstance(owner, pl.LightningModule) else _INTERNAL
    if isinstance(owner, torch.nn.RNNBase):
        hidden = hidden | _RECURRENT
    return {name: value for name, value in vars(owner).items() if name not in hidden}


def _equal_scalars(one: Any, two: Any) -> bool:
    scalars = (bool, int, float, str)
    return isinstance(one, scalars) and isinstance(two, scalars) and one == two


def assignment_line(module: pl.LightningModule, attribute: str) -> str:
    """Return the line of the module's source that assigns `self.<name>`, "" if it cannot be found."""
    path, _, name = attribute.rpartition(".")
    for owner in type(module.get_submodule(path)).__mro__:
        try:
            source, start = inspect.getsourcelines(owner)
            file = inspect.getsourcefile(owner)
        except (OSError, TypeError):
            continue
        lines = [i for i, text in enumerate(source) if "=" in text.partition(f"self.{name}")[2]]
        if lines:
            return f"{file}:{start + lines[-1]} in {owner.__name__}"
    return ""


class Watched:
    """Remember which plain attributes the step reads, to see later whether somebody changed them.

    Reads are seen by giving the modules, for the time of the trace, a subclass with its own `__getattribute__`.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self.values: dict[str, Any] = {}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Note the attributes that are read inside."""
        classes = [(path, owner, type(owner)) for path, owner in self._module.named_modules()]
        swapped = [(owner, cls) for path, owner, cls in classes if self._swap(path, owner, cls)]
        try:
            yield
        finally:
            for owner, cls in swapped:
                object.__setattr__(owner, "__class__", cls)

    def _swap(self, path: str, owner: torch.nn.Module, cls: type) -> bool:
        plain = {n for n, v in attributes_of(owner).items() if isinstance(v, (bool, int, float, str, type(None)))}
        if not plain or isinstance(owner, (torchmetrics.Metric, torchmetrics.MetricCollection, torch.jit.ScriptModule)):
            return False
        values, prefix = self.values, f"{path}." if path else ""

        def __getattribute__(self: Any, name: str) -> Any:
            value = object.__getattribute__(self, name)
            if name in plain:
                values[prefix + name] = value
            return value

        space = {"__getattribute__": __getattribute__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        try:
            object.__setattr__(owner, "__class__", type(cls.__name__, (cls,), space))
        except TypeError:  # a class with a layout of its own cannot be swapped; it has no plain attributes to set then
            return False
        return True

    def changed(self) -> str:
        """Return a description of the first attribute that no longer has its captured value, "" if none."""
        for name, value in self.values.items():
            path, _, attribute = name.rpartition(".")
            now = getattr(self._module.get_submodule(path), attribute, None)
            if now is not value and now != value:
                return f"self.{name} was {value!r} when the step was captured and is {now!r} now"
        return ""
