"""How micro-batches hold the values of a graph that was traced for the whole batch."""
