"""User code told from library code, and the names that it reads.

Files of Python, torch, Lightning, torchmetrics, NumPy and this package are libraries; those of other packages are
installed; all else is the user's, among it what a notebook defines, which has no file.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Container, Iterable, Iterator
from typing import Any, TypeAlias

from torch import nn

Code: TypeAlias = tuple[types.CodeType, dict[str, Any]]  # with the globals that it sees
_MOST_FUNCTIONS = 2000  # whose globals are looked for
LIGHTNING = ("/lightning/pytorch/", "/lightning/fabric/", "/pytorch_lightning/", "/lightning_fabric/")
_LIBRARIES = ("/torch/", *LIGHTNING, "/lightning_utilities/", "/lightning_pipe/", "/torchmetrics/", "/numpy/")
_OURS = __file__.removesuffix("capture/python/users_code.py")
_STANDARD = (types.__file__ or "").rpartition("/")[0] + "/"


def is_ours(filename: str) -> bool:
    """Return whether a file belongs to this package."""
    return filename.startswith(_OURS)


def is_frameworks(filename: str) -> bool:
    """Return whether a file belongs to torch, Lightning, torchmetrics, NumPy or this package."""
    return any(part in filename for part in _LIBRARIES)


@functools.cache
def is_library(filename: str) -> bool:
    """Return whether a file belongs to Python, torch, Lightning, torchmetrics, NumPy or this package."""
    if filename.startswith("<frozen") or is_frameworks(filename):
        return True
    return filename.startswith(_STANDARD) and "site-packages" not in filename


@functools.cache
def is_lightnings(filename: str) -> bool:
    """Return whether a file belongs to Lightning, by either of its names."""
    return any(part in filename for part in LIGHTNING)


@functools.cache
def is_installed(filename: str) -> bool:
    """Return whether a file was not written by the user: of a library or any other installed package."""
    return is_library(filename) or "site-packages" in filename or "dist-packages" in filename


def users_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the innermost frame, from this one on, of a file that belongs to no library; None without one."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith("<") and not is_library(path):
            return frame
        frame = frame.f_back
    return None


def is_users(cls: type) -> bool:
    """Return whether a class is written by the user."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:  # of a notebook, or written in C
        return cls.__module__.partition(".")[0] not in sys.stdlib_module_names or cls.__module__ == "__main__"
    return not is_installed(file)


def assignment_line(module: nn.Module, attribute: str) -> str:
    """Return the line of the module's source that assigns `self.<name>`, "" if it cannot be found."""
    path, _, name = attribute.rpartition(".")
    try:
        part = module.get_submodule(path)
    except AttributeError:  # an attribute of something that is no module
        return ""
    for owner in type(part).__mro__:
        try:
            source, start = inspect.getsourcelines(owner)
            file = inspect.getsourcefile(owner)
        except (OSError, TypeError):
            continue
        lines = [i for i, text in enumerate(source) if "=" in text.partition(f"self.{name}")[2]]
        if lines:
            return f"{file}:{start + lines[-1]} in {owner.__name__}"
    return ""


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a piece of code, and the code inside it, may read as globals or attributes."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_in(inner)
        elif isinstance(inner, str) and inner.isidentifier():  # getattr(config, "alpha"), globals()["ALPHA"]
            yield inner


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions in an attribute of a class: a method, or those of a property or class method."""
    for function in (value, *(getattr(value, name, None) for name in ("fget", "fset", "__func__", "func"))):
        if isinstance(function, types.FunctionType):
            yield function


def functions_of(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions in the attributes of a class."""
    for value in vars(cls).values():
        yield from functions_in(value)


def forget_cached(codes: Container[types.CodeType]) -> None:
    """Empty the caches (`functools.lru_cache`) of functions with such code: they keep what a trace has made."""
    for cache in _CACHES.alive():
        if getattr(cache.__wrapped__, "__code__", None) in codes:
            cache.cache_clear()


class _Caches:
    """All caches of functions, wherever they hang; all objects are looked through when their number has changed."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []
        self._references = 0

    def alive(self) -> list[Any]:
        """Return them."""
        references = sys.getrefcount(_CACHE)  # to their class; every cache has one
        found = [cache for one in self._known if (cache := one()) is not None]
        if len(found) < len(self._known) or references != self._references:
            found = [thing for thing in gc.get_referrers(_CACHE) if type(thing) is _CACHE]
            self._known, self._references = [weakref.ref(cache) for cache in found], references
        return found


_CACHE = functools._lru_cache_wrapper
_CACHES = _Caches()


def reached(codes: Iterable[Code]) -> list[Code]:
    """Add the user's functions that code names as globals, and theirs."""
    found: dict[int, Code] = {}
    waiting = list(codes)
    while waiting and len(found) < _MOST_FUNCTIONS:
        code, namespace = waiting.pop()
        if id(code) in found or is_installed(code.co_filename):
            continue
        found[id(code)] = (code, namespace)
        for name in names_in(code):
            value = namespace.get(name)
            if isinstance(value, types.FunctionType):
                waiting.append((value.__code__, value.__globals__))
            elif isinstance(value, type) and is_users(value):
                waiting.extend((f.__code__, f.__globals__) for f in functions_of(value))
    return list(found.values())
