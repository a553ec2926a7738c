"""Turn an order of computes into a program: a list of rewrites that add one concern each.

Every rewrite is `Program -> Program`, keeps what is there in its order, and says what must have run before it. Their
sequence is the table of contents of a program. An order that breaks a law
of `verify` is lowered as it is, and refused there.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.core.program import CopyingOrder, Layout, Program, Seam, Traffic
from lightning_pipe.schedule.lower.backward import split_backward
from lightning_pipe.schedule.lower.gradients import add_reductions
from lightning_pipe.schedule.lower.join import join_weight_halves
from lightning_pipe.schedule.lower.loads import add_loads
from lightning_pipe.schedule.lower.memory import add_frees
from lightning_pipe.schedule.lower.milestones import add_confirmation, add_head, add_publication
from lightning_pipe.schedule.lower.offload import add_swaps
from lightning_pipe.schedule.lower.samples import drop_empty_computes
from lightning_pipe.schedule.lower.steps import add_steps
from lightning_pipe.schedule.lower.transfers import add_receives, add_sends
from lightning_pipe.schedule.lower.weights import add_versions
from lightning_pipe.schedule.verification.well_formed import check_frame

__all__ = ["lower"]


def lower(
    order: CopyingOrder,
    *,
    layout: Layout,
    sizes: tuple[int, ...],
    traffic: Traffic,
    training: bool = True,
    synchronise: bool = True,
    early_release: bool = True,
    split: bool = True,
    join: int = 1,
    beside: Sequence[int | None] = (),
    confirms: bool = False,
    publishes: bool = False,
    seam: Seam | None = None,
) -> Program:
    """Return the program of an order.

    Args:
        order: computes per rank, and where copies to the host have their places (`add_swaps`).
        layout: ranks of each stage.
        sizes: samples of each micro-batch.
        traffic: what crosses between stages.
        training: False for a forward-only program.
        synchronise: False while gradients are accumulated: no reductions and no optimizer step.
        early_release: whether the input gradient leaves before the weight gradient is computed; False only for
            comparison with published fused backwards.
        split: whether B is replaced by I and W; False for stages whose backward is one function.
        join: micro-batches whose W, where they follow each other, may at most be one (joined W); 1 joins none.
        beside: by stage that offloads, the computes beside a copy to the host (`add_swaps`).
        confirms: whether ranks run ahead, and look before their first backward whether the step before was right.
        publishes: whether ranks tell their results as soon as their forwards are done.
        seam: how a round of an asynchronous pipeline joins the rounds before and after it.

    Raises:
        ProgramError: if layout, sizes or traffic make no sense, or the order names an unknown stage or micro-batch.
    """
    program = Program(order, sizes, layout, traffic, training, synchronise, seam)
    check_frame(program)
    program = drop_empty_computes(program)
    program = split_backward(program) if split else program
    program = join_weight_halves(program, most=join)
    program = add_reductions(program)
    program = add_sends(program, early_release=early_release)
    program = add_receives(program)
    program = add_swaps(program, beside=beside)
    program = add_loads(program)
    program = add_versions(program)
    program = add_confirmation(program) if confirms else program
    program = add_head(program)
    program = add_frees(program)
    program = add_steps(program)
    return add_publication(program) if publishes else program
