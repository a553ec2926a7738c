"""Start the ranks of this host, as Lightning does, under guard from the beginning.

    script      runs the script again for every other rank; a thread looks how they end
    fork...     ranks are children of this process, which gets the first failure through a file

Nobody is killed here before the guards had time to say why.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from lightning_pipe.errors import PipelineError, UnsupportedError
from lightning_pipe.lightning_names import ClusterEnvironment
from lightning_pipe.random_start import handed_on
from lightning_pipe.runtime.guard.client import GuardClient
from lightning_pipe.runtime.guard.failure import Failure
from lightning_pipe.runtime.shortages import shortages_named
from lightning_pipe.strategy.lightning_private import ForkLauncher, ScriptLauncher, limit_threads, prefixed_commands
from lightning_pipe.strategy.ranks.openmp import release_threads
from lightning_pipe.strategy.ranks.outcome import handed_over, taken_over

_LOOK_S = 0.2
_MOMENT_S = 1.0  # for the guards to say it first: they know what the rank did
_VERDICT_S = 3.0

Begin = Callable[..., GuardClient]
Check = Callable[[Any, Sequence[Any]], None]


class GuardedScriptLauncher(ScriptLauncher):
    """Run the script again for every other rank of this host, unless a launcher outside has done so.

    Args:
        environment: of the trainer.
        processes: of this host.
        hosts: number of hosts.
        begin: begins to guard this process.
        check: is given the trainer and the arguments of the run, before anything starts.
        command_prefix: what stands between interpreter and script.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        processes: int,
        hosts: int,
        *,
        begin: Begin,
        check: Check,
        command_prefix: Sequence[str] = (),
    ) -> None:
        super().__init__(environment, processes, hosts)
        self._begin, self._check, self._command_prefix = begin, check, command_prefix

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

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks of this host and call the function."""
        self._check(trainer, args)
        guard = self._begin()
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._start_ranks()
            children = {guard.rank + number: child for number, child in enumerate(self.procs, start=1)}
            guard.watch_children({rank: child.pid for rank, child in children.items()})
            observe = threading.Thread(target=_observe, args=(children, guard), name="children", daemon=True)
            observe.start()
        limit_threads(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def _start_ranks(self) -> None:
        """Start the other ranks of this host; end those that have been started if one cannot be."""
        with shortages_named("A rank of this host"), contextlib.ExitStack() as undo:
            undo.callback(self._end_started)
            with handed_on(), prefixed_commands(self._command_prefix):
                self._call_children_scripts()
            undo.pop_all()

    def _end_started(self) -> None:
        for child in self.procs:
            child.kill()


def _observe(children: dict[int, subprocess.Popen[bytes]], guard: GuardClient) -> None:
    """Tell all ranks of one that has ended badly, or without having been there."""
    while children:
        time.sleep(_LOOK_S)
        for rank, child in list(children.items()):
            code = child.poll()
            if code is None:
                continue
            del children[rank]
            if guard.heard.wait(_MOMENT_S):
                continue
            state = guard.where([rank]).get(rank)
            if code or state is None:
                where = str(state) if state is not None else "before it had joined the others"
                guard.fail(Failure(rank, where, _ending(code), session=guard.session, lasting=True), wait_s=_MOMENT_S)


def _ending(code: int) -> str:
    if code >= 0:
        return f"its process has ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was ended by {name}"


class GuardedForkLauncher(ForkLauncher):
    """Let ranks be children of this process, which waits for them (also in a notebook).

    Args:
        strategy: of the trainer.
        start_method: of multiprocessing.
        begin: begins to guard a process; called in every child with the file for the first failure.
        check: is given the trainer and the arguments of the run, before anything starts.
    """

    def __init__(self, strategy: Any, *, start_method: Any, begin: Begin, check: Check) -> None:
        super().__init__(strategy, start_method=start_method)
        self._begin, self._check = begin, check

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start all ranks, wait for them, and return what rank 0 does.

        Raises:
            PipelineError: if a rank has died, with what it did last.
        """
        self._check(trainer, args)
        release_threads()
        with shortages_named("A rank of this host"), tempfile.TemporaryDirectory(prefix="verdict") as folder:
            verdict = Path(folder, "failure")
            try:
                guarded = _Guarded(self._begin, self._strategy.on_exception, str(verdict), function)
                return super().launch(guarded, *args, trainer=trainer, **kwargs)
            except (ProcessExitedException, ProcessRaisedException) as error:
                text = _read(verdict, wait_s=_VERDICT_S if isinstance(error, ProcessExitedException) else 0.0)
                if not text or text in str(error):
                    raise
                raise PipelineError(text) from error

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        """Add what rank 0 knows of the run."""
        return {**super().get_extra_results(trainer), **handed_over(trainer, trainer.strategy.outcome)}

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        """Let trainer and strategy of this process know it."""
        super().update_main_process_results(trainer, extra)
        trainer.strategy.outcome = taken_over(trainer, extra)


@dataclass(frozen=True)
class _Guarded:
    """The function of a child: under guard, which hears of errors (Lightning handles those in the parent only)."""

    begin: Begin
    failed: Callable[[BaseException], None]
    verdict: str
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begin(verdict=self.verdict)
        try:
            return self.function(*args, **kwargs)
        except BaseException as error:
            self.failed(error)
            raise


def _read(verdict: Path, *, wait_s: float) -> str:
    """Return the first failure, which a guard may be about to write."""
    end = time.monotonic() + wait_s
    while not verdict.exists():
        if time.monotonic() > end:
            return ""
        time.sleep(_LOOK_S / 4)
    return verdict.read_text(encoding="utf-8")
