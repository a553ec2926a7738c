"""Searches over what all planners propose, over schedules, and over everything."""
