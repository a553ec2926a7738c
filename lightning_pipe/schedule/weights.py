"""Policies of weight versions: how far forwards run ahead, which weights computes read, and what that promises.

    policy      ahead of stage s of p    F reads               I and W read        versions that a rank holds at once
    stale       p - 1 - s                those of its moment   those of theirs     1
    pipedream   p - 1 - s                those of its moment   those that F read   1 + ceil(ahead / T)
    2bw         p - 1 - s, at most T     one for the batch     those that F read   2
    pipedream_vertical   p - 1 - s       those of its entry    those that F read   1 + ceil(ahead of stage 0 / T)
    spectrain   p - 1 - s                predicted             predicted           1, and 1 predicted
    xpipe       p - 1 - s                one predicted for     one predicted for   1, and 2 predicted
                                         the batch             the batch
    pipemare    2 (p - 1 - s) + 1        those of its moment   corrected           1, the discrepancy, 1 corrected
    pb          2 (p - 1 - s)            those of its moment   those of theirs     1
    pb_lwpv     2 (p - 1 - s)            predicted             those of theirs     1, and 1 predicted
    pb_lwpd     as pb_lwpv, from the difference of weights instead of the optimizer's state
    pb_sc       as pb, with spikes of the momentum compensated; pb_lwpv_sc is both
    timeprest   p - 1 - s                those of its moment   those of theirs     1

Legend: T micro-batches a batch. The optimizer steps at the end of every round, on every rank.

    pipedream   Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), 3.3
    2bw         Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021), 3.1
    spectrain   Chen, Yang, Cheng, "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU
                Platform" (arXiv 1809.02839, 2018)
    xpipe       Guan et al., "XPipe: Efficient Pipeline Model Parallelism for Multi-GPU DNN Training" (arXiv 1911.04610)
    pb          Kosson et al., "Pipelined Backpropagation at Scale" (MLSys 2021): spike compensation, and linear weight
                prediction
    pipemare    Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training" (MLSys 2021), section 3
    timeprest   Dutta, Chaki, De, "TiMePReSt: Time and Memory Efficient Pipeline Parallel DNN Training with Removed
                Staleness" (arXiv 2410.14312, 2024): one backward per batch with the newest weights. Backwards of its
                micro-batches read one version and their gradients are added, so they run as soon as they can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_pipe.core.program import Layout, Order, Seam
from lightning_pipe.schedule.rolling import rolling, seam_of

Promise = Literal["", "micro-batch", "micro-batch on all stages", "batch", "pass"]
Form = Literal["velocity", "difference"]
Corrected = Literal["", "discrepancy", "spike"]
Rate = Literal["", "annealed"]


@dataclass(frozen=True)
class WeightPolicy:
    """A policy as data.

    Attributes:
        depth: how many micro-batches forwards are ahead, by the number of stages behind.
        work: codes of the own work that chooses weights (`core.versions`).
        promise: what reads one version: F, I and W of a "micro-batch", or those on all stages; those of a whole
            "batch", on every stage; on each stage F of a batch, and I and W of a batch (a "pass"); or nothing.
        live: the most versions that a rank holds at once, by how far it is ahead and the micro-batches of a batch.
        within_batch: whether forwards are ahead by one batch at most.
        horizons: by stage, number of stages and micro-batches of a batch: how many updates ahead the weights are
            predicted that F reads, and those that I and W read.
        prediction: from the optimizer's state, where it has a velocity ("velocity"), or from the last update.
        predicted: the most predictions, or corrected weights, that a rank holds at once; they are part of `live`.
        correction: of the "discrepancy" of weights (those that I and W read), or of the "spike" of a late gradient (in
            the optimizer's step), by `runtime.weights.corrections`.
        rate: whether the learning rate of a stage is reduced by its delay, less and less ("annealed").
    """

    depth: Callable[[int], int]
    work: tuple[str, ...] = ()
    promise: Promise = ""
    live: Callable[[int, int], int] = lambda ahead, batch: 1
    within_batch: bool = False
    horizons: Callable[[int, int, int], tuple[int, int]] | None = None
    prediction: Form = "velocity"
    predicted: int = 0
    correction: Corrected = ""
    rate: Rate = ""

    @property
    def scratch(self) -> int:
        """Return the copies of its parameters that a rank has beside versions that a step copies."""
        keeps_difference = self.correction == "discrepancy" or (self.prediction == "difference" and self.predicted > 0)
        return self.predicted + keeps_difference

    def horizons_of(self, stage: int, stages: int, batch: int) -> tuple[int, int]:
        """Return how many updates ahead F of a stage reads, and I and W; -1 for weights that are corrected."""
        if self.horizons is not None:
            return self.horizons(stage, stages, batch)
        return 0, -1 if self.correction == "discrepancy" else 0

    @property
    def is_corrected(self) -> bool:
        """Return whether something has to be done about the optimizer's step."""
        return bool(self.correction or self.rate)

    @property
    def is_alike_on_stages(self) -> bool:
        """Return whether all stages read the same version, so that they may share a parameter."""
        return self.promise in ("batch", "micro-batch on all stages")

    @property
    def keeps_entries(self) -> bool:
        """Return whether versions live from a micro-batch's entry at stage 0, however late its forward is."""
        return "PINENTRY" in self.work

    @property
    def predicts_once(self) -> bool:
        """Return whether all micro-batches of a batch read one prediction."""
        return self.horizons is not None and self.promise == "pass"

    @property
    def reads_twice(self) -> bool:
        """Return whether I and W of a micro-batch may read other weights than its F."""
        return self.promise in ("", "pass")

    @property
    def counts_updates(self) -> bool:
        """Return whether what is read, or corrected, depends on how many updates a micro-batch is under way."""
        return self.within_batch or self.horizons is not None or self.is_corrected

    def mean_delay(self, layout: Layout, batch: int, stage: int) -> float:
        """Return the mean number of updates between a forward of a stage and the step that takes its gradient."""
        return self.ahead(layout, batch)[stage] / batch

    def ahead(self, layout: Layout, batch: int) -> tuple[int, ...]:
        """Return by stage how many micro-batches forwards are ahead of backwards."""
        depths = [self.depth(behind) for behind in reversed(range(len(layout.stages)))]
        return tuple(min(depth, batch) if self.within_batch else depth for depth in depths)

    def lives(self, layout: Layout, batch: int) -> tuple[int, ...]:
        """Return by stage the most versions that a rank holds at once, predictions too."""
        ahead = self.ahead(layout, batch)
        return tuple(self.live(ahead[0] if self.keeps_entries else own, batch) for own in ahead)

    def seam(self, layout: Layout, batch: int, *, enters: Sequence[int] = (), following: Sequence[int] = ()) -> Seam:
        """Return the seam of a round.

        Args:
            layout: one stage per rank, with any replicas.
            batch: micro-batches of its batch.
            enters: forwards of each stage that ran in earlier rounds; () if nothing is in flight.
            following: micro-batches of each batch that is known to follow.
        """
        known = sum(following[:1] if self.within_batch else following)
        enters = enters or (0,) * len(layout.stages)
        seam = seam_of(self.ahead(layout, batch), batch=batch, enters=enters, following=known, work=self.work)
        is_flushed = not any((*seam.enters, *seam.leaves))  # then there is one version, and no delay to predict
        return replace(seam, work=()) if is_flushed else seam

    def middle(self, layout: Layout, sizes: tuple[int, ...]) -> tuple[Seam, tuple[int, ...]]:
        """Return the seam of a round in the middle of many, and the samples of its micro-batches.

        Args:
            layout: one stage per rank, with any replicas.
            sizes: samples of the micro-batches of a batch; all batches are alike.
        """
        ahead = self.ahead(layout, len(sizes))
        batches = 1 + -(-max(ahead) // len(sizes))
        seam = self.seam(layout, len(sizes), enters=ahead, following=(len(sizes),) * (batches - 1))
        return seam, (sizes * batches)[: seam.batch + max(seam.leaves)]

    def order(self, layout: Layout, seam: Seam) -> Order:
        """Return the order of a round."""
        return rolling(layout, seam, self.ahead(layout, seam.batch))


def until_first_backward(stage: int, stages: int, batch: int) -> tuple[int, int]:
    """Return how many updates a stage makes from F, and from I, to the backward of the batch on the first stage.

    F: floor((T + p - s/2 - 2) / T), I: floor((T + floor(s/2) - 1) / T) (XPipe). For T = 1 these are
    floor(s/2) + p - s - 1 and floor(s/2) (SpecTrain). They leave out messages, and take F and B as equally long.
    """
    return _updates(stages - 1 - stage + stage // 2, batch), _updates(stage // 2, batch)


def until_backward(stage: int, stages: int, batch: int) -> tuple[int, int]:
    """Return how many updates a stage makes from F to I of a micro-batch that is 2 (p - 1 - s) ahead, and none for I.

    Kosson et al. (2021), linear weight prediction with T = D; here T micro-batches pass between two updates.
    """
    return _updates(2 * (stages - 1 - stage), batch), 0


def _updates(microbatches: int, batch: int) -> int:
    """Return the most updates that are made while so many micro-batches pass."""
    return -(-microbatches // batch)


_STALE = WeightPolicy(lambda behind: behind)
_DEEP = WeightPolicy(lambda behind: 2 * behind)
_PREDICTED = replace(_DEEP, work=("PREDICT",), horizons=until_backward, predicted=1, live=lambda ahead, batch: 2)
_SPECTRAIN = replace(
    _STALE, work=("PREDICT", "PREDICTBACK"), horizons=until_first_backward, predicted=1, live=lambda ahead, batch: 2
)

POLICIES = {
    "stale": _STALE,
    "pipedream": WeightPolicy(
        lambda behind: behind, ("PIN",), "micro-batch", live=lambda ahead, batch: 1 + -(-ahead // batch)
    ),
    "2bw": WeightPolicy(
        lambda behind: behind, ("PIN", "PINOLDER"), "batch", live=lambda ahead, batch: 2, within_batch=True
    ),
    "pipedream_vertical": WeightPolicy(
        lambda behind: behind,
        ("PINENTRY",),
        "micro-batch on all stages",
        live=lambda ahead, batch: 1 + -(-ahead // batch),
    ),
    "spectrain": _SPECTRAIN,
    "xpipe": replace(_SPECTRAIN, promise="pass", predicted=2, live=lambda ahead, batch: 3),
    "pipemare": WeightPolicy(
        lambda behind: 2 * behind + 1,
        ("PREDICTBACK",),
        live=lambda ahead, batch: 2,
        predicted=1,
        correction="discrepancy",
        rate="annealed",
    ),
    "pb": _DEEP,
    "pb_lwpv": _PREDICTED,
    "pb_lwpd": replace(_PREDICTED, prediction="difference"),
    "pb_sc": replace(_DEEP, correction="spike"),
    "pb_lwpv_sc": replace(_PREDICTED, correction="spike"),
    "timeprest": _STALE,
}


def same_as(name: str) -> str:
    """Return the first policy that trains as one does, by its name; "" if that is the only one."""
    first = next(other for other, policy in POLICIES.items() if policy == POLICIES[name])
    return "" if first == name else first


@dataclass(frozen=True)
class VersionOptions:
    """What a user can set of policies (option `versions_options`).

    Attributes:
        warmup_epochs: epochs at the beginning that are flushed after every batch (PipeMare's T3).
        anneal: steps over which the learning rate of a stage becomes that of the optimizer (T1); 0: it is that at once.
        decay: what is left of a difference of weights when it has become irrelevant (T2); 0: nothing is corrected.
    """

    warmup_epochs: int = 0
    anneal: int = 0
    decay: float = math.exp(-2)

    def of(self, policy: WeightPolicy) -> WeightPolicy:
        """Return a policy without what these options switch off."""
        if policy.correction == "discrepancy" and not self.decay:
            policy = replace(policy, correction="", predicted=0, work=())
        return replace(policy, rate=policy.rate if self.anneal else "")
