"""Weights that computes read instead of the parameters of their moment."""
