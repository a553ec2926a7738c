"""Gradients of a pipeline are those of the plain module, with all ranks in one thread."""

import dataclasses

import pytest
import torch

from lightning_pipe.core.program import Compute, Free, Load, Message, Program, Recv, Samples, Send, VerifiedProgram
from lightning_pipe.errors import BatchError, PipelineError, ProgramError
from lightning_pipe.runtime.executor import run_together
from lightning_pipe.runtime.transport.local import Hub
from ranks.pipelines import Case, capture_of, executor_of, job_of, module_of, plain_gradients, program_of, split_of

UNREPLICATED = {
    "1": Case("Chain", ((0,),), ()),
    "1-1": Case("Chain", ((0,), (1,)), ("second",)),
    "1-1-1": Case("Chain", ((0,), (1,), (2,))),
    "two stages on one rank": Case("Chain", ((0,), (1,), (0,))),
    "all stages on one rank": Case("Chain", ((0,), (0,), (0,))),
    "gpipe": Case("Chain", ((0,), (1,), (2,)), schedule="gpipe"),
    "uneven micro-batches": Case("Chain", ((0,), (1,), (2,)), sizes=(3, 3, 2)),
    "skip": Case("Skip", ((0,), (1,), (2,))),
    "sum": Case("Summed", ((0,), (1,), (2,)), sizes=(3, 2)),
    "batch norm": Case("Normed", ((0,), (1,), (2,)), sizes=(3, 2)),
}
REPLICATED = {
    "2-1": Case("Chain", ((0, 1), (2,)), ("second",)),
    "1-2": Case("Chain", ((0,), (1, 2)), ("second",)),
    "2-2": Case("Chain", ((0, 1), (2, 3)), ("second",)),
    "3-2": Case("Chain", ((0, 1, 2), (3, 4)), ("second",), sizes=(6, 6)),
    "3-2-1 uneven": Case("Skip", ((0, 1, 2), (3, 4), (5,)), sizes=(5, 5, 2)),
    "fewer samples than replicas": Case("Skip", ((0, 1, 2), (3, 4), (5,)), sizes=(2, 1)),
    "whole": Case("Chain", ((0, 1), (2,)), ("second",), sizes=(2, 2, 1), whole=frozenset({0})),
    "three to one": Case("Chain", ((0, 1), (2,)), ("second",), sizes=(4, 4), weights=((3, 1), (1,))),
    "one to three": Case("Chain", ((0,), (1, 2)), ("second",), sizes=(5, 4), weights=((1,), (1, 3))),
    "unequal parts on both sides": Case("Skip", ((0, 1), (2, 3), (4,)), sizes=(7, 6), weights=((3, 1), (2, 5), (1,))),
    "nothing for a replica of a small micro-batch": Case(
        "Skip", ((0, 1), (2, 3), (4,)), sizes=(4, 1), weights=((3, 1), (1, 3), (1,))
    ),
    "nothing for a replica at all": Case("Chain", ((0, 1), (2,)), ("second",), sizes=(2, 2), weights=((1, 5), (1,))),
    "sum, three to one": Case("Summed", ((0, 1), (2,)), ("second",), sizes=(4, 1), weights=((3, 1), (1,))),
    "tied, three to one": Case("Tied", ((0, 1), (2,), (3,)), sizes=(4, 3), weights=((3, 1), (1,), (1,))),
    "sum": Case("Summed", ((0, 1), (2,)), ("second",), sizes=(3, 2)),
    "tied": Case("Tied", ((0,), (1,), (2,))),
    "tied, first stage replicated": Case("Tied", ((0, 1), (2,), (3,))),
    "tied, both on one rank": Case("Tied", ((0,), (1,), (0,))),
    "two pipes": Case("Skip", ((0, 1), (1, 0)), ("third",), (3, 3, 2), "chimera", frozenset({0, 1})),
    "two pipes, tied": Case("Tied", ((0, 1), (1, 0)), ("third",), (3, 3, 2), "dualpipe", frozenset({0, 1})),
}


def pipeline_gradients(case: Case, **changes: float) -> list[dict[str, torch.Tensor | None]]:
    """Return the gradients of the parameters of each rank's stages after one program."""
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    modules = [module_of(case) for _ in range(case.layout.ranks)]
    executors = [executor_of(case, m, capture, split, hub.endpoint(rank)) for rank, m in enumerate(modules)]
    run_together(executors, program_of(case, split), [job_of(case, **changes)] * len(modules))
    owned = [{n for s in e.stages.values() for n in s.program.gradients.values()} for e in executors]
    return [
        {name: p.grad for name, p in module.named_parameters() if name in names}
        for module, names in zip(modules, owned, strict=True)
    ]


@pytest.mark.parametrize("case", UNREPLICATED.values(), ids=UNREPLICATED)
def test_gradients_without_replicas_equal_accumulation_bit_for_bit(case: Case) -> None:
    expected = plain_gradients(case)
    seen = set()
    for gradients in pipeline_gradients(case):
        for name, gradient in gradients.items():
            assert gradient is not None and torch.equal(gradient, expected[name]), name
            seen.add(name)
    assert seen == set(expected)


@pytest.mark.parametrize("case", REPLICATED.values(), ids=REPLICATED)
def test_gradients_with_replicas_or_tied_weights_equal_the_batch_and_each_other_bit_for_bit(case: Case) -> None:
    expected = plain_gradients(case, [(0, sum(case.sizes))])
    seen: dict[str, torch.Tensor | None] = {}
    for gradients in pipeline_gradients(case):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12, msg=name)
            assert torch.equal(gradient, seen.setdefault(name, gradient)), name
    assert set(seen) == set(expected)


def test_a_piece_is_summed_as_soon_as_its_gradients_are_made_and_gradients_live_in_it(monkeypatch) -> None:
    """In pieces of a parameter each, all ranks post them in one order, the first while W still makes others."""
    case = REPLICATED["2-1"]
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    modules = [module_of(case) for _ in range(3)]
    executors = [executor_of(case, m, capture, split, hub.endpoint(rank)) for rank, m in enumerate(modules)]
    events: list[list[str]] = [[], []]
    for rank, executor in enumerate(executors[:2]):
        sums = executor._gradients
        sums._piece_bytes = 1
        made, post = sums.made, sums._post

        def told(name, rank=rank, made=made):
            events[rank].append(f"made {name}")
            made(name)

        def posted(reduce, names, rank=rank, post=post):
            events[rank].append(f"posted {' '.join(names)}")
            post(reduce, names)

        for stage in executor.stages.values():
            monkeypatch.setattr(stage, "made", told)
        monkeypatch.setattr(sums, "_post", posted)
    run_together(executors, program_of(case, split), [job_of(case)] * 3)
    assert events[0] == events[1]
    (bucket,) = (
        names for b, names in zip(split.traffic.buckets, split.bucket_parameters, strict=True) if 0 in b.stages
    )
    last = events[0][-2 * len(bucket) :]
    assert last == [f"{word} {name[5:]}" for name in last[::2] for word in ("made", "posted")]
    expected = plain_gradients(case, [(0, sum(case.sizes))])
    for name in bucket:
        gradient = modules[0].get_parameter(name).grad
        assert gradient.untyped_storage().nbytes() == gradient.nbytes, "a piece is one gradient here"
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)


def test_the_weight_of_the_job_scales_gradients() -> None:
    case = UNREPLICATED["1-1"]
    for whole, half in zip(pipeline_gradients(case), pipeline_gradients(case, weight=0.5), strict=True):
        assert all(torch.equal(half[name], whole[name] / 2) for name in whole)


def test_gradients_accumulate_over_programs_until_one_synchronises() -> None:
    case = REPLICATED["2-1"]
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    modules = [module_of(case) for _ in range(3)]
    executors = [executor_of(case, m, capture, split, hub.endpoint(rank)) for rank, m in enumerate(modules)]
    for synchronise in (False, True):
        run_together(executors, program_of(case, split, synchronise=synchronise), [job_of(case, weight=0.5)] * 3)
    expected = plain_gradients(case, [(0, sum(case.sizes))])
    for rank, module in enumerate(modules):
        layer = "third" if rank == 2 else "first"
        gradient = module.get_submodule(layer).weight.grad
        torch.testing.assert_close(gradient, expected[f"{layer}.weight"], rtol=0, atol=1e-12)


def test_running_averages_are_the_mean_over_micro_batches() -> None:
    """Once per batch, whichever ranks have which of them: of three and two samples that begin with the same content."""
    case = UNREPLICATED["batch norm"]
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    modules = [module_of(case) for _ in range(3)]
    executors = [executor_of(case, m, capture, split, hub.endpoint(rank)) for rank, m in enumerate(modules)]
    run_together(executors, program_of(case, split), [job_of(case)] * 3)
    x, y = job_of(case).leaves
    norms = []
    for part in (slice(0, 3), slice(3, 5)):
        plain = module_of(case)
        plain.training_step((x[part], y[part]), 0)
        norms.append(plain.norm)
    for name in ("running_mean", "running_var"):
        expected = 0.6 * norms[0].get_buffer(name) + 0.4 * norms[1].get_buffer(name)
        torch.testing.assert_close(modules[0].norm.get_buffer(name), expected, rtol=0, atol=1e-12)
    assert modules[0].norm.num_batches_tracked == 1


def test_replicas_agree_on_running_averages_after_the_step() -> None:
    case = Case("Normed", ((0, 1), (2,), (3,)), sizes=(4, 4))
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    modules = [module_of(case) for _ in range(4)]
    executors = [executor_of(case, m, capture, split, hub.endpoint(rank)) for rank, m in enumerate(modules)]
    run_together(executors, program_of(case, split), [job_of(case)] * 4)
    first, second = modules[0].norm, modules[1].norm
    assert not torch.equal(first.running_mean, module_of(case).norm.running_mean)
    for name, buffer in first.named_buffers():
        assert torch.equal(buffer, second.get_buffer(name)), name


def test_replicas_with_unequal_parts_count_by_them_in_running_averages() -> None:
    """Six and two of eight samples: the mean of what the slices leave, three to one."""
    case = Case("Normed", ((0, 1), (2,), (3,)), sizes=(8,), weights=((3, 1), (1,), (1,)))
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    modules = [module_of(case) for _ in range(4)]
    executors = [executor_of(case, m, capture, split, hub.endpoint(rank)) for rank, m in enumerate(modules)]
    run_together(executors, program_of(case, split), [job_of(case)] * 4)
    x, y = job_of(case).leaves
    norms = []
    for part in (slice(0, 6), slice(6, 8)):
        plain = module_of(case)
        plain.training_step((x[part], y[part]), 0)
        norms.append(plain.norm)
    for own in modules[:2]:
        for name in ("running_mean", "running_var"):
            expected = 0.75 * norms[0].get_buffer(name) + 0.25 * norms[1].get_buffer(name)
            torch.testing.assert_close(own.norm.get_buffer(name), expected, rtol=0, atol=1e-12)
        assert own.norm.num_batches_tracked == 1


def test_results_of_unequal_parts_are_those_of_their_samples() -> None:
    """A replicated last stage: each replica reports its samples' share of the loss, none where it has none."""
    case = Case("Chain", ((0,), (1, 2)), ("second",), sizes=(4, 1), weights=((1,), (3, 1)))
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    executors = [executor_of(case, module_of(case), capture, split, hub.endpoint(rank)) for rank in range(3)]
    outcomes = run_together(executors, program_of(case, split), [job_of(case)] * 3)
    x, y = job_of(case).leaves
    found = {p.samples: p for o in outcomes for p in o.results.get(capture.record.loss, ()) if p.microbatch == 0}
    assert set(found) == {Samples(0, 3), Samples(3, 4)}
    for samples, piece in found.items():
        part = slice(samples.start, samples.stop)
        loss = module_of(case).training_step((x[part], y[part]), 0)
        torch.testing.assert_close(piece.content, loss * len(samples) / len(x))
    assert [[p.samples for p in o.results.get(capture.record.loss, ()) if p.microbatch == 1] for o in outcomes] == [
        [],
        [],
        [Samples(0, 1)],
    ]


def test_results_are_shares_of_the_micro_batches() -> None:
    case = UNREPLICATED["1-1"]
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    module = module_of(case)
    executors = [executor_of(case, module_of(case), capture, split, hub.endpoint(rank)) for rank in range(2)]
    outcomes = run_together(executors, program_of(case, split), [job_of(case)] * 2, record=True)
    assert not outcomes[0].results
    x, y = job_of(case).leaves
    expected = [module.training_step((x[i : i + 2], y[i : i + 2]), 0) / 3 for i in (0, 2, 4)]
    pieces = outcomes[1].results[capture.record.loss]
    assert [piece.microbatch for piece in pieces] == [0, 1, 2]
    torch.testing.assert_close([piece.content for piece in pieces], expected)
    assert [len(outcome.timeline.computes(rank)) for rank, outcome in enumerate(outcomes)] == [9, 9]


def test_only_verified_programs_are_run() -> None:
    case = UNREPLICATED["1"]
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    executor = executor_of(case, module_of(case), capture, split, Hub().endpoint(0))
    program = program_of(case, split)
    fields = {field.name: getattr(program, field.name) for field in dataclasses.fields(Program)}
    with pytest.raises(ProgramError, match=r"schedule\.verify"):
        executor.run(Program(**fields), job_of(case))


def test_a_message_that_no_compute_takes_is_an_error() -> None:
    case = UNREPLICATED["1-1"]
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    message = Message("F", 0, 1, 0, Samples(0, 2))
    sender = (Load(0, 0), Compute(0, "F", 0), Send(message, 1), Free(0, 0))
    broken = VerifiedProgram((sender, (Recv(message, 0),)), case.sizes, case.layout, split.traffic, training=False)
    hub = Hub()
    executors = [executor_of(case, module_of(case), capture, split, hub.endpoint(rank)) for rank in range(2)]
    with pytest.raises(PipelineError, match=r"Rank 1 ended its program with letters .*1RECV_F0<0@0\[0:2\]"):
        run_together(executors, broken, [job_of(case)] * 2)


def test_an_error_in_a_compute_names_rank_and_instruction() -> None:
    case = UNREPLICATED["1-1"]
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    hub = Hub()
    executors = [executor_of(case, module_of(case), capture, split, hub.endpoint(rank)) for rank in range(2)]
    x, y = job_of(case).leaves
    job = dataclasses.replace(job_of(case), leaves=(x[:, :3], y))
    with pytest.raises(PipelineError, match="Rank 0 failed at 0F0: RuntimeError"):
        run_together(executors, program_of(case, split), [job] * 2)


def test_a_batch_with_too_few_samples_is_refused() -> None:
    case = UNREPLICATED["1"]
    capture = capture_of(case, module_of(case))
    split = split_of(case, capture)
    executor = executor_of(case, module_of(case), capture, split, Hub().endpoint(0))
    x, y = job_of(case).leaves
    with pytest.raises(BatchError, match=r"Leaf 0 of the batch is \[5, 4\]; samples 4 to 6"):
        executor.run(program_of(case, split), dataclasses.replace(job_of(case), leaves=(x[:5], y)))
