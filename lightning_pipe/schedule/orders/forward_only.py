"""Forward computes only, for validation, test and prediction.

Micro-batches stream through the stages one behind the other, so a rank needs memory for those in flight only.
"""

from __future__ import annotations

from lightning_pipe.core.program import Compute, Layout, Options, Order
from lightning_pipe.schedule.construct.merge import merge_stages
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS


def forward_only(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order the forwards by micro-batch.

    Four stages and four micro-batches:

        0 | F0 F1 F2 F3
        1 |  . F0 F1 F2 F3
        2 |  .  . F0 F1 F2 F3
        3 |  .  .  . F0 F1 F2 F3

    Args:
        layout: ranks of each stage.
        microbatches: number of micro-batches, at least 1.
        options: none are known.

    Raises:
        ConfigError: if an option is unknown or there is no micro-batch.
    """
    read_options(options, schedule="forward_only", defaults={})
    check_microbatches(microbatches)
    lines = [[Compute(s, "F", m) for m in range(microbatches)] for s in range(len(layout.stages))]
    return merge_stages(lines, layout=layout)
