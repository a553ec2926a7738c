"""Agreement of ranks: everything that must be equal is compared before the first transfer.

Ranks that disagree about the plan, the graph or the program would hang, or train something else; so each says a short
text (a hash, a version) under a name, and all of them raise the same error if one differs.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lightning_pipe.errors import PipelineError


def agree(what: Mapping[str, str]) -> None:
    """Compare texts over all ranks of the default process group, together with the versions of Python and torch.

    Args:
        what: name of a thing -> its hash or text, e.g. `{"plan": "5f2c…", "graph": "9a01…"}`.

    Raises:
        PipelineError: on every rank, if something differs on some ranks; it says what, and where.
    """
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    everyone: list[dict[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {**versions, **what})
    complaints = disagreements([said for said in everyone if said is not None])
    if complaints:
        raise PipelineError(
            "The ranks do not agree: " + "; ".join(complaints) + ". All ranks must run the same code on the same "
            "versions with the same configuration; what is random or read from the host must not decide about them."
        )


def disagreements(said: Sequence[Mapping[str, str]]) -> list[str]:
    """Return, for everything that differs, which ranks say what; `said` has one entry per rank."""
    names = dict.fromkeys(name for texts in said for name in texts)
    return [f"{name} is {_spread(name, said)}" for name in names if len({texts.get(name) for texts in said}) > 1]


def _spread(name: str, said: Sequence[Mapping[str, str]]) -> str:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, texts in enumerate(said):
        ranks[texts.get(name, "missing")].append(rank)
    return ", ".join(f"{text} on {_ranks(who)}" for text, who in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spelled = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return ("rank " if len(ranks) == 1 else "ranks ") + spelled
