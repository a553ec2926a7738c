"""Schedules that look at times: list scheduling, greedy search, and the mixed-integer program."""
