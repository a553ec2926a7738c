"""Parameters, gradients and optimizer state: where they live, their norms, clipping, and who stands in for them."""
