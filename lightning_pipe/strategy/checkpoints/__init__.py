"""Checkpoints of modules that no rank holds whole: written by all ranks, read by the rank that needs a tensor."""
