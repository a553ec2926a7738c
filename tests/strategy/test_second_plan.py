"""A plan is changed while training goes on: what is trained is what one device trains, whatever is taken then."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipe import DappleStrategy
from lightning_pipe.core.plan import Plan
from lightning_pipe.planner.evaluation.evaluate import judge
from lightning_pipe.strategy.plans import second_plan
from lightning_pipe.strategy.plans.planning import Planned, propose
from ranks.world import World
from strategy.fits import Case, Fitted, assert_same, dapple, fit, fit_as_pipeline, make_trainer


@dataclass(frozen=True)
class Change:
    """A fit whose plan is changed after its first steps."""

    case: Case
    then: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    back: bool = False


def cut_later(planned: Planned) -> Plan:
    """Return the plan with half of the second stage in the first."""
    (cut,), nodes, (first, second) = planned.cuts, planned.problem.graph.nodes, planned.plan.stages
    return replace(planned.plan, stages=(first, replace(second, at=nodes[(cut + len(nodes)) // 2].name)))


@contextlib.contextmanager
def changing(then: dict[str, Any], *, back: bool = False) -> Iterator[list[Plan]]:
    """Let a plan with these options, or one that is cut later, be taken after the first steps; yield rank 0's plans."""
    seen: list[Planned] = []
    plans: list[Plan] = []

    def choice(self: second_plan.SecondPlan, planned: Planned, comparison: object, **_: object) -> Planned | None:
        seen.append(planned)
        plans.append(planned.plan)
        if len(seen) > 1:
            self.is_settled = True
            return seen[0] if back else None
        if not then:
            judged = [judge(cut_later(planned), planned.problem)]
        else:
            wanted = replace(planned.wanted, **{"layout": None, "microbatches": None, "warmup": None, **then})
            judged = propose(planned.problem, wanted, given=None, may_offload=planned.may_offload)
        return replace(planned, plan=judged[0].plan, cuts=judged[0].cuts, judged=tuple(judged))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_plan.SecondPlan, "choice", choice)
        yield plans


def strategy_of(options: dict[str, Any]) -> DappleStrategy:
    """Return a strategy that records one step, with counted costs."""
    trace = f"{tempfile.mkdtemp()}/trace.json"
    return dapple(timeline_steps=1, trace=trace, **options)


def changed(change: Change) -> tuple[Fitted, list[Plan], Plan | None]:
    """Fit with a change of plans; return what is left, the plans, and the last one."""
    strategy = strategy_of(change.options)
    with changing(change.then, back=change.back) as plans:
        found = fit(change.case, strategy)
    return found, plans, strategy.plan


def close(found: Fitted, expected: Fitted) -> None:
    assert_same(found, expected, rtol=1e-9)


DATA = {"layout": "2", "microbatches": 2}
PIPE = {"layout": "1-1", "microbatches": 4}
GPIPE = {"layout": "1-1", "microbatches": 2, "schedule": "gpipe"}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("name", "before", "then", "back"),
    [
        pytest.param("gpt_tied", DATA, PIPE, False, marks=pytest.mark.slow),
        ("gpt_tied", {**DATA, "shard_optimizer": "on"}, PIPE, True),
        ("dict_batch", {**DATA, "shard_optimizer": "on"}, PIPE, False),
        pytest.param("seq2seq", PIPE, GPIPE, False, marks=pytest.mark.slow),
        ("dict_batch", PIPE, GPIPE, False),
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


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("back", [False, True])
def test_buffers_move_with_their_stages(back):
    case = Case("resnet_batchnorm", epochs=4)
    plain = World(2).run(fit_as_pipeline, replace(case, options=PIPE))[0]
    (found, plans, last), (other, _, _) = World(2).run(changed, Change(case, {}, PIPE, back))
    close(found, plain)
    close(other, plain)
    assert plans[0].stages[1].at != plans[1].stages[1].at and last == plans[not back]


class Net(pl.LightningModule):
    """Three layers; with Adam, whose state has to move where parameters do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.double()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) - batch.flip(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Hooked(Net):
    """Gradients are summed after every batch, where a hook changes them, also those that are accumulated further."""

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(lambda g: g / (g.norm() + 1))


class Keeping(Net):
    """Gradients of two optimizer steps are added up, by a hook of the user's."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Sparse(Net):
    """A table with sparse gradients, and an optimizer that takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8, sparse=True).double()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        rows = self.table((batch[:, 0] > 0).long())
        return (self.net(batch) * rows).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Averaging(Net):
    """A teacher that a hook averages, whose layers are those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) - self.teacher(batch.flip(1))).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


KINDS = {"hooked": Hooked, "keeping": Keeping, "sparse": Sparse, "averaging": Averaging, "plain": Net}


class Stream(IterableDataset):
    """Samples without a number, of which a batch is loaded ahead."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.rows


def trained(kind: str, options: dict[str, Any] | None, then: dict[str, Any], *, stream: bool = False, **trainer: Any):
    """Train one of these modules; return its parameters, and the plans that were taken."""
    torch.manual_seed(1)
    module, data = KINDS[kind](), torch.randn(64, 8, dtype=torch.float64)
    data = Stream(data) if stream else data
    strategy: Any = "auto" if options is None else strategy_of(options)
    with changing(then) as plans:
        make_trainer(strategy, max_epochs=1, **trainer).fit(module, DataLoader(data, batch_size=8))
    return [parameter.detach().clone() for parameter in module.parameters()], plans


@pytest.mark.parametrize(
    ("kind", "trainer", "changes"), [("hooked", {"accumulate_grad_batches": 3}, True), ("keeping", {}, False)]
)
def test_gradients_that_are_added_to_stay_where_they_are(kind, trainer, changes):
    expected, _ = trained(kind, None, {}, **trainer)
    then = {"layout": "1-1", "microbatches": 2, "schedule": "gpipe"}
    ran = World(2).run(partial(trained, **trainer), kind, DATA, then)
    for found, _ in ran:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert len(ran[0][1]) == (2 if changes else 0)


def changed_exactly(change: Change) -> tuple[Fitted, list[Plan], Plan | None]:
    """Fit with deterministic algorithms, for which Lightning sets a switch of the process."""
    try:
        return changed(replace(change, case=replace(change.case, trainer={"deterministic": True})))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_run_that_is_to_be_the_same_every_time_keeps_its_plan():
    (_, plans, last), _ = World(2).run(changed_exactly, Change(Case("dict_batch"), PIPE, DATA))
    assert plans == [] and last is not None and last.layout.stages == ((0, 1),)


@pytest.mark.sampled
@pytest.mark.parametrize("before", [DATA, {"layout": "1-1", "microbatches": 4, "schedule": "zb_v"}], ids=["data", "v"])
@pytest.mark.parametrize(("kind", "stream"), [("sparse", False), ("averaging", False), ("plain", True)])
def test_what_is_unusual_goes_on_too(kind, stream, before):
    expected, _ = trained(kind, None, {}, stream=stream)
    ran = World(2).run(partial(trained, stream=stream), kind, before, {"layout": "1-1", "microbatches": 2})
    for found, _ in ran:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert len(ran[0][1]) == 2


class Normalised(Net):
    """Batch normalisation in both stages, which changes buffers while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())), nn.Linear(8, 8)
        )
        self.double()


def averaged(then: dict[str, Any] | None) -> list[torch.Tensor]:
    """Train with averages of parameters and buffers, which are what the module has after it; change plans, or not."""
    torch.manual_seed(1)
    module, data = Normalised(), torch.randn(64, 8, dtype=torch.float64)
    average = EMAWeightAveraging(decay=0.5, use_buffers=True)
    with contextlib.nullcontext() if then is None else changing(then):
        trainer = make_trainer(strategy_of({**PIPE, "schedule": "gpipe"}), max_epochs=2, callbacks=[average])
        trainer.fit(module, DataLoader(data, batch_size=8))
    return [tensor.detach().clone() for tensor in module.state_dict().values()]


def test_averages_move_with_their_stages():
    expected = World(2).run(averaged, None)
    torch.testing.assert_close(World(2).run(averaged, {}), expected, rtol=1e-9, atol=1e-12)
