"""A captured step on this rank: checked, run on a batch, its logs and results merged."""
