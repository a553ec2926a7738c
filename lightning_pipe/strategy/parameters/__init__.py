"""Parameters and optimizer state: where they live, how they are built, and who stands in for them."""
