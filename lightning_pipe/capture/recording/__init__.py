"""Units of a step whose Python runs every time: which calls of sub-modules they are, and what flows between them."""
