"""A step that goes by the number of its samples does for micro-batches what it does for the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.errors import PlanError
from ranks.world import World
from strategy.small import LAYOUTS, Small, assert_as_on_one_device, loader, run, samples

BATCH = 4  # of which micro-batches have two; the last batch has two as well
REPLAYED = LAYOUTS[1]


def decided(net: Net, outputs: torch.Tensor, loss: torch.Tensor) -> Any:
    """A small last batch counts half."""
    return loss if len(outputs) == BATCH else 0.5 * loss


def text(net: Net, outputs: torch.Tensor, loss: torch.Tensor) -> Any:
    return {"loss": loss, "said": f"{len(outputs)} samples of {outputs.shape[1]}"}


def key(net: Net, outputs: torch.Tensor, loss: torch.Tensor) -> Any:
    net.log(f"loss of {len(outputs)}", loss)
    return loss


def names(net: Net, outputs: torch.Tensor, loss: torch.Tensor) -> Any:
    return {"loss": loss, "said": [f"{k}.png" for k in range(len(outputs))]}


def named_rows(net: Net, outputs: torch.Tensor, loss: torch.Tensor) -> Any:
    return {"loss": loss, "said": [{"id": k, "class": row.argmax()} for k, row in enumerate(outputs.detach())]}


def constants(net: Net, outputs: torch.Tensor, loss: torch.Tensor) -> Any:
    return {"loss": loss, "said": ["fake"] * len(outputs)}


def kept(net: Net, outputs: torch.Tensor, loss: torch.Tensor) -> Any:
    net.noted += [f"{k}" for k in range(len(outputs))]
    return loss


def flag(net: Net, outputs: torch.Tensor, loss: torch.Tensor) -> Any:
    return {"loss": loss, "said": len(outputs) >= BATCH}


def bent(net: Net, outputs: torch.Tensor, loss: torch.Tensor) -> Any:
    return {"loss": loss, "said": min(3, len(outputs))}


STEPS = {one.__name__: one for one in (decided, text, key, names, named_rows, constants, kept, flag, bent)}
IN_GRAPHS = {"decided", "bent"}  # where replay warns at most


class Net(Small):
    data = staticmethod(lambda: loader(18, BATCH))

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        return STEPS[self.way](self, outputs, F.cross_entropy(outputs, batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append(outputs.get("said"))


def fitted(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(lambda: Net(way), options)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("way", STEPS)
def test_a_step_goes_by_the_samples_of_the_batch(way: str, options: dict[str, Any]) -> None:
    """It went by those of a micro-batch: half of the names, the weight of the small batch for all."""
    if options == REPLAYED and way in IN_GRAPHS:
        pytest.skip("nothing tells a replayed step from one of so many samples")
    assert_as_on_one_device(fitted, way, options)


class Queue(Small):
    """Negatives of earlier batches, in a queue whose length the samples of a batch divide, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(3, 8, dtype=torch.float64), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        keys = self(batch[0])
        loss = F.cross_entropy(keys @ self.queue.clone(), batch[1])
        pointer = int(self.pointer)
        assert 8 % len(keys) == 0, "the queue is written to in whole batches"
        self.queue[:, pointer : pointer + len(keys)] = keys.detach().T
        self.pointer[0] = (pointer + len(keys)) % 8
        return loss


def queued(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit it; a worker function."""
    return run(Queue, options)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_that_runs_with_some_numbers_of_samples_only_is_not_cut(microbatches: int) -> None:
    """A replayed step was refused, as it is also run with a sample less."""
    assert_as_on_one_device(queued, "", {**REPLAYED, "microbatches": microbatches})


def asserted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    assert len(outputs) == BATCH, f"{len(outputs)} samples"
    return F.cross_entropy(outputs, targets)


def nothing_of_few(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    return None if len(outputs) < BATCH else F.cross_entropy(outputs, targets)


def hardest(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
    return F.cross_entropy(outputs, targets, reduction="none").topk(3)[0].mean()


NEEDY = {one.__name__: one for one in (asserted, nothing_of_few, hardest)}


class Needy(Small):
    """A step that trains with all samples of a batch, and not with some of them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return NEEDY[self.way](self(batch[0]), batch[1])


def needy(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit it; a worker function."""
    return run(lambda: Needy(way), options)


@pytest.mark.parametrize("options", LAYOUTS[:2], ids=["joint", "replay"])
@pytest.mark.parametrize("way", NEEDY)
def test_a_step_that_does_not_run_with_few_samples_is_not_cut(way: str, options: dict[str, Any]) -> None:
    """It was refused, or told that its first batch gives no loss."""
    assert_as_on_one_device(needy, way, options)


class Packed(Small):
    """Sequences that are packed as they come, sorted by their lengths: what the first layer returns cannot be told."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.LSTM(1, 8, batch_first=True).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        lengths = torch.arange(len(batch[0]), 0, -1)
        sequences = nn.utils.rnn.pack_padded_sequence(batch[0][..., None], lengths, batch_first=True)
        _, (hidden, _) = self.inside(sequences)
        return F.cross_entropy(self.last(hidden[-1]), batch[1])


def packed(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit it; a worker function."""
    return run(Packed, options)


def test_packed_sequences_are_replicated() -> None:
    """The step is run with other samples, too, which were in another order than torch asks for."""
    assert_as_on_one_device(packed, "", {"layout": "2", "microbatches": 1})


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(PlanError) as raised:
        run(Packed, options)
    return str(raised.value)


def test_no_stage_begins_where_python_reads_what_cannot_be_told() -> None:
    """Later stages had None in the place of a packed sequence, and ended in a TypeError of the step."""
    for said in World(2).run(refused, {"layout": "1-1", "microbatches": 1}, deadline_s=60):
        assert "since what inside returns is no tensor and cannot be sent" in said


def with_ignored() -> DataLoader[Any]:
    """Return batches whose halves ignore one and two of their samples."""
    rows = samples(8)
    rows.tensors[1][:] = torch.tensor([1, 0, 1, 2, 1, 0, 0, 2])
    return DataLoader(rows, BATCH)


class Asks(Small):
    """Asks its targets a question in validation, so that a graph holds for one answer."""

    validation = staticmethod(with_ignored)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        counted = batch[1] != 0
        self.log("some", 1.0 if counted.any() else 0.0)
        self.log("loss", F.cross_entropy(self(batch[0]), batch[1], ignore_index=0))


def asked(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit it; a worker function."""
    return run(Asks, options)


def test_a_validation_that_is_replayed_from_some_batch_on_says_what_its_graph_would_say() -> None:
    """Its mean over the targets that count was exact in the graph, and became a mean over samples in silence."""
    assert_as_on_one_device(asked, "", LAYOUTS[0])
