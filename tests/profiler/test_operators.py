"""A profile times every distinct call of a step once, on tensors made up for it, and leaves everything as it was."""

from __future__ import annotations

import functools
import itertools
import logging
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.capture.graphs.value_sizes import TensorSpec
from lightning_pipe.capture.stages.operation_calls import OperatorCall, operator_calls
from lightning_pipe.profiler.timing import operators, windows
from lightning_pipe.profiler.timing import sample_region as part
from lightning_pipe.profiler.timing.arguments import Maker, index_bounds
from lightning_pipe.profiler.timing.clock import TimingClock
from lightning_pipe.profiler.timing.glue import glue_names, measure_glue
from lightning_pipe.profiler.timing.op_sequence import Course
from lightning_pipe.profiler.timing.operators import Operators, profile_capture
from lightning_pipe.profiler.timing.timed_run import Tools, Walk
from lightning_pipe.profiler.timing.windows import choose_windows
from models.parity import make_loader, make_module
from zoo.test_zoo_pipelines import captured, made, sizes_of

CPU = torch.device("cpu")
GIGABYTE = 2**30
DIVERSE = "resnet_batchnorm moe_dense gcn_index_add embedding_bag_offsets stft wavenet vqvae_ema".split()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Repeat everything as often as is needed for quartiles, no matter how short it is."""
    for module, name, value in [
        (part, "_RUNS", (2, 2)),
        (part, "_MOST_INSTANCES", 2),
        (windows, "_RUNS", (1, 1)),
        (operators, "_ROUNDS", 1),
    ]:
        monkeypatch.setattr(module, name, value)


@functools.cache
def parity_capture(name: str) -> Capture:
    module = make_module(name).train()
    _, structure = flatten(next(iter(make_loader(name, batch_size=4))))
    return capture_step(Request(module, "training_step", structure, samples=4))


class Deep(pl.LightningModule):
    """Equal layers."""

    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()


@functools.cache
def deep_capture(layers: int, **options: int) -> Capture:
    with torch.device("meta"):
        module = Deep(layers, **options)
    _, structure = flatten(torch.zeros(4, module.layers[0][0].in_features))
    return capture_step(Request(module.train(), "training_step", structure, samples=4))


def course_of(capture: Capture, samples: int = 4) -> Course:
    return Course(capture.graph, list(operator_calls(capture.joint, samples, CPU)))


def tools(limit_bytes: int = GIGABYTE) -> Tools:
    return Tools(Maker(CPU), TimingClock(), limit_bytes)


@pytest.mark.parametrize("name", DIVERSE)
def test_every_operation_of_a_module_of_the_zoo_can_be_timed(name, caplog):
    module, batch = made(name)
    capture = captured(module, batch, sizes_of(batch)).capture
    with caplog.at_level(logging.INFO, logger="lightning_pipe"):
        profile = profile_capture(capture, device=CPU, sizes=(2, 3))
    assert "made-up inputs" not in caplog.text
    assert profile.graph == capture.graph.fingerprint
    pairs = zip(capture.graph.operations, profile.seconds, strict=True)
    timeless = [operation.name for operation, seconds in pairs if min(seconds) <= 0 and not operation.adds_terms]
    assert not timeless, "only additions of terms count as part of others"
    assert all(len(seconds) == len(profile.samples) for seconds in profile.seconds)


def test_a_deeper_network_of_equal_layers_takes_no_more_measurements():
    few, many = deep_capture(6), deep_capture(24)
    assert len(many.graph.operations) > 3 * len(few.graph.operations)
    signatures = [course_of(capture).signatures for capture in (few, many)]
    assert len(signatures[0]) == len(signatures[1])
    chosen = [course_of(c).part(frozenset(s), instances=2) for c, s in zip((few, many), signatures, strict=True)]
    assert len(chosen[1]) <= len(chosen[0]) + 12, "a part of a deep network is about as long as one of a flat one"


def test_a_part_meets_every_call_as_often_as_wanted_or_as_it_occurs():
    course = course_of(parity_capture("gpt_tied"))
    for instances in (1, 3):
        chosen = [
            course.items[i].call.signature for i in course.part(frozenset(course.signatures), instances=instances)
        ]
        everywhere = [item.call.signature for item in course.items]
        rare = {n for n in course.signatures if chosen.count(n) < min(instances, everywhere.count(n))}
        repeated = {
            item.call.signature for item in course.items if course.graph.operations[item.operation].phase == "repeated"
        }
        assert rare <= repeated, f"met less than {instances} times: {rare - repeated}"
        assert set(chosen) == set(course.signatures)


def test_ranks_that_share_the_work_measure_everything_once():
    operators_ = Operators(parity_capture("gpt_tied"), device=CPU, sizes=(2, 3))
    shares = [operators_.measure({}, share=(rank, 3)) for rank in range(3)]
    assert all(shares)
    assert sum(map(len, shares)) == len({name for share in shares for name in share}), "nothing is measured twice"
    together = {name: timing for share in shares for name, timing in share.items()}
    assert together.keys() == operators_.measure({}).keys()
    assert operators_.measure(together) == {}
    assert operators_.assemble(together).samples == (2, 3)


@pytest.mark.parametrize("is_short", [True, False])
def test_a_share_is_timed_among_the_calls_of_the_others_if_all_are_short(is_short, monkeypatch):
    ran: list[set[str]] = []

    class Watched(Walk):
        def __init__(self, course: Course, chosen: tuple[int, ...], tools: Tools) -> None:
            ran.append({course.items[i].call.signature for i in chosen})
            super().__init__(course, chosen, tools)

    monkeypatch.setattr(part, "Walk", Watched)
    monkeypatch.setattr(part, "_WHOLE_S", GIGABYTE if is_short else 0.0)
    course = course_of(parity_capture("gpt_tied"))
    share = set(course.signatures[: len(course.signatures) // 3])
    region = part.SampleRegion(course, share, tools())
    region.measure(lambda done: None)
    assert (ran[-1] == set(course.signatures)) == is_short
    assert share <= ran[-1]
    assert {name for name, _ in region.timings({})} == share, "the others tell what is theirs"


def test_what_is_in_the_cache_is_not_measured_again(tmp_path, monkeypatch):
    capture = parity_capture("resnet_batchnorm")
    first = profile_capture(capture, device=CPU, sizes=(2, 4), cache=tmp_path)

    def refuse(*_):
        raise AssertionError("something was timed again")

    monkeypatch.setattr(Walk, "run", refuse)
    assert profile_capture(capture, device=CPU, sizes=(2, 4), cache=tmp_path) == first


def test_another_model_finds_the_calls_that_it_shares_in_the_cache(tmp_path, monkeypatch):
    profile_capture(deep_capture(6), device=CPU, sizes=(4,), cache=tmp_path)
    monkeypatch.setattr(part, "SampleRegion", None)
    deeper = deep_capture(9)
    profile = profile_capture(deeper, device=CPU, sizes=(4,), cache=tmp_path)
    assert len(profile.seconds) == len(deeper.graph.operations)


def test_profiling_leaves_random_numbers_threads_and_the_module_as_they_were():
    module = make_module("gpt_tied", dropout=0.5).train()
    _, structure = flatten(next(iter(make_loader("gpt_tied", batch_size=4))))
    capture = capture_step(Request(module, "training_step", structure, samples=4))
    parameters = [p.detach().clone() for p in module.parameters()]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    profile_capture(capture, device=CPU, sizes=(3,))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()) == before[1:]
    for parameter, own in zip(module.parameters(), parameters, strict=True):
        assert torch.equal(parameter, own) and parameter.grad is None


@pytest.mark.parametrize("name", ["gpt_tied", "resnet_batchnorm", "lstm"])
def test_a_walk_within_little_memory_times_the_same_calls(name):
    course = course_of(parity_capture(name))
    chosen = course.part(frozenset(course.signatures), instances=1)
    plenty, little = (Walk(course, chosen, tools(limit)) for limit in (GIGABYTE, 1))
    assert (plenty._is_tight, little._is_tight) == (False, True)
    for walk in (plenty, little, little):
        assert min(walk.run()) > 0
    assert len(little._given) < len(plenty._given) / 4, "made-up tensors are dropped when the limit is reached"


class WatchedWalk(Walk):
    """Keeps the bytes of all tensors that it holds between calls."""

    def _run(self, call, values):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values.values()}
        self.held_bytes = [*getattr(self, "held_bytes", []), sum(storages.values())]
        return super()._run(call, values)


def test_a_model_larger_than_the_limit_is_walked_within_it():
    width, layers = 512, 24
    course = course_of(deep_capture(layers, width=width))
    limit = 6 * width * width * 4  # as much as six weights, of 24
    walk = WatchedWalk(course, range(len(course.items)), tools(limit))
    assert min(walk.run()) > 0
    assert max(walk.held_bytes) <= limit


def test_terms_of_a_gradient_are_charged_to_the_operations_that_make_them():
    capture = parity_capture("lstm")
    course, graph = course_of(capture), capture.graph
    sums = [o for o, operation in enumerate(graph.operations) if operation.adds_terms]
    assert sums, "a recurrent network uses its weights at every time step"
    charged = [operation for name, operation in course.charges()]
    assert not set(charged) & set(sums)
    added = {graph.tensors[t].maker for o in sums for t in graph.operations[o].reads} - set(sums)
    assert all(charged.count(operation) == 2 for operation in added), "each is run, and added"


def test_what_a_stage_does_with_gradients_and_buffers_is_part_of_the_course():
    capture = parity_capture("resnet_batchnorm")
    inplace = [item for item in course_of(capture).items if not item.call.results]
    words = [item.call.signature.partition("(")[0] for item in inplace]
    assert words.count("copy_") == len(capture.graph.updates) > 0
    assert words.count("add_") == len(capture.graph.gradients) > 0


@pytest.mark.parametrize("name", ["gpt_tied", "resnet_batchnorm", "lstm"])
def test_a_course_makes_what_it_reads_and_ends_with_gradients_that_only_parameters_need(name):
    course = course_of(parity_capture(name))
    made = {spec.name: i for i, item in enumerate(course.items) for spec, _ in item.call.results}
    late = [n for i, item in enumerate(course.items) for n in item.reads if made.get(n, -1) >= i]
    assert not late, "read before they are made"
    operations = [course.graph.operations[item.operation] for item in course.items if item.call.results]
    halves = [operation.reach >= operation.at for operation in operations if operation.phase == "backward"]
    assert halves == sorted(halves) and {False, True} == set(halves)


def test_saved_tensors_outlive_the_forward_and_others_die_at_their_last_reader():
    course = course_of(deep_capture(3))
    forward = [i for i, item in enumerate(course.items) if course.graph.operations[item.operation].phase == "forward"]
    read_later = {n for i, item in enumerate(course.items) if i > max(forward) for n in item.reads}
    made = {spec.name for i in forward for spec, _ in course.items[i].call.results}
    assert made & read_later and not made & read_later & course.last_reader.keys()
    dying = {n for i in forward for n in course.items[i].reads} & made - read_later
    assert dying <= course.last_reader.keys() | {course.graph.tensors[t].name for t in course.graph.results}


def spec(*shape: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None) -> TensorSpec:
    strides = torch.empty(shape, device="meta").stride() if stride is None else stride
    return TensorSpec(dtype, shape, strides)


INDICES = spec(3, 4, dtype=torch.int64)
AT_DIM_1 = (spec(5, 7), 1)


@pytest.mark.parametrize(
    ("op", "args", "bound"),
    [
        ("aten.embedding.default", (spec(9, 2), INDICES), 9),
        ("aten.embedding_dense_backward.default", (spec(3, 4, 2), INDICES, 9, -1, False), 9),
        ("aten.gather.default", (*AT_DIM_1, INDICES), 7),
        ("aten.index_add.default", (*AT_DIM_1, INDICES, spec(5, 12)), 7),
        ("aten.index.Tensor", (spec(5, 7), [None, INDICES]), 7),
        ("aten.index.Tensor", (spec(5, 7), [INDICES, INDICES]), 5),
        ("aten.nll_loss_forward.default", (spec(6, 8), INDICES, None, 1, -100), 8),
        ("aten.nll_loss2d_backward.default", (spec(), spec(6, 8, 2, 2), INDICES, None, 1, -100, spec()), 8),
        ("aten.take.default", (spec(5, 7), INDICES), 35),
        ("aten.add.Tensor", (INDICES, 1), None),
    ],
)
def test_indices_are_random_below_the_bound_that_the_operator_sets(op, args, bound):
    call = OperatorCall(f"{op}(...)", torch.add, args, {}, ())
    assert index_bounds(call) == ({} if bound is None else {id(INDICES): bound})
    if bound is not None:
        made = Maker(CPU).indices(INDICES, bound)
        assert made.dtype == torch.int64 and made.shape == (3, 4)
        assert made.min() >= 0 and made.max() < bound and len(made.unique()) > 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("form", [((3, 4), (4, 1)), ((3, 4), (1, 3)), ((3, 4), (0, 1)), ((), ()), ((2, 0), (1, 1))])
def test_made_up_tensors_have_type_shape_and_strides_and_moderate_numbers(dtype, form):
    shape, stride = form
    made = Maker(CPU).tensor(TensorSpec(dtype, shape, stride))
    assert (made.dtype, tuple(made.shape), made.stride()) == (dtype, shape, stride)
    if made.numel() and (dtype.is_floating_point or dtype.is_complex):
        assert float(made.abs().min()) > 1e-30 and float(made.abs().max()) < 2, "no denormals, no overflow"


@pytest.mark.parametrize("error", [RuntimeError, KeyError, TypeError])
def test_a_call_that_cannot_be_run_is_said_once_and_has_no_time(error, caplog):
    caplog.set_level(logging.INFO, logger="lightning_pipe")
    course = course_of(deep_capture(2))

    def broken(*_):
        raise error("no kernel")

    for item in course.items:
        if item.call.signature.startswith("aten.relu"):
            object.__setattr__(item.call, "target", broken)
    walk = Walk(course, range(len(course.items)), tools())
    seconds = [walk.run() for _ in range(2)][-1]
    assert caplog.text.count("no kernel") == 1
    failed = {course.items[i].call.signature.partition(".default")[0] for i, s in enumerate(seconds) if s != s}
    assert failed == {"aten.relu"}


class FeaturesAmongTokens(pl.LightningModule):
    """Made-up inputs have more tokens for images than features."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.last = nn.Embedding(20, 8), nn.Linear(8, 4)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens, features = batch
        places = (tokens == 0).unsqueeze(-1).expand(-1, -1, 8)
        return self.last(self.tokens(tokens).masked_scatter(places, features)).square().mean()


def test_what_does_not_run_on_made_up_inputs_is_estimated(caplog):
    caplog.set_level(logging.INFO, logger="lightning_pipe")
    _, structure = flatten([torch.zeros(4, 12, dtype=torch.long), torch.zeros(4, 1, 8)])
    capture = capture_step(Request(FeaturesAmongTokens().train(), "training_step", structure, samples=4))
    profile = profile_capture(capture, device=CPU, sizes=(4,))
    scatters = [o for o, operation in enumerate(capture.graph.operations) if "masked_scatter" in operation.op]
    assert scatters and all(profile.seconds[o][0] > 0 for o in scatters)
    assert "its time is estimated" in caplog.text and "timed one by one only" in caplog.text


def test_windows_lie_at_cuts_and_the_cost_model_runs_the_same_operations():
    capture = parity_capture("resnet_batchnorm")
    graph = capture.graph
    for begin, end in choose_windows(graph):
        assert 0 <= begin < end <= len(graph.nodes) and not {begin, end} & graph.uncuttable.keys()
    found = measure_glue(capture, {3: course_of(capture, 3)}, tools())
    assert tuple(found) == glue_names(graph, 3)
    many = deep_capture(60)
    found_windows = choose_windows(many.graph)
    assert len(found_windows) == 3 and all(a[1] <= b[0] for a, b in itertools.pairwise(found_windows))


def test_numbers_of_samples_for_which_a_graph_does_not_hold_are_left_out():
    capture = parity_capture("resnet_batchnorm")
    assert Operators(capture, device=CPU, sizes=(4, 2, 2)).sizes == (2, 4)
    module, batch = made("embedding_bag_offsets")  # holds for one batch only
    fixed = captured(module, batch, sizes_of(batch)).capture
    assert Operators(fixed, device=CPU, sizes=(1, 2)).sizes == (fixed.graph.samples,)


def test_more_seconds_come_with_more_work():
    """Of all laws of speed the one that noise does not break."""
    profile = profile_capture(deep_capture(1, width=256), device=CPU, sizes=(2, 2048))
    few, many = (sum(seconds[k] for seconds in profile.seconds) for k in range(2))
    assert many > few
