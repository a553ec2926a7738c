"""What policies of weight versions need of a fit: optimizers, and the learning rates of their next updates."""
