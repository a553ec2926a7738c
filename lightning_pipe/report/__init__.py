"""Show plans and timelines to people: tables, traces, plots, explanations."""

from lightning_pipe.report.account import Account, Flight, accounts, flights, mean_bubble, mean_computing, step_seconds
from lightning_pipe.report.advice import Alternative, PlanSituation, advice
from lightning_pipe.report.clocks import aligned, clock_offsets
from lightning_pipe.report.comparison import Comparison, RankPeak, compare
from lightning_pipe.report.comparison_table import comparison_table
from lightning_pipe.report.explain import explain, sentences
from lightning_pipe.report.page import Page, html_page
from lightning_pipe.report.plot import plot_memory, plot_timeline
from lightning_pipe.report.stack_plot import plot_stacks
from lightning_pipe.report.table import idle_stages, plan_table, timeline_table
from lightning_pipe.report.trace import Curve, Curves, chrome_trace, draw

__all__ = [
    "Account",
    "Alternative",
    "Comparison",
    "Curve",
    "Curves",
    "Flight",
    "Page",
    "PlanSituation",
    "RankPeak",
    "accounts",
    "advice",
    "aligned",
    "chrome_trace",
    "clock_offsets",
    "compare",
    "comparison_table",
    "draw",
    "explain",
    "flights",
    "html_page",
    "idle_stages",
    "mean_bubble",
    "mean_computing",
    "plan_table",
    "plot_memory",
    "plot_stacks",
    "plot_timeline",
    "sentences",
    "step_seconds",
    "timeline_table",
]
