"""A plan is changed while training goes on: what is trained is what one device trains, whatever is taken then."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lightning_pipe.core.plan import Plan
from lightning_pipe.strategy.plans import second_plan
from lightning_pipe.strategy.plans.planning import Planned, propose
from lightning_pipe.strategy.strategy import DappleStrategy
from ranks.world import World
from strategy.fits import Case, Fitted, assert_same, fit, fit_as_pipeline


@dataclass(frozen=True)
class Change:
    """A fit whose plan is changed after its first steps."""

    case: Case
    then: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    back: bool = False


def changed(change: Change) -> tuple[Fitted, list[Plan], Plan | None]:
    """Fit, and take another plan after the first steps whatever they took; return what is left, and the plans."""
    seen: list[Planned] = []

    def choice(self: second_plan.SecondPlan, planned: Planned, comparison: object, **_: object) -> Planned | None:
        seen.append(planned)
        if len(seen) > 1:
            self.is_settled = True
            return seen[0] if change.back else None
        wanted = replace(planned.wanted, **{"layout": None, "microbatches": None, **change.then})
        judged = propose(planned.problem, wanted, given=None, may_offload=planned.may_offload)
        return replace(planned, plan=judged[0].plan, cuts=judged[0].cuts, judged=tuple(judged))

    strategy = DappleStrategy(**{"timeline_steps": 1, "planner": "uniform", **change.options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_plan.SecondPlan, "choice", choice)
        found = fit(change.case, strategy)
    return found, [planned.plan for planned in seen], strategy.plan


def close(found: Fitted, expected: Fitted) -> None:
    assert_same(found, expected, rtol=1e-9)


DATA = {"layout": "2", "microbatches": 2}
PIPE = {"layout": "1-1", "microbatches": 4}


@pytest.mark.parametrize(
    ("name", "before", "then", "back"),
    [
        ("gpt_tied", DATA, PIPE, False),
        ("gpt_tied", {**DATA, "shard_optimizer": "on"}, PIPE, True),
        ("seq2seq", PIPE, {"layout": "1-1", "microbatches": 2, "schedule": "gpipe"}, False),
        ("parameter_groups", {**PIPE, "capture": "replay"}, {**PIPE, "schedule": "gpipe"}, True),
    ],
)
def test_training_goes_on_as_on_one_device(name, before, then, back):
    case = Case(name, epochs=4, trainer={"gradient_clip_val": 0.5})
    expected = fit(case)
    (found, plans, last), (other, _, _) = World(2).run(changed, Change(case, then, before, back))
    close(found, expected)
    close(other, expected)
    first, second = plans
    assert first != second and last == (first if back else second)


def test_three_ranks_deal_the_stages_out_anew():
    case = Case("dict_batch", epochs=4, trainer={"accumulate_grad_batches": 2})
    change = Change(case, {"layout": "1-1-1", "microbatches": 4}, {"layout": "2-1", "microbatches": 2})
    for found, _, plan in World(3).run(changed, change):
        close(found, fit(case))
        assert plan.layout.stages == ((0,), (1,), (2,))


@pytest.mark.parametrize("then", [DATA, {"layout": "1-1", "microbatches": 2}])
def test_batches_whose_samples_are_mixed_are_cut_as_before(then):
    """Batch normalisation takes its statistics of micro-batches: other ones would train another model."""
    case = Case("resnet_batchnorm", epochs=2)
    (_, _, plan), _ = World(2).run(changed, Change(case, then, PIPE))
    assert plan.layout.stages == ((0,), (1,)) and plan.microbatches == 4


def test_a_stage_with_other_buffers_goes_on_with_them():
    case = Case("resnet_batchnorm", epochs=3)
    plain = World(2).run(fit_as_pipeline, replace(case, options=PIPE))[0]
    change = Change(case, {**PIPE, "planner": "auto", "schedule": "gpipe"}, {**PIPE, "schedule": "gpipe"})
    for found, plans, _ in World(2).run(changed, change):
        close(found, plain)
        assert not plans or plans[0].stages[1].at != plans[1].stages[1].at
