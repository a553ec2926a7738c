"""Stages of a joint graph: which node runs where, and the functions that run it."""
