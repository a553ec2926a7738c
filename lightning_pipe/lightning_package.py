"""Lightning's two package names, `lightning` and `pytorch_lightning`: finding out whose Trainer it is.

Classes of one are none of the other, so a process uses this package with one of them. A strategy that is asked for by
name is for the package that asks. For an instance we look, before anything of Lightning is imported for it, at what the
file that asks for the class imports (also below that line), then at the files that import that one, then at what is
imported already.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import FrameType

from lightning_pipe.errors import ConfigError

TRAINERS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}  # package -> has its Trainer
FABRICS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}

_chosen: list[str] = []  # one name, once somebody has asked


def choose(package: str) -> None:
    """Use this package in this process.

    Raises:
        ConfigError: if the other one is in use already.
    """
    if _chosen and _chosen[0] != package:
        raise ConfigError(
            f"found a strategy for a Trainer of {package!r} in a process that has used `lightning_pipe` with "
            f"{_chosen[0]!r}; expected one of them. Import Trainer, LightningModule and callbacks from one package."
        )
    _chosen[:] = [package]


def package_in_use() -> str:
    """Return the package that this process uses: as chosen, or as the caller's files have it."""
    if not _chosen:
        _chosen.append(_looked_up(sys._getframe(1)))
    return _chosen[0]


def name_in_use(module: str) -> str:
    """Return the name of a module in the package that is used; `pytorch...` and `fabric...` name it in both."""
    part, _, rest = module.partition(".")
    root = {"pytorch": TRAINERS, "fabric": FABRICS}[part][package_in_use()]
    return f"{root}.{rest}" if rest else root


def _looked_up(frame: FrameType) -> str:
    named = (_imported_by(caller) for caller in _callers(frame))
    loaded = {package for package, module in TRAINERS.items() if module in sys.modules}
    candidates = [*(packages for packages in named if len(packages) == 1), loaded]
    found = next((next(iter(packages)) for packages in candidates if len(packages) == 1), None)
    installed = (package for package in TRAINERS if importlib.util.find_spec(package) is not None)
    return found or next(installed, "lightning")


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a call from the inside out, but for those of this package, which names both."""
    own = __name__.partition(".")[0]
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] != own:
            yield frame
        frame = frame.f_back


def _imported_by(frame: FrameType) -> set[str]:
    """Return which of the two a frame's file imports; a file that is executed need not have come to that line."""
    names = [str(frame.f_globals.get("__name__"))]
    if frame.f_code.co_name == "<module>":
        names += frame.f_code.co_names
    for value in list(frame.f_globals.values()):
        module = getattr(value, "__module__", None) if isinstance(value, type) else getattr(value, "__name__", None)
        names += [module] if isinstance(module, str) else []
    roots = {name.partition(".")[0] for name in names}
    return {package for package in TRAINERS if package in roots}
