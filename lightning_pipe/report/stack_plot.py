"""Draw memory by what it is for, as a PNG: the picture of what a page shows as `Stack`s.

Needs matplotlib, as `report.plot` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_pipe.report.page import STACK, Stack
from lightning_pipe.report.plot import CAP_IN_SIGHT, DPI, INK, MARGIN_IN, PANEL_IN, figure_of
from lightning_pipe.units import BYTES, format_bytes

COLOURS = ("#4477AA", "#66CCEE", "#228833", "#BBBBBB", "#EE6677", "#CCBB44", "#AA3377")  # after Tol (2021), of STACK
STATE = 4  # kinds that are always there come first


def plot_stacks(stacks: Sequence[Stack], path: str | Path) -> None:
    """Draw predicted bytes over time, stacked by kind, a panel for each; measured saved tensors as a dashed line.

    Args:
        stacks: what to draw, at least one.
        path: PNG file to write; its directory must exist.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    figure = figure_of(1.6 * PANEL_IN * len(stacks) + MARGIN_IN)
    axes_of = figure.subplots(len(stacks), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    size = 1 / BYTES["MiB"]
    end = max((stack.times[-1] for stack in stacks if stack.times), default=0.0)
    for axes, stack in zip(axes_of, stacks, strict=True):
        times = [*stack.times, end]
        series = [[amount * size for amount in (*stack.kinds[kind], *stack.kinds[kind][-1:])] for kind in STACK]
        axes.stackplot(times, series, colors=COLOURS, labels=STACK, step="post", linewidth=0)
        if stack.measured_saved:
            first, last = stack.measured_saved[0][0], stack.measured_saved[-1][0]
            state = sum(stack.kinds[kind][0] for kind in STACK[:STATE])
            stretched = [(time - first) / ((last - first) or 1.0) * end for time, _ in stack.measured_saved]
            amounts = [(state + amount) * size for _, amount in stack.measured_saved]
            axes.step(stretched, amounts, where="post", color=INK, linestyle="--", linewidth=1.0)
        if stack.limit is not None and stack.limit <= CAP_IN_SIGHT * stack.peak:
            axes.axhline(stack.limit * size, color="#D62728", linewidth=1.5)
        facts = [f"rank {stack.ranks}", f"predicted peak {format_bytes(stack.peak)}"]
        if stack.measured_peak is not None:
            facts.append(f"measured {format_bytes(stack.measured_peak)}")
        if stack.limit is not None:
            facts.append(f"limit {format_bytes(stack.limit)}")
        axes.set_title(", ".join(facts), loc="left", fontsize=9, color=INK)
        axes.set_xlim(0, end or 1.0)
    axes_of[-1].set_xlabel("time of the predicted step (s)", color=INK)
    figure.supylabel("MiB", fontsize=10, color=INK)
    handles, labels = axes_of[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, dpi=DPI)
