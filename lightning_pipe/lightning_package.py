"""Lightning's two package names, `lightning` and `pytorch_lightning`: which one this process uses.

Classes of one are none of the other, so a process uses this package with one of them: with the first whose Trainer
takes a strategy, or whose module is planned for. Asked before that, the one that is imported decides.
"""

from __future__ import annotations

import importlib.util
import sys

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
            f"found a Trainer or module of the package {package!r} in a process that uses `lightning_pipe` with "
            f"{_chosen[0]!r}; expected one of them in a process. Import Trainer, LightningModule and callbacks from "
            "one package, or train with the other one in a process of its own."
        )
    _chosen[:] = [package]


def package_of(kind: type) -> str | None:
    """Return the package of which a class or a base of it is; None if it is of neither."""
    roots = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((root for root in roots if root in TRAINERS), None)


def package_in_use() -> str:
    """Return the package that this process uses: as chosen, else the imported one, else one that is installed."""
    if not _chosen:
        imported = [package for package, module in TRAINERS.items() if module in sys.modules]
        installed = (package for package in TRAINERS if importlib.util.find_spec(package) is not None)
        _chosen.append(imported[0] if len(imported) == 1 else next(installed, "lightning"))
    return _chosen[0]


def name_in_use(module: str) -> str:
    """Return the name of a module in the package that is used; `pytorch...` and `fabric...` name it in both."""
    part, _, rest = module.partition(".")
    root = {"pytorch": TRAINERS, "fabric": FABRICS}[part][package_in_use()]
    return f"{root}.{rest}" if rest else root
