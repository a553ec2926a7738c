"""Weights that are read instead of those of the moment, and steps that are corrected, where gradients are late."""
