"""Make the values of parameters that have none yet, on the ranks that need them, the same on all.

agree     every rank's tape must make what that of rank 0 makes; it draws from the random states of rank 0
make      a rank makes what it holds
made      for a while a rank has all values, and then none again
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from lightning_pipe.errors import UnsupportedError
from lightning_pipe.strategy.parameters.pending import Pending, call_it, put_off
from lightning_pipe.strategy.parameters.stand_ins import Guarded, occupy
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.start.tape import Tape


def pending_in(parameters: Mapping[str, nn.Parameter]) -> dict[str, Pending]:
    """Return the parameters that have no values yet, by name."""
    return {name: parameter for name, parameter in parameters.items() if isinstance(parameter, Pending)}


def agree(parameters: Mapping[str, nn.Parameter], control: ControlPlane) -> None:
    """Let all ranks make the values that rank 0 would make; on all ranks together.

    Raises:
        UnsupportedError: on every rank, if modules were built differently.
    """
    pending = pending_in(parameters)
    for name, parameter in pending.items():
        call_it(parameter, name)
    tapes = list({id(tape): tape for tape in map(_tape, pending.values())}.values())
    mine = ([*pending], [(tape.fingerprint(), tape.read.hexdigest()) for tape in tapes])
    first, states = control.broadcast((mine, [tape.states() for tape in tapes]), source=0, what="how values are made")
    differing = control.sum(torch.tensor(float(mine != first)), what="whether all ranks have built the same module")
    if differing:
        raise UnsupportedError(
            f"{int(differing)} of {control.ranks} ranks have built another module than rank 0: configure_model (or "
            "what ran inside trainer.init_module) depends on the rank, or reads random numbers into Python. Call "
            "seed_everything(...) before the module is built, on every rank, and do not ask for the rank in it."
        )
    for tape, state in zip(tapes, states, strict=True):
        tape.begin_from(state)


def holders(tensors: Mapping[str, torch.Tensor], control: ControlPlane) -> dict[str, tuple[int, ...]]:
    """Return the ranks that have the values of a parameter or buffer where others have none; on all ranks together.

    Raises:
        UnsupportedError: on every rank, if nobody has the values of one.
    """
    here = [not isinstance(tensor, Guarded) or isinstance(tensor, Pending) for tensor in tensors.values()]
    table = torch.zeros(control.ranks, len(here))
    table[control.rank] = torch.tensor(here, dtype=torch.float32)
    table = control.sum(table, what="which rank has which values")
    found = {name: tuple(table[:, n].nonzero().flatten().tolist()) for n, name in enumerate(tensors)}
    if lost := [name for name, ranks in found.items() if not ranks]:
        raise UnsupportedError(
            f"No rank has the values of {lost[0]} any more (and of {len(lost) - 1} others), because the fit before "
            "this one has failed. Build the module again, and resume from a checkpoint."
        )
    return {name: ranks for name, ranks in found.items() if len(ranks) < control.ranks}


def make(parameters: Iterable[nn.Parameter], *, device: torch.device) -> None:
    """Give parameters that have no values yet theirs, on a device; others stay as they are."""
    for parameter in parameters:
        if isinstance(parameter, Pending):
            occupy(parameter, _value(parameter).to(device))


@contextlib.contextmanager
def made(
    parameters: Mapping[str, nn.Parameter], *, placed: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[None]:
    """Have values on the host of this rank inside, of those parameters that have none yet; afterwards none again.

    Args:
        parameters: by name.
        placed: returns what is kept of a value; None for the value itself.
    """
    pending = pending_in(parameters)
    absences = {name: parameter.absence for name, parameter in pending.items()}
    for parameter in pending.values():
        value = _value(parameter)
        occupy(parameter, value if placed is None else placed(value))
    try:
        yield
    finally:
        for name, absence in absences.items():
            put_off(parameters[name], absence)


def _tape(parameter: Pending) -> Tape:
    tape = parameter.absence.tape
    assert tape is not None, "given by `suspend`"
    return tape


def _value(parameter: Pending) -> torch.Tensor:
    """Return the values of a parameter, with memory of its own."""
    (value,) = _tape(parameter).values([parameter.absence.form])
    has_more = value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if has_more else value
