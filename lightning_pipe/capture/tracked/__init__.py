"""Python numbers that remember how they were computed: what they are, and what reads them."""
