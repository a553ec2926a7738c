"""What the Python of a step reads and changes: places, snapshots, guards, and numbers that become inputs."""
