"""Tensors whose values are made or read late: by a tape that remembers how, or from a file."""
