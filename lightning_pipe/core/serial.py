"""Serialization of frozen dataclasses to YAML and JSON and back, by type; errors name the path of the mistake.

Fields may be int, float, str, bool, None, Literal, unions of these, tuples, frozen sets, mappings with string keys, and
other dataclasses. Tuples and sets are lists in the file. Keys with a default may be left out; unknown keys are errors.

    save_yaml(plan, "plan.yaml");  plan = load_yaml(Plan, "plan.yaml")
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from lightning_pipe.errors import PlanError
from lightning_pipe.foreign_names import expected_names


class Dataclass(Protocol):
    """An instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[object]]]


_CLOSE = 0.7  # likeness of a misspelt key: "start" is not "share"

T = TypeVar("T", bound=Dataclass)
V = TypeVar("V")

_NAMES: dict[object, str] = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    NoneType: "nothing (null)",
}


def save_yaml(value: Dataclass, path: str | Path) -> None:
    """Write a dataclass to a YAML file."""
    Path(path).write_text(to_yaml(value), encoding="utf-8")


def load_yaml(cls: type[T], path: str | Path) -> T:
    """Read a dataclass from a YAML file.

    Raises:
        PlanError: if the file cannot be read, or a key is missing, unknown or of the wrong type.
    """
    return from_yaml(cls, _read(path), source=str(path))


def to_yaml(value: Dataclass) -> str:
    """Return a dataclass as YAML text."""
    return yaml.safe_dump(to_dict(value), sort_keys=False, default_flow_style=None, width=120)


def from_yaml(cls: type[T], text: str, *, source: str = "the text") -> T:
    """Return the dataclass that a YAML text describes.

    Raises:
        PlanError: if the text is no YAML, or a key is missing, unknown or of the wrong type.
    """
    try:
        data = yaml.load(text, Loader=_OnceLoader)
    except Exception as error:  # yaml's own, and what Python raises of a date, a number or a depth that cannot be
        raise PlanError(f"{source} is not YAML: {error}") from None
    return _with_source(cls, data, source)


class _OnceLoader(yaml.SafeLoader):
    """Reads plain YAML, in which a key stands once; YAML itself would take the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {key!r} a second time; expected it once", key_node.start_mark
                )
            seen |= {key} if isinstance(key, Hashable) else set()
        return super().construct_mapping(node, deep=deep)


def save_json(value: Dataclass, path: str | Path) -> None:
    """Write a dataclass to a JSON file."""
    Path(path).write_text(json.dumps(to_dict(value), indent=1), encoding="utf-8")


def load_json(cls: type[T], path: str | Path) -> T:
    """Read a dataclass from a JSON file.

    Raises:
        PlanError: if the file cannot be read, or a key is missing, unknown or of the wrong type.
    """
    try:
        data = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not JSON: {error}") from None
    return _with_source(cls, data, str(path))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {path}: {error}") from None


def _with_source(cls: type[T], data: object, source: str) -> T:
    try:
        return from_dict(cls, data)
    except PlanError as error:
        raise PlanError(f"{source}: {error}") from None


def to_dict(value: Dataclass) -> dict[str, object]:
    """Return a dataclass as nested dictionaries and lists, without what is empty, open or off by default."""
    written = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: _plain(item) for field, item in written if not _is_off(item, field.default)}


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, (frozenset, set)):
        return [_plain(item) for item in sorted(value)]
    return value


def from_dict(cls: type[T], data: object) -> T:
    """Return the dataclass that nested dictionaries and lists describe.

    Raises:
        PlanError: naming the path of a key that is missing, unknown or of the wrong type.
    """
    return cast(T, _dataclass(cls, data, ""))


def _dataclass(cls: type, data: object, path: str) -> object:
    if not isinstance(data, Mapping):
        raise PlanError(f"{path or 'the top'}: expected {_name(cls)}, found {data!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            expected = expected_names(str(key), fields, close=_CLOSE)
            raise PlanError(f"{_join(path, key)}: unknown key; {expected}")
    for name, field in fields.items():
        if name not in data and _is_required(field):
            raise PlanError(f"{_join(path, name)}: missing; {cls.__name__} needs it")
    hints = get_type_hints(cls)
    return cls(**{name: _value(hints[name], item, _join(path, name)) for name, item in data.items()})


def _is_required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(kind: object, data: object, path: str) -> object:
    """Return data as a value of a type."""
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(cast(type, kind), data, path)
    if origin in (Union, UnionType):
        return _union(kind, data, path)
    if origin is Literal:
        return _checked(data in get_args(kind), kind, data, path)
    if origin is tuple:
        return _tuple(kind, data, path)
    if origin is frozenset:
        (item,) = get_args(kind)
        return frozenset(_items([item] * len(_list(kind, data, path)), data, path))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(kind, data, path)
    return _scalar(kind, data, path)


def _scalar(kind: object, data: object, path: str) -> object:
    assert kind in _NAMES, f"{path}: fields of type {kind} cannot be written to a file"
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(_checked(abs(data) <= sys.float_info.max, kind, data, path))
    fits = isinstance(data, cast(type, kind)) and (kind is bool or not isinstance(data, bool))
    return _checked(fits, kind, data, path)


def _checked(fits: bool, kind: object, data: V, path: str) -> V:
    if not fits:
        raise PlanError(f"{path}: expected {_name(kind)}, found {data!r}{_float_hint(kind, data)}")
    return data


def _float_hint(kind: object, data: object) -> str:
    """Show the form that YAML reads as a number: it takes `1e-5`, without a point, for a text."""
    if kind is not float or not isinstance(data, str):
        return ""
    try:
        return f" (write {yaml.safe_dump(float(data)).split()[0]})"
    except ValueError:
        return ""


def _union(kind: object, data: object, path: str) -> object:
    nested = [option for option in get_args(kind) if dataclasses.is_dataclass(option)]
    if isinstance(data, Mapping) and len(nested) == 1:
        return _value(nested[0], data, path)  # so that its own errors are the ones that are seen
    for option in get_args(kind):
        try:
            return _value(option, data, path)
        except PlanError:
            continue
    raise PlanError(f"{path}: expected {_name(kind)}, found {data!r}")


def _tuple(kind: object, data: object, path: str) -> object:
    kinds, found = get_args(kind), _list(kind, data, path)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_items([kinds[0]] * len(found), found, path))
    _checked(len(found) == len(kinds), kind, data, path)
    return tuple(_items(list(kinds), found, path))


def _list(kind: object, data: object, path: str) -> list[object]:
    _checked(isinstance(data, list), kind, data, path)
    return cast(list[object], data)


def _items(kinds: list[object], data: object, path: str) -> list[object]:
    pairs = zip(kinds, cast(list[object], data), strict=True)
    return [_value(kind, item, f"{path}[{number}]") for number, (kind, item) in enumerate(pairs)]


def _mapping(kind: object, data: object, path: str) -> object:
    _, item_kind = get_args(kind)
    _checked(isinstance(data, Mapping), kind, data, path)
    items = cast(Mapping[object, object], data)
    for key in items:
        _checked(isinstance(key, str), str, key, f"{path}: key")
    return {key: _value(item_kind, item, _join(path, key)) for key, item in items.items()}


def _name(kind: object) -> str:
    """Return how a type is called in an error text."""
    if kind in _NAMES:
        return _NAMES[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_name(option) for option in args)
    if origin is Literal:
        return " or ".join(repr(option) for option in args)
    if origin in (tuple, frozenset):
        if len(args) == 2 and args[1] is not Ellipsis:
            return f"a list of {' and '.join(_name(arg) for arg in args)}"
        return f"a list of {_plural(args[0])}"
    if dataclasses.is_dataclass(kind):
        return f"a mapping with the keys of {getattr(kind, '__name__', kind)}"
    return f"a mapping of texts to {_plural(args[1])}"


def _plural(kind: object) -> str:
    plurals: dict[object, str] = {int: "integers", float: "numbers", str: "texts"}
    if dataclasses.is_dataclass(kind):
        return str(getattr(kind, "__name__", kind))
    return plurals.get(kind, _name(kind))


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_off(item: object, default: object) -> bool:
    return (item == () and default == ()) or (item is default and (item is False or item is None))
