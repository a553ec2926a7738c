"""Decide a plan for a graph and a number of ranks."""
