"""Models that ship with the package, for `lightning-pipe plan model=gpt-13b` and the pages that walk through it."""
