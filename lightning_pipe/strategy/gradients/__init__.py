"""Gradients of the whole batch: their hooks, norm and clipping, and steps taken before the norm is known."""
