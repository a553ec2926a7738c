"""The joint graph of forward and backward: its trace, the flow of samples through it, and its fingerprint."""
