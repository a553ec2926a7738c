"""Output of a step: what it prints and logs, once per batch, with the values of the batch."""
