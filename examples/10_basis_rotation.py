"""Train without a flush, by an optimizer that answers to late gradients: Adam in a rotated basis.

    python examples/10_basis_rotation.py

With `versions="pipedream"` no rank waits for the last backward, and gradients of the first stage are one update late.
Such delays harm Adam less where the axes of its second moments are those of the loss: basis rotation (Jung, Shin, Lee,
ICML 2026, arXiv 2602.03515). The same training then runs with a flush and on one device, to compare the loss.
For real size: more stages, which are later by more updates, and `docs/weights.md` for what each policy costs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import DappleStrategy


class BasisRotation(torch.optim.Optimizer):
    """AdamW whose second moments of a matrix W with gradient G are kept in the eigenbasis of its gradients.

        L <- c L + (1 - c) G G^T       R <- c R + (1 - c) G^T G       c = beta2
        U <- qr(L U)                   V <- qr(R V)                   every few steps; at first eigenvectors
        M <- beta1 M + (1 - beta1) G   v <- beta2 v + (1 - beta2) (U^T G V)^2
        W <- (1 - lr decay) W - lr / (1 - beta1^t) U ((U^T M V) / (sqrt(v / (1 - beta2^t)) + eps)) V^T

    Columns of U and V are ordered by falling diagonals of U^T L U and V^T R V before each qr, and v with them. Tensors
    of other dimensions have neither U nor V, which makes this AdamW; eps stands where torch's AdamW has it.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: of first and second moments; the second is that of L and R too.
        eps: added to the root of second moments.
        weight_decay: decoupled from the gradient.
        every: steps from one basis to the next.
        largest_side: rows or columns up to which a side of a matrix has a basis: L and U take twice its square.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        every: int = 10,
        largest_side: int = 1024,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "every": every, "largest_side": largest_side})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what the closure returns."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        state["step"] += 1
        for side in range(2) if parameter.ndim == 2 else ():
            if parameter.shape[side] <= group["largest_side"]:
                _update_basis(state, gradient, side, beta2, is_due=(state["step"] - 1) % group["every"] == 0)
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(_rotated(gradient, state).square(), 1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt()
        direction = _rotated(state["exp_avg"], state) / (root + group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        step_size = group["lr"] / (1 - beta1 ** state["step"])
        parameter.sub_(_rotated(direction, state, back=True), alpha=step_size)


def _update_basis(state: dict[str, Any], gradient: torch.Tensor, side: int, beta: float, *, is_due: bool) -> None:
    """Add a gradient to the covariance of its rows (side 0) or columns (side 1), and make the next basis of it."""
    covariance, basis = f"covariance_{side}", f"basis_{side}"
    rows = gradient.T if side else gradient
    state.setdefault(covariance, rows.new_zeros(len(rows), len(rows))).lerp_(rows @ rows.T, 1 - beta)
    if basis not in state:
        state[basis] = torch.linalg.eigh(state[covariance]).eigenvectors.flip(1)  # eigh's values rise
    elif is_due:
        spread = state[covariance] @ state[basis]
        order = (state[basis] * spread).sum(0).argsort(descending=True)
        state["exp_avg_sq"] = state["exp_avg_sq"].index_select(side, order)
        state[basis] = torch.linalg.qr(spread[:, order]).Q


def _rotated(matrix: torch.Tensor, state: dict[str, Any], *, back: bool = False) -> torch.Tensor:
    """Return U^T matrix V, or U matrix V^T on the way back."""
    if (left := state.get("basis_0")) is not None:
        matrix = (left if back else left.T) @ matrix
    if (right := state.get("basis_1")) is not None:
        matrix = matrix @ (right.T if back else right)
    return matrix


class Student(pl.LightningModule):
    """Learn what a network with other weights gives."""

    def __init__(self, width: int = 16, depth: int = 4):
        super().__init__()
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.layers = nn.Sequential(*layers, nn.Linear(width, width)).double()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return BasisRotation(self.parameters(), lr=1e-2)


def train(strategy: str | Strategy, devices: int) -> pl.Trainer:
    pl.seed_everything(0)
    inputs = torch.randn(12800, 16, dtype=torch.float64)
    with torch.no_grad():
        targets = 4 * Student().layers(inputs)
    trainer = pl.Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(Student(), DataLoader(TensorDataset(inputs, targets), batch_size=128))
    return trainer


def main() -> None:
    halves = {"layout": "1-1", "microbatches": 4, "planner": "uniform"}
    never_flushed = train(DappleStrategy(versions="pipedream", **halves), devices=2)
    flushed = train(DappleStrategy(**halves), devices=2)
    if flushed.is_global_zero:
        loss = float(never_flushed.callback_metrics["loss"])
        print(f"trained {flushed.global_step} steps, never flushed: {loss:.7f}; now on one device")
        losses = [float(trainer.callback_metrics["loss"]) for trainer in (train("auto", devices=1), flushed)]
        print("one device: {:.7f}, pipeline: {:.7f}".format(*losses))
        if abs(losses[0] - losses[1]) > 1e-6:
            raise SystemExit("The losses differ.")


if __name__ == "__main__":
    main()
