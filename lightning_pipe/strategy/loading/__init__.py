"""Batches: who loads them, how the other ranks know of them, and samplers that divide data."""
