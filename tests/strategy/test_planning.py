"""Which plans of the user are taken."""

from __future__ import annotations

import pytest

from lightning_pipe.config import DappleConfig
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.serial import save_yaml
from lightning_pipe.errors import PlanError
from lightning_pipe.strategy.planning import given_plan


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"recompute": ("blocks.3",)}, "`recompute`"),
        ({"offload": ("gelu_3",)}, "`offload`"),
        ({"recompute": ("blocks.3",), "offload": ("gelu",)}, "`recompute` and `offload`"),
    ],
)
def test_a_plan_that_does_not_keep_all_is_refused_until_it_can_be_run(tmp_path, keys, named):
    path = tmp_path / "plan.yaml"
    save_yaml(Plan((StagePlan("", (0,)), StagePlan("h", (1,), **keys)), 2), path)
    with pytest.raises(PlanError, match=f"Stage 1 of the plan .* has {named}, which can be planned"):
        given_plan(DappleConfig(plan=str(path)))


def test_a_plan_that_keeps_all_is_taken(tmp_path):
    plan = Plan((StagePlan("", (0,)), StagePlan("h", (1,))), 2)
    save_yaml(plan, tmp_path / "plan.yaml")
    assert given_plan(DappleConfig(plan=str(tmp_path / "plan.yaml"))) == plan
