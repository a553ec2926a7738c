"""Rewrites that add one concern each to an order: transfers, gradients, memory."""
