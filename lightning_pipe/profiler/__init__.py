"""Measure devices and the links between them."""
