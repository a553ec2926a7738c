"""Plans beside their alternatives, and the capacity of a cluster."""
