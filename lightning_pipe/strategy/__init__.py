"""The Lightning strategy and its training loop."""
