"""Frozen nouns that every floor shares: graph, plan, program, timeline. No torch."""
