"""What the Python of a step reads, changes and says: places, snapshots, guards, and where texts go."""
