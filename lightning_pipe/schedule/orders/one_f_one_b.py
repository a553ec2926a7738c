"""1F1B: some warm-up forwards, then one backward and one forward in turn, then the remaining backwards.

Sources: PipeDream-Flush (Narayanan et al. 2021); the warm-up policies PA and PB are named after DAPPLE (Fan et al.
2021, section 3); 1F1B* is after MadPipe (Beaumont, Eyraud-Dubois and Shilova 2022). The depth of a stage is its number
of warm-up forwards, and therefore the number of micro-batches that it keeps at once:

    pa       p - s             the least that loses no time if messages are free
    pb       2 (p - s) - 1     one more per stage behind: hides messages as long as a compute
    1f1b*    see `star_depths`
    3        that many on every stage
    4,3,2,1  one depth per stage

Depths must not grow along the stages: the first backward of stage s waits for all warm-up forwards of stage s+1, so a
stage that forwards less than the next one can never be answered.

Legend: s stage, p number of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_pipe.core.program import Compute, Layout, Options, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.merge import merge_stages, stages_by_rank
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS

Warmup = Literal["pa", "pb", "1f1b*"]
WARMUPS = '"pa", "pb", "1f1b*", a depth such as 3, or one depth per stage such as "4,3,2,1"'


def one_f_one_b(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order warm-up forwards, then backwards and forwards in turn.

    Four stages and four micro-batches with the default warm-up, one unit for each of F, I and W:

        0 | F0 F1 F2 F3  .  .  . I0 W0  . I1 W1  . I2 W2  . I3 W3
        1 |  . F0 F1 F2  .  . I0 W0 F3 I1 W1  . I2 W2  . I3 W3
        2 |  .  . F0 F1  . I0 W0 F2 I1 W1 F3 I2 W2  . I3 W3
        3 |  .  .  . F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3

    All replicas of a stage get the same order; any number of micro-batches is fine, also fewer than stages. A rank that
    holds several stages runs their orders merged (see `schedule.construct.merge`).

    Args:
        layout: ranks of each stage.
        microbatches: number of micro-batches, at least 1.
        options: `warmup`: "pa" (default), "pb", "1f1b*", a depth, or a depth per stage.

    Raises:
        ConfigError: if an option is unknown or unreadable, or there is no micro-batch.
    """
    read = read_options(options, schedule="1f1b", defaults={"warmup": "pa"})
    check_microbatches(microbatches)
    depths = warmup_depths(read["warmup"], layout)
    lines = [_stage_order(s, min(depth, microbatches), microbatches) for s, depth in enumerate(depths)]
    return merge_stages(lines, layout=layout)


def _stage_order(stage: int, depth: int, microbatches: int) -> list[Compute]:
    order = [Compute(stage, "F", m) for m in range(depth)]
    for m in range(microbatches):
        order.append(Compute(stage, "B", m))
        if m + depth < microbatches:
            order.append(Compute(stage, "F", m + depth))
    return order


def star_depths(loads: Sequence[float], *, links: Sequence[float], period: float) -> tuple[int, ...]:
    """Return the smallest warm-up depths that sustain one micro-batch per period, after MadPipe's 1F1B*.

    Walk from the last stage to the first over stages and links alternately, packing neighbours into one group while
    their loads together fit into the period; an element that does not fit opens the next group. A stage of the g-th
    group from the end has depth g.

    Args:
        loads: seconds of F and B of each stage on one micro-batch.
        links: seconds of both messages between each stage and the next, one fewer than stages.
        period: seconds per micro-batch, at least the largest load.
    """
    elements = [loads[0], *(x for link, load in zip(links, loads[1:], strict=True) for x in (link, load))]
    groups, filled, group = [], 0.0, 1
    for load in reversed(elements):
        if filled + load > period * (1 + ROUNDING):
            group, filled = group + 1, 0.0
        filled += load
        groups.append(group)
    return tuple(reversed(groups[::2]))


ROUNDING = 1e-9  # loads that fill the period exactly must fit, whatever the order of their sum


def _unit_star_depths(layout: Layout) -> tuple[int, ...]:
    """Return 1F1B* depths for stages of equal load and free messages.

    A schedule knows no times, so every stage counts as one unit of work, which its replicas share such that they take
    equally long (also by weights, which are there to make up for unequal devices), and the period is the load of the
    busiest rank. With one stage per rank that is "pa"; it is less where some ranks hold several stages or
    stages have unequal replicas. A planner that knows times calls `star_depths` and passes the depths.
    """
    loads = [1 / len(ranks) for ranks in layout.stages]
    period = max(sum(loads[s] for s in stages) for stages in stages_by_rank(layout))
    return star_depths(loads, links=[0.0] * (len(loads) - 1), period=period)


def warmup_depths(warmup: int | str, layout: Layout) -> tuple[int, ...]:
    """Return the depth of every stage.

    Raises:
        ConfigError: if the warm-up is unreadable, or its depths do not suit the layout.
    """
    count = len(layout.stages)
    match warmup:
        case "pa":
            return tuple(count - s for s in range(count))
        case "pb":
            return tuple(2 * (count - s) - 1 for s in range(count))
        case "1f1b*":
            return _unit_star_depths(layout)
        case int():
            return _checked_depths((warmup,) * count, warmup, count)
        case str():
            return _checked_depths(_read_depths(warmup, count), warmup, count)
        case _:  # of a file, or of the command line
            raise ConfigError(f"schedule '1f1b': found warmup {warmup!r}; expected {WARMUPS}")


def _read_depths(text: str, count: int) -> tuple[int, ...]:
    try:
        depths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"schedule '1f1b': found warmup {text!r}; expected {WARMUPS}") from None
    return depths * count if len(depths) == 1 else depths


def _checked_depths(depths: tuple[int, ...], found: int | str, count: int) -> tuple[int, ...]:
    if len(depths) != count:
        raise ConfigError(f"schedule '1f1b': warmup {found!r} has {len(depths)} depths; the layout has {count} stages")
    if min(depths) < 1:
        raise ConfigError(f"schedule '1f1b': warmup {found!r} has a depth below 1; every stage needs one forward first")
    for s in range(1, count):
        if depths[s] > depths[s - 1]:
            raise ConfigError(
                f"schedule '1f1b': warmup {found!r} deadlocks: stage {s} wants {depths[s]} forwards first, "
                f"stage {s - 1} gives {depths[s - 1]}; depths must not grow along the stages"
            )
    return depths
