"""Law of stage programs: whatever a function reads is made, received or held before it runs.

A forward reads nothing of the head, which runs when all forwards have run. A stage that breaks the law would end in a
KeyError when it runs, so it is no stage: the step takes its next route.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from lightning_pipe.capture.steps.stage_program import Half, Split, StageProgram
from lightning_pipe.core.program import Pass
from lightning_pipe.errors import BrokenRouteError


def closed(split: Split) -> Split:
    """Return stages that obey the law.

    Raises:
        BrokenRouteError: if a stage reads what nothing gives it.
    """
    if found := open_inputs(split):
        raise BrokenRouteError(f"its stages are not closed ({found}); please report this as a bug")
    return split


def open_inputs(split: Split) -> str:
    """Name the first values that a stage reads and nothing gives it by then; "" if all stages are closed."""
    return next((found for program in split.stages for found in _OpenReads(program).found()), "")


class _OpenReads:
    """What a stage reads and nothing gives it by then.

    Args:
        program: the stage.
    """

    def __init__(self, program: StageProgram) -> None:
        self._program = program
        self._held = {*program.parameters, *program.buffers, *program.leaves}

    def found(self) -> Iterator[str]:
        """Yield it in words, in the order in which a stage runs."""
        program, head = self._program, None if self._program.head is None else self._program.head.half
        self._held.update(_names(program.receives, "F"))
        yield from self._run("F", program.forward)
        yield from self._read("its buffers", program.mutations.values())
        yield from self._read("a message", _names(program.sends, "F"))
        self._held.update(program.tangents)
        yield from self._run("the head", head)
        yield from self._read("a result", program.results)
        self._held.update(_names(program.receives, "B"))
        yield from self._run("I", program.input_grad)
        yield from self._run("W", program.weight_grad)
        yield from self._read("a message", _names(program.sends, "B"))
        yield from self._read("a gradient", program.gradients)

    def _run(self, what: str, half: Half | None) -> Iterator[str]:
        if half is not None:
            yield from self._read(what, half.inputs)
            self._held.update(half.outputs)

    def _read(self, what: str, names: Iterable[str]) -> Iterator[str]:
        if absent := [name for name in names if name not in self._held]:
            yield f"stage {self._program.stage}: {what} reads {', '.join(absent)}"


def _names(edges: Mapping[tuple[Pass, int], tuple[str, ...]], way: Pass) -> list[str]:
    return [name for (direction, _), names in edges.items() if direction == way for name in names]
