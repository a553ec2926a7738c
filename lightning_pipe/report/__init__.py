"""Show plans and timelines to people: tables, traces."""

from lightning_pipe.report.table import plan_table, timeline_table
from lightning_pipe.report.trace import chrome_trace, draw

__all__ = ["chrome_trace", "draw", "plan_table", "timeline_table"]
