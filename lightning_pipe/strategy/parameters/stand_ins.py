"""Stand-ins: tensors of which this rank knows everything but the values, because other ranks have them.

A parameter that other ranks hold is the user's own object without memory (`vacate`, `occupy`); a batch that other ranks
have loaded is made of tensors without data (`absent_batch`). Both answer what does not depend on values: shape, type,
device, flags, `requires_grad`, hooks, identity. Whatever reads or writes values raises `AbsentError` with the user's
line, because torch would do nothing, silently: adding a tensor of the meta device to one of the host in place has no
effect.

This package itself looks behind a stand-in with `unguarded()`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, NoReturn, cast

import torch
from torch import nn
from torch.overrides import handle_torch_function

from lightning_pipe.capture.steps.batch import LeafSlot, Structure
from lightning_pipe.capture.steps.hazards import at, user_line
from lightning_pipe.capture.steps.other_ranks import is_in_step
from lightning_pipe.capture.torch_private import unguarded
from lightning_pipe.errors import AbsentError

__all__ = [
    "Absence",
    "BatchStandIn",
    "BufferStandIn",
    "Guarded",
    "StandIn",
    "absent_batch",
    "absent_buffer",
    "bare",
    "concerns_values",
    "form_of",
    "is_asked_by_a_hook",
    "movable",
    "occupy",
    "only_present",
    "unguarded",
    "vacate",
]

WAY_OUT_OF_WEIGHTS = (
    "On all ranks together, `with trainer.strategy.whole_module():` gives the module of every rank all current values; "
    "put these lines into it (see docs/hooks.md)"
)
_IN_STEP = (
    "A replayed step has a state on the rank of the layers that are used around its last line. Use it there only, let "
    "the step be one graph, or give the model one stage (`layout`)"
)
_LEFT = "The fit has failed, so that each rank has what it held then. Take a checkpoint, or fit again on the same ranks"
_WAY_OUT_OF_BATCHES = (
    "Return what you need of the batch from the step: its outputs are those of the whole batch on every rank "
    "(see docs/hooks.md)"
)
_OF_FORM = frozenset(
    """dim ndimension size stride numel nelement element_size __len__ is_contiguous storage_offset is_floating_point
    is_complex is_signed is_same_size is_conj is_neg""".split()
)
_FORM_FLAGS = frozenset(
    """shape ndim nbytes itemsize dtype layout names is_sparse is_sparse_csr is_quantized is_nested is_mkldnn""".split()
)
_PLACE_FLAGS = frozenset("device is_cpu is_cuda is_meta is_xla is_mps is_xpu is_mtia is_maia is_vulkan is_ipu".split())
_OWN_FLAGS = frozenset(
    """requires_grad grad is_leaf grad_fn retains_grad output_nr _version _backward_hooks
    _post_accumulate_grad_hooks""".split()
)
_OWN = frozenset("requires_grad_ register_hook register_post_accumulate_grad_hook __hash__ __dir__".split())


_SAYS_WHAT_IT_IS = frozenset("__repr__ __format__ __str__ get_device".split())
_COMPARES = frozenset("__eq__ eq __ne__ ne equal".split())

_READ_NO_GRADIENTS = ("/torch/optim/", "/lightning_pipe/", "/lightning/pytorch/", "/lightning/fabric/")
_READS_FOR_USERS = "/lightning/pytorch/utilities/grads.py"
_BETWEEN = ("/strategy/parameters/stand_ins.py", "/strategy/parameters/hook_weights.py")
_OF_OPTIMIZERS = frozenset({"step", "zero_grad"})


@dataclass(frozen=True)
class Absence:
    """What is known of values that are not here.

    Attributes:
        name: of the parameter, or of the field of the batch.
        ranks: that have the values.
        rank: this one.
        device: where they would be if they were here.
        form: a meta tensor with their shape, strides and type.
        kind: the class of a parameter's object while it has values.
        line: of the user's, where they were computed from such values; "" if they were not.
        is_left: whether the fit that has spread the values has failed, so that they stay where they are.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    form: torch.Tensor
    kind: type = torch.Tensor
    line: str = ""
    is_left: bool = False

    def refuse(self, what: str, way_out: str) -> NoReturn:
        """Raise an error: something reads or writes the values."""
        have = "rank " + ", ".join(map(str, self.ranks)) if self.ranks else "other ranks"
        advice = _LEFT if self.is_left else _IN_STEP if is_in_step() else way_out
        raise AbsentError(
            f"{what}{at(user_line(3))} reads or writes the values of {self.name}{self._computed()}, which only {have} "
            f"{'have' if len(self.ranks) != 1 else 'has'}; this is rank {self.rank}. {advice}."
        )

    def _computed(self) -> str:
        return f" (computed{at(self.line)})" if self.line else ""


class Guarded:
    """What both kinds of stand-ins do with calls of torch."""

    absence: Absence
    _way_out = WAY_OUT_OF_WEIGHTS

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what does not depend on values, and refuse the rest."""
        kwargs = kwargs or {}
        name = func.__name__
        first = args[0] if args else None
        if isinstance(first, Guarded):
            match name:
                case "__get__" | "__set__":
                    return first._attribute(func, *args[1:])
                case "__eq__" | "eq" | "__ne__" | "ne" if len(args) > 1:
                    return first._compare(name, args[1])
                case "__repr__" | "__format__" | "__str__":
                    return first._described()
                case "get_device":
                    return -1 if first.absence.device.index is None else first.absence.device.index
                case "type" if len(args) == 1 and not kwargs:
                    return first._type_name()
        if name == "equal":
            return _are_one(*args)
        if name in _OF_FORM:
            return func(*(arg.absence.form if isinstance(arg, Guarded) else arg for arg in args), **kwargs)
        if name in _OWN:
            with unguarded():
                return func(*args, **kwargs)
        guarded = _guarded_in((args, kwargs))
        assert guarded is not None, "torch asks the class of an argument"
        guarded.absence.refuse(name, guarded._way_out)

    def _attribute(self, access: Any, *value: Any) -> Any:
        attribute = getattr(access.__self__, "__name__", "")
        sets = access.__name__ == "__set__"
        if sets and (attribute in ("requires_grad", "_backward_hooks") or (attribute == "grad" and value[0] is None)):
            with unguarded():
                return access(self, *value)
        if not sets and attribute in _FORM_FLAGS:
            return access(self.absence.form, *value)
        if not sets and attribute in _PLACE_FLAGS:
            kind = self.absence.device
            return kind if attribute == "device" else attribute == f"is_{kind.type}"
        if not sets and attribute in _OWN_FLAGS:
            with unguarded():
                return access(self, *value)
        self.absence.refuse(f"{'setting ' if sets else ''}.{attribute}", self._way_out)

    def _compare(self, name: str, other: Any) -> bool:
        if isinstance(other, torch.Tensor) and other is not self:
            self.absence.refuse(name, self._way_out)
        return (other is self) == ("eq" in name)

    def _type_name(self) -> str:
        on_host = torch.empty(0, dtype=self.absence.form.dtype).type()
        kind = self.absence.device.type
        return on_host if kind == "cpu" else on_host.replace("torch.", f"torch.{kind}.", 1)

    def _described(self) -> str:
        of = self.absence
        have = f"held by rank {', '.join(map(str, of.ranks))}" if of.ranks else "on other ranks"
        return f"{type(self).__name__}({of.name}, shape={tuple(of.form.shape)}, dtype={of.form.dtype}, {have})"

    def __repr__(self, *, tensor_contents=None):  # type: ignore[no-untyped-def]  # mypy compares no names of keywords
        return self._described()

    def __deepcopy__(self, memo: Any) -> Any:
        return handle_torch_function(deepcopy, (self,), cast("torch.Tensor", self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return handle_torch_function(pickling, (self,), cast("torch.Tensor", self), protocol)


def deepcopy(tensor: torch.Tensor, memo: Any) -> Any:
    """Copy a tensor that may have got its values since a copy was asked for."""
    return copy.deepcopy(tensor, memo)


def pickling(tensor: torch.Tensor, protocol: Any) -> Any:
    """Take a tensor apart that may have got its values since that was asked for."""
    return tensor.__reduce_ex__(protocol)


class StandIn(Guarded, nn.Parameter):
    """A parameter of the user while other ranks hold its values; equal to itself only.

    Attributes:
        gradient: stands for the gradient that other ranks have; None while they have none. Hooks of the user see it.
            Optimizers do not, so that they pass over the parameter.
    """

    gradient: torch.Tensor | None

    def _attribute(self, access: Any, *value: Any) -> Any:
        if getattr(access.__self__, "__name__", "") != "grad":
            return super()._attribute(access, *value)
        if access.__name__ == "__get__":
            return self.gradient if self.gradient is not None and is_asked_by_a_hook() else None
        if self.gradient is None:
            return super()._attribute(access, *value)
        if value[0] is None:
            self.gradient = None
        elif not (isinstance(value[0], Guarded) and value[0].absence.ranks == self.absence.ranks):
            self.absence.refuse("setting .grad", self._way_out)
        return None


class BufferStandIn(Guarded, torch.Tensor):
    """A buffer that training changes on other ranks; what this rank has is out of date."""


class BatchStandIn(Guarded, torch.Tensor):
    """A tensor of a batch that other ranks have loaded."""

    _way_out = _WAY_OUT_OF_BATCHES


def concerns_values(func: Any, args: Any) -> bool:
    """Return whether a call of torch reads or writes values: not one that stand-ins answer.

    Args:
        func: what is called.
        args: its positional arguments.
    """
    name: str = func.__name__
    if name in ("__get__", "__set__"):
        return getattr(func.__self__, "__name__", "") not in _FORM_FLAGS | _PLACE_FLAGS | _OWN_FLAGS
    if name == "type" and len(args) == 1:
        return False
    if name in _COMPARES:
        return len(args) > 1 and isinstance(args[1], torch.Tensor) and args[1] is not args[0]
    return name not in _OF_FORM and name not in _OWN and name not in _SAYS_WHAT_IT_IS


def vacate(parameter: nn.Parameter, name: str, *, ranks: tuple[int, ...], rank: int, device: torch.device) -> None:
    """Give up the memory and the gradient of a parameter that other ranks hold."""
    form = torch.empty_like(form_of(parameter).detach(), device="meta")
    occupy(parameter, None)
    parameter.grad = None
    absence = Absence(f"the parameter {name}", ranks, rank, device, form, type(parameter))
    parameter.data = torch.empty(0, dtype=parameter.dtype)
    parameter.__class__ = StandIn
    vars(parameter).update(absence=absence, gradient=None)


def occupy(parameter: nn.Parameter, value: torch.Tensor | None) -> None:
    """Make a vacated parameter what it was, with this value; None leaves it without memory."""
    if isinstance(parameter, StandIn):
        kind = vars(parameter).pop("absence").kind
        del parameter.gradient
        parameter.__class__ = kind
    if value is not None:
        parameter.data = value


@contextlib.contextmanager
def bare(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let stand-ins be parameters without elements inside, for who moves all parameters of a module."""
    stand_ins = [(parameter, type(parameter)) for parameter in parameters if isinstance(parameter, StandIn)]
    for parameter, _ in stand_ins:
        parameter.__class__ = parameter.absence.kind
    try:
        yield
    finally:
        for parameter, kind in stand_ins:
            parameter.__class__ = kind


@contextlib.contextmanager
def movable(module: nn.Module) -> Iterator[None]:
    """Let a module be moved inside, whatever of it is on other ranks."""
    tables = [owner._buffers for owner in module.modules()]
    absent = [(table, name, one) for table in tables for name, one in table.items() if isinstance(one, BufferStandIn)]
    for table, name, _ in absent:
        table[name] = None
    try:
        with bare(module.parameters()):
            yield
    finally:
        for table, name, buffer in absent:
            table[name] = buffer


@contextlib.contextmanager
def only_present(*alike: nn.Module) -> Iterator[None]:
    """Let modules of one structure have inside no parameters and buffers but those that are here in all of them.

    Who goes through the tensors of several of them side by side meets those of one name together.
    """
    paths = [dict(module.named_modules()) for module in alike]
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    for path, kind in itertools.product(paths[0], ("_parameters", "_buffers")):
        tables = [getattr(named[path], kind) for named in paths if path in named]
        absent = {name for table in tables for name, x in table.items() if isinstance(x, Guarded)}
        hidden += [(table, name, table[name]) for table in tables for name in absent if name in table]
    for table, name, _ in hidden:
        table[name] = None
    try:
        yield
    finally:
        for table, name, tensor in hidden:
            table[name] = tensor


def absent_buffer(
    buffer: torch.Tensor, name: str, *, ranks: tuple[int, ...], rank: int, device: torch.device
) -> BufferStandIn:
    """Return a stand-in for a buffer that other ranks change."""
    form = torch.empty_like(buffer.detach(), device="meta")
    stand_in = form.as_subclass(BufferStandIn)
    stand_in.absence = Absence(f"the buffer {name}", ranks, rank, device, form)
    return stand_in


def form_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the meta tensor that is like a stand-in; another tensor as it is."""
    return tensor.absence.form if isinstance(tensor, Guarded) else tensor


def absent_batch(structure: Structure, *, ranks: tuple[int, ...], rank: int, device: torch.device) -> Any:
    """Return a batch of this structure without values, which the ranks `ranks` have."""
    paths = dict(_paths(structure.template, "batch"))
    tensors = []
    for index, leaf in enumerate(structure.leaves):
        form = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        tensor = form.as_subclass(BatchStandIn)
        tensor.absence = Absence(paths.get(index, f"tensor {index} of the batch"), ranks, rank, device, form)
        tensors.append(tensor)
    return structure.fill(tensors)


def _paths(template: Any, path: str) -> list[tuple[int, str]]:
    """List the tensors of a batch with the expressions that lead to them."""
    if isinstance(template, LeafSlot):
        return [(template.index, path)]
    if isinstance(template, Mapping):
        inner = [(value, f"{path}[{key!r}]") for key, value in template.items()]
    elif isinstance(template, (list, tuple)):
        inner = [(value, f"{path}[{number}]") for number, value in enumerate(template)]
    elif is_dataclass(template):
        inner = [(getattr(template, one.name, None), f"{path}.{one.name}") for one in fields(template)]
    else:
        return []
    return [found for value, where in inner for found in _paths(value, where)]


def is_asked_by_a_hook() -> bool:
    """Return whether the user's code, called by Lightning, is looking; not an optimizer, Lightning or this package."""
    frame = sys._getframe(1)
    by_user = False
    while frame is not None:
        code = frame.f_code
        match _reader(code.co_filename):
            case "between":
                pass
            case "for users":
                by_user = True
            case "optimizer":
                return False
            case "library":
                return by_user
            case reader:
                if code.co_name in _OF_OPTIMIZERS and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
                    return False
                by_user |= reader == "user"
        frame = frame.f_back  # type: ignore[assignment]
    return by_user


@functools.cache
def _reader(path: str) -> Literal["between", "for users", "optimizer", "library", "torch", "user"]:
    """Return whose code a file is, as far as that tells who reads a gradient."""
    if path.endswith(_BETWEEN):
        return "between"
    if path.endswith(_READS_FOR_USERS):
        return "for users"
    if any(part in path for part in _READ_NO_GRADIENTS):
        return "optimizer" if "/torch/optim/" in path else "library"
    return "torch" if "/torch/" in path else "user"


def _are_one(one: Any, other: Any) -> bool:
    """Compare parameters by identity, as callbacks do to find out whether an optimizer has one; nothing else."""
    if one is other or (isinstance(one, nn.Parameter) and isinstance(other, nn.Parameter)):
        return one is other
    guarded = _guarded_in((one, other))
    assert guarded is not None, "torch asks the class of an argument"
    guarded.absence.refuse("equal", guarded._way_out)


def _guarded_in(value: Any) -> Guarded | None:
    """Return the first stand-in among arguments."""
    if isinstance(value, Guarded):
        return value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for one in inner if (found := _guarded_in(one)) is not None), None)
