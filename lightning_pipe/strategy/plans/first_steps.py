"""First steps of a fit: recorded, compared with their prediction; where that was wrong, a reason for another plan."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lightning_pipe.config import DappleConfig
from lightning_pipe.lightning_names import pl, rank_zero_info, rank_zero_warn
from lightning_pipe.report import Comparison, comparison_table
from lightning_pipe.strategy.pipeline import Pipeline
from lightning_pipe.strategy.plans.plan_report import findings, write_files
from lightning_pipe.strategy.plans.planning import Planned
from lightning_pipe.strategy.plans.recording import Recorded, Recording
from lightning_pipe.strategy.plans.second_plan import SecondPlan
from lightning_pipe.strategy.plans.stale_times import forget_stale_times
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.steps.step_calls import StepRequest


class FirstSteps:
    """The first steps of one rank.

    Args:
        config: how many are recorded, and what is done with them.
        pipeline: that runs them.
        module: that is trained.
        control: to the other ranks.
        device: of this rank.
        optimizers: of the trainer.
        may_change: whether another plan may be taken.

    Attributes:
        recording: what the next step is recorded in; None once enough is recorded.
        comparison: of the last ones that could be compared with what was predicted; None elsewhere than on rank 0, and
            before it is known.
    """

    def __init__(
        self,
        config: DappleConfig,
        *,
        pipeline: Pipeline,
        module: pl.LightningModule,
        control: ControlPlane,
        device: torch.device,
        optimizers: Sequence[Optimizer],
        may_change: bool,
    ) -> None:
        self._config, self._pipeline, self._module, self._control = config, pipeline, module, control
        self._device, self._optimizers = device, optimizers
        self._second = SecondPlan() if may_change else None
        self.recording: Recording | None = self._begun()
        self.comparison: Comparison | None = None
        self._told: Comparison | None = None  # of those that were told of last

    @property
    def are_over(self) -> bool:
        """Return whether enough is recorded, and nothing was said of it."""
        return self.recording is not None and not self.recording.active

    @property
    def may_change_plan(self) -> bool:
        """Return whether another plan may be taken; the same on all ranks."""
        return self._second is not None

    def tell(self) -> Recorded | None:
        """Compare what was recorded with what was predicted, and say it; on all ranks together.

        Returns:
            What was recorded, on rank 0; None elsewhere, and if nothing was since the last call.
        """
        recording, self.recording, self._told = self.recording, None, None
        if recording is None:
            return None
        recorded = recording.finish(self._control, host=socket.gethostname())
        planned = self._pipeline.proposal
        if recorded is None or planned is None:
            return None
        found = findings(planned, recorded)
        if found is not None:
            self.comparison = self._told = found.comparison
            rank_zero_info(comparison_table(found.comparison, brief=True, is_disturbed=planned.is_disturbed))
            forget_stale_times(found.comparison, cache=self._config.cache_dir, device=self._device)
        write_files(self._config, planned, recorded, found, module=self._module)
        return recorded

    def change_plan(self, call: StepRequest, *, loading: Sequence[int], steps: float, change_s: float) -> bool:
        """Take another plan, if what was told shows a better one; on all ranks together.

        Args:
            call: the step that comes next.
            loading: ranks that load batches.
            steps: that are left.
            change_s: seconds that taking another plan may need.

        Returns:
            Whether another one was taken, whose first steps are recorded then.
        """
        assert self._second is not None, "asked before"
        second = self._second
        planned, told = self._pipeline.proposal, self._told
        other: Planned | None = None

        def choose() -> None:
            nonlocal other
            if planned is None:
                return
            try:
                other = second.choice(planned, told, loading=loading, steps=steps, change_s=change_s)
            except Exception as error:  # for which nobody's training should end
                rank_zero_warn(f"Planning again failed, so the plan stays: {type(error).__name__}: {error}")

        self._control.agreed(choose, source=0, what="whether the plan stays")
        if not self._pipeline.take(other, call):
            return False
        if self._control.broadcast(second.is_settled, source=0, what="whether the plan stays now"):
            self._second = None
        else:
            self.recording = self._begun()
        return True

    def _begun(self) -> Recording:
        config, device = self._config, self._device
        wants_memory = config.measure_memory or config.report is not None or device.type == "cuda"
        steps = config.timeline_steps
        return Recording(steps, wants_memory=wants_memory, device=device, optimizers=self._optimizers)
