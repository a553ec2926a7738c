"""GPipe: all forwards, then all backwards (after Huang et al. 2019, section 2.3).

Keeps every micro-batch in memory until the end of the forwards. The paper's recompute is an activation policy here and
belongs to the plan, not to the order. Backwards run in the order of the forwards; the reverse takes the same time.
"""

from __future__ import annotations

from lightning_pipe.core.program import Compute, Layout, Options, Order, Pass
from lightning_pipe.schedule.construct.merge import merge_stages
from lightning_pipe.schedule.construct.options import check_microbatches, read_options

NO_OPTIONS: Options = {}
PASSES: tuple[Pass, ...] = ("F", "B")


def gpipe(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order all forwards before all backwards.

    Four stages and four micro-batches, one unit for each of F, I and W (time runs to the right):

        0 | F0 F1 F2 F3  .  .  .  .  .  . I0 W0 I1 W1 I2 W2 I3 W3
        1 |  . F0 F1 F2 F3  .  .  .  . I0 W0 I1 W1 I2 W2 I3 W3
        2 |  .  . F0 F1 F2 F3  .  . I0 W0 I1 W1 I2 W2 I3 W3
        3 |  .  .  . F0 F1 F2 F3 I0 W0 I1 W1 I2 W2 I3 W3

    A rank that holds several stages runs their orders merged (see `merge`), still all forwards first.

    Args:
        layout: ranks of each stage.
        microbatches: number of micro-batches, at least 1.
        options: none are known.

    Raises:
        ConfigError: if an option is unknown or there is no micro-batch.
    """
    read_options(options, schedule="gpipe", defaults={})
    check_microbatches(microbatches)
    lines = [[Compute(s, kind, m) for kind in PASSES for m in range(microbatches)] for s in range(len(layout.stages))]
    return merge_stages(lines, layout=layout)
