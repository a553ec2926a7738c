"""Kept traces: the joint graph of a step that was traced before, found by the first run of the step's Python.

The tracer runs a step twice. After the first run its identity is known (`python.step_identity`): if a graph with that
identity is kept on disk, tracing ends there. All that belongs to this process is of this run: what the Python of the
step read and said, guards, questions and their lines. So nothing that Python does goes unseen, and what is not run is
only what follows from it: the functional form of its operations, and their derivatives.

Where several processes of a host come to the same step at once, as ranks do, the first one traces it. The others wait
until its graph is kept; not for ever, since it may be stopped, or its graph be none that can be kept.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lightning_pipe import cache_files
from lightning_pipe.capture import torch_private as private
from lightning_pipe.capture.graphs.fingerprint import fingerprint
from lightning_pipe.capture.graphs.joint_graph import JointGraph, joint_graph_of
from lightning_pipe.capture.kept_graphs import KeptGraph, NotKept, Rebuilt, kept_graph, load, path_of, store
from lightning_pipe.capture.python.guards import PythonGuards
from lightning_pipe.capture.python.step_identity import StepIdentity, structure_of, surroundings, versions
from lightning_pipe.capture.steps.step_function import StepFunction

log = logging.getLogger(__name__)

_FIELDS = (
    "parameters buffers leaves tangents loss results mutations gradients symbol samples conditions lengths".split()
)  # of a joint graph: what the tracer has found, in names and expressions


_PATIENCE = 12  # runs of the step on fake tensors: a whole trace takes four to eight


class Known(Exception):  # no error: there is nothing left to trace
    """A graph of this step is kept."""

    def __init__(self, kept: KeptGraph) -> None:
        super().__init__()
        self.kept = kept


class KeptTraces:
    """Graphs of a folder, for one trace; a context in which no other process traces the same.

    Args:
        folder: where they are.
        step: what is traced.
        request: all that was asked for, as plain values.
    """

    def __init__(self, folder: Path, step: StepFunction, request: Iterable[Any]) -> None:
        self._folder, self._step, self._request = folder, step, [*request, *versions()]
        self._key = ""
        self._lock: FileLock | None = None
        self._begin = time.perf_counter()
        step.identity, step.identified = StepIdentity(), self._look

    def __enter__(self) -> KeptTraces:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def _look(self, identity: StepIdentity) -> None:
        """Look for the graph of a step that has run once.

        Raises:
            Known: if it is kept.
        """
        step = self._step
        identity.note(self._request, structure_of(step.model), surroundings())
        identity.note_code(step.reads.codes)
        identity.note_calls(step.observers[-1].calls)
        recording = step.recordings[-1]
        identity.note(recording.calls, recording.outputs, recording.returned, recording.kept, step.has_loss)
        if identity.refusal:
            log.debug("The graph of %s is not kept: %s.", step.method, identity.refusal)
            return
        self._key = identity.hexdigest()
        kept = load(self._folder, self._key) or (None if step.observers[-1].constants else self._of_another())
        if kept is not None:
            log.debug("The graph of %s is known from an earlier start.", step.method)
            raise Known(kept)

    def _of_another(self) -> KeptGraph | None:
        """Return what another process is tracing now; None, and hold others back, if there is none."""
        lock = FileLock(self._folder / f"{self._key[:2]}.lock")  # few files, which stay
        try:
            cache_files.make_folder(self._folder)
            with contextlib.suppress(Timeout):
                lock.acquire(timeout=0)
                found = load(self._folder, self._key)  # it may have come just now
                if found is None:
                    self._lock = lock
                else:
                    lock.release()
                return found
            lock.acquire(timeout=_PATIENCE * (time.perf_counter() - self._begin), poll_interval=0.02)
            lock.release()  # if it could not be kept, all that have waited trace at once
        except Timeout:
            log.debug("Another process has not traced %s in time.", self._step.method)
        except (OSError, NotImplementedError) as error:
            log.debug("Files in %s cannot be locked (%s).", self._folder, error)
        return load(self._folder, self._key)

    def forget(self, reason: str) -> None:
        """Remove the graph that was found, which cannot be used."""
        cache_files.drop(path_of(self._folder, self._key), reason)

    def identified(self, joint: JointGraph) -> JointGraph:
        """Return a graph that is kept, with its identity."""
        return replace(joint, identity=self._key)

    def keep(self, joint: JointGraph) -> JointGraph:
        """Keep a graph that was traced, if it may be found again; return it, then with its identity."""
        if not self._key or self._step.has_python_backward:
            return joint
        fields = {name: getattr(joint, name) for name in _FIELDS}
        try:
            kept = kept_graph(joint.module.graph, fields, fingerprint(joint))
        except NotKept as reason:
            log.debug("The graph of %s is not kept: %s.", self._step.method, reason)
            return joint
        store(self._folder, self._key, kept)
        return self.identified(joint)


def rebuilt(kept: KeptGraph, step: StepFunction, *, mode: Any, guards: PythonGuards) -> JointGraph | str:
    """Return the joint graph of a step from what was kept; why it cannot be used, if it is none or another one.

    Args:
        kept: from a file.
        step: the step, which has run once.
        mode: in which its fake tensors live.
        guards: what the step read, which must not change.
    """
    try:
        with private.quick_symbols():
            graph = Rebuilt(kept, mode)
            fields = graph.fields()
            joint = joint_graph_of(graph.module(), {name: fields[name] for name in _FIELDS}, step, guards=guards)
        return joint if fingerprint(joint) == kept.fingerprint else "its graph is another one"
    except Exception as error:  # whatever a content raises that this version does not write
        return f"it is no graph of {step.method}: {error!r}"
