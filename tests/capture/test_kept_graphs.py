"""Graphs kept on disk are those that tracing gives, for whatever a step does; what nobody can know is not kept."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from filelock import FileLock
from torch import nn

from lightning_pipe import cache_files
from lightning_pipe.capture import Capture, Request, capture_step, flatten, kept_graphs
from lightning_pipe.capture.graphs import kept_traces
from lightning_pipe.capture.tracked.number_expressions import Situation
from lightning_pipe.errors import CaptureError
from ranks.world import World

BATCH = (torch.randn(6, 4), torch.randn(6, 4))


class Net(pl.LightningModule):
    """Two layers of one form, and a body that says what is done with them."""

    def __init__(self, body: Callable[[Net, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.body, self.scale, self.rate, self.layers = body, 2.0, 0.25, [0, 1]
        self.outside, self.seen = torch.ones(4), None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.body(self, *batch)


class Doubled(torch.autograd.Function):
    """A derivative in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def plain(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net.two(torch.tanh(net.one(x))), y) * net.scale


def logging(net: Net, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    h = F.dropout(net.norm(net.one(x)), net.rate, training=net.training)
    net.log("mean", h.mean())
    net.log("samples", x.shape[0])
    net.log("scale", net.scale)
    net.seen = h.detach().mean()
    return {"loss": (net.two(h) - y).square().sum() * 0.5 ** float(net.current_epoch), "h": h.detach()}


def asking(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = net.one(x)
    return h.square().mean() if bool(h.sum() > 1e9) else plain(net, h, y)


def in_place(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = net.one(x).tanh().clone()
    h[:, 0] = h[:, 1] * net.scale
    h.add_(1.0)
    with torch.no_grad():
        target = net.two(y)
    return (h - target).abs().mean()


def counting(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    classes = torch.bincount((y[:, 0] > 0).long(), minlength=4)  # a size that is known when torch has counted
    return (net.one(x) * classes / classes.sum()).square().mean()


def with_a_constant(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (net.one(x) * net.outside).square().mean()


def captured(net: Net, folder: Path | None) -> Capture:
    return capture_step(Request(net, "training_step", flatten(BATCH)[1], samples=3, kept=folder))


def same(one: Capture, two: Capture) -> bool:
    """Return whether two captured steps are the same to whoever runs and plans them."""
    code = one.joint.module.code == two.joint.module.code and one.joint.results == two.joint.results
    return one.graph == two.graph and one.kinds == two.kinds and code and one.flow == two.flow


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note, for every graph that is taken from a file, whether it could be used."""
    noted: list[bool] = []
    rebuild = kept_traces.rebuilt

    def rebuilt(*args: Any, **options: Any) -> Any:
        joint = rebuild(*args, **options)
        noted.append(not isinstance(joint, str))
        return joint

    monkeypatch.setattr("lightning_pipe.capture.graphs.trace.rebuilt", rebuilt)
    return noted


@pytest.mark.parametrize("body", [plain, logging, asking, in_place, counting], ids=lambda body: body.__name__)
def test_a_kept_graph_is_the_graph_that_tracing_gives(body: Any, tmp_path: Path, found: list[bool]) -> None:
    net = Net(body)
    traced = captured(net, None)
    changed = said_of_another_scale(traced, net)
    assert same(captured(Net(body), tmp_path), traced)
    assert not found
    net = Net(body)
    again = captured(net, tmp_path)
    assert found
    assert all(found)
    assert same(again, traced)
    assert [call.line for call in again.record.calls] == [call.line for call in traced.record.calls]
    assert not again.changed(Situation((0,)))
    assert said_of_another_scale(again, net) == changed


def said_of_another_scale(capture: Capture, net: Net) -> str:
    """Return what a captured step says when the number that its Python may read is another one."""
    net.scale = 3.0
    said = capture.changed(Situation((0,)))
    net.scale = 2.0
    return said


def varied(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One code for steps that differ in what they read, and in nothing that a list of their torch calls would show."""
    first, second = (net.two, net.one) if net.kind == "other layers" else (net.one, net.two)
    h, z = first(x), second(x)
    if net.kind == "other operands":
        h, z = z, h
    if net.kind == "detached":
        h = h.detach() + 0
    with torch.set_grad_enabled(net.kind != "without gradients"):
        z = torch.sub(h, z)
    if net.kind == "other column":
        return z[:, 1].square().mean()
    return (z[:, 0] * (3.0 if net.kind == "other number" else 2.0)).square().mean() + 0 * h.sum()


KINDS = ("as it is", "other layers", "other operands", "without gradients", "detached", "other column", "other number")


def test_steps_that_differ_in_anything_share_no_graph(tmp_path: Path, found: list[bool]) -> None:
    nets = {kind: Net(varied) for kind in (*KINDS, "frozen", "evaluating", "another form")}
    for kind, net in nets.items():
        net.kind = kind
    nets["frozen"].one.weight.requires_grad_(False)
    nets["evaluating"].norm.eval()
    nets["another form"].one.weight = nn.Parameter(torch.randn(4, 4).t())
    traced = {kind: captured(net, None) for kind, net in nets.items()}
    assert all(same(captured(net, tmp_path), traced[kind]) for kind, net in nets.items())
    assert not found
    assert all(same(captured(net, tmp_path), traced[kind]) for kind, net in nets.items())
    assert len(found) == len(nets)


def custom(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(Doubled.apply(net.one(x)), y)


def hooked(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = net.one(x)
    h.register_hook(lambda gradient: gradient * net.scale)
    return F.mse_loss(h, y)


def with_constant(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(net.one(x) * net.outside, y)


@pytest.mark.parametrize("body", [custom, hooked, with_constant], ids=lambda body: body.__name__)
def test_what_a_run_of_the_forward_does_not_tell_is_not_kept(body: Any, tmp_path: Path) -> None:
    assert same(captured(Net(body), tmp_path), captured(Net(body), None))
    assert not [*tmp_path.iterdir()]


def counting(net: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    net.log("calls", float(net.clock()))
    return plain(net, x, y)


def test_a_number_that_changes_from_call_to_call_is_refused_beside_kept_graphs(tmp_path: Path) -> None:
    net = Net(counting)
    net.clock = iter([1.0] * 8).__next__
    captured(net, tmp_path)
    net = Net(counting)
    net.clock = iter(range(8)).__next__
    with pytest.raises(CaptureError, match="changes from call to call"):
        captured(net, tmp_path)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


CODE = "__import__('pathlib').Path('harm').touch()"


def change(op: str, part: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of the first node of a kind."""
    return lambda content: next(row for row in content["nodes"] if row[0] == op).__setitem__(part, value)


ATTACKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a text for a constructor": lambda content: content["expressions"].append(["Add", CODE]),
    "another class of sympy": lambda content: content["expressions"].append(["sin", CODE]),
    "a symbol of code": lambda content: content["expressions"].append(["symbol", CODE, {}]),
    "a call of a method": change("call_function", 2, ["_operator", "methodcaller"]),
    "torch.load": change("call_function", 2, ["torch", "load"]),
    "a library": change("call_function", 2, ["op", "load_library.__call__.__call__"]),
    "a file": change("call_function", 2, ["op", "aten.from_file.default"]),
    "a default of a parameter": change("placeholder", 2, f"x={CODE}"),
    "a keyword": change("call_function", 4, ["dict", [[f"x=0) or {CODE} #", 0]]]),
    "a name of a node": change("call_function", 1, CODE),
    "other fields": lambda content: content["fields"][1].pop(),
    "no nodes": lambda content: content["nodes"].clear(),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_whole_file_of_somebody_else_runs_no_code_and_is_captured_again(
    attack: str, tmp_path: Path, found: list[bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its hash is right: it is of what stands in the file."""
    monkeypatch.chdir(tmp_path)
    traced = captured(Net(plain), tmp_path / "graphs")
    (file,) = (tmp_path / "graphs").glob("*.graph")
    content = cache_files.read(file, json.loads, version=kept_graphs._FORMAT)
    ATTACKS[attack](content)
    cache_files.write(file, json.dumps(content).encode(), version=kept_graphs._FORMAT)
    assert same(captured(Net(plain), tmp_path / "graphs"), traced)
    assert found == [False]
    assert [str(file) in text for text in warnings_of(caplog)] == [True]
    assert not (tmp_path / "harm").exists()
    assert file.exists(), "kept again"


def test_gradients_that_are_swapped_in_a_file_are_not_believed(
    tmp_path: Path, found: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    """The fingerprint of a graph is of its nodes; which gradient is of which parameter is a field."""
    traced = captured(Net(plain), tmp_path)
    (file,) = tmp_path.glob("*.graph")
    swap = {b'"one.weight"': b'"two.weight"', b'"two.weight"': b'"one.weight"'}
    start, fields = file.read_bytes().split(b'"fields"')
    file.write_bytes(start + b'"fields"' + re.sub(b"|".join(swap), lambda match: swap[match[0]], fields))
    assert captured(Net(plain), tmp_path).joint.gradients == traced.joint.gradients
    assert not found
    assert [str(file) in text for text in warnings_of(caplog)] == [True]


def test_graphs_that_are_used_least_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as all of them take more bytes than they may."""
    graph = kept_graphs.KeptGraph([], [], {}, "")
    for age, key in enumerate("abcd"):
        kept_graphs.store(tmp_path, key, graph)
        os.utime(tmp_path / f"{key}.graph", (age, age))
    size = (tmp_path / "a.graph").stat().st_size
    assert kept_graphs.load(tmp_path, "a") == graph
    monkeypatch.setattr(kept_graphs, "_MOST_BYTES", 3 * size)
    kept_graphs.store(tmp_path, "e", graph)
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "d", "e"}


def traces_of_a_rank(body: Any, folder: Path) -> tuple[int, str]:
    """Capture at the same time as all other ranks; return how often this one kept a graph, and what it captured."""
    stored = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_traces, "store", lambda *args: (stored.append(args), kept_graphs.store(*args)))
        patch.setattr(kept_traces, "_PATIENCE", 10_000)
        dist.barrier()
        fingerprint = captured(Net(body), folder).graph.fingerprint
    return len(stored), fingerprint


@pytest.mark.parametrize("body", [plain, in_place], ids=lambda body: body.__name__)
def test_ranks_that_come_to_a_step_at_once_trace_it_once(body: Any, tmp_path: Path) -> None:
    found = World(3).run(traces_of_a_rank, body, tmp_path)
    assert len({fingerprint for _, fingerprint in found}) == 1
    assert sum(count for count, _ in found) == 1


def test_nobody_waits_for_ever_for_a_process_that_does_not_trace_on(tmp_path: Path, monkeypatch) -> None:
    captured(Net(plain), tmp_path)
    (file,) = tmp_path.glob("*.graph")
    file.unlink()
    monkeypatch.setattr(kept_traces, "_PATIENCE", 0.1)
    with FileLock(tmp_path / f"{file.stem[:2]}.lock"):
        assert captured(Net(plain), tmp_path).identity == file.stem
    assert file.exists()


def test_a_step_with_a_constant_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph is not kept, so that there is nothing to wait for."""
    monkeypatch.setattr(kept_traces, "FileLock", None)
    captured(Net(with_a_constant), tmp_path)
    assert not [*tmp_path.iterdir()]
