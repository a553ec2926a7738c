"""Random steps whose backward reads Python that changes, as source of a file of the user's.

where       a number lives: in a list, a dict, a class, an object, a global, a closure, nested
reader      what reads it in the backward: an `autograd.Function`, a hook, a recomputation
when        it changes: before every batch, once, in the step itself
what        it decides: a factor, a branch, a length, a key, whether the backward raises
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass

TOO_LARGE = "the factor is too large"

_HEAD = """
import torch, lightning.pytorch as pl, torch.nn.functional as F
from dataclasses import dataclass, field
from torch import nn
from torch.utils.checkpoint import checkpoint

class Inner:
    def __init__(self): self.values, self.table, self.by = [1.0, 1.0], {"by": 1.0}, 1.0

class Slotted:
    __slots__ = ("by",)
    def __init__(self): self.by = 1.0

@dataclass
class Config:
    by: float = 1.0
    inner: Inner = field(default_factory=Inner)

class Static:
    by = 1.0
    values = [1.0]
    table = {"by": 1.0}

def in_closure():
    by, values = 1.0, [1.0]
    def get(): return by
    def put(value):
        nonlocal by
        by = value
    def all_values(): return values
    return get, put, all_values

GET, PUT, ALL = in_closure()
BY, VALUES, TABLE, NESTED = 1.0, [1.0], {"by": 1.0}, {"loss": [{"by": 1.0}]}
CONFIG, SLOTTED = Config(), Slotted()
TENSOR = torch.ones((), dtype=torch.float64)

def put_global(value):
    global BY
    BY = value
"""

_TAIL = """
def scaled(gradient):
    owner = NET[0]
    {check}
    return gradient * ({value})

def scaled_tuple(after, before):
    return (scaled(after[0]),)

NOTED = []
NET = []
def noted(gradient):
    owner = NET[0]
    NOTED.append({value})

class Scale(torch.autograd.Function):
    by = 1.0
    values = [1.0]
{function}

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)
        self.act = nn.Tanh()
        self.by, self.values, self.table, self.config = 1.0, [1.0], {{"by": 1.0}}, Config()
        NET[:] = [self]
{init}

    def read(self, hidden):
        owner = self
{reader}

    def training_step(self, batch, batch_idx):
        owner = self
        {in_step}
        hidden = self.read(self.act(self.one(batch["x"])))
        return F.cross_entropy(self.two(hidden), batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

class Change(pl.Callback):
    def on_train_batch_start(self, trainer, owner, batch, number):
        {change}
"""

# where -> (how it is read, how a value is put there); `owner` is the module
SCALARS = {
    "list of a file": ("VALUES[0]", "VALUES[0] = {}"),
    "dict of a file": ('TABLE["by"]', 'TABLE["by"] = {}'),
    "number of a file": ("BY", "put_global({})"),
    "closure": ("GET()", "PUT({})"),
    "list in a closure": ("ALL()[0]", "ALL()[0] = {}"),
    "class of the function": ("Scale.by", "Scale.by = {}"),
    "list of the function": ("Scale.values[0]", "Scale.values[0] = {}"),
    "class": ("Static.by", "Static.by = {}"),
    "dict of a class": ('Static.table["by"]', 'Static.table["by"] = {}'),
    "object": ("CONFIG.by", "CONFIG.by = {}"),
    "list of an object": ("CONFIG.inner.values[1]", "CONFIG.inner.values[1] = {}"),
    "tensor": ("TENSOR", "TENSOR.fill_({})"),
    "slot": ("SLOTTED.by", "SLOTTED.by = {}"),
    "nested": ('NESTED["loss"][0]["by"]', 'NESTED["loss"][0]["by"] = {}'),
    "attribute": ("owner.by", "owner.by = {}"),
    "list of the module": ("owner.values[0]", "owner.values[0] = {}"),
    "dict of the module": ('owner.table["by"]', 'owner.table["by"] = {}'),
    "object of the module": ("owner.config.inner.by", "owner.config.inner.by = {}"),
    "list replaced": ("owner.values[0]", "owner.values = [{}]"),
    "list replaced in a class": ("Static.values[0]", "Static.values = [{}]"),
}
LISTS = ("VALUES", "ALL()", "Scale.values", "Static.values", "CONFIG.inner.values", "owner.values")
DICTS = ("TABLE", "Static.table", "CONFIG.inner.table", "owner.table")

_BACKWARD = """
    @staticmethod
    def backward(ctx, gradient):
        owner = ctx.owner
        {check}
        return gradient * ({value}), None
"""
_OLD = """
    @staticmethod
    def forward(ctx, x, owner):
        ctx.owner = owner
        return x.view_as(x)"""
_NEW = """
    @staticmethod
    def forward(x, owner): return x.view_as(x)
    @staticmethod
    def setup_context(ctx, inputs, output): ctx.owner = inputs[1]"""
_HOOK = """
        owner = self
        def hook(*given):
            {{check}}
            return {returned}
        {register}
        {result}
"""


def _by_step(returned: str, register: str) -> tuple[str, str, str]:
    return "", "", _HOOK.format(returned=returned, register=register, result="return hidden")


def _at_start(returned: str, register: str) -> tuple[str, str, str]:
    return "", _HOOK.format(returned=returned, register=register, result=""), "        return hidden"


def _by_file(line: str) -> tuple[str, str, str]:
    return "", "", f"        {line}\n        return hidden"


_APPLIED = "        return Scale.apply(hidden, owner)"
_OF_TUPLE = "(given[0][0] * ({value}),)"
_OF_MODULE = "(given[1][0] * ({value}),)"
_UNPACKED = """
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, scaled):
            return hidden.sin()
"""
_RECOMPUTED = """
        def run(hidden):
            {check}
            return (hidden * ({value})).sin()
        return checkpoint(run, hidden, use_reentrant=False)
"""
# reader -> what is added to the function, to the constructor and to the step
READERS = {
    "Function": (_OLD + _BACKWARD, "", _APPLIED),
    "Function with setup_context": (_NEW + _BACKWARD, "", _APPLIED),
    "hook on a tensor": _by_step("given[0] * ({value})", "hidden.register_hook(hook)"),
    "function on a tensor": _by_file("hidden.register_hook(scaled)"),
    "hook on a node": _by_step(_OF_TUPLE, "hidden.grad_fn.register_hook(hook)"),
    "hook before a node": _by_step(_OF_TUPLE, "hidden.grad_fn.register_prehook(hook)"),
    "function on a node": _by_file("hidden.grad_fn.register_hook(scaled_tuple)"),
    "function on tensors": _by_file("torch.autograd.graph.register_multi_grad_hook([hidden], noted, mode='any')"),
    "hook on a module": _at_start(_OF_MODULE, "self.two.register_full_backward_hook(hook)"),
    "hook before a module": _at_start(_OF_MODULE, "self.two.register_full_backward_pre_hook(hook)"),
    "hook on a parameter": _at_start("given[0] * ({value})", "self.one.weight.register_hook(hook)"),
    "hook after a gradient": _at_start(
        "[given[0].grad.mul_({value})] and None", "self.one.weight.register_post_accumulate_grad_hook(hook)"
    ),
    "hook after a gradient, by the step": _by_file("self.one.weight.register_post_accumulate_grad_hook(noted)"),
    "unpacking": ("", "", _UNPACKED),
    "recomputation": ("", "", _RECOMPUTED),
}
TIMES = ("every batch", "once", "in the step")
OF_LISTS, OF_DICTS = ("length", "grown"), ("key", "sum")


@dataclass(frozen=True)
class BackwardStep:
    """A step, by its choices."""

    where: str
    reader: str
    when: str
    what: str

    @property
    def source(self) -> str:
        """Return the file."""
        value, put = self._value()
        check = f"if ({value}) > 2.5: raise RuntimeError('{TOO_LARGE}')" if self.what == "raise" else "pass"
        function, init, reader = (part.format(value=value, check=check) for part in READERS[self.reader])
        change, in_step = {
            "every batch": (put.format("1.0 + number"), "pass"),
            "once": (f"if number == 2: {put.format('3.0')}", "pass"),
            "in the step": ("pass", put.format("1.0 + batch_idx")),
        }[self.when]
        parts = {"function": function, "init": init, "reader": reader, "change": change, "in_step": in_step}
        return _HEAD + _TAIL.format(value=value, check=check, **parts)

    def _value(self) -> tuple[str, str]:
        """Return what reads the value, and what puts one there."""
        match self.what:
            case "length":
                return f"len({self.where})", f"{self.where}[:] = [1.0] * int({{}})"
            case "grown":
                return f"len({self.where})", f"{self.where}.append({{}})"
            case "key":
                return f"(2.0 if 'more' in {self.where} else 1.0)", f"{self.where}.update(more={{}})"
            case "sum":
                return f"sum({self.where}.values())", f"{self.where}.update(more={{}})"
            case "branch":
                read, put = SCALARS[self.where]
                return f"(1.5 if {read} > 1 else 0.5)", put
            case _:
                return SCALARS[self.where]


def all_steps() -> list[BackwardStep]:
    """List every step."""
    kinds: dict[str, Iterable[str]] = {**dict.fromkeys(("factor", "branch", "raise"), SCALARS)}
    kinds |= {**dict.fromkeys(OF_LISTS, LISTS), **dict.fromkeys(OF_DICTS, DICTS)}
    return [
        BackwardStep(*choice, what)
        for what, places in kinds.items()
        for choice in itertools.product(places, READERS, TIMES)
    ]


def some_steps(count: int, *, seed: int) -> list[BackwardStep]:
    """Draw steps, of every reader in turn."""
    steps, generator = all_steps(), random.Random(seed)
    of_reader = [[step for step in steps if step.reader == reader] for reader in READERS]
    return [generator.choice(of_reader[number % len(READERS)]) for number in range(count)]
