"""The judge of plans: names resolved on a graph, symmetry, and the simulator."""
