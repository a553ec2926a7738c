"""A list or dict that a step only adds to is told from one whose earlier content it looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_pipe.capture.python.kept_collections import KeptDict, KeptList, kept_collections
from lightning_pipe.capture.python.places import Place

LIST_READS: dict[str, Callable[[list[Any]], Any]] = {
    "item": lambda c: c[0],
    "slice": lambda c: c[:1],
    "iteration": lambda c: [x for x in c],  # noqa: C416
    "length": len,
    "truth": bool,
    "membership": lambda c: 1 in c,
    "equality": lambda c: c == [1, 2],
    "sum": sum,
    "copy": lambda c: c.copy(),
    "list": list,
    "tuple": tuple,
    "unpacking": lambda c: (*c,),
    "concatenation": lambda c: c + [3],  # noqa: RUF005
    "concatenation behind": lambda c: [3] + c,  # noqa: RUF005
    "repetition": lambda c: c * 2,
    "sorted": sorted,
    "reversed": lambda c: list(reversed(c)),
    "index": lambda c: c.index(2),
    "count": lambda c: c.count(2),
    "text": str,
    "extension of another": lambda c: [0].extend(c),
    "slice assignment to another": lambda c: [0].__setitem__(slice(0, 1), c),
    "zip": lambda c: list(zip(c, c, strict=True)),
    "pop": lambda c: c.pop(),
    "remove": lambda c: c.remove(1),
    "deletion": lambda c: c.__delitem__(0),
    "assignment": lambda c: c.__setitem__(0, 5),
    "insertion": lambda c: c.insert(0, 5),
    "sort": lambda c: c.sort(),
    "reverse": lambda c: c.reverse(),
    "repetition in place": lambda c: c.__imul__(2),
    "star arguments": lambda c: max(*c),
}
LIST_ADDITIONS: dict[str, Callable[[list[Any]], Any]] = {
    "append": lambda c: c.append(3),
    "extend": lambda c: c.extend([3]),
    "augmented": lambda c: c.__iadd__([3]),
}
DICT_READS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "item": lambda c: c["a"],
    "get": lambda c: c.get("a"),
    "get of nothing": lambda c: c.get("z", 0),
    "iteration": list,
    "length": len,
    "truth": bool,
    "membership": lambda c: "a" in c,
    "equality": lambda c: c == {},
    "keys": lambda c: list(c.keys()),
    "values": lambda c: list(c.values()),
    "items": lambda c: list(c.items()),
    "copy": lambda c: c.copy(),
    "dict": dict,
    "double star": lambda c: {**c},
    "keyword arguments": lambda c: dict(**c),
    "union": lambda c: c | {"b": 2},
    "union behind": lambda c: {"b": 2} | c,
    "update of another": lambda c: {"b": 2}.update(c),
    "text": str,
    "pop": lambda c: c.pop("a"),
    "popitem": lambda c: c.popitem(),
    "setdefault": lambda c: c.setdefault("z", 1),
    "deletion": lambda c: c.__delitem__("a"),
    "reversed": lambda c: list(reversed(c)),
}
DICT_ADDITIONS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "assignment": lambda c: c.__setitem__("b", 2),
    "update": lambda c: c.update(b=2),
    "update by pairs": lambda c: c.update([("b", 2)]),
    "augmented": lambda c: c.__ior__({"b": 2}),
}


@pytest.mark.parametrize("name", LIST_READS)
def test_whoever_looks_at_the_content_of_a_list_is_noticed(name: str) -> None:
    kept = KeptList([1, 2])
    found = LIST_READS[name](kept)
    assert kept.is_read
    plain = [1, 2]
    assert LIST_READS[name](plain) == found
    kept.is_read = False
    assert list.__eq__(kept, plain) is True


@pytest.mark.parametrize("name", LIST_ADDITIONS)
def test_who_only_adds_to_a_list_has_not_read_it(name: str) -> None:
    kept = KeptList([1, 2])
    LIST_ADDITIONS[name](kept)
    assert not kept.is_read
    assert kept.is_changed and kept.only_grew
    assert kept.added == [3]
    assert kept.original == [1, 2]


@pytest.mark.parametrize("name", DICT_READS)
def test_whoever_looks_at_the_content_of_a_dict_is_noticed(name: str) -> None:
    kept = KeptDict({"a": 1})
    found, plain = DICT_READS[name](kept), {"a": 1}
    assert kept.is_read
    assert DICT_READS[name](plain) == found
    assert dict(dict.items(kept)) == plain


@pytest.mark.parametrize("name", DICT_ADDITIONS)
def test_who_only_sets_entries_of_a_dict_has_not_read_it(name: str) -> None:
    kept = KeptDict({"a": 1})
    DICT_ADDITIONS[name](kept)
    assert not kept.is_read
    assert kept.is_changed and kept.only_grew
    assert {key: dict.__getitem__(kept, key) for key in kept.written} == {"b": 2}
    assert kept["b"] == kept.get("b") == 2
    assert not kept.is_read, "entries of the step's own may be read"


def test_a_list_that_is_cleared_first_may_be_read_afterwards() -> None:
    kept = KeptList([1, 2])
    kept.clear()
    kept.append(3)
    assert sum(kept) == 3
    assert not kept.is_read
    assert kept.added == [3]
    assert not kept.only_grew


def test_a_dict_that_is_cleared_is_no_longer_what_it_was() -> None:
    kept = KeptDict({"a": 1})
    kept.clear()
    kept["b"] = 2
    assert list(kept.values()) == [2]
    assert not kept.is_read
    assert kept.is_changed and not kept.only_grew


def test_an_untouched_collection_is_unchanged() -> None:
    assert not KeptList([1, float("nan")]).is_changed
    assert not KeptDict({"a": float("nan")}).is_changed


def test_collections_are_in_their_places_for_a_while_only() -> None:
    holder = {"losses": [1.0], "entries": {"a": 1}, "number": 3, "special": type("Own", (list,), {})()}
    before = dict(holder)
    with kept_collections([Place(holder, key, key) for key in holder]) as collections:
        assert [type(kept) for _, kept in collections] == [KeptList, KeptDict]
        holder["losses"].append(2.0)
    assert all(holder[key] is value for key, value in before.items())
    assert holder["losses"] == [1.0]


def test_a_list_that_takes_the_place_of_a_kept_one_stays() -> None:
    holder = {"losses": [1.0]}
    with kept_collections([Place(holder, "losses", "losses")]):
        holder["losses"] = new = [5.0]
    assert holder["losses"] is new
