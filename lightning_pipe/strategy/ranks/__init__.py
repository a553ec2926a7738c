"""Ranks of a fit: how they are started, connected, and told small things."""
