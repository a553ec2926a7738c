"""Run a verified program on real ranks."""
