"""A snapshot sees every change of the Python state behind its slots, names the place, and gives everything back."""

from __future__ import annotations

import array
import contextvars
import ctypes
import enum
import functools
import itertools
import multiprocessing
import queue
import random
import threading
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipe.capture.python.places import ABSENT, Place, follow
from lightning_pipe.capture.python.snapshots import Snapshot

TREE = nn.Module()


class Config:
    rate = 1.0

    class Inner:
        depth = 1

    def __init__(self) -> None:
        self.alpha = 1.0
        self.steps = [1, 2, 3]


class Heir(Config):
    pass


class Registry(type):
    size = 1


class Registered(metaclass=Registry):
    pass


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self) -> None:
        self.shown, self.__hidden = 1, [1]

    def hide(self, value: int) -> None:
        self.__hidden[0] = value


class Both:
    """Has a slot, one without value, and a dict."""

    __slots__ = ("__dict__", "late", "shown")

    def __init__(self) -> None:
        self.shown, self.other = 1, 1


class Descriptor:
    def __init__(self) -> None:
        self.value = 1.0

    def __get__(self, owner: Any, cls: Any = None) -> float:
        return self.value


class Described:
    rate = Descriptor()


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Point(NamedTuple):
    x: float
    items: list[int]


@dataclass(frozen=True)
class Frozen:
    values: dict[str, float] = field(default_factory=lambda: {"a": 1.0})


def counter_in_a_closure() -> Callable[[], int]:
    count = 0

    def call() -> int:
        nonlocal count
        count += 1
        return count

    return call


def counter_in_a_default(seen: list[int] = []) -> int:  # noqa: B006
    seen.append(1)
    return len(seen)


def counter_in_an_attribute() -> int:
    counter_in_an_attribute.calls = getattr(counter_in_an_attribute, "calls", 0) + 1
    return counter_in_an_attribute.calls


def alternating() -> Iterator[int]:
    level = 0
    while True:
        level += 1
        yield level // 100


def decorated() -> Callable[[], float]:
    calls: list[int] = []

    def noting(function: Callable[[], float]) -> Callable[[], float]:
        @functools.wraps(function)
        def call() -> float:
            calls.append(1)
            return function()

        return call

    return noting(lambda: 1.0)


class Bound:
    def __init__(self) -> None:
        self.n = 0

    def advance(self) -> int:
        self.n += 1
        return self.n


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=1.0)


def _set(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda thing: setattr(thing, name, value)


def _item(key: Any, value: Any) -> Callable[[Any], Any]:
    return lambda thing: thing.__setitem__(key, value)


def _begun() -> Iterator[int]:
    generator = alternating()
    next(generator)
    return generator


# what is made, how it is changed, and where the change is named ("" where only that it is seen counts)
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "attribute of an object": (Config, _set("alpha", 2.0), "thing.alpha was 1.0 and is 2.0 now"),
    "new attribute": (Config, _set("beta", 2.0), "thing.beta was absent and is 2.0 now"),
    "removed attribute": (Config, lambda t: delattr(t, "alpha"), "thing.alpha was 1.0 and is absent now"),
    "list in an object": (Config, lambda t: t.steps.append(4), "content of thing.steps has changed"),
    "item of a list": (Config, lambda t: t.steps.__setitem__(1, 9), "thing.steps[1] was 2 and is 9 now"),
    "class attribute of an object": (Config, lambda _: setattr(Config, "rate", 2.0), "Config.rate was 1.0"),
    "class attribute of a parent": (Heir, lambda _: setattr(Config, "rate", 2.0), "Config.rate was 1.0"),
    "class attribute of an heir": (Heir, lambda _: setattr(Heir, "rate", 2.0), "Heir.rate was absent"),
    "class": (lambda: Config, lambda _: setattr(Config, "rate", 2.0), "thing.rate was 1.0 and is 2.0 now"),
    "class in a class": (lambda: Config, lambda _: setattr(Config.Inner, "depth", 2), "Inner.depth was 1"),
    "method of a class": (Config, lambda _: setattr(Config, "extra", lambda self: 2), "Config.extra was absent"),
    "metaclass": (lambda: Registered, lambda _: setattr(Registry, "size", 2), "Registry.size was 1"),
    "descriptor": (Described, lambda _: setattr(vars(Described)["rate"], "value", 2.0), "Described.rate.value"),
    "slots": (Slotted, _set("shown", 2), "thing.shown was 1 and is 2 now"),
    "slots beside a dict": (Both, _set("shown", 2), "thing.shown was 1 and is 2 now"),
    "a slot without value": (Both, _set("late", 2), "thing.late was absent and is 2 now"),
    "a dict beside slots": (Both, _set("other", 2), "thing.other was 1 and is 2 now"),
    "private slots": (Slotted, lambda t: t.hide(2), "thing._Slotted__hidden[0] was 1 and is 2 now"),
    "enumeration": (lambda: {"color": Color.RED}, _item("color", Color.GREEN), "thing['color']"),
    "named tuple": (lambda: [Point(1.0, [])], _item(0, Point(2.0, [])), "thing[0]"),
    "list in a named tuple": (lambda: Point(1.0, [1]), lambda t: t.items.append(2), "thing[1]"),
    "frozen data class": (Frozen, lambda t: t.values.__setitem__("a", 2.0), "thing.values['a'] was 1.0"),
    "dict": (lambda: {"a": {"b": 1}}, lambda t: t["a"].__setitem__("b", 2), "thing['a']['b'] was 1 and is 2 now"),
    "order of a dict": (lambda: OrderedDict(a=1, b=2), lambda t: t.move_to_end("a"), "content of thing"),
    "default dict": (lambda: defaultdict(list), lambda t: t["a"].append(1), "thing['a'] was absent"),
    "counter": (lambda: Counter("aab"), lambda t: t.update("a"), "thing['a'] was 2 and is 3 now"),
    "chain of dicts": (lambda: ChainMap({}, {"a": 1}), _item("a", 2), ""),
    "user dict": (lambda: UserDict(a=1), _item("a", 2), "thing.data['a'] was 1 and is 2 now"),
    "set": (lambda: {1, 2}, lambda t: t.add(3), "content of thing"),
    "queue": (lambda: deque([1], maxlen=2), lambda t: t.extend([2, 3]), "content of thing"),
    "simple namespace": (lambda: types.SimpleNamespace(a=[1]), lambda t: t.a.clear(), "content of thing.a"),
    "mapping proxy": (lambda: _Proxied().proxy, lambda t: _Proxied.content.__setitem__("a", 2.0), "thing['a']"),
    "closure": (counter_in_a_closure, lambda t: t(), "thing.count was 0 and is 1 now"),
    "default argument": (lambda: counter_in_a_default, lambda t: t(), "content of thing.0"),
    "attribute of a function": (lambda: counter_in_an_attribute, lambda t: t(), "thing.calls"),
    "decorator": (decorated, lambda t: t(), "content of thing.calls has changed"),
    "bound method": (lambda: Bound().advance, lambda t: t(), "thing.__self__.n was 0 and is 1 now"),
    "partial function": (lambda: functools.partial(max, [1, 2]), lambda t: t.args[0].append(3), "thing.args[0]"),
    "generator": (alternating, next, "thing"),
    "generator that has begun": (_begun, next, "thing.level was 1 and is 2 now"),
    "iterator": (lambda: iter([0, 0, 0]), next, "content of thing"),
    "cycle": (lambda: itertools.cycle([0, 0, 0]), next, "content of thing"),
    "count": (lambda: itertools.count(), next, "content of thing"),
    "map": (lambda: map(abs, iter([0, 0, 0])), next, "content of thing"),
    "zip": (lambda: zip([0, 0, 0], itertools.repeat(1), strict=False), next, "content of thing"),
    "enumeration of a list": (lambda: enumerate([0, 0, 0]), next, "content of thing"),
    "random numbers of Python": (lambda: random.Random(0), lambda t: t.random(), "content of thing"),
    "random numbers of NumPy": (lambda: np.random.default_rng(0), lambda t: t.random(), "content of thing"),
    "old random numbers of NumPy": (lambda: np.random.RandomState(0), lambda t: t.rand(), "content of thing"),
    "random numbers of torch": (torch.Generator, lambda t: torch.rand(1, generator=t), "content of thing"),
    "array": (lambda: np.zeros(3), _item(1, 1.0), "content of thing"),
    "array of no dimension": (lambda: np.array(1.0), _item((), 2.0), "content of thing"),
    "view of an array": (lambda: np.zeros((2, 2)).T, _item((0, 1), 1.0), "content of thing"),
    "large array": (lambda: np.zeros(2**18), _item(-1, 1.0), "content of thing"),
    "array of objects": (lambda: np.array([None, 1]), _item(0, 1), "content of thing"),
    "tensor": (lambda: torch.zeros(2), lambda t: t.add_(1), "content of thing"),
    "attribute of a tensor": (lambda: torch.zeros(2), _set("scale", 2.0), "thing.scale was absent"),
    "need of a gradient": (lambda: torch.zeros(2), lambda t: t.requires_grad_(), "content of thing"),
    "bytes": (lambda: bytearray(b"ab"), _item(0, 0), "content of thing"),
    "array of the library": (lambda: array.array("d", [1.0]), _item(0, 2.0), "content of thing"),
    "number of C": (lambda: ctypes.c_double(1.0), _set("value", 2.0), "content of thing"),
    "number of several processes": (lambda: multiprocessing.Value("d", 1.0), _set("value", 2.0), ""),
    "event": (threading.Event, lambda t: t.set(), "thing._flag was False and is True now"),
    "queue of threads": (queue.Queue, lambda t: t.put(1), "content of thing.queue"),
    "weak reference": (lambda: weakref.ref(_referred()), lambda t: setattr(t(), "alpha", 2.0), "alpha was 1.0"),
    "context variable": (lambda: VARIABLE, lambda t: t.set(2.0), "thing.get() was 1.0 and is 2.0 now"),
}


class _Proxied:
    content: ClassVar[dict[str, float]] = {}

    def __init__(self) -> None:
        _Proxied.content = {"a": 1.0}
        self.proxy = types.MappingProxyType(_Proxied.content)


_HELD: list[Config] = []


def _referred() -> Config:
    _HELD[:] = [Config()]
    return _HELD[0]


ONE_WAY = {  # seen, but nobody can put it back
    *(
        "generator",
        "generator that has begun",
        "iterator",
        "mapping proxy",
        "cycle",
        "count",
        "map",
        "zip",
        "enumeration of a list",
    ),
    *("large array", "array of objects", "tensor", "need of a gradient", "context variable"),
}


@pytest.fixture(autouse=True)
def classes_as_they_were() -> Iterator[None]:
    classes = (Config, Config.Inner, Heir, Registry)
    before = [dict(vars(cls)) for cls in classes]
    yield
    for cls, attributes in zip(classes, before, strict=True):
        for name in [name for name in vars(cls) if name not in attributes]:
            delattr(cls, name)
        for name, value in attributes.items():
            if vars(cls)[name] is not value:
                setattr(cls, name, value)
    vars(Described)["rate"].value = 1.0
    VARIABLE.set(1.0)


def snapshot_of(thing: Any) -> Snapshot:
    return Snapshot([Place({"thing": thing}, "thing", "thing")], tree=TREE)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [{"deep": (t,)}]], ids=["bare", "nested"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_anywhere_behind_a_slot_is_seen_and_given_back(name: str, wrap: Callable[[Any], Any]) -> None:
    make, change, where = CHANGES[name]
    thing = make()
    snapshot = snapshot_of(wrap(thing))
    assert snapshot.first_change() is None
    change(thing)
    found = snapshot.first_change()
    assert found is not None, "the change is not seen"
    if wrap(thing) is thing:
        assert where in "; ".join(map(str, snapshot.changes()))
    snapshot.restore()
    if name not in ONE_WAY:
        assert snapshot.first_change() is None


def test_reading_changes_nothing() -> None:
    things = {name: make() for name, (make, _, _) in CHANGES.items()}
    snapshot = snapshot_of(things)
    for thing in things.values():
        assert repr(thing)
    assert [*map(str, snapshot.changes())] == []


def _draw(random_numbers: random.Random, depth: int = 0) -> Any:
    """Return random nested state."""
    kinds: list[Callable[[], Any]] = [lambda: random_numbers.randint(0, 9), random_numbers.random]
    if depth < 3:

        def several() -> list[Any]:
            return [_draw(random_numbers, depth + 1) for _ in range(random_numbers.randint(1, 4))]

        kinds += [
            several,
            lambda: dict(enumerate(several())),
            lambda: deque(several()),
            lambda: tuple(several()),
            lambda: types.SimpleNamespace(**{f"a{i}": value for i, value in enumerate(several())}),
            lambda: functools.partial(print, *several()),
            lambda: set(range(random_numbers.randint(0, 4))),
            lambda: np.zeros(3),
            lambda: random.Random(0),
            lambda: counter_in_a_closure(),
        ]
    return random_numbers.choice(kinds)()


def _mutables(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict, deque, set, types.SimpleNamespace, np.ndarray, random.Random)):
        yield value
    if isinstance(value, types.FunctionType):
        yield value
    inner: Any = ()
    if isinstance(value, (list, tuple, deque)):
        inner = value
    elif isinstance(value, (dict, types.SimpleNamespace)):
        inner = (value if isinstance(value, dict) else vars(value)).values()
    elif isinstance(value, functools.partial):
        inner = value.args
    for item in inner:
        yield from _mutables(item)


def _mutate(random_numbers: random.Random, thing: Any) -> None:
    new = random_numbers.randint(100, 199)
    match thing:
        case list():
            choices = [
                lambda: thing.append(new),
                lambda: thing.insert(0, new),
                thing.clear,
                lambda: thing.extend([new]),
            ]
            if thing:
                choices += [thing.pop, lambda: thing.__setitem__(0, new)]
            random_numbers.choice(choices)()
        case dict():
            random_numbers.choice([lambda: thing.__setitem__(0, new), lambda: thing.update(x=new), thing.clear])()
        case deque():
            random_numbers.choice([lambda: thing.append(new), lambda: thing.rotate(1), thing.clear])()
        case set():
            thing.symmetric_difference_update({0, new})
        case types.SimpleNamespace():
            setattr(thing, random_numbers.choice(["a0", "new"]), new)
        case np.ndarray():
            thing[random_numbers.randrange(3)] += new
        case random.Random():
            thing.random()
        case types.FunctionType():
            thing()


def _spelled(value: Any) -> Any:
    """Return the whole content of random state, with the identities of its objects."""
    match value:
        case list() | deque() | tuple():
            return id(value), [_spelled(item) for item in value]
        case dict():
            return id(value), [(key, _spelled(item)) for key, item in value.items()]
        case types.SimpleNamespace():
            return id(value), [(key, _spelled(item)) for key, item in vars(value).items()]
        case functools.partial():
            return id(value), [_spelled(item) for item in value.args]
        case set():
            return id(value), sorted(value)
        case np.ndarray():
            return id(value), value.tolist()
        case random.Random():
            return id(value), value.getstate()
        case types.FunctionType():
            return id(value), [cell.cell_contents for cell in value.__closure__ or ()]
    return value


@pytest.mark.parametrize("block", range(4))
def test_random_mutations_are_seen_and_given_back(block: int) -> None:
    for seed in range(block * 100, (block + 1) * 100):
        draw = random.Random(seed)
        state = [_draw(draw) for _ in range(4)]
        mutables = [*_mutables(state)]
        before, snapshot = _spelled(state), snapshot_of(state)
        assert snapshot.first_change() is None, f"seed {seed}"
        for _ in range(draw.randint(1, 5)):
            _mutate(draw, draw.choice(mutables))
        is_changed = _spelled(state) != before
        assert (snapshot.first_change() is not None) == is_changed, f"seed {seed}"
        snapshot.restore()
        assert _spelled(state) == before, f"seed {seed}"
        assert snapshot.first_change() is None, f"seed {seed}"


def test_a_snapshot_ends_at_the_modules_of_the_tree() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    snapshot = Snapshot([Place({"m": module}, "m", "m")], tree=module)
    module[0].extra = 1
    with torch.no_grad():
        module[0].weight.add_(1)
    assert snapshot.first_change() is None


def test_what_is_ignored_is_not_looked_at() -> None:
    config = Config()
    slot = Place(vars(config), "alpha", "config.alpha")
    snapshot = Snapshot([Place({"c": config}, "c", "config")], tree=TREE, ignored=[slot])
    config.alpha = 2.0
    assert snapshot.first_change() is None
    config.steps.append(1)
    assert "config.steps" in str(snapshot.first_change())


def test_state_that_refers_to_itself_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    snapshot = snapshot_of(loop)
    loop.append(2)
    snapshot.restore()
    assert len(loop) == 2 and loop[1] is loop


def test_a_path_leads_to_its_place_on_another_rank() -> None:
    one, two = nn.Module(), nn.Module()
    for module in (one, two):
        module.part = nn.Module()
        module.part.config = Config()
    path = (("self", "part"), ("attribute", "config"), ("attribute", "steps"), ("item", 1))
    follow(two, path).write(7)
    assert two.part.config.steps == [1, 7, 3]
    assert follow(one, path).read() == 2
    follow(two, path[:2]).write(ABSENT)
    assert not hasattr(two.part, "config")


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_place_is_the_same_place_on_another_rank(name: str) -> None:
    make, change, _ = CHANGES[name]
    one, two = nn.Module(), nn.Module()
    two.thing, one.thing = make(), make()
    roots = [Place(vars(m), "thing", "thing", (("self", ""), ("attribute", "thing"))) for m in (one, two)]
    snapshot = Snapshot(roots[:1], tree=nn.Module())
    change(one.thing)
    for found in snapshot.changes():
        if not found.is_content and found.slot.path:
            other = follow(two, found.slot.path)
            assert type(other.container) is type(found.slot.container)
            if other.place != found.slot.place:  # not one class, function or global of both
                assert repr(other.read()) == repr(found.before) or not isinstance(found.before, (int, float, str))
            if other.is_writable:
                other.write(found.now)
                assert follow(two, found.slot.path).read() is found.now
    snapshot.restore()
