"""How the processes of one host are started, and what the process that started them learns of a fit in others.

A script is run again by every rank ("popen"), so the process of the user is rank 0. With multiprocessing ("fork", the
only way in a notebook) it is none of them: what rank 0 knows at the end is handed over in a file.
"""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pipe.core.plan import Plan
from lightning_pipe.errors import UnsupportedError
from lightning_pipe.lightning_names import pl
from lightning_pipe.report import Comparison
from lightning_pipe.strategy import lightning_private as private

if TYPE_CHECKING:
    from lightning_pipe.strategy.strategy import DappleStrategy

_KEY = "lightning_pipe"


@dataclass(frozen=True)
class Outcome:
    """What is known after a fit (or validate, test, predict).

    Attributes:
        plan: that was used; None before it is made.
        comparison: of the first steps with their prediction; on rank 0, once it is known.
        steps_taken_back: optimizer steps that were taken back and taken again.
    """

    plan: Plan | None = None
    comparison: Comparison | None = None
    steps_taken_back: int = 0


class RerunLauncher(private.ScriptLauncher):
    """Runs the script again for every other rank of the host."""

    @property
    def is_interactive_compatible(self) -> bool:
        """Refuse notebooks; Lightning asks in a notebook only.

        Raises:
            UnsupportedError: with the way out.
        """
        raise UnsupportedError(
            "start_method='popen' runs the script again for every rank, and a notebook is no script. In a notebook use "
            'Trainer(strategy=lightning_pipe.DappleStrategy(start_method="fork"), ...), before anything has used CUDA '
            "in it."
        )


class ForkingLauncher(private.ForkLauncher):
    """Starts processes by multiprocessing, and brings back what rank 0 knows."""

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Add outcome and progress of the run, in a file: what is sent itself must fit into a pipe."""
        strategy: DappleStrategy = trainer.strategy  # type: ignore[assignment]
        path = Path(tempfile.mkdtemp()) / "outcome"
        path.write_bytes(pickle.dumps((strategy.outcome, private.progress(trainer))))
        return {**super().get_extra_results(trainer), _KEY: str(path)}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Give outcome and progress to the trainer of this process."""
        super().update_main_process_results(trainer, extra)
        path = Path(extra[_KEY])
        strategy: DappleStrategy = trainer.strategy  # type: ignore[assignment]
        strategy.outcome, progress = pickle.loads(path.read_bytes())
        private.restore_progress(trainer, progress)
        path.unlink()
        path.parent.rmdir()
