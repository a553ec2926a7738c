"""Plan and run hybrid data and pipeline parallel training of unmodified LightningModules.

Importing this package makes `Trainer(strategy="dapple")` known to Lightning. It imports neither torch nor Lightning:
the strategy itself is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_pipe.registration import register_strategy

if TYPE_CHECKING:
    from lightning_pipe.cli.python import PlannedStep, compare, plan
    from lightning_pipe.entry.dapple_strategy import DappleStrategy
    from lightning_pipe.schedule.registry import register_schedule

__all__ = ["DappleStrategy", "PlannedStep", "__version__", "compare", "plan", "register_schedule"]
__version__ = "0.1.0"

register_strategy()


def __getattr__(name: str) -> Any:
    if name == "DappleStrategy":
        from lightning_pipe.entry.dapple_strategy import DappleStrategy

        return DappleStrategy
    if name in ("PlannedStep", "compare", "plan"):
        from lightning_pipe.cli import python

        return getattr(python, name)
    if name == "register_schedule":
        from lightning_pipe.schedule.registry import register_schedule

        return register_schedule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)  # among them what is imported when it is first asked for
