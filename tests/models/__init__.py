"""Modules with data, for tests that compare a pipeline with one device."""
