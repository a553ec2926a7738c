"""The step of the command line: what a model or a published profile becomes."""

from __future__ import annotations

from typing import NamedTuple

from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile


class PricedStep(NamedTuple):
    """A graph, its costs, and how much is in a batch.

    Attributes:
        graph: the step.
        profile: seconds of its operations.
        samples: of a batch.
        tokens: of a sample; 0 if it is not known.
        module: class of the module, or the published profile.
        parameters: number of its parameters; 0 if it is not known.
    """

    graph: Graph
    profile: Profile
    samples: int
    tokens: int = 0
    module: str = ""
    parameters: int = 0
