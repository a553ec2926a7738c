"""Decide the order of computes, lower it to a program, and prove the program."""

from lightning_pipe.schedule.registry import SCHEDULES, Schedule, TimedSchedule, order_of

__all__ = ["SCHEDULES", "Schedule", "TimedSchedule", "order_of"]
