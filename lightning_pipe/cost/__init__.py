"""Price a cut of a graph on a cluster: seconds and bytes, by formula, from measured or counted operations."""
