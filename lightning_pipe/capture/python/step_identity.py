"""Identity of a step: a hash of everything that its joint graph is made from, known before the graph is.

While a step runs on fake tensors, every operation is written down with where its operands come from, what it gives, and
in which module, line and mode it stands. The graph of autograd behind the loss follows, then the code of the user's
functions that ran, the structure of the module, what the step logged, settings of torch, and versions. The operations
of a backward follow from these, unless Python of the user's or of a library runs in it: such a step has no identity
(`StepIdentity.refusal`), and neither has one with operators that others may define anew, or tensors from outside.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import nn

from lightning_pipe.capture import torch_private as private
from lightning_pipe.capture.python.guards import settings
from lightning_pipe.capture.tracked.number_expressions import Source
from lightning_pipe.lightning_names import pl

_HIDDEN_CALLS = frozenset(  # torch calls that change a tensor, or its backward, without an operation
    "__set__ register_hook register_post_accumulate_grad_hook retain_grad backward set_data resize_".split()
)
_HIDDEN_NAMES = frozenset(  # in code: what changes a backward without a torch call
    "register_hook register_prehook register_multi_grad_hook saved_tensors_hooks grad_fn".split()
)
_PARTS = Path(__file__).parents[1]


class StepIdentity(private.TorchDispatchMode):
    """Write down what a step does, once; to be entered around its run.

    Attributes:
        refusal: why the step has no identity; "" if it has one.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.refusal = ""
        self._digest = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # so that nothing else gets their identity

    def begin(self, inputs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note the tensors that the step is given, by name."""
        for name, tensor in inputs:
            self._write("input", name, type(tensor).__name__, self._number(tensor), _form(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write an operation down, and run it."""
        kwargs = kwargs or {}
        if not isinstance(func, private.OpOverload) or func.namespace not in private.TORCH_NAMESPACES:
            self._refuse(f"{func} is no operator of torch's own")
        if private.has_hooks_on_saved_tensors():
            self._refuse("somebody else keeps what autograd would keep")
        custom = private.fx_traceback.current_meta.get("custom")
        self._write(func, custom, torch.is_grad_enabled(), self._spelled(args), self._spelled(kwargs))
        result = func(*args, **kwargs)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            is_tensor = isinstance(value, torch.Tensor)
            self._write(self._number(value), _form(value)) if is_tensor else self._write(self._spelled(value))
        return result

    def end(self, outputs: Iterable[torch.Tensor], loss: torch.Tensor | None) -> None:
        """Note what the step returns, and the graph of autograd behind its loss."""
        self._write("outputs", [self._spelled(tensor) for tensor in outputs])
        if loss is not None:
            self._write("autograd", *self._autograd(loss))

    def note(self, *values: Any) -> None:
        """Note anything else that the graph depends on."""
        self._write(*map(text_of, values))

    def note_code(self, codes: Iterable[types.CodeType]) -> None:
        """Note the code that has run."""
        for code in codes:
            if _HIDDEN_NAMES.intersection(_names_in(code)):
                self._refuse(f"{code.co_name} may change what its backward does")
            self._write("code", code.co_filename, *_code(code))

    def note_calls(self, calls: Iterable[tuple[Any, str]]) -> None:
        """Note the torch calls of the step, with their lines."""
        for call, line in calls:
            if call[0] in _HIDDEN_CALLS:
                self._refuse(f"{call[0]}() at {line} is no operation")
            self._write("call", text_of(call), line)

    def hexdigest(self) -> str:
        """Return the hash of all that was noted."""
        return self._digest.hexdigest()[:40]

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def _write(self, *values: Any) -> None:
        self._digest.update(("\x1f".join(map(str, values)) + "\n").encode("utf-8", "backslashreplace"))

    def _number(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self._alive.append(tensor)
        return self._numbers[id(tensor)]

    def _spelled(self, value: Any) -> str:
        """Return a text of an operand; a tensor is known by where it comes from."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._numbers:
                self._refuse("a tensor from outside of the step enters it")
            return f"%{self._numbers.get(id(value))}"
        if isinstance(value, (tuple, list)):
            return f"({','.join(map(self._spelled, value))})"
        if isinstance(value, Mapping):
            return f"({','.join(f'{key}={self._spelled(item)}' for key, item in value.items())})"
        return f"{type(value).__name__} {value}"

    def _autograd(self, loss: torch.Tensor) -> Iterator[Any]:
        """Yield the operations of the backward, from the loss on, with where their results go."""
        numbers: dict[Any, int] = {}
        pending = [loss.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in numbers:
                continue
            numbers[node] = len(numbers)
            if private.is_foreign_backward(node):
                self._refuse(f"{node.name()} is no derivative of torch's own")
            yield node.name()
            if (variable := getattr(node, "variable", None)) is not None:
                yield self._spelled(variable)
            for after, place in node.next_functions:
                yield place, numbers.get(after, "new" if after is not None else None)
            pending += [after for after, _ in reversed(node.next_functions)]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    strided = tensor.layout is torch.strided
    place = (tensor.stride(), tensor.storage_offset()) if strided else ()
    return (tensor.dtype, tuple(tensor.shape), place, tensor.device, tensor.layout, tensor.requires_grad)


def text_of(value: Any) -> str:
    """Return a text of a value that is equal in every process, and tells plain values apart."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(text_of, value))})"
    if isinstance(value, Mapping):
        return f"({','.join(f'{text_of(key)}={text_of(item)}' for key, item in value.items())})"
    if isinstance(value, (set, frozenset)):
        return f"{{{','.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, Source):
        return f"source {value.name}"
    if isinstance(value, (torch.dtype, torch.device, sympy.Basic, torch.SymInt, torch.SymFloat)):
        return f"{type(value).__name__} {value}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, item.name) for item in dataclasses.fields(value) if item.compare)
        return f"{type(value).__name__}({','.join(map(text_of, parts))})"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _code(code: types.CodeType) -> Iterator[Any]:
    yield from (code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
    yield from (code.co_firstlineno, code.co_linetable, getattr(code, "co_exceptiontable", b""))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        else:
            yield text_of(constant)


def _names_in(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names, *(name for one in inner for name in _names_in(one))}


def structure_of(module: nn.Module) -> list[str]:
    """Return the modules with their classes and modes, and what hooks hang on them, as text."""
    return [
        f"{path} {type(owner).__module__}.{type(owner).__qualname__} {owner.training} "
        f"{len(owner._forward_hooks)} {len(owner._forward_pre_hooks)} {private.has_backward_hooks(owner)}"
        for path, owner in module.named_modules(remove_duplicate=False)
    ]


def surroundings() -> list[Any]:
    """Return settings that a trace depends on."""
    backends: list[Callable[[], Any]] = [
        lambda: torch.backends.cudnn.enabled,
        lambda: torch.backends.cudnn.deterministic,
        lambda: torch.backends.cudnn.benchmark,
        lambda: torch.backends.mkldnn.enabled,
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.cudnn_sdp_enabled,
    ]
    kinds = ("cpu", "cuda")
    casts = [(torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in kinds]
    found = {name: str(value) for name, value in settings().items()}
    return [found, casts, torch.is_grad_enabled(), [ask() for ask in backends]]


@functools.cache
def versions() -> tuple[str, ...]:
    """Return versions, and a hash of the code that captures."""
    sources = hashlib.sha256()
    for path in sorted(_PARTS.rglob("*.py")):
        sources.update(path.read_bytes())
    devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    torchs = (torch.__version__, torch.version.git_version, str(torch.version.cuda), *devices)
    return (*torchs, sympy.__version__, str(vars(pl)["__version__"]), platform.python_version(), sources.hexdigest())
