"""Small optimizers after public packages: wrappers, averages, preconditioners, and some that couple all parameters."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


def stepped(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Yield the parameters that have gradients, with their groups."""
    for group in optimizer.param_groups:
        yield from ((p, group) for p in group["params"] if p.grad is not None)


class Plain(Optimizer):
    """Call the closure, and then `update` every parameter that has a gradient."""

    def __init__(self, parameters: Any, lr: float = 0.01, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for p, group in stepped(self):
            self.update(p, p.grad, group)
        return loss

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        """Do so."""


class Lion(Plain):
    """Signs of interpolated momentum (lion-pytorch)."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * 0.1).add_((0.9 * momentum + 0.1 * grad).sign(), alpha=-group["lr"])
        momentum.lerp_(grad, 0.01)


class Lamb(Plain):
    """Adam with a trust ratio per parameter (torch_optimizer)."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["step"] += 1
        state["m"].lerp_(grad, 0.1)
        state["v"].lerp_(grad.square(), 0.01)
        update = state["m"] / (state["v"].sqrt() + 1e-6)
        p.sub_(update * (p.norm().clamp(max=10) / update.norm().clamp(min=1e-9)) * group["lr"])


class Shampoo(Plain):
    """A preconditioner per small dimension, in lists of the state (torch_optimizer)."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state.setdefault("preconditioners", [torch.eye(size).to(p) * 0.1 for size in p.shape])
        for dim, size in enumerate(p.shape if max(p.shape) < 64 else ()):
            flat = grad.transpose(0, dim).reshape(size, -1)
            state["preconditioners"][dim] += flat @ flat.T
            values, vectors = torch.linalg.eigh(state["preconditioners"][dim])
            root = vectors @ torch.diag(values.clamp(min=1e-9) ** (-1 / (2 * p.ndim))) @ vectors.T
            grad = (root @ flat).reshape(grad.transpose(0, dim).shape).transpose(0, dim)
        p.sub_(grad, alpha=group["lr"])


class ScheduleFree(Plain):
    """Averages of iterates, with modes for training and evaluation (schedulefree)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, k=0, weight_sum=0.0, train_mode=False)

    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        loss = super().step(closure)
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
        return loss

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        z = self.state[p].setdefault("z", p.clone())
        weight = group["lr"] ** 2
        p.lerp_(z, weight / (group["weight_sum"] + weight or 1.0)).sub_(grad, alpha=0.1 * group["lr"])
        z.sub_(grad, alpha=group["lr"])

    @torch.no_grad()
    def switch(self, train: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = train

    def train(self) -> None:
        self.switch(True, 0.1)

    def eval(self) -> None:
        self.switch(False, 1 - 1 / 0.9)


class Chained(Optimizer):
    """Optimizers one after the other, as Muon and AdamW are used together; the state dict is a list."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([{"params": [*g["params"]]} for part in parts for g in part.param_groups], {})
        self.param_groups = [group for part in parts for group in part.param_groups]

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts], "state": {}, "param_groups": []}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class Lookahead(Optimizer):
    """Slow weights in the state of the inner optimizer (timm); the constructor of torch's is not called."""

    def __init__(self, base: Optimizer) -> None:
        for name in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre"):
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group.setdefault("lookahead_step", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self._base.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
        for p, group in stepped(self):
            slow = self._base.state[p].setdefault("slow", p.clone())
            if group["lookahead_step"] % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return self._base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._base.load_state_dict(state_dict)
        self.param_groups = self._base.param_groups


class Wrapper(Optimizer):
    """An optimizer around another one, with the same groups."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for p, _ in stepped(self):
            self.update(p)
        return loss

    def update(self, p: torch.Tensor) -> None:
        """Change a parameter after its step."""


class SlowState(Wrapper):
    """Slow weights in the wrapper's own state, written under numbers beside the inner optimizer's (torch_optimizer)."""

    def update(self, p: torch.Tensor) -> None:
        state = self.state[p]
        state["count"] = state.get("count", 0) + 1
        slow = state.setdefault("slow", p.clone())
        if state["count"] % 2 == 0:
            p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        fast = self.base.state_dict()
        return {"fast": fast, "slow": super().state_dict()["state"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["fast"])
        groups = super().state_dict()["param_groups"]
        super().load_state_dict({"state": state_dict["slow"], "param_groups": groups})
        self.param_groups = self.base.param_groups


class ByOrder(SlowState):
    """The same, with slow weights as a list that is made of the state."""

    def state_dict(self) -> dict[str, Any]:
        slow = [
            self.state[p]["slow"].clone() if self.state[p] else None for g in self.param_groups for p in g["params"]
        ]
        return {
            "fast": self.base.state_dict(),
            "slow": slow,
            "count": max(s.get("count", 0) for s in self.state.values()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["fast"])
        self.param_groups = self.base.param_groups
        for p, slow in zip((p for g in self.param_groups for p in g["params"]), state_dict["slow"], strict=True):
            if slow is not None:
                self.state[p] = {"slow": slow, "count": state_dict["count"]}


class Forgetful(Wrapper):
    """It says nothing of the state of the inner optimizer, so that a resumed run begins without it."""


class CopiedGroups(Optimizer):
    """Groups of its own, copied from those of the inner optimizer, and rates told to these before every step."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__([{**group, "params": [*group["params"]]} for group in base.param_groups], {})
        self.base = base

    def step(self, closure: Any = None) -> Any:
        for own, group in zip(self.param_groups, self.base.param_groups, strict=True):
            group["lr"] = own["lr"]
        return self.base.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "rates": [group["lr"] for group in self.param_groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        for group, rate in zip(self.param_groups, state_dict["rates"], strict=True):
            group["lr"] = rate


class Counting(Wrapper):
    """Scalars of its own: a count of steps that warms rates up, and an average of the loss that scales them."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base)
        self.own = {"steps": 0, "average": torch.ones((), dtype=torch.float64)}

    def step(self, closure: Any = None) -> Any:
        self.own["steps"] += 1
        for group in self.param_groups:
            group["lr"] = 0.05 * min(1.0, self.own["steps"] / 6) * float(self.own["average"])
        loss = super().step(closure)
        self.own["average"] = 0.9 * self.own["average"] + 0.1 * loss.detach()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**self.base.state_dict(), "own": self.own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups, self.own = self.base.param_groups, state_dict["own"]


class InAttributes(Plain):
    """Momentum in a dict of its own, which no state dict has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.momentum: dict[torch.Tensor, torch.Tensor] = {}

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.momentum.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(grad)
        p.sub_(momentum, alpha=group["lr"])


# --- those that no rank of a pipeline can step


class SlowList(Wrapper):
    """Slow weights in a list of its own, which the state dict has."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base)
        self.slow = [p.detach().clone() for group in base.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for p, slow in zip((p for g in self.param_groups for p in g["params"]), self.slow, strict=True):
                if p.grad is not None:
                    p.copy_(slow.lerp_(p, 0.5))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow}


class CountsGroups(Plain):
    """A group counts its steps only where it has gradients."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(grad, alpha=group["lr"])

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in {id(group): group for _, group in stepped(self)}.values():
            group["steps"] = group.get("steps", 0) + 1
        return loss


class Sam(Wrapper):
    """Climb by the norm of all gradients, evaluate again, come back, and step (davda54/sam)."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p, _ in stepped(self)]).norm()
            climbs = [(p, p.grad * (0.5 / norm)) for p, _ in stepped(self)]
            for p, climb in climbs:
                p.add_(climb)
            with torch.enable_grad():
                closure()
            for p, climb in climbs:
                p.sub_(climb)
        self.base.step()
        return loss


class Gathers(Plain):
    """Exchanges gradients with other processes (Muon of its author, for data parallel training)."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        if dist.is_initialized():
            dist.all_reduce(grad)
        p.sub_(grad, alpha=group["lr"])


class Normalised(Wrapper):
    """Divides by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        if gradients := [p.grad for p, _ in stepped(self)]:
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.div_(norm)
        self.base.step()
        return loss


class Prodigy(Plain):
    """One rate for all, from how far all have come (prodigyopt)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0, d=1e-6)

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            numerator = denominator = 0.0
            d = self.param_groups[0]["d"]
            for p, _ in stepped(self):
                state = self.state[p]
                if not state:
                    state.update(start=p.clone(), s=torch.zeros_like(p), v=torch.zeros_like(p))
                numerator += float((p.grad * (state["start"] - p)).sum()) * d
                state["s"].add_(p.grad, alpha=d)
                state["v"].lerp_(p.grad.square(), 0.01)
                denominator += float(state["s"].abs().sum())
            if denominator:
                d = max(d, numerator / denominator)
            for group in self.param_groups:
                group["d"] = d
            for p, group in stepped(self):
                p.sub_(p.grad / (self.state[p]["v"].sqrt() + 1e-8), alpha=d * group["lr"])
        return loss


def muon_and_adamw(module: nn.Module) -> Optimizer:
    matrices = [module.b.weight]
    rest = [p for p in module.parameters() if p is not matrices[0]]
    return Chained(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01))


def around_adam(kind: Callable[[Optimizer], Optimizer]) -> Callable[[nn.Module], Optimizer]:
    return lambda module: kind(torch.optim.Adam(module.parameters(), lr=0.02))


def of_all(kind: Callable[[Iterable[nn.Parameter]], Optimizer], **options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda module: kind(module.parameters(), **options)


TRAINED: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": of_all(torch.optim.AdamW, lr=0.01),
    "Adafactor": of_all(torch.optim.Adafactor, lr=0.05),
    "Muon and AdamW": muon_and_adamw,
    "Lion": of_all(Lion),
    "Lamb": of_all(Lamb),
    "Shampoo": of_all(Shampoo, lr=0.1),
    "ScheduleFree": of_all(ScheduleFree),
    "Lookahead": around_adam(Lookahead),
    "SlowState": around_adam(SlowState),
    "ByOrder": around_adam(ByOrder),
    "Forgetful": around_adam(Forgetful),
    "CopiedGroups": around_adam(CopiedGroups),
    "Counting": around_adam(Counting),
    "InAttributes": of_all(InAttributes),
    "Lookahead of a chain": lambda module: SlowState(muon_and_adamw(module)),
}
REFUSED_ON_RANKS = {
    "ScheduleFree": (TRAINED["ScheduleFree"], "ScheduleFree writes weights in train and eval, "),
    "Lookahead": (TRAINED["Lookahead"], "Lookahead writes weights in step .its constructor does not call that"),
    "Gathers": (of_all(Gathers), "Gathers takes no trial step .* its step exchanges tensors with other ranks"),
}  # with shared state of the optimizer, or by exchanges of their own
REFUSED: dict[str, tuple[Callable[[nn.Module], Optimizer], str]] = {
    "SlowList": (around_adam(SlowList), r"SlowList.state_dict\(\)\['slow'\]\[\d\] differs if other parameters"),
    "CountsGroups": (
        lambda module: CountsGroups([{"params": [p]} for p in module.parameters()]),
        r"CountsGroups.state_dict\(\)\['param_groups'\]\[\d\] differs if other parameters",
    ),
    "Sam": (around_adam(Sam), "Sam runs its closure 2 times in a step"),
    "Normalised": (around_adam(Normalised), "Normalised steps a parameter differently if others"),
    "Prodigy": (of_all(Prodigy), "Prodigy steps a parameter differently if others"),
    "LBFGS": (of_all(torch.optim.LBFGS), "LBFGS"),
}
