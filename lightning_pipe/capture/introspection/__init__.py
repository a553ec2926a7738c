"""What a step finds out about objects while it is traced, and what is found out about its reads."""
