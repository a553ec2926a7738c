"""Caches of the user's functions are emptied wherever they hang, and looked for when there are others than before."""

from __future__ import annotations

import functools
import gc
import types

import pytest

from lightning_pipe.capture.python.users_code import forget_cached

HELPERS = types.ModuleType("helpers")
exec("import functools\ndef memoize(function): return functools.lru_cache(maxsize=8)(function)", vars(HELPERS))

# where a cache hangs -> module that hangs it there, as `kept`
CACHED = {
    "function": "import functools\n@functools.cache\ndef kept(x): return x",
    "by a name of its own": "from functools import lru_cache as lru\n@lru()\ndef kept(x): return x",
    "method": "import functools\nclass A:\n @functools.cache\n def f(self, x): return x\nkept = A.f",
    "attribute": "import functools\ndef ran(x): return x\nkept = type('A', (), {})()\nkept.f = functools.cache(ran)",
    "by a helper": "def ran(x): return x\nkept = type('A', (), {})()\nkept.f = memoize(ran)",
}


@pytest.mark.parametrize("where", CACHED)
def test_a_cache_is_emptied_wherever_it_hangs(where: str) -> None:
    module = {"memoize": HELPERS.memoize} if where == "by a helper" else {}
    exec(CACHED[where], module)
    kept = getattr(module["kept"], "f", module["kept"])
    code = kept.__wrapped__.__code__
    kept(*[1] * code.co_argcount)
    assert kept.cache_info().currsize == 1
    forget_cached({code})
    assert kept.cache_info().currsize == 0


def test_all_objects_are_looked_through_only_when_there_are_other_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_cached({})
    look, looks = gc.get_referrers, []
    monkeypatch.setattr(gc, "get_referrers", lambda kind: looks.append(kind) or look(kind))
    forget_cached({})
    assert not looks
    one = functools.cache(len)
    forget_cached({})
    assert len(looks) == 1
    del one
    two = functools.cache(len)
    forget_cached({})
    assert len(looks) == 2 and two(()) == 0
