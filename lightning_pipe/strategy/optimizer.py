"""How does the user's optimizer become that of one rank, and its state that of one device?

The groups stay, with all their options, so learning-rate schedulers work as ever; only parameters that this rank does
not hold leave them. A checkpoint numbers parameters as the whole groups do, so a plain trainer can load it; loading
picks the states of the parameters that are here.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.optim import Optimizer

from lightning_pipe.strategy.control import Control
from lightning_pipe.strategy.weights import Weights


class Groups:
    """The parameter groups of one optimizer, whole by name and narrowed by content.

    Args:
        optimizer: the user's optimizer over the whole module.
        weights: where parameters live.
    """

    def __init__(self, optimizer: Optimizer, weights: Weights) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._order: list[list[torch.Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        self._labels = [group.get("param_names") for group in optimizer.param_groups]

    def narrow(self) -> None:
        """Remove parameters that this rank does not hold, and their state."""
        for group in self._optimizer.param_groups:
            kept = [k for k, parameter in enumerate(group["params"]) if self._here(parameter)]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][k] for k in kept]
            group["params"] = [group["params"][k] for k in kept]
        for parameter in [p for p in self._optimizer.state if isinstance(p, torch.Tensor) and not self._here(p)]:
            del self._optimizer.state[parameter]

    def widen(self) -> None:
        """Put all parameters back into their groups."""
        for group, parameters, labels in zip(self._optimizer.param_groups, self._whole(), self._labels, strict=False):
            group["params"] = list(parameters)
            if labels is not None:
                group["param_names"] = list(labels)

    def parameters(self) -> list[torch.Tensor]:
        """List all parameters, here or not, in the order of the groups."""
        return [parameter for group in self._whole() for parameter in group]

    def gather(self, control: Control) -> dict[str, Any]:
        """Return the state of the whole optimizer on rank 0, as on one device; on other ranks without the states."""
        local = self._optimizer.state_dict()
        number = {id(p): k for k, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"])}
        numbered = set(number.values())
        states: dict[Any, Any] = {key: value for key, value in local["state"].items() if key not in numbered}
        for index, parameter in enumerate(self.parameters()):
            name = self._weights.name_of(parameter)
            own = local["state"].get(number.get(id(parameter)))
            source = self._weights.speaker(name) if name is not None else 0
            state = control.to_first(_on_host(own), source=source, what=f"the optimizer state of {name}")
            if state is not None:
                states[index] = state
        return {**local, "state": states, "param_groups": self._numbered(local["param_groups"])}

    def load(self, whole: dict[str, Any]) -> None:
        """Load the state of a whole optimizer: what belongs to parameters that are here.

        Raises:
            ValueError: from torch, if the groups of the checkpoint are others.
        """
        order = self.parameters()
        numbers = [k for group in whole["param_groups"] for k in group["params"]]
        if len(numbers) != len(order) or len(whole["param_groups"]) != len(self._optimizer.param_groups):
            self._optimizer.load_state_dict(whole)  # raises with torch's own words about the groups
        number_here = {id(p): k for k, p in enumerate(p for g in self._optimizer.param_groups for p in g["params"])}
        place = {n: number_here[id(p)] for n, p in zip(numbers, order, strict=True) if id(p) in number_here}
        groups = [
            {**group, "params": [place[n] for n in group["params"] if n in place]} for group in whole["param_groups"]
        ]
        for group, here in zip(groups, self._optimizer.param_groups, strict=True):
            if "param_names" in here:
                group["param_names"] = here["param_names"]
        known = set(numbers)
        states = {place.get(n, n): state for n, state in whole["state"].items() if n in place or n not in known}
        self._optimizer.load_state_dict({**whole, "state": states, "param_groups": groups})

    def _here(self, parameter: torch.Tensor) -> bool:
        name = self._weights.name_of(parameter)
        return name is None or self._weights.holds(name)

    def _whole(self) -> list[list[torch.Tensor]]:
        """Return the parameters of all groups; groups that were added later (by a callback) have all of them."""
        added = self._optimizer.param_groups[len(self._order) :]
        return [*self._order, *(list(group["params"]) for group in added)]

    def _numbered(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups with the numbers (and names) of all their parameters."""
        first, result = 0, []
        for k, (group, parameters) in enumerate(zip(groups, self._whole(), strict=True)):
            whole = {**group, "params": list(range(first, first + len(parameters)))}
            if "param_names" in group and k < len(self._labels):
                whole["param_names"] = self._labels[k]
            result.append(whole)
            first += len(parameters)
        return result


def _on_host(state: Any) -> Any:
    return apply_to_collection(state, torch.Tensor, lambda tensor: tensor.detach().cpu())
