"""Turn a training step into one graph, and the graph into stage programs."""
