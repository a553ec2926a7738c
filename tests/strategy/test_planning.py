"""Which plans of the user are taken."""

from __future__ import annotations

import pytest

from lightning_pipe.config import DappleConfig
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.serial import save_yaml
from lightning_pipe.strategy.plans.planning import given_plan


@pytest.mark.parametrize("keys", [{}, {"recompute": ("blocks.3",)}, {"offload": ("gelu_3",)}])
def test_a_plan_of_the_user_is_taken_as_it_is(tmp_path, keys):
    plan = Plan((StagePlan("", (0,)), StagePlan("h", (1,), **keys)), 2)
    save_yaml(plan, tmp_path / "plan.yaml")
    assert given_plan(DappleConfig(plan=str(tmp_path / "plan.yaml"))) == plan
