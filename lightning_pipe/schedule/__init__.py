"""Decide the order of computes, lower it to a program, and prove the program."""

from lightning_pipe.schedule.registry import SCHEDULES, ScheduleFunction, order_of

__all__ = ["SCHEDULES", "ScheduleFunction", "order_of"]
